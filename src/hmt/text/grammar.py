"""Grammars: which tokens may come next, so that an answer has a given form.

Grammars come from strangers: `hmt.sandbox.grammar_matching` compiles them and follows answers, a
child process for each grammar, which the kernel holds to limits.  What a grammar costs, neither the
engine nor answers of other grammars wait for.
"""

import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from hmt.base.errors import BudgetError, CheckpointError, HMTError, MachineError, RequestError
from hmt.base.units import format_bytes
from hmt.contracts.request import Grammar, GrammarKind
from hmt.sandbox import Ended, Limits, Lost, Refused, Reply, Sandbox, Worker
from hmt.text.json_schema import prepared

# Schemas of published tools compile in 1 to 30 ms and hold 1 to 10 MiB.
_MOST_SOURCE: Final = 1 << 20  # characters of a grammar
_COMPILING_S: Final = 3.0  # processor time
_TOKEN_S: Final = 0.2  # likewise; usual masks take up to 0.02
_COMPILED: Final = Limits(memory_bytes=128 << 20, cpu_s=_TOKEN_S)
_ALL_BYTES: Final = 256 << 20  # of all compiled grammars
_PREPARE: Final = Limits(memory_bytes=4 << 30, cpu_s=60.0)  # for vocabularies of any size
_AT_ONCE: Final = 2  # grammars that are compiled
# A small model may write white space for ever: so much of it is enough for any layout.
_JSON: Final[dict[str, object]] = {"whitespace_pattern": r"[ \n]{1,32}"}

_numbers = itertools.count(1)


@dataclass(eq=False, slots=True)
class _Compiled:
    """A grammar in a separate process.

    open     answers that are followed, by number
    closed   of them, those that have ended, which it has not been told yet
    failure  why it was ended although answers need it
    """

    grammar: Grammar
    worker: Worker
    open: set[int] = field(default_factory=set)
    closed: deque[int] = field(default_factory=deque)
    failure: str = ""

    def ask(self, message: dict[str, object], cpu_s: float | None = None) -> "Future[Reply]":
        closed = [self.closed.popleft() for _ in range(len(self.closed))]
        self.open.difference_update(closed)
        return self.worker.begin(message | {"closed": closed}, cpu_s=cpu_s)

    @property
    def idle(self) -> bool:
        """Whether no answer needs it."""
        return len(self.open) <= len(self.closed)


class Constraint:
    """What one answer may still become.  Not for use by several threads at once.

    After `push` the child process computes what may come next; until it has, `ready` is False, and
    `complete` and `allowed` wait.
    """

    def __init__(self, grammars: "Grammars", grammar: Grammar) -> None:
        """Begins to follow an answer.  Raises as `Grammars.open`."""
        self._grammars, self._grammar = grammars, grammar
        self._pushed: list[int] = []
        self._mask = np.zeros(0, np.uint8)
        self._complete = False
        self._reply: Future[Reply] | None = self._begin()
        self._know()

    @property
    def ready(self) -> bool:
        """Whether what may come next is known."""
        return self._reply is None or self._reply.done()

    def wait(self, seconds: float) -> bool:
        """Wait for so long at most; whether it is ready."""
        if self._reply is not None:
            try:
                self._reply.exception(seconds)
            except WaitedTooLong:
                return False
        return True

    @property
    def complete(self) -> bool:
        """True once nothing may follow.

        Raises RequestError where the last token cannot be followed: it, or what may come next,
        takes too much time or memory, or no token of the vocabulary may come next.
        """
        self._know()
        return self._complete

    def allowed(self) -> torch.Tensor:
        """Tokens that may come next, an end token where the text may end: int64 [n], ascending.

        Raises RequestError as `complete`.
        """
        self._know()
        ids = np.unpackbits(self._mask, bitorder="little")[: self._grammars.vocab_size].nonzero()[0]
        return torch.from_numpy(ids)

    def push(self, token_id: int) -> None:
        """The next token, which must be an allowed one.  Raises RequestError where it is not."""
        self._know()
        byte, bit = divmod(token_id, 8)
        if not 0 <= byte < len(self._mask) or not self._mask[byte] >> bit & 1:
            raise RequestError(f"the grammar does not allow token {token_id} here")
        self._pushed.append(token_id)
        self._reply = self._compiled.ask({"push": self._number, "token": token_id})

    def _know(self) -> None:
        """Take the child's answer, waiting for it."""
        while self._reply is not None:
            try:
                reply = self._compiled.worker.wait(self._reply)
            except Lost as error:
                if self._compiled.failure:
                    raise self._costly(self._compiled.failure) from error
                self._reply = self._again()  # another answer has ended the process
                continue
            except Ended as error:
                raise self._costly(str(error)) from error
            except Refused as error:
                raise RequestError(f"the grammar allows no token here: {error}") from error
            self._reply = None
            self._complete = bool(reply.message["complete"])
            self._mask = np.frombuffer(reply.blob, np.uint8)
            self._grammars.hold_to_bound()

    def _costly(self, why: str) -> RequestError:
        return RequestError(
            f"the grammar costs too much after {len(self._pushed)} tokens: {why}; make it smaller, "
            "or less ambiguous"
        )

    def _begin(self) -> "Future[Reply]":
        """Follow what has been pushed in a process that has the grammar."""
        self._number = number = next(_numbers)
        self._compiled = compiled = self._grammars.join(self._grammar, number)
        # Collected in the middle of anything: it may only leave a note.
        weakref.finalize(self, compiled.closed.append, number).atexit = False
        # The first mask of a large grammar builds much of its lexer, and no step waits for it.
        return compiled.ask({"open": number, "tokens": self._pushed}, _COMPILING_S)

    def _again(self) -> "Future[Reply]":
        """`_begin`, without waiting for it."""
        answer: Future[Reply] = Future()

        def work() -> None:
            try:
                answer.set_result(self._begin().result())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, name="hmt-grammar", daemon=True).start()
        return answer


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the latest.  Thread-safe."""

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiling = threading.Semaphore(_AT_ONCE)
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()  # the latest last
        self._sandbox = Sandbox(
            "hmt.sandbox.grammar_matching:Matchers",
            {"vocab_size": vocab_size, "eos_ids": sorted(eos_ids)},
            lambda: tokenizer_json().encode(),
            prepare=_PREPARE,
            worker=_COMPILED,
        )
        weakref.finalize(self, self._sandbox.close)

    def open(self, grammar: Grammar) -> Constraint:
        """For a new answer.

        Raises RequestError for a grammar that is none or passes a limit, BudgetError where those
        that answers need leave too little, MachineError without llguidance, CheckpointError for a
        tokenizer that llguidance cannot use.
        """
        return Constraint(self, grammar)

    def join(self, grammar: Grammar, number: int) -> _Compiled:
        """The grammar's process, a new one where there is none, for answer `number`.

        Raises as `open`.
        """
        if (compiled := self._known(grammar, number)) is not None:
            return compiled
        if len(grammar.source) > _MOST_SOURCE:
            raise RequestError(
                f"the {grammar.kind} has {len(grammar.source)} characters; {_MOST_SOURCE} are the "
                "most that is compiled"
            )
        with self._compiling:
            if (compiled := self._known(grammar, number)) is not None:
                return compiled  # another thread was faster
            compiled = _Compiled(grammar, self._compile(grammar), {number})
            with self._lock:
                self._compiled[grammar] = compiled
                self._end_idle()
                if self.used_bytes > _ALL_BYTES:
                    size, used = compiled.worker.used_bytes, self.used_bytes
                    self._end(compiled)
                    raise BudgetError(
                        f"the {grammar.kind} takes {format_bytes(size)}, and with those that "
                        f"answers need now {format_bytes(used)}; compiled grammars may have "
                        f"{format_bytes(_ALL_BYTES)} together: try again later"
                    )
            return compiled

    @property
    def used_bytes(self) -> int:
        """Of all compiled grammars, as their processes have measured them."""
        return sum(compiled.worker.used_bytes for compiled in list(self._compiled.values()))

    def hold_to_bound(self) -> None:
        """End processes until the others are within the bound of bytes.

        First those that no answer needs, the one that was not used for longest first, then the
        largest one, whose answers end with an error.
        """
        if self.used_bytes <= _ALL_BYTES:
            return
        with self._lock:
            self._end_idle()
            while self._compiled and self.used_bytes > _ALL_BYTES:
                largest = max(self._compiled.values(), key=lambda one: one.worker.used_bytes)
                size, count = largest.worker.used_bytes, len(self._compiled)
                largest.failure = (
                    f"it has grown to {format_bytes(size)}, the largest of {count} grammars in use "
                    f"that may have {format_bytes(_ALL_BYTES)} together"
                )
                self._end(largest)

    def _end_idle(self) -> None:
        for compiled in list(self._compiled.values()):
            if self.used_bytes > _ALL_BYTES and compiled.idle:
                self._end(compiled)

    def _end(self, compiled: _Compiled) -> None:
        del self._compiled[compiled.grammar]
        compiled.worker.end()

    def _known(self, grammar: Grammar, number: int) -> _Compiled | None:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None or compiled.worker.ended:
                return None
            self._compiled.move_to_end(grammar)
            compiled.open.add(number)
            return compiled

    def _compile(self, grammar: Grammar) -> Worker:
        source = grammar.source
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            source = prepared(source, _JSON)
        try:
            worker = self._sandbox.fork()
        except Refused as error:
            raise _unprepared(error) from error
        except (Ended, Lost) as error:
            raise CheckpointError(
                f"this tokenizer cannot be used for answers with a form: {error or 'it was closed'}"
            ) from error
        try:
            worker.call({"kind": grammar.kind.value, "source": source}, cpu_s=_COMPILING_S)
        except (Refused, Ended, Lost) as error:
            worker.end()
            raise _wrong(grammar, error) from error
        return worker


def _unprepared(error: Refused) -> HMTError:
    if error.kind == "missing":
        return MachineError("answers with a form need llguidance: pip install 'hmt[serve]'")
    return CheckpointError(f"this tokenizer cannot be used for answers with a form: {error}")


def _wrong(grammar: Grammar, problem: Exception) -> RequestError:
    said = " ".join(str(problem).split())[:300]
    return RequestError(f"the {grammar.kind} cannot be used as a grammar: {said}")
