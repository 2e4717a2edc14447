"""Images as a tower takes them, and what is written in a prompt in the place of each."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from hmt.contracts.checkpoint import Checkpoint
from hmt.text import Tokenizer
from hmt.text.small_file import read_object

ROWS: Final = "pixtral"  # the tower whose rows have a token behind them
_NAMING: Final = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_MOST: Final = 1 << 20  # of a number in a processor's file, which strings are repeated by


class Processing:
    """transformers' image processor; one token stands for each row of features, and nothing else.

    mark    token that stands for an image in a prompt as it is given
    token   that stands for one row of its features
    tokens  all that stand for any
    """

    def __init__(self, processor: Any, mark: int, token: int) -> None:
        self._processor = processor
        self.mark = mark
        self.token = token
        self.tokens = frozenset([token])

    @property
    def described(self) -> bytes:
        """What decides how pixels become what is encoded."""
        import transformers

        images = getattr(self._processor, "image_processor", self._processor)
        return f"transformers {transformers.__version__} {images.to_json_string()}".encode()

    def made(self, pixels: Tensor) -> Mapping[str, Any]:
        """What the processor makes of uint8 [height, width, 3], and raises where it cannot."""
        made: Mapping[str, Any] = self._processor(
            images=[pixels.numpy()], return_tensors="pt", input_data_format="channels_last"
        )
        return made

    def written(self, made: Mapping[str, Any], rows: int) -> list[int]:
        """Tokens in the place of an image that has so many `rows`, as far as sizes tell."""
        return [self.token] * rows

    def joined(self, left: Sequence[int], right: Sequence[int]) -> list[int]:
        """Tokens of a text and of what follows it."""
        return [*left, *right]


class WithRows(Processing):
    """Rows of an image each have a token behind them, as Pixtral's.

    side    pixels of a token in each direction
    behind  a row, and the last one
    """

    def __init__(self, processor: Any, token: int, side: int, behind: tuple[int, int]) -> None:
        super().__init__(processor, token, token)
        self._side = side
        self._behind = behind

    def made(self, pixels: Tensor) -> Mapping[str, Any]:
        """See Processing."""
        made: Mapping[str, Any] = self._processor(
            images=[pixels.numpy()],
            patch_size={"height": self._side, "width": self._side},
            return_tensors="pt",
            input_data_format="channels_last",
        )
        return made

    def written(self, made: Mapping[str, Any], rows: int) -> list[int]:
        """See Processing."""
        height, width = (int(pixels) // self._side for pixels in made["image_sizes"][0])
        between, last = self._behind
        tokens = ([self.token] * width + [between]) * height
        return [*tokens[:-1], last]


class WithTokens(Processing):
    """Tokens are written around as many rows as each image has, as a file with an encoder says.

    written   `front` and `behind` are tokens around `rows` for each square that an image is cut
              into; `mark` is an image's token in a prompt
    """

    def __init__(self, processor: Any, token: int, written: Mapping[str, Any]) -> None:
        front, behind = written["front"], written["behind"]
        super().__init__(processor, written["mark"], token)
        self._front, self._rows, self._behind = front, written["rows"], behind

    def written(self, made: Mapping[str, Any], rows: int) -> list[int]:
        """See Processing."""
        rows = self._rows * len(made["pixel_values"])
        return [*self._front, *[self.token] * rows, *self._behind]


class WithText(Processing):
    """transformers' processor of the model writes a text, in the tokens of its `tokenizer`."""

    def __init__(self, processor: Any, token: int) -> None:
        """Raises ValueError where a prompt cannot say where an image is."""
        self.tokenizer = processor.tokenizer
        self._place: str = getattr(processor, "image_placeholder_token", processor.image_token)
        mark = self._tokens(self._place)
        if len(mark) != 1:
            raise ValueError(f"its mark of images is {len(mark)} tokens")
        super().__init__(processor, mark[0], token)
        self._added = set(self.tokenizer.added_tokens_decoder)

    def made(self, pixels: Tensor) -> Mapping[str, Any]:
        """See Processing."""
        from PIL import (
            Image,
        )  # some processors know no arrays, or take those of few pixels for bare

        made: Mapping[str, Any] = self._processor(
            images=[Image.fromarray(pixels.numpy())],
            text=[self._place],
            add_special_tokens=False,
            padding=False,
            return_tensors="pt",
        )
        return made

    def written(self, made: Mapping[str, Any], rows: int) -> list[int]:
        """See Processing."""
        found: list[int] = made["input_ids"][0].tolist()
        return found

    def joined(self, left: Sequence[int], right: Sequence[int]) -> list[int]:
        """See Processing.

        Text that meets is encoded together, as it is where a prompt is encoded with its images.
        """
        end = next((n for n, t in enumerate(reversed(left)) if t in self._added), len(left))
        begin = next((n for n, t in enumerate(right) if t in self._added), len(right))
        tail, head = list(left[len(left) - end :]), list(right[:begin])
        if tail and head:
            words = [self.tokenizer.decode(part) for part in (tail, head)]
            if [self._tokens(part) for part in words] == [tail, head]:
                tail, head = self._tokens("".join(words)), []
        return [*left[: len(left) - end], *tail, *head, *right[begin:]]

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.ids(text)
        return found


def from_file(config: Any, token: int, images: Any, written: Mapping[str, Any]) -> Processing:
    """As a file with an encoder says: see `hmt.formats.gguf.projectors`.

    config, token, images   as `with_text` takes them
    """
    if "behind_rows" in written:
        between, last = written["behind_rows"]
        return WithRows(images, token, _side(config), (between, last))
    return WithTokens(images, token, written)


def writes_text(kind: str) -> bool:
    """Whether transformers has a processor of images and text for models of this type."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    return kind in PROCESSOR_MAPPING_NAMES


def _class_of(kind: str, folder: Path) -> Any:
    """transformers' processor for models of a type, or the one that the model's files name."""
    import transformers  # it takes a second
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(kind)
    for file in _NAMING if name is None else ():
        named = read_object(folder / file).get("processor_class")
        if named in PROCESSOR_MAPPING_NAMES.values():
            name = named
            break
    if name is None:
        raise LookupError(f"transformers has no processor for {kind}, and its files name none")
    return getattr(transformers, name)


def tokenizer_of(folder: Path, checkpoint: Checkpoint) -> Callable[[], Any] | None:
    """What opens a checkpoint's tokenizer for processors, once, when it is first called.

    folder   that has its tokenizer.json, unless a GGUF file says what would be in it
    None where there is neither.
    """
    from hmt.models.vision import tokenizing

    said, path = checkpoint.vocabulary, checkpoint.path
    if said is not None:
        return cache(lambda: tokenizing.ProcessorTokenizer(Tokenizer.of_gguf(path, said)))
    if not (folder / "tokenizer.json").is_file():
        return None
    return cache(lambda: tokenizing.opened(folder))


def with_text(
    config: Any,
    folder: Path,
    token: int,
    images: Any,
    tokenizer: Callable[[], Any] | None = None,
) -> Processing:
    """As transformers' processor of a type does it.

    config   transformers', of the whole model
    token    that stands for one row of features
    images   its image processor
    tokenizer   gives a ProcessorTokenizer; None: of the tokenizer.json in `folder`
    Raises errors of many kinds where files are not what they should be.
    """
    from hmt.models.vision import tokenizing

    reading = tokenizing.opened(folder) if tokenizer is None else tokenizer()
    # Pixtral 12B is of type llava.  PixtralProcessor needs torchvision, if only to be imported.
    if config.vision_config.model_type == ROWS:
        known: Any = reading  # by its hints it returns other types
        between, last = known.convert_tokens_to_ids(["[IMG_BREAK]", "[IMG_END]"])
        if {between, last} & {None, reading.unk_token_id}:
            raise LookupError("its tokenizer has no [IMG_BREAK] and [IMG_END]")
        return WithRows(images, token, _side(config), (between, last))
    kind = _class_of(config.model_type, folder)
    return WithText(_processor(kind, folder, images, reading), token)


def _side(config: Any) -> int:
    """Pixels of a token in each direction, of a tower whose rows have a token behind them."""
    side: int = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    return side


def _processor(kind: Any, folder: Path, images: Any, tokenizer: Any) -> Any:
    """A processor of class `kind` that reads images and text."""
    # transformers' own reader also loads an audio tokenizer, from wherever the file says.
    fields = read_object(folder / "processor_config.json")
    for name in ("audio_tokenizer", "chat_template"):
        fields.pop(name, None)
    for name, value in fields.items():
        if isinstance(value, int | float) and not abs(value) <= _MOST:
            raise ValueError(f"{name} of its processor is {value}")

    class OfImages(kind):  # type: ignore[misc]
        """Without the parts for video and sound, of a text that is an image's place alone."""

        check_argument_for_proper_class: Callable[..., None] = lambda *_: None
        validate_inputs: Callable[..., None] = lambda *_, **__: None

    OfImages.__name__ = kind.__name__
    parts = {"image_processor": images, "tokenizer": tokenizer}
    names = kind.get_attributes()
    try:
        args = [parts.get(name) for name in names]
        return OfImages.from_args_and_dict(args, fields)
    except AttributeError:  # of a class that asks its part for videos something, as MiniCPM-V's
        args = [parts.get(name, _Absent()) for name in names]
        return OfImages.from_args_and_dict(args, fields)


class _Absent(dict[str, Any]):
    """In place of a part of a processor that images do not need."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
