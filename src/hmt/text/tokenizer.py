"""A checkpoint's tokenizer: text and chats to token ids, and back."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers.processors import TemplateProcessing

from hmt.base.errors import CheckpointError, RequestError
from hmt.text.channels import HarmonyReader
from hmt.text.chat_template import (
    DEFAULT,
    TOOL_USE,
    ChatTemplate,
    cut,
    gguf_template_sources,
    marked,
    template_sources,
)
from hmt.text.encoder import Encoder
from hmt.text.end_tokens import ends_of_turns
from hmt.text.gguf import gguf_tokenizer
from hmt.text.grammar import Grammars
from hmt.text.harmony import (
    ENDINGS,
    FINAL,
    LEAVE,
    MARKS,
    START,
    harmony_messages,
    harmony_tools,
    is_harmony,
)
from hmt.text.infill import Infill, infill_of, stated_ids, within_text
from hmt.text.reasoning import CLOSE, OPEN, ReasoningReader, ThoughtLimit
from hmt.text.small_file import read_object
from hmt.text.stream import TextStream, joiner_for
from hmt.text.tokenizer_file import (
    LONGEST_TOKEN,
    ConfinedEncoder,
    TokenizerFile,
)
from hmt.text.tool_calls.dialects import MARKS as CALL_MARKS
from hmt.text.tool_calls.dialects import ToolStyle

_NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")
_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """Text to token ids and back, as the files of one checkpoint say.

    Uses tokenizer.json through the `tokenizers` package itself: transformers' AutoTokenizer gives
    the same ids and takes a second longer to import.  Special tokens that occur in a text count
    as such, as in transformers.  Safe for use by several threads.

    call_marks   special tokens that mark calls of tools, by their text; shown as no others are
    eos_ids      tokens that end an answer, by any of the checkpoint's configurations
    vocab_size   ids are below this, added tokens included
    """

    call_marks: dict[str, int]
    eos_ids: frozenset[int]
    vocab_size: int

    def __init__(
        self,
        folder: Path,
        backend: tokenizers.Tokenizer,
        said: Mapping[str, Any] | None = None,
        file: TokenizerFile | None = None,
    ) -> None:
        """Reads the other files in `folder`; changes `backend` to what they say.

        file   that `backend` comes from
        said   what the tokenizer_config.json of a GGUF file would be, which stands for all of them
        """
        self._folder = folder
        self._backend = backend
        self._json = backend.to_str if file is None else partial(file.whole, backend)
        self._confined = ConfinedEncoder(self._json) if file and file.unknown else None
        self._encoder = Encoder(backend, self._confined)
        self._in_one_file = said is not None
        self._literal: Mapping[int, str] = {} if said is None else said["literal_tokens"]
        if said is None:
            self._config = read_object(folder / "special_tokens_map.json") | read_object(
                folder / "tokenizer_config.json"
            )
            sources = template_sources(folder, self._config)
        else:
            self._config = dict(said)
            sources = said.get("chat_templates", {})
        self._template_source = sources.get(DEFAULT)
        self._tool_source = sources.get(TOOL_USE)  # of chats with tools, where it is another
        self._compiled: dict[str, ChatTemplate] = {}
        self._named = _named_tokens(self._config)
        try:
            self._prepare()
            eos_ids = self._stated_eos_ids()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder}: the tokens in tokenizer_config.json, config.json or "
                f"generation_config.json are not what they should be ({error!r}): "
                "download these files again"
            ) from error
        if eos_ids and not self._in_one_file:  # a folder that names none is no model's
            added = backend.get_added_tokens_decoder()
            special = {token.content: id_ for id_, token in added.items() if token.special}
            eos_ids |= ends_of_turns(self._template_source or "", special)
        decoder = backend.decoder
        self._new_joiner = joiner_for(decoder and json.loads(decoder.__getstate__()))
        self._bos_id = self._id_of(self._named.get("bos_token"))
        self._adds_bos = self._encode("", add_special_tokens=True)[:1] == [self._bos_id]
        eos_id = self._id_of(self._named.get("eos_token"))
        self.eos_ids = eos_ids if eos_id is None else eos_ids | {eos_id}
        self._look_for_marks()
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def open(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of the checkpoint in folder `path`.

        Raises MissingFileError without a tokenizer.json, CheckpointError where a file cannot be
        understood.
        """
        folder = Path(path)
        file = TokenizerFile(folder / "tokenizer.json")
        return cls(folder, file.backend, file=file)

    @classmethod
    def of_gguf(cls, file: Path, vocabulary: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer that a GGUF file describes.  Raises as `gguf_tokenizer` does."""
        backend, said = gguf_tokenizer(vocabulary, str(file))
        said["chat_templates"] = gguf_template_sources(vocabulary)
        said["infill"] = stated_ids(vocabulary, backend.get_vocab_size(with_added_tokens=True))
        return cls(file, backend, said)

    def use_chat_template(self, source: str) -> None:
        """Write chats by a template of the user's, in place of all that the checkpoint has.

        Before the first chat: it is not for use beside other threads.
        """
        self._template_source, self._tool_source = source, None
        self._look_for_marks()

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of plain text, with the start tokens that the checkpoint puts before it.

        most   tokens that there is room for: longer texts may be refused before all of their
               tokens are known

        A text that begins with the BOS token already gets no second one.  Raises RequestError for
        text that is not valid Unicode or has a megabyte without a place where it can be divided,
        ContextLengthError for what `most` cannot hold.
        """
        ids = self._encode(text, add_special_tokens=True, most=most)
        twice = self._adds_bos and ids[:2] == [self._bos_id, self._bos_id]
        return ids[1:] if twice else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens; U+FFFD stands for bytes without a meaning.

        The marks between gpt-oss's messages, and those of calls, are no special tokens here.
        """
        if self._harmony or self._in_one_file or self.call_marks:
            stream = self.stream()
            return "".join([*map(stream.push, ids), stream.flush()])
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token writes, as bytes: a character may need several.  Special ones by name."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special_ids or token_id in self._literal:
            return piece.encode()
        return self._new_joiner().bytes_of(piece)

    def stream(self) -> TextStream:
        """A detokenizer for one sequence whose tokens come one at a time."""
        return TextStream(self._piece_of, self._new_joiner(), self._literal)

    @cached_property
    def grammars(self) -> Grammars:
        """What holds answers to a form."""
        return Grammars(self._json, self.vocab_size, self.eos_ids)

    @property
    def has_chat_template(self) -> bool:
        """True where `chat_prompt` can work."""
        return self._template_source is not None

    @property
    def tool_style(self) -> ToolStyle | None:
        """How calls of tools are written; None where the chat template has no place for tools."""
        source = self._source(tools=True)
        return ToolStyle.of(source) if source is not None and "tools" in source else None

    def reasoning(self, prompt: Sequence[int]) -> ReasoningReader | None:
        """For an answer to a chat of these tokens; None where the model does not think first.

        None also where `channels` reads all of it.
        """
        if not self._writes_thoughts:
            return None
        end = b"".join(map(self.token_bytes, prompt[-16:]))
        return ReasoningReader(begun=end.rstrip().endswith(OPEN.encode()))

    def thought_limit(self, prompt: Sequence[int], most: int) -> ThoughtLimit | None:
        """What ends the reasoning of an answer to `prompt`; None where there is none."""
        reader = self.channels(prompt, ()) or self.reasoning(prompt)
        if reader is None:
            return None
        leave = LEAVE if self._harmony else f"{CLOSE}\n\n"
        closing = self._encode(leave, add_special_tokens=False)
        return ThoughtLimit(reader, self.stream(), closing, most)

    def channels(self, prompt: Sequence[int], names: Iterable[str]) -> HarmonyReader | None:
        """What reads an answer to `prompt` where answers have channels; None where they have none.

        names   of functions that may be called
        """
        if not self._harmony:
            return None
        begin = max(0, len(prompt) - 16)
        if self._start_id in prompt:  # the last message may have much text already
            begin = len(prompt) - 1 - prompt[::-1].index(self._start_id)
        end = b"".join(map(self.token_bytes, prompt[begin:])).decode(errors="replace")
        return HarmonyReader(end.rpartition(START)[2], names)

    @property
    def thinks(self) -> bool:
        """Whether answers to chats may begin with reasoning, as far as the template shows."""
        return self._harmony or self._writes_thoughts

    def template_reads(self, *, tools: bool) -> frozenset[str]:
        """Names that the chat template reads: `enable_thinking`, `reasoning_effort`, ...

        tools   whether there are tools, which may have a separate template
        """
        try:
            return self._template(tools=tools).names
        except (CheckpointError, RequestError):
            return frozenset()  # rendering says what is wrong

    def template_says(self, word: str, *, tools: bool) -> bool:
        """Whether the chat template has `word` in quotation marks, as something to compare with."""
        source = self._source(tools=tools) or ""
        return any(f"{mark}{word}{mark}" in source for mark in "'\"")

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The vocabulary and added tokens, which callers must not change."""
        return self._backend

    @property
    def confined(self) -> bool:
        """Whether a child process encodes, and `backend` cannot."""
        return self._confined is not None

    @property
    def about(self) -> dict[str, Any]:
        """What tokenizer_config.json says, with special tokens and the chat template as text."""
        ours = ("chat_templates", "eos_token_ids", "infill", "literal_tokens")  # of a GGUF file
        stated = {name: value for name, value in self._config.items() if name not in ours}
        stated.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        return stated | self._named | {"chat_template": self._template_source}

    @cached_property
    def infill(self) -> Infill:
        """How the vocabulary marks prefix and suffix.  Raises RequestError where it does not."""
        stated = self._config.get("infill") if self._in_one_file else None
        marks = infill_of(self._id_of, stated)
        if marks is None:
            raise RequestError(
                "this model's vocabulary has no tokens for filling in the middle, such as "
                "<|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>: leave the suffix out, or use a "
                "model that was trained for it"
            )
        return marks

    def infill_prompt(self, before: str, after: str, most: int | None = None) -> list[int]:
        """Token ids of a prompt for what stands between.  Raises as `infill` and `encode`."""
        ids = [
            self._within.ids(text, add_special_tokens=False, most=most) for text in (before, after)
        ]
        bos = [self._bos_id] if self._adds_bos and self._bos_id is not None else []
        return bos + self.infill.prompt(*ids)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        goes_on: bool = False,
        formed: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins.

        tools       that may be called, in OpenAI's form; they may have a separate template
        variables   what the template may read besides: see `ChatTemplate.render`
        goes_on     whether the answer continues the last message, and begins no new one
        formed      whether the answer has a form, and no room for anything before it
        most        see `encode`

        The checkpoint's template writes all special tokens; none is added, but for BOS where a GGUF
        file wants it and its template leaves it out.  Raises RequestError
        for messages that the template refuses and where the checkpoint has no template,
        CheckpointError for a broken template.
        """
        if self._harmony:
            messages, tools = harmony_messages(messages), tools and harmony_tools(tools)
        if goes_on:
            messages = marked(messages)
            variables = {**(variables or {}), "add_generation_prompt": False}
        text = self._template(tools=bool(tools)).render(messages, tools, variables)
        text = cut(text) if goes_on else text
        text += FINAL if formed and self._harmony and not goes_on else ""
        if self._in_one_file and self._config["add_bos_token"] is True:
            # llama.cpp puts BOS before a chat whether its template writes it or not.
            return self.encode(text.removeprefix(self._named.get("bos_token", "")), most)
        return self._encode(text, add_special_tokens=False, most=most)

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of plain text without start tokens.  Raises RequestError as `encode`."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        return self._encoder.ids(text, add_special_tokens=add_special_tokens, most=most)

    @cached_property
    def _within(self) -> Encoder:
        """Encodes what stands within a text."""
        return Encoder(within_text(self._backend), self._confined)

    @property
    def _writes_thoughts(self) -> bool:
        return CLOSE in (self._template_source or "") + (self._tool_source or "")

    def _look_for_marks(self) -> None:
        """Find the marks of channels and of calls that the template writes: parts of the text."""
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._harmony = is_harmony(self._template_source or "")
        self._start_id = self._id_of(START)
        if self._harmony:  # marks tell what an answer's parts are
            self._special_ids -= {id_ for id_, token in added.items() if token.content in MARKS}
            self.eos_ids |= {id_ for id_, token in added.items() if token.content in ENDINGS}
        self.call_marks = {
            token.content: id_
            for id_, token in added.items()
            if id_ in self._special_ids and token.content in CALL_MARKS and self.tool_style
        }
        self._special_ids -= frozenset(self.call_marks.values())

    def _piece_of(self, token_id: int) -> str | None:
        return None if token_id in self._special_ids else self._backend.id_to_token(token_id)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def _prepare(self) -> None:
        """Bring the backend to what tokenizer_config.json says beyond tokenizer.json."""
        backend, config, named = self._backend, self._config, self._named
        backend.no_padding()
        backend.no_truncation()
        _forget_words(backend)
        stated = config.get("added_tokens_decoder", {})
        for _, token in sorted(stated.items(), key=lambda item: int(item[0])):
            if len(token["content"]) > LONGEST_TOKEN:
                raise ValueError(f"a token of {len(token['content'])} characters")
            if self._id_of(token["content"]) is None:
                flags = {flag: token[flag] for flag in _TOKEN_FLAGS if flag in token}
                backend.add_tokens([tokenizers.AddedToken(token["content"], **flags)])
        if not self._in_one_file:  # whose tokens' types say which are special
            backend.add_special_tokens(
                [token for token in named.values() if self._id_of(token) is not None]
            )
        if isinstance(config.get("add_bos_token"), bool):
            # DeepSeek's and other Llama-like tokenizer.json leave BOS to this entry.  An EOS is
            # never added: nothing would follow it.
            bos, bos_id = named.get("bos_token"), self._id_of(named.get("bos_token"))
            adds = config["add_bos_token"] and bos_id is not None
            backend.post_processor = TemplateProcessing(
                single=[bos, "$A"] if adds else ["$A"],
                special_tokens=[(bos, bos_id)] if adds else [],
            )

    def _stated_eos_ids(self) -> frozenset[int]:
        if self._in_one_file:
            return frozenset(self._config["eos_token_ids"])
        config = read_object(self._folder / "config.json")
        ids: list[int] = []
        for source in (
            config,
            config.get("text_config") or {},
            read_object(self._folder / "generation_config.json"),
        ):
            stated = source.get("eos_token_id")
            ids += stated if isinstance(stated, list) else [] if stated is None else [stated]
        if any(type(token_id) is not int or token_id < 0 for token_id in ids):
            raise ValueError(f"eos_token_id {ids}")
        return frozenset(ids)

    def _source(self, *, tools: bool) -> str | None:
        """Of the chat template, as transformers chooses it."""
        return (tools and self._tool_source) or self._template_source

    def _template(self, *, tools: bool) -> ChatTemplate:
        source = self._source(tools=tools)
        if source is None:
            raise RequestError(
                f"{self._folder} has no chat template (chat_template.jinja, chat_template in "
                "tokenizer_config.json, or of a GGUF file tokenizer.chat_template): send plain "
                "text, use the instruction-tuned version, or give a template by --chat-template"
            )
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source, self._named)
        return self._compiled[source]


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens as text; they are stored as text or as {"content": text}."""
    stated = ((name, config.get(name)) for name in _NAMED_TOKENS)
    texts = (
        (name, token.get("content") if isinstance(token, dict) else token) for name, token in stated
    )
    return {name: token for name, token in texts if isinstance(token, str)}


def _forget_words(backend: tokenizers.Tokenizer) -> None:
    """Keep no merged words between texts.

    tokenizers (0.23) keeps them for each thread, and never lets go of those of a tokenizer that is
    gone: 5 MiB with six threads, so that a server grew by as much as it loaded models.  Without,
    400,000 tokens/s are encoded on one core, and 500,000 with them.
    """
    resize = getattr(backend.model, "_resize_cache", None)
    if resize is not None:
        resize(0)
