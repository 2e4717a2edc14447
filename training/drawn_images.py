"""Images drawn by a seed, with questions that have one right answer.

A third of the images show a number or a word, the others up to five shapes in the cells of a grid
of 3 x 3.  Sides are 64 to 160 pixels, odd ones too.
"""

import random
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

STRIDE = 16  # the tower's patches of 8 x 8, merged 2 x 2: sides are brought to multiples of it
LEAST, MOST = 64, 160
KINDS = ("colour", "shape", "number", "position", "relation", "digits", "text")
DESCRIBE = "Describe the image."
COLOURS = {
    "red": (214, 32, 32), "green": (24, 150, 50), "blue": (36, 70, 220), "yellow": (236, 196, 0),
    "purple": (146, 40, 176), "orange": (244, 126, 16), "black": (16, 16, 16),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
ROWS, COLUMNS = ("top", "", "bottom"), ("left", "", "right")
WORDS = [
    "apple",
    "arm",
    "baby",
    "ball",
    "bank",
    "bear",
    "bell",
    "bird",
    "boat",
    "book",
    "box",
    "boy",
    "bread",
    "cake",
    "cat",
    "chair",
    "city",
    "clock",
    "coat",
    "corn",
    "cow",
    "cup",
    "day",
    "deer",
    "desk",
    "dog",
    "door",
    "dream",
    "duck",
    "earth",
    "egg",
    "eye",
    "farm",
    "fire",
    "fish",
    "flag",
    "foot",
    "fork",
    "fox",
    "game",
    "gate",
    "girl",
    "glass",
    "gold",
    "hand",
    "hat",
    "hill",
    "home",
    "horse",
    "house",
    "ice",
    "jam",
    "jar",
    "juice",
    "key",
    "king",
    "lake",
    "lamp",
    "leaf",
    "lion",
    "list",
    "love",
    "map",
    "milk",
    "moon",
    "mouse",
    "music",
    "name",
    "nest",
    "night",
    "north",
    "nut",
    "open",
    "owl",
    "page",
    "paint",
    "paper",
    "park",
    "pear",
    "pen",
    "pig",
    "plane",
    "queen",
    "quick",
    "rain",
    "rice",
    "ring",
    "river",
    "road",
    "rock",
    "room",
    "rose",
    "sail",
    "salt",
    "sand",
    "sea",
    "seed",
    "sheep",
    "ship",
    "shoe",
    "sky",
    "sleep",
    "snow",
    "song",
    "south",
    "spoon",
    "star",
    "stone",
    "sun",
    "table",
    "tail",
    "tea",
    "tent",
    "tree",
    "truck",
    "van",
    "wall",
    "wave",
    "west",
    "wheel",
    "wind",
    "window",
    "wolf",
    "wood",
    "word",
    "year",
    "yes",
    "zebra",
]


class Question(NamedTuple):
    """What is asked of an image.  `kind` is one of KINDS, or "describe"."""

    kind: str
    text: str
    answer: str


class Shape(NamedTuple):
    """`row` and `column` of the grid are 0 to 2."""

    name: str
    colour: str
    row: int
    column: int

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return f"{ROWS[self.row]} {COLUMNS[self.column]}".strip() or "centre"


def draw(rng: random.Random, width: int, height: int) -> tuple[Image.Image, list[Question]]:
    """An image of this size, and all that can be asked of it; advances `rng`."""
    shade = rng.randrange(226, 256)
    ground = tuple(min(255, shade + rng.randrange(-8, 9)) for _ in range(3))
    image = Image.new("RGB", (width, height), ground)
    if rng.random() < 0.35:
        return image, _write(rng, image)
    cells = rng.sample(
        [(row, column) for row in range(3) for column in range(3)], rng.randint(1, 5)
    )
    looks = rng.sample([(name, colour) for name in SHAPES for colour in COLOURS], len(cells))
    if rng.random() < 0.4:  # more of one kind, or there would be little to count
        same = rng.choice(looks)
        looks = [
            (same[0], colour) if rng.random() < 0.5 else (name, colour) for name, colour in looks
        ]
    shapes = [Shape(*look, *cell) for look, cell in zip(looks, sorted(cells), strict=True)]
    for shape in shapes:
        _draw_shape(rng, image, shape)
    return image, _about(shapes)


def training_size(rng: random.Random, width: int, height: int) -> tuple[int, int]:
    """A size that the image processor brings to `width` x `height`, multiples of STRIDE."""
    sides = (side + rng.randint(1 - STRIDE // 2, STRIDE // 2 - 1) for side in (width, height))
    first, second = (min(MOST, max(LEAST, side)) for side in sides)
    return first, second


def _draw_shape(rng: random.Random, image: Image.Image, shape: Shape) -> None:
    wide, high = image.width / 3, image.height / 3
    radius = min(wide, high) * rng.uniform(0.3, 0.44)
    slack_x, slack_y = max(0.0, wide / 2 - radius - 1), max(0.0, high / 2 - radius - 1)
    x = (shape.column + 0.5) * wide + rng.uniform(-1, 1) * min(slack_x, 0.2 * wide)
    y = (shape.row + 0.5) * high + rng.uniform(-1, 1) * min(slack_y, 0.2 * high)
    colour = tuple(
        min(255, max(0, value + rng.randrange(-12, 13))) for value in COLOURS[shape.colour]
    )
    pen = ImageDraw.Draw(image)
    if shape.name == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape.name == "ring":
        edge = max(2, round(radius * 0.35))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=edge)
    else:
        pen.polygon([(x + radius * a, y + radius * b) for a, b in _OUTLINES[shape.name]], colour)


def _star() -> list[tuple[float, float]]:
    angles = [np.pi * (n / 5 - 0.5) for n in range(10)]
    sizes = [1.0 if n % 2 == 0 else 0.42 for n in range(10)]
    return [
        (float(s * np.cos(a)), float(s * np.sin(a))) for s, a in zip(sizes, angles, strict=True)
    ]


_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": [(0, -1), (1, 0.85), (-1, 0.85)],
    "star": _star(),
    "cross": [
        (-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3),
        (0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3), (-1, -0.3), (-0.3, -0.3),
    ],
}  # fmt: skip


def _about(shapes: list[Shape]) -> list[Question]:
    names, colours = Counter(s.name for s in shapes), Counter(s.colour for s in shapes)
    listed = ", ".join(f"{shape.colour} {shape.name} {shape.place}" for shape in shapes)
    asked = [
        Question("describe", DESCRIBE, listed),
        Question("number", "How many shapes are there?", str(len(shapes))),
    ]
    for name, count in names.items():
        asked.append(Question("number", f"How many {_plural(name)} are there?", str(count)))
    for colour, count in colours.items():
        asked.append(Question("number", f"How many {colour} shapes are there?", str(count)))
    looks = Counter((s.name, s.colour) for s in shapes)
    for shape in shapes:
        if names[shape.name] == 1:
            asked.append(Question("colour", f"What colour is the {shape.name}?", shape.colour))
        if colours[shape.colour] == 1:
            asked.append(Question("shape", f"Which shape is {shape.colour}?", shape.name))
        if looks[shape.name, shape.colour] == 1:
            asked.append(
                Question("position", f"Where is the {shape.colour} {shape.name}?", shape.place)
            )
    single = [shape for shape in shapes if looks[shape.name, shape.colour] == 1]
    for one, other in permutations(single, 2):
        pair = f"Is the {one.colour} {one.name} {{}} the {other.colour} {other.name}?"
        if one.column != other.column:
            answer = "yes" if one.column < other.column else "no"
            asked.append(Question("relation", pair.format("left of"), answer))
        if one.row != other.row:
            answer = "yes" if one.row < other.row else "no"
            asked.append(Question("relation", pair.format("above"), answer))
    return asked


def _plural(name: str) -> str:
    return f"{name}es" if name == "cross" else f"{name}s"


def _write(rng: random.Random, image: Image.Image) -> list[Question]:
    digits = rng.random() < 0.5
    text = str(rng.randrange(10 ** rng.randint(1, 4))) if digits else rng.choice(WORDS)
    colour = rng.choice([name for name in COLOURS if name != "yellow"])
    size = rng.randint(16, 34)
    while True:
        font = ImageFont.load_default(size)
        left, top, right, bottom = font.getbbox(text)
        if right - left < image.width - 6 or size <= 12:
            break
        size -= 2
    x = rng.uniform(2, max(2.0, image.width - (right - left) - 3)) - left
    y = rng.uniform(2, max(2.0, image.height - (bottom - top) - 3)) - top
    ImageDraw.Draw(image).text((x, y), text, COLOURS[colour], font)
    what, kind = ("number", "digits") if digits else ("word", "text")
    return [
        Question("describe", DESCRIBE, f"the {what} {text} in {colour}"),
        Question(kind, f"Which {what} is written?", text),
        Question("colour", f"What colour is the {what}?", colour),
    ]


class Rows(NamedTuple):
    """A batch of images of one size, each with questions about it.

    pixels    uint8 [rows, height, width, 3]
    ids       int16 [rows, length]; `image_at` is where the images' tokens begin, the same in each
    weights   f32 [rows, length] of the loss: of answers, most for the first
    """

    pixels: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


class Special(NamedTuple):
    """Token ids of the chat format."""

    begin: int
    end: int
    user: int
    assistant: int
    pad: int
    image: int
    vision_start: int
    vision_end: int


_FIRST = 3  # later answers can be read off earlier ones
_ASKED, _DESCRIBED = 5, 0.2  # questions before a description; images that have one alone
IMAGE_AT = 3  # <|begin|><|user|><|vision_start|> stand before the image


def batch(
    rng: random.Random, encode: Callable[[str], list[int]], special: Special, rows: int, length: int
) -> Rows:
    """A batch whose text, behind the image, has at most `length` tokens; advances `rng`."""
    width, height = (STRIDE * rng.randint(LEAST // STRIDE, MOST // STRIDE) for _ in range(2))
    tokens = width * height // STRIDE**2
    pixels = np.empty((rows, height, width, 3), np.uint8)
    ids = np.full((rows, IMAGE_AT + tokens + 1 + length), special.pad, np.int16)
    weights = np.zeros(ids.shape, np.float32)
    start = [special.begin, special.user, special.vision_start]
    start += [special.image] * tokens + [special.vision_end]
    ids[:, : len(start)] = start
    for row in range(rows):
        image, asked = draw(rng, *training_size(rng, width, height))
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        pixels[row] = np.asarray(image)
        at = len(start)
        for number, question in enumerate(_chosen(rng, asked)):
            before = [special.user] if number else []
            before += [*encode(question.text), special.end, special.assistant]
            after = [*encode(question.answer), special.end]
            end = at + len(before) + len(after)
            if end > ids.shape[1]:
                break
            ids[row, at:end] = before + after
            weights[row, at + len(before) : end] = 1 if number else _FIRST
            at = end
    return Rows(pixels, ids, weights)


def _chosen(rng: random.Random, asked: list[Question]) -> list[Question]:
    """Some of the questions, each kind in its turn; a description gives them away, and is last."""
    by_kind: dict[str, list[Question]] = {}
    for question in rng.sample(asked, len(asked)):
        by_kind.setdefault(question.kind, []).append(question)
    describe = by_kind.pop("describe")
    kinds = rng.sample(sorted(by_kind), len(by_kind))
    chosen = [by_kind[kind][n] for n in range(2) for kind in kinds if n < len(by_kind[kind])]
    return describe if rng.random() < _DESCRIBED else [*chosen[:_ASKED], *describe]
