"""DeepSeek-V4: entries that stand for several positions, and how its checkpoints are published."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import drawn, ids, publish
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_memory import PlainKV, put_tokenizer, random_reference
from random_configs import cases
from safetensors.torch import load_file, save_file

import hmt
from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.contracts.model import KVKind, ModelSpec
from hmt.contracts.step import Step
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.kernels.cpu import extension
from hmt.kernels.reference.packing import E2M1
from hmt.layers import Compressor, EntryPart, GroupRows, RMSNorm
from hmt.models import open_model
from hmt.quant.fp4 import round_mxfp4

# With more, threads would only wait for one another.
pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_prefill_tokens": 16, "host_memory": "64MiB"}
POSITIONS = 400
NAMES = [case.name for case in cases("deepseek_v4")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepseek_v4")
    publish(NAMES[1], made, POSITIONS)
    return made


def mean(numbers: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return (numbers * logits.softmax(0)).sum(0)


@settings(max_examples=40, deadline=None)
@given(
    positions=st.sampled_from([1, 2, 4, 16, 32]),
    overlapping=st.booleans(),
    seed=st.integers(0, 1 << 30),
    scale=st.sampled_from([1.0, 60.0]),
)
def test_entries_are_means_by_softmax_in_any_chunks(
    positions: int, overlapping: bool, seed: int, scale: float
) -> None:
    """In float64, of all tokens at once; the same bits however two sequences are cut."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    parts = tuple(EntryPart(f"{n}", f"{n}.", RMSNorm(w, 1e-6)) for n, w in (("a", 32), ("b", 16)))
    own = Compressor(8, positions, overlapping, parts)
    params = {}
    for param in own.params(""):
        tensor = torch.randn(param.shape, generator=generator)
        tensor = tensor * (scale if "gate" in param.name else 1.0)
        params[param.name] = WeightTensor(Encoding.F32, param.shape, tensor)
    x = [torch.randn(rng.randint(1, 70), 8, generator=generator) for _ in range(2)]
    spec = ModelSpec("Any", 1, 8, 9, 99, (), (None,), 0, state=(own.state,))

    def computed(sizes: range) -> list[torch.Tensor]:
        kv, at = PlainKV(spec), [0, 0]
        found: list[list[torch.Tensor]] = [[], []]
        while any(place < len(one) for place, one in zip(at, x, strict=True)):
            runs = []
            for number, one in enumerate(x):
                count = min(rng.choice(sizes), len(one) - at[number])
                if count:
                    runs.append((number, at[number], [0] * count, 0))
            step = Step.build(runs)
            rows = torch.cat([x[n][start : start + len(some)] for n, start, some, _ in runs])
            entries = own(rows, 0, step, params, kv)
            for index, (number, _, some, _) in enumerate(runs):
                found[number].append(torch.cat([part[index] for part in entries], dim=1))
                at[number] += len(some)
        return [torch.cat(one) for one in found]

    # More than 16 tokens at once are multiplied with f32 weights in another order.
    apart = [computed(range(1, 2)), computed(range(1, 9)), computed(range(8, 9))]
    if extension.load() is not None:
        assert all(
            torch.equal(a, b) for other in apart[1:] for a, b in zip(apart[0], other, strict=True)
        )
    for one, entries in zip(x, apart[2], strict=True):
        assert len(entries) == len(one) // positions
        first = 0
        for part in parts:
            kv = one.double() @ params[f"{part.name}kv"].data.double().T
            gate = one.double() @ params[f"{part.name}gate"].data.double().T
            width = part.dim
            for number in range(len(entries)):
                inside = slice(number * positions, (number + 1) * positions)
                bias = params[f"{part.name}bias"].data.double()
                numbers, logits = kv[inside], gate[inside] + bias
                if overlapping:
                    numbers, logits = numbers[:, width:], logits[:, width:]
                    before = slice(max(0, inside.start - positions), inside.start)
                    numbers = torch.cat((kv[before, :width], numbers))
                    earlier = gate[before, :width] + bias[: before.stop - before.start, :width]
                    logits = torch.cat((earlier, logits))
                wanted = mean(numbers, logits)
                wanted = wanted * (wanted.square().mean() + 1e-6).rsqrt()
                wanted = wanted * params[f"{part.name}norm"].data.double()
                got = entries[number, first : first + width]
                assert (got - wanted).norm() <= 1e-4 * max(1.0, float(wanted.norm())), number
            first += width


def test_rows_of_the_cache_take_what_entries_do() -> None:
    """Of few positions no more than their numbers; of many a row's share of one page."""
    for positions, width in ((4, 128), (16, 32), (128, 32)):
        kept = GroupRows(positions, 512).kv(KVKind.LATENT)
        assert (kept.row_width, kept.grouped) == (width, min(positions, 16))
    [case] = cases("deepseek_v4")[:1]
    config = case.config.to_dict() | {"architectures": ["DeepseekV4ForCausalLM"]}
    spec = open_model(config, Path("there"), torch.float32).spec
    kinds = case.config.layer_types
    assert [one is not None for one in spec.compressed] == ["compress" in kind for kind in kinds]
    assert [one is not None for one in spec.index_keys] == ["sparse" in kind for kind in kinds]
    assert all(one is not None and one.window == 8 for one in spec.kv)


def test_chunks_and_neighbours_do_not_change_a_bit(folder: Path) -> None:
    tokens, found = ids(150), []
    for chunk, prefill in ((16, 150), (7, 150), (13, 90), (1, 20)):
        options = OPTIONS | {"max_prefill_tokens": chunk, "context": POSITIONS, "max_batch": 1}
        with hmt.Engine(**options) as engine:
            model = engine.load_model(folder)
            found.append(model.logits(tokens, range(150), prefill=prefill))
            if chunk == 16:
                requests = [drawn(ids(count, count), count) for count in (3, 40, 17, 90, 1)]
                alone = [model.infer(request).token_ids for request in requests]
    if extension.load() is not None:  # torch adds otherwise, by how many tokens there are
        assert all(torch.equal(found[0], other) for other in found[1:])
    with hmt.Engine(**OPTIONS, context=1024, max_batch=3) as engine:
        model = engine.load_model(folder)
        assert [answer.token_ids for answer in model.infer_batch(requests)] == alone
        [first, second] = model.infer_choices(drawn(ids(40, 40), 40), 2)
        assert first.token_ids == alone[1] and second.token_ids != alone[1]


def test_nor_does_any_chunk_where_weights_are_integers(folder: Path) -> None:
    """Of any size: products of integers are exact, and all others are made of few tokens each."""
    tokens, found = ids(150), []
    for chunk, prefill in ((150, 150), (33, 120), (1, 30)):
        options = OPTIONS | {"max_prefill_tokens": chunk, "context": POSITIONS, "max_batch": 1}
        options |= {"dtype": "bfloat16", "quantization": "w8a8"}
        with hmt.Engine(**options) as engine:
            model = engine.load_model(folder)
            found.append(model.logits(tokens, range(150), prefill=prefill))
    if extension.load() is not None:
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_conversations_share_pages_and_mixtures(folder: Path) -> None:
    tokens = ids(70, 1)
    with hmt.Engine(**OPTIONS, context=POSITIONS, max_batch=1) as engine:
        model, asked = engine.load_model(folder), []
        for turn in range(3):
            asked.append(drawn(tokens, turn, 20))
            tokens = [*tokens, *model.infer(asked[-1]).token_ids, *ids(25, 10 + turn)]
        alone = [model.infer(request).token_ids for request in asked]
    with hmt.Engine(**OPTIONS, context=POSITIONS, max_batch=2, prefix_cache=True) as engine:
        model, before = engine.load_model(folder), 0
        for turn, (request, wanted) in enumerate(zip(asked, alone, strict=True)):
            assert model.infer(request).token_ids == wanted
            computed = model.summary().prompt.tokens - before
            before += computed
            assert computed <= (25 + 16 if turn else 70)
    levels = {"kv_gpu_memory": "1MiB", "prefix_cache": True}
    with (
        pytest.raises(ConfigError, match="sliding window"),
        hmt.Engine(**OPTIONS, **levels) as engine,
    ):
        engine.load_model(folder)


def test_a_device_computes_the_same_and_keys_may_be_kept_in_fewer_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    tokens = ids(150)
    found = []
    ways: list[dict[str, Any]] = [{}, {"gpus": "fake", "gpu_memory": "64MiB"}]
    ways += [ways[1] | {"kv_gpu_memory": "200KiB"}, {"kv_quant": "fp8"}]
    for way in ways:
        with hmt.Engine(**OPTIONS, **way, context=POSITIONS, max_batch=1) as engine:
            model = engine.load_model(folder)
            found.append(model.logits(tokens, range(100, 150), prefill=140))
            summary = str(model.summary())
        assert "gpus" not in way or "entries become known" in summary
    wanted, *devices, fp8 = found
    assert all((device - wanted).norm() <= 1e-5 * wanted.norm() for device in devices)
    assert 0 < (fp8 - wanted).norm() < 0.5 * wanted.norm()


def as_published(tensors: dict[str, torch.Tensor], block: int) -> dict[str, torch.Tensor]:
    """Names and encodings of the published files; `tensors` get the numbers that these hold."""
    written = {"mtp.0.e_proj.weight": torch.zeros(3, 3)}
    for name, tensor in tensors.items():
        own = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
        own = own.replace("embed_tokens.", "embed.").replace("attn.norm.", "attn.kv_norm.")
        kept = tensor
        if tensor.dim() == 2 and any(part in name for part in ("experts", ".wq_", ".wkv", ".wo_")):
            rows, columns = tensor.shape
            if ".experts." in name:
                codes, exponents = round_mxfp4(tensor.view(-1, 32))
                numbers = torch.tensor(E2M1)[codes.long()]
                scales = torch.exp2(exponents.float() - 127)
                tensor.copy_((numbers * scales[:, None]).view(rows, columns))
                pairs = codes.view(rows, -1, 2)
                kept = (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8)
                exponents = exponents.view(rows, -1)
            elif "compressor" not in name:
                parts = torch.nn.functional.pad(tensor, (0, -columns % block, 0, -rows % block))
                parts = parts.unflatten(1, (-1, block)).unflatten(0, (-1, block))
                _, power = torch.frexp(parts.abs().amax((1, 3)))
                scales = torch.exp2((power - 8).float())
                codes = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
                numbers = (codes.float() * scales[:, None, :, None]).flatten(2).flatten(0, 1)
                tensor.copy_(numbers[:rows, :columns])
                kept = codes.float().flatten(2).flatten(0, 1)[:rows, :columns]
                kept = kept.to(torch.float8_e4m3fn)
                exponents = (power - 8 + 127).to(torch.uint8)
            else:
                written[own] = kept
                continue
            scale = own.removesuffix("weight") + "scale"
            written[scale] = exponents.view(torch.float8_e8m0fnu).contiguous()
        written[own] = kept.contiguous()
    return written


def test_the_published_form_is_read(tmp_path: Path) -> None:
    """FP8 in blocks and experts in four bits, with powers of two; names without a beginning."""
    [case] = cases("deepseek_v4")[:1]
    case.config.update({"hidden_size": 64, "moe_intermediate_size": 32, "o_lora_rank": 32})
    reference = random_reference(case.config, case.seed)
    reference.save_pretrained(tmp_path)
    put_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    written = as_published(tensors, 32)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(tensors, plain / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    section = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    section |= {"weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    config |= {"quantization_config": section, "expert_dtype": "fp4"}
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4}
    config["compress_ratios"] = [ratios.get(kind, 128) for kind in config.pop("layer_types")]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(written, tmp_path / "model.safetensors")
    theirs = type(reference).from_pretrained(plain, attn_implementation="eager").eval()
    tokens = ids(40)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens])).logits[0]
    options = OPTIONS | {"context": 64, "max_batch": 1, "activations": "exact"}
    with hmt.Engine(**options) as engine:
        model = engine.load_model(tmp_path)
        encodings = {w.format.encoding for b in model.prepared.layouts.values() for w in b.placed}
        found = model.logits(tokens, range(40), prefill=30)
    assert {Encoding.MXFP4, Encoding.FP8_BLOCK} <= encodings
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hc_mult": 100}, "hc_mult is 100"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0"),
        ({"swiglu_limit": 7.0}, "swiglu_limit is 7.0"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"o_groups": 3}, "o_groups 3"),
        ({"index_head_dim": 6}, "index_head_dim is 6"),
        ({"compress_rates": {"heavily_compressed_attention": 24}}, "compress_rates has"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "fixed rope_type",
        ),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], said: str) -> None:
    [case] = cases("deepseek_v4")[:1]
    config = case.config.to_dict() | {"architectures": ["DeepseekV4ForCausalLM"]} | fields
    with pytest.raises(CheckpointError, match=said):
        open_model(config, Path("there"), torch.float32)
