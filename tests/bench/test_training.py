"""The training code still makes what the published reference models were made of."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import MultiTokenPrediction, build, routers
from export import export, quantize_tiles
from hypothesis import given, settings
from hypothesis import strategies as st
from mixture import Mixture
from optimizer import MasterAdamW, weighted_loss
from prepare import SPECIAL_TOKENS, clean, split, train_tokenizer
from safetensors.torch import load_file
from score import dequantize, load
from tokenizers import Tokenizer
from train import TINY, Batches, RouterBalance

ROOT = Path(__file__).parents[2]
DENSE = ROOT / "src" / "hmt" / "embedded" / "mini-dense"
MOE = ROOT / "assets" / "mini-moe"
TOKENIZER = Tokenizer.from_file(str(DENSE / "tokenizer.json"))
TEXT = (np.arange(50000) % 4088 + 8).astype(np.uint16)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def header(file: Path) -> dict:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        return json.loads(opened.read(length))


@pytest.mark.parametrize(
    ("seed", "ids", "weights"),
    [(0, "419155c3cf3a87ca", "7f7c38017ae902ff"), (3, "da31a5b9d49855a0", "a41b876e48abbdad")],
)
def test_the_mixture_is_that_of_the_training(seed, ids, weights):
    drawn = [hashlib.sha256(), hashlib.sha256()]
    mixture = Mixture(encode, TEXT, seed, pool_size=50)
    for length in (256, 512, 2048, 5000):
        for _ in range(20):
            for digest, part in zip(drawn, mixture.sample(length), strict=True):
                assert len(part) == length
                digest.update(part.tobytes())
    assert [digest.hexdigest()[:16] for digest in drawn] == [ids, weights]


@pytest.mark.parametrize("file", sorted(path.name for path in MOE.glob("*.safetensors")))
def test_the_published_fp8_is_what_the_export_makes_of_it(file):
    stored = load_file(MOE / file)
    scaled = [name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")]
    assert scaled
    for name in scaled:
        numbers, scales = stored[name], stored[f"{name}_scale_inv"]
        rows, columns = numbers.shape
        factors = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        again, again_scales = quantize_tiles(numbers.float() * factors)
        assert torch.equal(again.view(torch.uint8), numbers.view(torch.uint8))
        assert torch.equal(again_scales, scales)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 9))
def test_tiles_keep_weights_to_a_sixteenth(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight[: rows // 2] = 0
    numbers, scales = quantize_tiles(weight)
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    error = (dequantize(numbers, scales).float() - weight).abs()
    # e4m3 has three bits after the point, BF16 seven; below 2^-6 its steps stay 2^-9.
    bound = weight.abs() * (2**-4 + 2**-8) + scales.max() * 2**-10
    assert bool((error <= bound).all())


def test_an_exported_moe_has_the_tensors_of_the_published_one(tmp_path):
    torch.manual_seed(0)
    model = build("moe", TOKENIZER.get_vocab_size())
    export(tmp_path, model, TOKENIZER, MultiTokenPrediction(model))
    for file in MOE.glob("*.safetensors"):
        assert header(tmp_path / file.name) == header(file)
    for name in ("config.json", "model.safetensors.index.json", "tokenizer_config.json"):
        ours, published = (json.loads((folder / name).read_text()) for folder in (tmp_path, MOE))
        ours["transformers_version"] = published.get("transformers_version")
        assert {key: ours.get(key) for key in published} == published
    assert (tmp_path / "chat_template.jinja").read_text() == (
        MOE / "chat_template.jinja"
    ).read_text()
    tokens = [0, 2, 100, 200]
    expected = model.eval()(torch.tensor([tokens])).logits[0].float()
    error = (load(tmp_path).logits(tokens, range(4)) - expected).norm() / expected.norm()
    assert error < 0.25  # 8 bits in five layers of random weights, where some experts change


def test_an_exported_dense_model_has_the_tensors_of_the_published_one(tmp_path):
    export(tmp_path, build("dense", TOKENIZER.get_vocab_size()), TOKENIZER, None)
    file = "model.safetensors"
    assert header(tmp_path / file) == header(DENSE / file)
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert again.encode("The 3 moons.").ids == TOKENIZER.encode("The 3 moons.").ids


def test_one_step_lowers_the_loss_and_evens_the_routers(tmp_path):
    TEXT.tofile(tmp_path / "train.bin")
    torch.manual_seed(0)
    model = build("moe", TOKENIZER.get_vocab_size())
    optimizer, balance = MasterAdamW(model.parameters(), weight_decay=0.1), RouterBalance(model)
    batches = Batches(tmp_path, TOKENIZER, TINY)
    ids, weights = batches.take(256, 512)
    assert ids.shape == weights.shape == (8, 256)

    def loss() -> torch.Tensor:
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        return weighted_loss(states, ids, weights, model.lm_head)

    before = loss()
    before.backward()
    optimizer.step(1e-3)
    balance.step(1e-2)
    assert loss().item() < before.item()
    for router in routers(model):
        assert router.e_score_correction_bias.dtype == torch.float32
        assert router.e_score_correction_bias.abs().amax().item() == pytest.approx(1e-2)
    assert batches.take(512, 512)[0].shape == (4, 512)


def test_books_become_paragraphs_and_their_ends_are_held_out():
    book = "Frame\n*** START OF IT ***\r\nOne line\r\nand more.\r\n\r\nTwo.\r\n*** END OF IT ***"
    assert clean(book) == "One line and more.\nTwo.\n"
    lines = "".join(f"Line {i}.\n" for i in range(100))
    train, valid = split(lines, 0.1)
    assert train + valid == lines
    assert train.endswith("\n")
    assert 0.09 < len(valid) / len(lines) < 0.12


def test_a_trained_tokenizer_speaks_the_chat_format_and_keeps_digits_single():
    text = (ROOT / "assets" / "text" / "valid.txt").read_text(encoding="utf-8")
    tokenizer = train_tokenizer([text])
    assert tokenizer.get_vocab_size() == 4096
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(8))
    assert len(tokenizer.encode("48213").ids) == 5
    sentence = "Ünïcode, “quoted”, the 3 moons.\n"
    assert tokenizer.decode(tokenizer.encode(sentence).ids) == sentence
