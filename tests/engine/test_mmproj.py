"""GGUF files of models that see: the numbers of the same models in safetensors, and errors."""

import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import gguf_conventions
import mmproj_files
import pytest
import torch
from gguf_conventions import VOCABULARY, conventions
from mmproj_answers import IMAGES, OPTIONS, PROMPT, answer, asked, check_logprobs, spoken
from mmproj_files import write_mmproj, write_text
from transformers import CONFIG_MAPPING, Qwen3_5ForConditionalGeneration
from vision_families import FAMILIES, family_logits, family_model, publish_family
from vision_models import (
    BEGIN,
    END,
    IMAGE,
    logprobs_of,
    publish,
    vision_model,
)
from vision_models import CASES as VISION_CASES

import hmt
from hmt.base.errors import CheckpointError, RequestError
from hmt.engine import EngineConfig
from hmt.engine.loading.packs import convert
from hmt.formats.gguf import open_gguf, read_gguf
from hmt.formats.gguf.projectors import config_with_encoder

QUANTISED = {"hidden_size": 32, "intermediate_size": 64}  # of whole blocks of Q8_0
CASES = {
    "qwen2_vl": ("qwen2_vl", "F32", {}),
    "qwen2_5_vl": ("qwen2_5_vl", "BF16", {}),
    "qwen2_5_vl-Q8_0": ("qwen2_5_vl", "Q8_0", QUANTISED),
    "qwen3_vl": ("qwen3_vl", "F16", {}),
    "qwen3_vl-Q8_0": ("qwen3_vl-flat", "Q8_0", QUANTISED),
    "qwen3_vl_moe": ("qwen3_vl_moe", "F32", {}),
}


@pytest.fixture(scope="module")
def files_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> tuple[Path, Path]:
        """A folder of safetensors, and a GGUF file with its mmproj beside it."""
        case, kind, tower = CASES[name]
        folder, other = (tmp_path_factory.mktemp(name) for _ in range(2))
        model = vision_model(case, **tower)
        write_mmproj(model, other / f"mmproj-{kind}.gguf", lambda _: kind)
        publish(model, folder)
        return folder, write_text(model, other / "model.gguf")

    return made


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_folder(name: str, files_of: Any) -> None:
    folder, file = files_of(name)
    wanted = answer(folder, asked())
    found = answer(file, asked())
    assert wanted.prompt_tokens > len(PROMPT) + 20
    assert found.token_ids == wanted.token_ids
    assert logprobs_of(found) == logprobs_of(wanted)


def test_a_chat_shows_an_image_by_the_vocabularys_own_token(files_of: Any) -> None:
    """In the folder and in the file the token of images has other names, and one number."""
    folder, file = files_of("qwen3_vl")
    messages = [{"role": "user", "content": "What is this?"}]
    wanted, found = (answer(path, asked(messages, IMAGES[:1])) for path in (folder, file))
    assert found.prompt_tokens == wanted.prompt_tokens
    assert logprobs_of(found) == logprobs_of(wanted)


def test_an_encoder_elsewhere_is_named(files_of: Any, tmp_path: Path) -> None:
    _, file = files_of("qwen3_vl")
    alone = Path(shutil.copy(file, tmp_path / file.name))
    with pytest.raises(RequestError, match=r"no mmproj\*.gguf beside model.gguf.*--mmproj"):
        answer(alone, asked())
    mmproj = file.with_name("mmproj-F16.gguf")
    assert logprobs_of(answer(alone, asked(), mmproj=mmproj)) == logprobs_of(answer(file, asked()))


def test_a_folder_holds_a_model_and_its_encoder(files_of: Any, tmp_path: Path) -> None:
    _, file = files_of("qwen3_vl")
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(file.parent)
        assert logprobs_of(model.infer(asked())) == logprobs_of(answer(file, asked()))
        assert "sees images by mmproj-F16.gguf" in model.summary().notes
    shutil.copy(file.with_name("mmproj-F16.gguf"), tmp_path)
    with pytest.raises(CheckpointError, match="encoders of images alone"):
        answer(tmp_path, asked())


def test_text_is_answered_beside_an_encoder_that_is_of_another_model(
    files_of: Any, tmp_path: Path
) -> None:
    """One that is found is passed over, with the reason for requests with images; else refused."""
    _, file = files_of("qwen3_vl")
    alone = Path(shutil.copy(file, tmp_path / file.name))
    other = vision_model("qwen3_vl", out_hidden_size=48)
    mmproj = write_mmproj(other, tmp_path / "mmproj.gguf")
    text = asked(PROMPT[:3], ())
    assert logprobs_of(answer(alone, text)) == logprobs_of(answer(file, text))
    why = "belongs to another model: it makes features of 48 numbers.* embeddings have 32"
    with pytest.raises(RequestError, match=why):
        answer(alone, asked())
    with pytest.raises(CheckpointError, match=why):
        answer(alone, text, mmproj=mmproj)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"projector": "ldp"},
            "projector of type 'ldp'; HMT reads gemma3, idefics3, internvl, mlp, pixtral, ",
        ),
        ({"projector": "qwen2vl_merger"}, "belongs to models of architecture qwen2vl"),
        (
            {"more": ["v.blk.0.ls1.weight"]},
            "1 tensors that HMT does not know.*'v.blk.0.ls1.weight'",
        ),
        ({"patch_size": 7}, "patch_size 7, and its kernels are of 4 pixels"),
    ],
)
def test_encoders_that_are_not_read_are_refused(
    changed: dict[str, Any], why: str, files_of: Any, tmp_path: Path
) -> None:
    _, file = files_of("qwen3_vl")
    mmproj = write_mmproj(vision_model("qwen3_vl"), tmp_path / "encoder.gguf", **changed)
    with pytest.raises(CheckpointError, match=why):
        answer(file, asked(), mmproj=mmproj)


def test_older_files_call_matrices_otherwise(tmp_path: Path) -> None:
    model = vision_model("qwen2_vl")
    file = write_text(model, tmp_path / "model.gguf")
    write_mmproj(model, tmp_path / "mmproj.gguf")
    old = write_mmproj(model, tmp_path / "old.gguf", swapped=True)
    wanted = logprobs_of(answer(file, asked()))
    assert logprobs_of(answer(file, asked(), mmproj=old)) == wanted


def test_a_pack_holds_the_part_for_text(files_of: Any, tmp_path: Path) -> None:
    _, file = files_of("qwen3_vl")
    convert(file, tmp_path / "pack", EngineConfig.resolve(host_memory="64MiB"))
    text = asked(PROMPT[:3], ())
    assert logprobs_of(answer(tmp_path / "pack", text)) == logprobs_of(answer(file, text))
    with pytest.raises(RequestError, match="the pack was made without the encoder of images"):
        answer(tmp_path / "pack", asked())


def test_an_encoder_is_for_gguf_files(files_of: Any) -> None:
    folder, file = files_of("qwen3_vl")
    with pytest.raises(CheckpointError, match="is for GGUF files"):
        answer(folder, asked(), mmproj=file.with_name("mmproj-F16.gguf"))
    with pytest.raises(CheckpointError, match="is of architecture 'qwen3vl'"):
        answer(file, asked(), mmproj=file)


def test_a_hybrid_sees_by_an_encoder_without_deepstack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5: its language model is the converter's own file."""
    one = conventions()["qwen35"]
    wrap = gguf_conventions.vocabulary

    def words(writer: Any) -> None:
        wrap(writer)
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        tokens[-3:] = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]

    monkeypatch.setattr(gguf_conventions, "vocabulary", words)
    begin, end, image = range(VOCABULARY - 3, VOCABULARY)
    text = {name: value for name, value in one.config.items() if name != "architectures"}
    config = CONFIG_MAPPING["qwen3_5"](
        text_config=text,
        vision_config=VISION_CASES["qwen3_5"][2] | {"out_hidden_size": text["hidden_size"]},
        image_token_id=image,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = Qwen3_5ForConditionalGeneration(config).float().eval()
    numbers_of = {
        name.replace("model.", "model.language_model.", 1): torch.from_numpy(array)
        for name, array in one.numbers().items()
    }
    assert not model.load_state_dict(numbers_of, strict=False).unexpected_keys
    (tmp_path / "folder").mkdir()
    publish(model, tmp_path / "folder")
    write_mmproj(model, tmp_path / "mmproj.gguf")
    file = one.write(tmp_path / "model.gguf", "F32")
    prompt = [30, 31, begin, image, end, 40, 41]
    wanted, found = (
        answer(path, asked(prompt, IMAGES[:1]), activations="exact")
        for path in (tmp_path / "folder", file)
    )
    assert found.prompt_tokens == wanted.prompt_tokens > len(prompt) + 10
    assert logprobs_of(found) == pytest.approx(logprobs_of(wanted), abs=1e-4)


def test_gemma3_sees_squares(tmp_path: Path) -> None:
    """Its tokens of images see each other, with others around them that the vocabulary names."""
    kind, text, tower, own, processor = FAMILIES["gemma3"]
    ropes = {"full_attention": 1000.0, "sliding_attention": 10000.0}
    text = dict(text) | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": theta} for name, theta in ropes.items()
        },
    }
    case = (kind, text, tower, own, processor)
    model = family_model(case)
    mmproj = write_mmproj(model, tmp_path / "mmproj.gguf", lambda name: "F16")
    file = write_text(model, tmp_path / "model.gguf")
    (tmp_path / "folder").mkdir()
    publish_family(case, model, tmp_path / "folder")
    words = [300, 17, BEGIN, 81, 99, 2000, BEGIN, 45]
    with hmt.Engine(**OPTIONS) as engine:
        loaded = engine.load_model(file)
        request = asked(words)
        found = loaded.infer(request)
        whole = loaded._input.process(request, None).state.tokens
    between = [7, BEGIN, *[IMAGE] * 9, END, 7]
    assert whole == [300, 17, *between, 81, 99, 2000, *between, 45]
    tokens = [*whole, *found.token_ids]
    wanted = family_logits(model, tmp_path / "folder", tokens, list(IMAGES)).log_softmax(-1)
    expected = wanted[range(len(tokens) - 1), tokens[1:]]
    torch.testing.assert_close(torch.tensor(logprobs_of(found)), expected, atol=1e-4, rtol=0)
    for changed, why in (({"scale": 5}, "scale_factor 5"), ({"image_size": 28}, "image_size 28")):
        write_mmproj(model, mmproj, **changed)
        with pytest.raises(CheckpointError, match=why):
            answer(file, asked(words), mmproj=mmproj)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_mistral3_sees_rows(kind: str, tmp_path: Path) -> None:
    """Behind each row of tokens is one, which the language model's vocabulary names."""
    _, text, tower, own, processor = FAMILIES["mistral3"]
    tower = dict(tower) | {"image_size": 48}
    if kind == "Q8_0":  # of whole blocks of it
        tower |= {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "hidden_act": "silu"}
    case = ("mistral3", text, tower, own, processor)
    model = family_model(case)
    mmproj = write_mmproj(model, tmp_path / "mmproj.gguf", lambda name: kind)
    arch = gguf.MODEL_ARCH.LLAMA if kind == "Q8_0" else None  # as files of before 2026 have it
    file = write_text(model, tmp_path / "model.gguf", arch)
    words = [300, 17, IMAGE, 81, 99, 2000, IMAGE, 45]
    whole, got = spoken(file, words)
    rows, narrow = [*[IMAGE] * 5, BEGIN], [*[IMAGE] * 3, BEGIN]
    assert whole == [
        300,
        17,
        *rows * 2,
        *rows[:-1],
        END,
        81,
        99,
        2000,
        *narrow * 5,
        *narrow[:-1],
        END,
        45,
    ]
    check_logprobs(case, model, tmp_path / "folder", whole, got)
    if kind == "Q8_0":
        return
    for changed, why in (
        ({"merge": 3}, "spatial_merge_size 3"),
        ({"epsilon": 1e-3}, "layer_norm_epsilon"),
        ({"image_size": 4}, "image_size 4"),
    ):
        write_mmproj(model, mmproj, **changed)
        with pytest.raises(CheckpointError, match=why):
            answer(file, asked(words), mmproj=mmproj)


def test_pixtral_sees_rows_of_patches(tmp_path: Path) -> None:
    """Pixtral 12B's tokens are its patches: its files merge none."""
    kind, text, tower, own, processor = FAMILIES["pixtral"]
    case = (kind, text, dict(tower) | {"image_size": 48}, own, processor)
    model = family_model(case)
    mmproj = write_mmproj(model, tmp_path / "mmproj.gguf", lambda name: "F16")
    file = write_text(model, tmp_path / "model.gguf")
    words = [300, IMAGE, 81, IMAGE, 45]
    whole, got = spoken(file, words)
    rows, narrow = [*[IMAGE] * 10, BEGIN], [*[IMAGE] * 5, BEGIN]
    assert whole == [300, *rows * 5, *rows[:-1], END, 81, *narrow * 11, *narrow[:-1], END, 45]
    check_logprobs(case, model, tmp_path / "folder", whole, got)
    write_mmproj(model, mmproj, merge=2)
    with pytest.raises(CheckpointError, match="spatial_merge_size 2"):
        answer(file, asked(words), mmproj=mmproj)


@pytest.mark.parametrize("name", ["internvl", "internvl-biased", "internvl-normed"])
def test_internvl_sees_tiles(name: str, tmp_path: Path) -> None:
    """Their tokens stand between two that the language model's vocabulary names."""
    kind, text, tower, own, processor = FAMILIES["internvl"]
    if name == "internvl-biased":
        tower = dict(tower) | {"attention_bias": True}
    if name == "internvl-normed":
        tower = dict(tower) | {"use_qk_norm": True, "norm_type": "rms_norm"}
    case = (kind, text, tower, own, processor)
    model = family_model(case)
    mmproj = write_mmproj(model, tmp_path / "mmproj.gguf", lambda name: "F16")
    file = write_text(model, tmp_path / "model.gguf")
    words = [300, 17, IMAGE, 81, 99, 2000, IMAGE, 45]
    whole, got = spoken(file, words)
    wide, narrow = ([BEGIN, *[IMAGE] * 9 * n, END] for n in (3, 4))
    assert whole == [300, 17, *wide, 81, 99, 2000, *narrow, 45]
    check_logprobs(case, model, tmp_path / "folder", whole, got)
    if name != "internvl":
        return
    for changed, why in (
        ({"scale": 4}, "scale_factor 4"),
        ({"scale": 1}, "scale_factor 1"),
        ({"image_size": 28}, "image_size 28"),
        ({"tiles": 1000}, "preproc_max_tiles 1000"),
    ):
        write_mmproj(model, mmproj, **changed)
        with pytest.raises(CheckpointError, match=why):
            answer(file, asked(words), mmproj=mmproj)


def test_llava_sees_patches(tmp_path: Path) -> None:
    """Files have no layer behind that of the features; older ones name matrices otherwise."""
    model = vision_model("llava")
    mmproj = write_mmproj(model, tmp_path / "mmproj.gguf", lambda name: "F16", swapped=True)
    file = write_text(model, tmp_path / "model.gguf")
    (tmp_path / "folder").mkdir()
    publish(model, tmp_path / "folder")
    words = [300, 17, IMAGE, 81, 99, 2000, IMAGE, 45]
    wanted, found = (answer(path, asked(words)) for path in (tmp_path / "folder", file))
    assert found.prompt_tokens == wanted.prompt_tokens == len(words) + 2 * 35
    assert logprobs_of(found) == pytest.approx(logprobs_of(wanted), abs=1e-4)
    layers = [1], gguf.GGUFValueType.ARRAY
    write_mmproj(model, mmproj, feature_layer=layers)
    model.config.vision_feature_layer = 1
    publish(model, tmp_path / "folder")
    wanted, found = (answer(path, asked(words)) for path in (tmp_path / "folder", file))
    assert logprobs_of(found) == pytest.approx(logprobs_of(wanted), abs=1e-4)
    for changed, why in (
        ({"feature_layer": ([3], layers[1])}, "feature_layer"),
        ({"feature_layer": ([1, 2], layers[1])}, "feature_layer that differs by layer"),
        ({"mm_patch_merge_type": ("spatial", gguf.GGUFValueType.STRING)}, "spatial_unpad"),
        ({"image_size": 28}, "image_size 28"),
    ):
        write_mmproj(model, mmproj, **changed)
        with pytest.raises(CheckpointError, match=why):
            answer(file, asked(words), mmproj=mmproj)


def test_llava_without_a_token_of_images_reads_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As files of the model that its authors published, whose program marks images."""
    model = vision_model("llava")
    file = write_text(model, tmp_path / "model.gguf")
    assert "no mmproj*.gguf beside model.gguf" in open_gguf(file).images_refused
    monkeypatch.setitem(mmproj_files._OWN_WORDS, "llava", {6: "<other>"})
    file = write_text(model, tmp_path / "model.gguf")
    assert not open_gguf(file).images_refused  # no Llama is asked for an encoder
    with pytest.raises(RequestError, match="images"):
        answer(file, asked([300, IMAGE, 17], IMAGES[:1]))
    write_mmproj(model, tmp_path / "mmproj.gguf")
    assert answer(file, asked([300, 17], ())).token_ids
    with pytest.raises(RequestError, match="no token <image>, for images"):
        answer(file, asked([300, IMAGE, 17], IMAGES[:1]))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "mistral3", "internvl", "llava"])
def test_damaged_encoders_are_errors_of_checkpoints(kind: str, tmp_path: Path) -> None:
    """Keys of other values and types, and tensors that are away or of other shapes."""
    model = family_model(FAMILIES[kind]) if kind in FAMILIES else vision_model(kind)
    mmproj, file = write_mmproj(model, tmp_path / "mmproj.gguf"), tmp_path / "model.gguf"
    text, encoder = read_gguf(write_text(model, file)), read_gguf(mmproj)
    config, rng = open_gguf(file).config["text_config"], random.Random(4)
    values = (
        0,
        -1,
        1,
        7,
        1 << 31,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        [],
        [1],
        [0.5] * 3,
        True,
    )
    refused = 0
    for _ in range(600):
        metadata, records = dict(encoder.metadata), dict(encoder.records)
        for _ in range(rng.randrange(1, 3)):
            metadata[rng.choice(list(metadata))] = rng.choice(values)
            name = rng.choice(list(records))
            shape = tuple(rng.choice((1, 3, 16)) for _ in range(rng.randrange(1, 5)))
            if rng.random() < 0.3:
                records[name] = replace(records[name], shape=shape)
            elif rng.random() < 0.3:
                del records[name]
        try:
            config_with_encoder(
                config, text.metadata, replace(encoder, metadata=metadata, records=records)
            )
        except CheckpointError:
            refused += 1
    assert 100 < refused < 600
