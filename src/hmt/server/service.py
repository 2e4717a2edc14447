"""The model that is served, and how requests to it begin."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from fastapi import Request as HttpRequest
from starlette.types import Receive

from hmt.base.errors import HMTError
from hmt.contracts.request import Request
from hmt.engine import LoadedModel
from hmt.server.concurrency_limit import ConcurrencyLimit
from hmt.server.config import ServerConfig
from hmt.server.errors import ApiError, as_api_error
from hmt.server.generation import Generation, Observer
from hmt.server.image_fetching import ImageFetcher
from hmt.server.images import RemoteImage
from hmt.server.stream import unless_gone

if TYPE_CHECKING:
    from hmt.server.page.snapshot_cache import SnapshotCache

LATER = -1  # priority of those who let all others go first
_OF_CHATS: Final = 1024  # tokens of an answer where neither client nor server says a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest(Request):
    """What one HTTP request wants of the engine: a Request, whose `input` each of its prompts is.

    max_new_tokens   also -1: what the context holds; None: the server's default, or what it holds
    unbounded        whether the server's default is what the context holds, unless it was told one
    answers          to each prompt; `counted` is the parameter that said so
    formed           the parameter that said what the grammar is
    """

    owner: str
    input: list[int] = field(default_factory=list)
    unbounded: bool = False
    answers: int = 1
    counted: str = "n"
    formed: str = "response_format"


@dataclass(slots=True)
class Service:
    """A model with its name, its limits, its observer, and the last looks at it.

    adapter   of the model, which requests are computed with; "": none.  The name has it behind a
              colon then
    """

    model: LoadedModel
    name: str
    config: ServerConfig
    limit: ConcurrencyLimit
    observer: Observer
    watch: "SnapshotCache"
    created: int = field(default_factory=lambda: int(time.time()))
    adapter: str = ""
    fetcher: ImageFetcher = field(init=False)

    def __post_init__(self) -> None:
        self.fetcher = ImageFetcher(self.config.image_hosts)

    def with_adapter(self, adapter: str) -> "Service":
        """The same model under the name that it has with an adapter."""
        made = replace(self, name=f"{self.name}:{adapter}", adapter=adapter)
        made.fetcher = self.fetcher
        return made

    @property
    def base_name(self) -> str:
        """The model's own name."""
        return self.name.removesuffix(f":{self.adapter}") if self.adapter else self.name

    @property
    def max_positions(self) -> int:
        """The longest that prompt and answer may be together."""
        return self.model.max_positions

    async def files_of(
        self, images: Sequence[bytes | RemoteImage], receive: Receive
    ) -> tuple[bytes, ...]:
        """The files of a request's images; those of other hosts are fetched.

        Raises ApiError; ClientGone once the client goes, as `receive` tells.
        """
        here = tuple(image for image in images if isinstance(image, bytes))
        if len(here) == len(images):
            return here
        try:
            self.model.check_images(len(images))
        except HMTError as error:
            raise as_api_error(error, "messages") from error
        return await unless_gone(receive, self.fetcher.files(images))

    async def begin(
        self, request: ApiRequest, prompts: Callable[[], list[list[int]]], count: int, param: str
    ) -> Generation:
        """Begin answers to `count` prompts, which `prompts` makes on a thread.  Raises ApiError.

        param   the parameter that holds them
        """
        most = self.config.max_choices
        if request.answers > most:
            raise ApiError(
                400,
                f"{request.answers} answers were asked for; this server gives {most} at most",
                param=request.counted,
                code="invalid_value",
            )
        vocab_size = self.model.prepared.model.spec.vocab_size
        biased = [token for token, _ in request.sampling.logit_bias]
        named = {"logit_bias": biased, "stop_token_ids": request.stop_token_ids}
        for name, tokens in named.items():
            for token in tokens:
                if token >= vocab_size:
                    raise ApiError(
                        400,
                        f"{name} has token {token}; this model's tokens are 0 to {vocab_size - 1}",
                        param=name,
                        code="invalid_value",
                    )
        generation = Generation(self.limit, self.observer, param)

        def requests() -> list[Request]:
            self._check_form(request)
            return [self._request(request, tokens) for tokens in prompts()]

        answers, images = count * request.answers, bool(request.images or request.videos)
        timeout_s = self._timeout_s(request)
        await generation.begin(self.model, requests, answers, timeout_s, images=images)
        return generation

    def _check_form(self, request: ApiRequest) -> None:
        """Compile the grammar, which may take a while.  Raises ApiError."""
        if request.grammar is not None:
            try:
                self.model.tokenizer.grammars.open(request.grammar)
            except HMTError as error:
                raise as_api_error(error, request.formed) from error

    def _timeout_s(self, asked: ApiRequest) -> float:
        most = self.config.timeout_s
        return most if asked.timeout_s is None else min(most, asked.timeout_s)

    def _request(self, request: ApiRequest, tokens: list[int]) -> Request:
        longest, room = request.max_new_tokens, max(1, self.max_positions - len(tokens))
        default = self.config.default_new_tokens
        if longest is None and default is None and request.unbounded:
            longest = -1
        seen = request.images or request.videos
        if seen and longest in (None, -1) and not request.min_tokens:
            longest = None  # the engine knows what is left beside them
        elif longest is None:
            longest = min(room, max(default or _OF_CHATS, request.min_tokens))
        elif longest == -1:
            longest = room
        if longest is not None and longest < request.min_tokens:
            raise ApiError(
                400,
                f"at least {request.min_tokens} tokens were asked for; the answer may have "
                f"{longest}: lower min_tokens, or raise max_tokens as far as the context goes",
                param="min_tokens",
                code="invalid_value",
            )
        plain = {entry.name: getattr(request, entry.name) for entry in fields(Request)}
        told: dict[str, Any] = {"input": tokens, "max_new_tokens": longest}
        told |= {"timeout_s": self._timeout_s(request), "adapter": self.adapter}
        return Request(**(plain | told))


def service_of(request: HttpRequest, name: str | None = None) -> Service:
    """The model of this name, or the first one.  Raises ApiError 404 where it is not loaded."""
    state = request.app.state
    service: Service = state.service if name is None else state.model_manager.find(name)
    return service
