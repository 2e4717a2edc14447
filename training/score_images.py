"""Count a vision model's right answers with transformers: what `hmt eval` is compared with.

    python training/score_images.py CHECKPOINT [--device cuda] [--quant w4a16] [--out quality.json]

FP8 tiles are turned into BF16, as score.py does; with --quant they are rounded by HMT's scheme
before, and transformers gets the numbers that the codes stand for.
"""

import argparse
import io
import json
import random
from pathlib import Path

import torch
from drawn_images import KINDS, LEAST, MOST, draw
from export import dequantize
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoImageProcessor, Qwen3VLForConditionalGeneration

from hmt.bench import Quality, Score
from hmt.bench.image_questions import FILE, MOST_TOKENS, ImageQuestion, ImageQuestions
from hmt.contracts.blocks import ParamSpec
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels import reference
from hmt.quant import Scheme, empty_weight, parse_scheme, quantize

_HELD_OUT_SEED = 1 << 20  # the training counts from 0


def held_out(count: int) -> ImageQuestions:
    """`count` questions, of each kind as many, about images that the training does not draw."""
    rng = random.Random(_HELD_OUT_SEED)
    images: list[bytes] = []
    questions: list[ImageQuestion] = []
    missing = {kind: -(-count // len(KINDS)) for kind in KINDS}
    while len(questions) < count:
        image, asked = draw(rng, rng.randint(LEAST, MOST), rng.randint(LEAST, MOST))
        chosen = {q.kind: q for q in rng.sample(asked, len(asked)) if missing.get(q.kind)}
        if not chosen:
            continue
        for kind, question in sorted(chosen.items())[: count - len(questions)]:
            missing[kind] -= 1
            questions.append(ImageQuestion(len(images), kind, question.text, question.answer))
        data = io.BytesIO()
        image.save(data, "PNG", optimize=True)
        images.append(data.getvalue())
    return ImageQuestions(tuple(images), tuple(questions))


def rounded(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """`weight` [out, in] as `scheme` stores it, in numbers again, f32."""
    shape = tuple(weight.shape)
    form = scheme.format_for(ParamSpec("weight", shape, ("weight",)))
    if form is None:
        return weight
    stored = empty_weight(form, shape)
    quantize(WeightTensor(Encoding.F32, shape, weight.float().contiguous()), stored)
    return reference.dequantize(stored, torch.float32)


class TransformersModel:
    """A checkpoint in transformers, in `dtype`; its FP8 matrices as `quant` stores them."""

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        quant: str = "none",
    ) -> None:
        config = AutoConfig.from_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
        state, scheme = {}, parse_scheme(quant)
        for name, tensor in stored.items():
            if (scales := stored.get(f"{name}_scale_inv")) is not None:
                numbers = rounded(dequantize(tensor, scales, torch.float32), scheme)
                state[name] = numbers.to(dtype)
            elif not name.endswith("_scale_inv"):
                state[name] = tensor
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype
        )
        self.model.to(device).eval()
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def inputs(self, image: bytes, question: str) -> dict[str, torch.Tensor]:
        """What the model is given for a question in its chat template, with a batch of one."""
        with Image.open(io.BytesIO(image)) as opened:
            given = self._processor(images=[opened.convert("RGB")], return_tensors="pt")
        tokens = int(given["image_grid_thw"].prod()) // self._processor.merge_size**2
        text = (
            f"<|begin|><|user|><|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>{question}"
            "<|end|><|assistant|>"
        )
        ids = torch.tensor([self._tokenizer.encode(text, add_special_tokens=False).ids])
        kinds = (ids == self.model.config.image_token_id).int()
        inputs = {"input_ids": ids, "mm_token_type_ids": kinds, **given}
        return {name: value.to(self.model.device) for name, value in inputs.items()}

    @torch.no_grad()
    def answer(self, image: bytes, question: str) -> str:
        """What it writes by greedy decoding."""
        inputs = self.inputs(image, question)
        ids = self.model.generate(**inputs, max_new_tokens=MOST_TOKENS, do_sample=False)
        return self._tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :].tolist())


def main() -> None:
    """Count, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quant", default="none", help="as hmt eval takes it")
    parser.add_argument("--out", type=Path, help="add the scores to those in this file")
    options = parser.parse_args()
    oracle = TransformersModel(options.checkpoint, options.device, quant=options.quant)
    scores = ImageQuestions.read(options.checkpoint / FILE).grade(oracle.answer)
    total = Score(*(sum(parts) for parts in zip(*scores.values(), strict=True)))
    for kind, score in (scores | {"all": total}).items():
        print(f"{kind}: {score}")
    if options.out:
        data = json.loads(options.out.read_text()) if options.out.exists() else {}
        data["images"] = Quality(images=scores).as_json()["images"]
        options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
