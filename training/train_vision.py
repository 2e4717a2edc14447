"""Train a small model that sees: Qwen3-VL's tower and decoder, on drawn images and on text.

    python training/train_vision.py --data FOLDER --out FOLDER [--seconds 400] [--tiny]

FOLDER comes from prepare.py with `--vocabulary 1532`.  Processes draw while the GPU trains; batches
are used again until new ones come.  `--tiny` shows on a CPU that everything works.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
import threading
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from drawn_images import IMAGE_AT, STRIDE, Special, batch
from export import quantize_checkpoint
from optimizer import MasterAdamW, weighted_loss
from prepare import SPECIAL_TOKENS
from score_images import TransformersModel, held_out
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from train import Batches, Schedule, learning_rate, timed_steps
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import rotate_half

from hmt.bench.image_questions import FILE

PATCH, MERGE, CONTEXT = 8, 2, 8192
_VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_RATE = 0.5  # of the learning rate that language models of this size stand


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a run.

    rows    images of a batch
    length  tokens of the questions about an image
    kept    batches that are used again until others take their place
    """

    rows: int
    length: int
    kept: int
    workers: int
    text: Schedule


FULL = Sizes(384, 72, 96, 14, Schedule(((0.8, 512), (float("inf"), 2048)), 32768, 2000, 0.3))
TINY = Sizes(8, 40, 16, 1, Schedule(((0.5, 128), (float("inf"), 256)), 512, 100, 0.3))


def with_vision_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer`, to which the tokens that stand for and around images are added."""
    tokenizer.add_special_tokens(_VISION_TOKENS)
    return tokenizer


def special_tokens(tokenizer: Tokenizer) -> Special:
    """Their ids."""
    begin, end, user, assistant, _, _, _, pad = map(tokenizer.token_to_id, SPECIAL_TOKENS)
    start, stop, image, _ = map(tokenizer.token_to_id, _VISION_TOKENS)
    return Special(begin, end, user, assistant, pad, image, start, stop)


def build(vocabulary: int, special: Special) -> Qwen3VLForConditionalGeneration:
    """A fresh model: 2.8 million parameters that write, 1.8 million that see."""
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e5,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
        "bos_token_id": special.begin,
        "eos_token_id": special.end,
        "pad_token_id": special.pad,
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 5,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 256,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [2],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=special.image,
        video_token_id=special.image + 1,
        vision_start_token_id=special.vision_start,
        vision_end_token_id=special.vision_end,
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = special.end
    model.generation_config.pad_token_id = special.pad
    return model


class BatchedModel:
    """transformers' model, computed for many images of one size at once.

    Its own tower calls attention once per image and layer.  The numbers are the same up to
    rounding.
    """

    def __init__(self, model: Qwen3VLForConditionalGeneration) -> None:
        self.model = model
        self._visual, self._text = model.model.visual, model.model.language_model
        self._places: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def states(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Of ids int64 [rows, length] with images uint8 [rows, height, width, 3]: [.., width]."""
        high, wide = pixels.shape[1:3]
        features, deep = self._encode(pixels)
        tokens = high * wide // STRIDE**2
        hidden = self._text.embed_tokens(ids)
        span = slice(IMAGE_AT, IMAGE_AT + tokens)
        hidden = torch.cat([hidden[:, :IMAGE_AT], features, hidden[:, span.stop :]], 1)
        positions = self._positions(high // STRIDE, wide // STRIDE, ids.shape[1])
        rope = self._text.rotary_emb(hidden, positions)
        for number, layer in enumerate(self._text.layers):
            hidden = layer(hidden, attention_mask=None, position_embeddings=rope)
            if number < len(deep):
                after = ids.shape[1] - span.stop
                hidden = hidden + functional.pad(deep[number], (0, 0, IMAGE_AT, after))
        return self._text.norm(hidden)

    def _positions(self, high: int, wide: int, length: int) -> Tensor:
        """M-RoPE [3, 1, length] of text, an image at IMAGE_AT, and text again."""
        device = self.model.device
        down = torch.arange(high, device=device).repeat_interleave(wide)
        across = torch.arange(wide, device=device).repeat(high)
        image = torch.stack([torch.zeros_like(down), down, across]) + IMAGE_AT
        before = torch.arange(IMAGE_AT, device=device).expand(3, -1)
        after = torch.arange(length - IMAGE_AT - high * wide, device=device).expand(3, -1)
        return torch.cat([before, image, after + IMAGE_AT + max(high, wide)], 1)[:, None]

    def _encode(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Features [rows, tokens, width] of the images, and those of DeepStack."""
        rows, high, wide, _ = pixels.shape
        down, across = high // STRIDE, wide // STRIDE
        scaled = pixels.to(self.model.dtype) / 127.5 - 1
        cut = scaled.view(rows, down, MERGE, PATCH, across, MERGE, PATCH, 3)
        cut = cut.permute(0, 1, 4, 2, 5, 7, 3, 6)  # blocks, patches in a block, channels, pixels
        cut = cut.reshape(rows, -1, 3, 1, PATCH * PATCH).expand(-1, -1, -1, 2, -1).flatten(2)
        proj = self._visual.patch_embed.proj
        index, weights, cos, sin = self._grid(high // PATCH, wide // PATCH)
        place = (self._visual.pos_embed(index) * weights[..., None]).sum(1).to(cut.dtype)
        hidden = functional.linear(cut, proj.weight.flatten(1), proj.bias) + place
        deep = []
        for number, block in enumerate(self._visual.blocks):
            hidden = hidden + self._attend(block.attn, block.norm1(hidden), cos, sin)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if number in self._visual.deepstack_visual_indexes:
                merger = self._visual.deepstack_merger_list[len(deep)]
                deep.append(merger(hidden.flatten(0, 1)).unflatten(0, (rows, -1)))
        return self._visual.merger(hidden.flatten(0, 1)).unflatten(0, (rows, -1)), deep

    def _attend(self, attention: torch.nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        query, key = (part * cos + rotate_half(part) * sin for part in (query, key))
        out = functional.scaled_dot_product_attention(query, key, value)
        return attention.proj(out.transpose(1, 2).flatten(2))

    def _grid(self, high: int, wide: int) -> tuple[Tensor, ...]:
        """What positions of patches give: corners [patches, 4], their weights, cos and sin."""
        if (high, wide) not in self._places:
            device, visual = self.model.device, self._visual
            down, across = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
            down, across = (
                part.view(high // MERGE, MERGE, wide // MERGE, MERGE).transpose(1, 2).flatten()
                for part in (down, across)
            )
            side = visual.num_grid_per_side
            corners = []
            for at, count in ((down, high), (across, wide)):
                exact = torch.linspace(0, side - 1, count)[at]
                low = exact.long()
                corners.append((low, (low + 1).clamp(max=side - 1), exact - low))
            (top, bottom, part), (left, right, share) = corners
            index = torch.stack([y * side + x for y in (top, bottom) for x in (left, right)], 1)
            weights = torch.stack(
                [a * b for a in (1 - part, part) for b in (1 - share, share)], 1
            ).to(device, self.model.dtype)
            grid = torch.stack([down, across], 1).to(device)
            turns = visual.rotary_pos_emb(weights, grid)  # weights: an example of the dtype
            cos, sin = (turn.to(weights.dtype) for turn in turns)
            self._places[high, wide] = (index.to(device), weights, cos, sin)
        return self._places[high, wide]


def draw_batches(
    seed: int, tokenizer: str, special: Special, sizes: Sizes, folder: str,
    queue: "multiprocessing.Queue[str]",
) -> None:  # fmt: skip
    """Draw batches of this seed for ever: files whose names go into `queue`."""
    parsed = Tokenizer.from_str(tokenizer)
    rng = random.Random(seed)

    @lru_cache(1 << 14)
    def encode(text: str) -> list[int]:
        return parsed.encode(text, add_special_tokens=False).ids

    for number in range(1 << 40):
        file = Path(folder) / f"{seed}-{number}.npy"
        with file.open("wb") as stream:
            for array in batch(rng, encode, special, sizes.rows, sizes.length):
                np.save(stream, array)
        queue.put(str(file))


class DrawnBatches:
    """The latest batches, on the device; a thread reads those that processes draw."""

    def __init__(self, tokenizer: Tokenizer, special: Special, sizes: Sizes, device: str) -> None:
        self.drawn = 0
        self._device = device
        self._kept: deque[tuple[Tensor, ...]] = deque(maxlen=sizes.kept)
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._queue = context.Queue(2 * sizes.workers)
        given = tokenizer.to_str(), special, sizes, self._folder.name, self._queue
        self._workers = [
            context.Process(target=draw_batches, args=(seed, *given), daemon=True)
            for seed in range(sizes.workers)
        ]
        for worker in self._workers:
            worker.start()
        self._append(self._queue.get())
        threading.Thread(target=self._read, daemon=True).start()

    def take(self, rng: random.Random) -> tuple[Tensor, ...]:
        """Pixels, ids, weights of one that is kept, as `drawn_images.Rows`."""
        return self._kept[rng.randrange(len(self._kept))]

    def close(self) -> None:
        """Stop drawing."""
        for worker in self._workers:
            worker.terminate()

    def _read(self) -> None:
        while True:
            self._append(self._queue.get())

    def _append(self, name: str) -> None:
        with open(name, "rb") as stream:
            arrays = [np.load(stream) for _ in range(3)]
        Path(name).unlink()
        self._kept.append(tuple(torch.from_numpy(array).to(self._device) for array in arrays))
        self.drawn += len(arrays[0])


def train(
    batched: BatchedModel, drawn: DrawnBatches, text: Batches, sizes: Sizes, seconds: float
) -> None:
    """Train all parameters, in place: five batches of images, then one of text."""
    model, rng, used = batched.model, random.Random(0), 0
    losses: dict[str, Tensor] = {}
    optimizer = MasterAdamW(model.parameters(), weight_decay=0.05)
    for step, part, prints in timed_steps(seconds, every=10):
        if step % 6 == 5:
            length = sizes.text.length(part, 0)
            ids, weights = (each.to(model.device) for each in text.take(length, length))
            output = model.model.language_model(input_ids=ids, use_cache=False)
            states = output.last_hidden_state
        else:
            pixels, ids, weights = drawn.take(rng)
            ids = ids.long()
            states = batched.states(pixels, ids)
            used += len(ids)
        loss = weighted_loss(states, ids, weights, model.lm_head)
        losses["text" if step % 6 == 5 else "images"] = loss.detach()
        loss.backward()
        optimizer.step(_RATE * learning_rate(step, part))
        if prints:
            last = "  ".join(f"{what} {loss.item():.3f}" for what, loss in losses.items())
            print(
                f"{part:4.0%}  step {step}  loss of {last}  {used:,} images used, "
                f"{drawn.drawn:,} drawn",
                flush=True,
            )


def save(out: Path, model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer) -> None:
    """Write the checkpoint: its text's matrices in FP8 tiles, its tower in BF16."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    quantize_checkpoint(out, ("model.visual", "lm_head"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
        model_max_length=CONTEXT,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(out)
    (out / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR, indent=1) + "\n")


def main() -> None:
    """Train, write, count right answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--tiny", action="store_true", help="small batches, one process")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = with_vision_tokens(Tokenizer.from_file(str(options.data / "tokenizer.json")))
    special, sizes = special_tokens(tokenizer), TINY if options.tiny else FULL
    model = build(tokenizer.get_vocab_size(), special)
    model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters on {device}")
    drawn = DrawnBatches(tokenizer, special, sizes, device)
    text = Batches(options.data, tokenizer, sizes.text)
    train(BatchedModel(model), drawn, text, sizes, options.seconds)
    drawn.close()
    save(options.out, model.to(torch.bfloat16), tokenizer)
    questions = held_out(14 if options.tiny else 210)
    questions.write(options.out / FILE)
    oracle = TransformersModel(options.out, device)
    for kind, score in questions.grade(oracle.answer).items():
        print(f"{kind}: {score}", flush=True)
    print(f"wrote {options.out}; score_images.py and hmt eval measure it")


if __name__ == "__main__":
    main()
