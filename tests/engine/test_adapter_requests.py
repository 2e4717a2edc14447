"""Requests with low-rank adapters: alone and together, by budget, from either kind of file."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from adapter_files import WEIGHTS, answers, tensors_of, write_adapter
from gguf_files import ModelFile, _turned, bytes_vocabulary
from reference import MINI_DENSE, transformers_model
from single_answers import SingleAnswers
from transformers import LlamaConfig, LlamaForCausalLM

import hmt
from hmt.base.errors import AdapterError, BudgetError, DiskReadError, RequestError
from hmt.engine import EngineConfig, LoadedModel
from hmt.engine.loading.packs import convert
from hmt.kernels.cpu import extension

OPTIONS: dict[str, Any] = {"host_memory": "192MiB", "dtype": "float32", "context": 1024}
RANKS = (1, 4, 256, 16, 7, 4, 32, 64)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Eight adapters of the small model, and peft's model with the first ones."""
    folder, oracles = tmp_path_factory.mktemp("adapters"), {}
    for number, rank in enumerate(RANKS):
        targets = ["q_proj", "v_proj"] if number % 2 else None
        rank_pattern = {"layers.0.self_attn.v_proj": 5, "^model.layers.1.*q_proj": 3}
        adapted = write_adapter(
            transformers_model("mini-dense"),
            folder / f"a{number}",
            number,
            rank=rank,
            targets=targets,
            use_rslora=number == 3,
            rank_pattern=rank_pattern if number == 5 else {},
            alpha_pattern={"q_proj": 2.5} if number in (3, 5) else {},
        )
        if number in (2, 3, 5):
            oracles[f"a{number}"] = adapted
    return folder, oracles


@pytest.fixture(scope="module")
def model(adapters: tuple[Path, dict[str, Any]]) -> Iterator[LoadedModel]:
    folder, _ = adapters
    named = [f"a{number}={folder}/a{number}" for number in range(len(RANKS))]
    with hmt.Engine(adapters=named, max_batch=9, **OPTIONS) as engine:
        yield engine.load_model(MINI_DENSE)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 500) for _ in range(length)]


def test_logits_equal_pefts_at_ranks_up_to_256(
    model: LoadedModel, adapters: tuple[Path, dict[str, Any]]
) -> None:
    tokens = prompt(1, 40)
    for name, oracle in adapters[1].items():
        found = model.logits(tokens, range(40), prefill=30, adapter=name)
        torch.testing.assert_close(found, answers(oracle, tokens), atol=1e-4, rtol=0)


def test_eight_adapters_in_a_batch_answer_as_each_does_alone(model: LoadedModel) -> None:
    """And so does a request without any, beside them."""
    requests = [
        hmt.Request(
            prompt(n, 20 + 9 * n), 16, ignore_eos=True, adapter=f"a{n}" if n < len(RANKS) else ""
        )
        for n in range(len(RANKS) + 1)
    ]
    alone = SingleAnswers(model)
    wanted = [alone(request) for request in requests]
    assert [one.token_ids for one in model.infer_batch(requests)] == wanted
    same = [hmt.Request(requests[0].input, 16, ignore_eos=True, adapter=f"a{n}") for n in (2, 3)]
    assert len({alone(request) for request in [*same, requests[0]]}) == 3


@pytest.mark.skipif(extension.load() is None, reason="torch cuts products by rows")
def test_a_row_without_an_adapter_has_the_bits_that_it_has_alone(model: LoadedModel) -> None:
    tokens = prompt(3, 24)
    with hmt.Engine(**OPTIONS) as engine:
        wanted = engine.load_model(MINI_DENSE).logits(tokens, range(24), prefill=20)
    requests = [
        hmt.Request(prompt(5, 30), 24, ignore_eos=True, adapter="a2"),
        hmt.Request(tokens[:1], 0, prompt_logprobs=0),
        hmt.Request(tokens, 0, prompt_logprobs=0),
    ]
    found = model.infer_batch(requests)[2].prompt_logprobs
    normal = wanted.log_softmax(-1)
    expected = [float(normal[n, token]) for n, token in enumerate(tokens[1:])]
    assert [one.logprob for one in found] == pytest.approx(expected, rel=1e-5)
    assert torch.equal(model.logits(tokens, range(24), prefill=20), wanted)


@pytest.mark.parametrize(
    ("quantization", "limit"), [("w4a8", 0.4), ("w8a16", 0.05), ("mxfp4a8", 0.65)]
)
def test_quantised_weights_have_the_same_added(
    quantization: str, limit: float, adapters: tuple[Path, dict[str, Any]]
) -> None:
    """What an adapter changes is nearly what it changes of weights as they are, by their bits."""
    tokens, changes = prompt(7, 30), []
    for quant in (None, quantization):
        with hmt.Engine(
            quantization=quant, adapters=[f"own={adapters[0]}/a3"], **OPTIONS
        ) as engine:
            loaded = engine.load_model(MINI_DENSE)
            bare = loaded.logits(tokens, range(30))
            changes.append(loaded.logits(tokens, range(30), adapter="own") - bare)
    exact, rounded = changes
    assert float((rounded - exact).norm() / exact.norm()) < limit


@pytest.mark.parametrize("gpus", ["fake", "fake,fake"])
def test_devices_compute_the_same(gpus: str, adapters: tuple[Path, dict[str, Any]]) -> None:
    """Steps without adapters are captured, those with any are not, which the summary says."""
    tokens, found = prompt(29, 30), []
    named = [f"own={adapters[0]}/a3"]
    for device in ({}, {"gpus": gpus, "gpu_memory": "96MiB"}):
        with hmt.Engine(adapters=named, **OPTIONS, **device) as engine:
            loaded = engine.load_model(MINI_DENSE)
            asked = [hmt.Request(tokens, 8, ignore_eos=True, adapter=one) for one in ("own", "")]
            bare = loaded.infer(asked[1]).token_ids
            notes = loaded.summary().notes
            both = [one.token_ids for one in loaded.infer_batch(asked)]
            assert both[1] == bare
            used = loaded.summary()
            if device:  # a copy for each device, for as long as it is in memory
                held = used.used_bytes["adapters"]
                assert used.device.used_bytes["adapters"] == held * len(gpus.split(",")) > 0
            found.append((both, loaded.logits(tokens, range(30), adapter="own")))
            if device:
                assert not any("adapters" in note for note in notes)
                assert any("adapters" in note for note in loaded.summary().notes)
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_speculation_changes_no_answer(adapters: tuple[Path, dict[str, Any]]) -> None:
    text = prompt(11, 12) * 4
    asked = [
        hmt.Request(text, 24, ignore_eos=True, adapter=adapter) for adapter in ("own", "", "own")
    ]
    found = []
    for way in ("lookup", "off"):
        with hmt.Engine(speculate=way, adapters=[f"own={adapters[0]}/a0"], **OPTIONS) as engine:
            loaded = engine.load_model(MINI_DENSE)
            found.append([one.token_ids for one in loaded.infer_batch(asked)])
    assert found[0] == found[1]


def test_prefixes_are_not_shared_with_other_adapters(
    adapters: tuple[Path, dict[str, Any]],
) -> None:
    text = prompt(13, 100)
    named = [f"{name}={adapters[0]}/{file}" for name, file in (("x", "a0"), ("y", "a1"))]
    with hmt.Engine(prefix_cache=True, adapters=named, adapter_memory="48MiB", **OPTIONS) as engine:
        loaded = engine.load_model(MINI_DENSE)

        def computed(adapter: str) -> int:
            before = loaded.summary().prompt.tokens
            loaded.infer(hmt.Request(text, 4, ignore_eos=True, adapter=adapter))
            return loaded.summary().prompt.tokens - before

        assert [computed(name) for name in ("", "x", "y", "x", "")] == [100, 100, 100, 4, 4]
        loaded.load_adapter("x again", adapters[0] / "a0")
        assert computed("x again") == 4, "the same numbers under another name"
        loaded.unload_adapter("x")
        loaded.load_adapter("x", adapters[0] / "a2")
        assert computed("x") == 100


def test_those_in_use_stay_in_memory_and_others_make_room(
    adapters: tuple[Path, dict[str, Any]],
) -> None:
    named = [f"a{n}={adapters[0]}/a{n}" for n in (1, 3, 7)]
    with hmt.Engine(adapters=named, adapter_memory="2MiB", **OPTIONS) as engine:
        loaded = engine.load_model(MINI_DENSE)  # 0.1, 0.4 and 1.8 MiB
        store = loaded.adapters.store
        assert not store.in_memory
        wanted = {}
        for name in ("a1", "a3", "a7") * 2:
            found = loaded.infer(hmt.Request(prompt(1, 9), 6, adapter=name)).token_ids
            assert wanted.setdefault(name, found) == found
            assert name in store.in_memory
            used = loaded.summary().used_bytes["adapters"]
            assert used == sum(store.in_memory.values()) <= store.limit_bytes
        hold = store.hold("a7")
        with pytest.raises(AdapterError, match="1 requests use"):
            loaded.unload_adapter("a7")
        others = [store.hold("a1")]
        with pytest.raises(BudgetError, match="--adapter-memory"):
            others.append(store.hold("a3"))
        del others, hold
        loaded.unload_adapter("a7")
        with pytest.raises(RequestError, match="no adapter 'a7'"):
            loaded.infer(hmt.Request("x", 1, adapter="a7"))
        with pytest.raises(BudgetError, match="--adapter-memory"):
            loaded.load_adapter("large", adapters[0] / "a2")


def test_a_file_that_has_changed_is_not_read(
    adapters: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Its prompts may be in the prefix cache, under the fingerprint of what it was."""
    own = shutil.copytree(adapters[0] / "a1", tmp_path / "own")
    asked = hmt.Request(prompt(1, 9), 2, adapter="own")
    with hmt.Engine(adapters=[f"own={own}"], **OPTIONS) as engine:
        loaded = engine.load_model(MINI_DENSE)
        shutil.copy(adapters[0] / "a3" / WEIGHTS, own / WEIGHTS)
        with pytest.raises(AdapterError, match="has changed"):
            loaded.infer(asked)
        shutil.rmtree(own)
        with pytest.raises(DiskReadError):
            loaded.infer(asked)
        loaded.unload_adapter("own")
        loaded.load_adapter("own", adapters[0] / "a1")
        assert loaded.infer(asked).token_ids


def test_a_default_is_for_requests_that_name_none(model: LoadedModel) -> None:
    asked = hmt.Request(prompt(17, 9), 8, ignore_eos=True)
    bare = model.infer(asked).token_ids
    model.use_adapter("a2")
    try:
        own = model.infer(asked).token_ids
    finally:
        model.use_adapter("")
    named = hmt.Request(prompt(17, 9), 8, ignore_eos=True, adapter="a2")
    assert model.infer(named).token_ids == own != bare
    beams = model.beam_search(named, 2)
    assert beams[0].token_ids != model.beam_search(asked, 2)[0].token_ids
    with pytest.raises(RequestError, match="no adapter 'none'"):
        model.use_adapter("none")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_adapters_add_what_pefts_add(kind: str, tmp_path: Path) -> None:
    """To a GGUF file and to a checkpoint; rows of llama's queries and keys lie in another order."""
    sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=128, head_dim=16)
    torch.manual_seed(3)
    reference = LlamaForCausalLM(config).eval()
    write_adapter(reference, tmp_path / "own", 5, rank=6)
    file = ModelFile(gguf.MODEL_ARCH.LLAMA, config, lambda name: kind)
    file.add(reference.state_dict())
    path = file.write(tmp_path / "model.gguf", bytes_vocabulary(MINI_DENSE))
    checkpoint = file.write_checkpoint(tmp_path / "model", MINI_DENSE)
    converted = write_gguf(tmp_path / "own", tmp_path / "own.gguf", config)
    tokens, found = prompt(19, 30), []
    for base in (path, checkpoint):
        for adapter in (tmp_path / "own", converted):
            with hmt.Engine(adapters=[f"own={adapter}"], activations="exact", **OPTIONS) as engine:
                loaded = engine.load_model(base)
                found.append(loaded.logits(tokens, range(30), prefill=20, adapter="own"))
                bare = loaded.logits(tokens, range(30), prefill=20)
                assert float((found[-1] - bare).abs().max()) > 0.01
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-4, rtol=0)


def write_gguf(folder: Path, path: Path, config: Any, **changed: Any) -> Path:
    """What llama.cpp's converter makes of a llama's adapter: rows of q and k are reordered."""
    writer = gguf.GGUFWriter(path, "llama")
    metadata = {"type": "adapter", "adapter": "lora", "alpha": 18.0} | changed
    writer.add_type(metadata["type"])
    writer.add_string("adapter.type", metadata["adapter"])
    writer.add_float32("adapter.lora.alpha", metadata["alpha"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in tensors_of(folder).items():
        module, _, which = key.removeprefix("base_model.model.").rpartition(".lora_")
        name = names.get_name(module)
        numbers = tensor.numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        count = heads.get(name.rpartition(".")[2])
        if which.startswith("B") and count:
            numbers = _turned(numbers, count)
        writer.add_tensor(f"{name}.weight.lora_{which[0].lower()}", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_pack_has_adapters_too(adapters: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(MINI_DENSE, tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "pack", EngineConfig.resolve(quantization="w8a16"))
    tokens, found = prompt(23, 20), []
    for path, quantization in ((tmp_path / "pack", None), (MINI_DENSE, "w8a16")):
        named = [f"own={adapters[0]}/a3"]
        with hmt.Engine(quantization=quantization, adapters=named, **OPTIONS) as engine:
            found.append(engine.load_model(path).logits(tokens, range(20), adapter="own"))
    assert torch.equal(*found)
