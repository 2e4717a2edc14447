"""From a request to what runs it: the scheduler's state of it, and who processes its output."""

import time

from hmt.base.errors import EmptyPromptError, RequestError
from hmt.contracts.image import ImagePrompt
from hmt.contracts.request import Request
from hmt.engine.images import ImageStore, with_image_parts
from hmt.engine.loading.adapters import Adapters
from hmt.engine.loading.prepared import Prepared
from hmt.engine.outputs.output_processor import (
    OutputProcessor,
    TokenListener,
    check_least,
    end_tokens,
)
from hmt.engine.outputs.prompt_outputs import EmbeddingPool
from hmt.engine.outputs.sampler import SamplerState, check_logprobs
from hmt.engine.request_limits import LengthLimit, check_tokens
from hmt.engine.scheduling.sequence import SequenceState
from hmt.text import Constraint, StopStrings, ThoughtLimit, Tokenizer


class InputProcessor:
    """Checks requests and makes them ready to run.  For any thread."""

    def __init__(
        self,
        prepared: Prepared,
        tokenizer: Tokenizer,
        capacity_tokens: int,
        adapters: Adapters,
        images: ImageStore | None = None,
    ) -> None:
        """`capacity_tokens` positions there are in the KV cache; `images` prepares those."""
        self._images = images
        self._adapters = adapters
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._capacity_tokens = capacity_tokens

    @property
    def max_positions(self) -> int:
        """The longest that prompt and answer may be together."""
        return min(self._prepared.model.spec.max_context, self._capacity_tokens)

    def process(
        self, request: Request, listener: TokenListener, first: OutputProcessor | None = None
    ) -> OutputProcessor:
        """What runs a request, and tells `listener`.  Raises RequestError where it never can.

        first   of another answer to the same prompt: what was made of this one
        """
        if not isinstance(request, Request):
            raise RequestError(
                f"a request is an hmt.Request, not {type(request).__name__}: "
                "hmt.Request(input=..., max_new_tokens=...)"
            )
        self.check_images(len(request.images))
        self.check_videos(len(request.videos))
        shown, hold = self._prompt(request) if first is None else _prompt_of(first.state)
        tokens = shown.tokens
        sampler = SamplerState(request.sampling, tokens)
        if request.prompt_logprobs is not None:
            check_logprobs("prompt_logprobs", request.prompt_logprobs)
        biased = [token for token, _ in request.sampling.logit_bias]
        check_tokens([*biased, *request.stop_token_ids], self._prepared.model.spec.vocab_size)
        stops = (request.stop,) if isinstance(request.stop, str) else request.stop
        longest = self._new_tokens(request, len(tokens))
        check_least(request, longest)
        return OutputProcessor(
            state=self._state(request, shown, hold, longest),
            request=request,
            sampler=sampler,
            text=self._tokenizer.stream(),
            stops=StopStrings(stops),
            eos_ids=end_tokens(request, self._tokenizer.eos_ids),
            listener=listener,
            constraint=self._form(request, tokens),
            scores=None if request.prompt_logprobs is None else [],
            pool=None if request.embedding is None else EmbeddingPool(),
        )

    def _state(
        self, request: Request, shown: ImagePrompt, hold: object, longest: int
    ) -> SequenceState:
        timeout_s, tokens = request.timeout_s, shown.tokens
        ends = request.stop or request.stop_token_ids
        return SequenceState(
            tokens=tokens,
            prompt_tokens=len(tokens),
            max_total_tokens=len(tokens) + longest,
            owner=request.owner,
            priority=request.priority,
            cache_salt=request.cache_salt,
            fixed_length=request.ignore_eos and not ends and request.grammar is None,
            scores_prompt=request.prompt_logprobs is not None,
            pooling=request.embedding,
            deadline_s=None if timeout_s is None else time.monotonic() + timeout_s,
            images=shown.images,
            image_hold=hold,
            adapter=self._adapters.hold(request.adapter),
            axes=shown.positions,
            blocks=shown.blocks,
        )

    def check_images(self, count: int) -> None:
        """Raise RequestError where the model can see none of `count` images."""
        if count and (why := self.images_refused):
            raise RequestError(f"{count} images were given, and {why}")

    def check_videos(self, count: int) -> None:
        """Raise RequestError where the model can take none of `count` videos."""
        if count and (why := self.images_refused or self._videos_refused):
            raise RequestError(f"{count} videos were given, and {why}")

    @property
    def _videos_refused(self) -> str:
        why = "" if self._images is None else self._images.videos_refused
        return f"this {self._prepared.model.spec.architecture} takes none: {why}" if why else ""

    @property
    def images_refused(self) -> str:
        """Why the model sees no images; empty where it does."""
        if self._images is not None:
            return ""
        spec = self._prepared.model.spec
        why = [remark for remark in spec.remarks if remark.startswith("images")]
        told = f"this {spec.architecture} reads text only"
        return f"{told}: {'; '.join(why)}" if why else told

    def _prompt(self, request: Request) -> tuple[ImagePrompt, object]:
        """The prompt with its images, and what keeps these.  Raises RequestError, BudgetError."""
        tokens = self._prompt_tokens(request)
        encoder = self._prepared.model.encoder
        shown = request.images or request.videos
        if not shown or self._images is None or encoder is None:
            return ImagePrompt(tokens, ()), None
        images, hold = self._images.hold(request.images, request.videos)
        return encoder.prompt(tokens, images), hold

    def _form(self, request: Request, prompt: list[int]) -> Constraint | ThoughtLimit | None:
        if request.grammar is not None:
            return self._tokenizer.grammars.open(request.grammar)
        most = request.reasoning_tokens
        if most is None:
            return None
        if type(most) is not int or most < 0:
            raise RequestError(f"reasoning_tokens is {most!r}; give an integer of at least 0")
        return self._tokenizer.thought_limit(prompt, most)

    def _new_tokens(self, request: Request, prompt: int) -> int:
        """How many tokens a request may generate.  Raises ContextLengthError, RequestError."""
        asked = request.max_new_tokens
        self._prepared.check_head(needed=request.embedding is None)
        if request.embedding is not None and asked != 0:
            raise RequestError(f"max_new_tokens is {asked!r}; it must be 0 for an embedding")
        longest = self._prepared.model.spec.max_context
        limit = LengthLimit.of(longest, self._capacity_tokens, request.context_size)
        shows = request.prompt_logprobs is not None or request.embedding is not None
        return limit.new_tokens(prompt, asked, fewest=0 if shows else 1)

    def _prompt_tokens(self, request: Request) -> list[int]:
        if not isinstance(request.input, (str, list, tuple)):
            raise RequestError(
                f"input is {type(request.input).__name__}; it must be text, chat messages or ids"
            )
        if not request.input:
            raise EmptyPromptError("the prompt is empty; give text, messages or token ids")
        if isinstance(request.input, str):
            tokens = self._tokenizer.encode(request.input, most=self.max_positions)
        elif isinstance(request.input[0], dict):
            messages = with_image_parts(request.input, len(request.images), len(request.videos))
            tokens = self._tokenizer.chat_prompt(messages, most=self.max_positions)
        else:
            tokens = list(request.input)
        check_tokens(tokens, self._prepared.model.spec.vocab_size)
        return tokens


def _prompt_of(state: SequenceState) -> tuple[ImagePrompt, object]:
    """The prompt of a sequence that has not begun."""
    return ImagePrompt(list(state.tokens), state.images, state.axes), state.image_hold
