"""Count a vision model's right answers with transformers: what `hmt eval` is compared with.

    python training/score_images.py CHECKPOINT [--device cuda] [--answers FILE]

FP8 tiles are turned into BF16, as score.py does.
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

from hmt.bench import Score
from hmt.bench.image_questions import FILE, MOST_TOKENS, ImageQuestion, ImageQuestions

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


class TransformersEyes:
    """A checkpoint in transformers, in BF16."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16):
        config = AutoConfig.from_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
        state = {
            name: dequantize(tensor, stored.get(f"{name}_scale_inv"), dtype)
            for name, tensor in stored.items()
            if not name.endswith("_scale_inv")
        }
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
    """Count, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--answers", type=Path, help="write all answers here, as JSON")
    options = parser.parse_args()
    eyes = TransformersEyes(options.checkpoint, options.device)
    questions = ImageQuestions.read(options.checkpoint / FILE)
    given: list[str] = []

    def answer(image: bytes, question: str) -> str:
        given.append(eyes.answer(image, question))
        return given[-1]

    scores = questions.grade(answer)
    right = sum(score.right for score in scores.values())
    for kind, score in (scores | {"all": Score(right, len(given))}).items():
        print(f"{kind}: {score}")
    if options.answers:
        pairs = zip(questions.questions, given, strict=True)
        found = [[*question, said] for question, said in pairs]
        options.answers.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
