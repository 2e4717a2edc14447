"""Load on an endpoint: what is asked when, and what is made of the answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import perf_counter
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import ConfigError, HMTError
from hmt.bench.load import Matrix, report_html
from hmt.bench.load.chart import ceiling, chart_svg
from hmt.bench.load.client import Client, Endpoint, connect, versioned
from hmt.bench.load.loops import closed_loop, open_loop, poisson_arrivals
from hmt.bench.load.matrix import _measure
from hmt.bench.load.outcome import OK, Outcome, percentiles, summarise
from hmt.bench.load.prompts import Prompts

TEXT = "the quick brown fox jumps over the lazy dog and runs away. " * 20


def outcome(**given: Any) -> Outcome:
    usual = {"due_s": 0.0, "sent_s": 0.0, "first_s": 1.0, "last_s": 3.0, "ended_s": 4.0}
    return Outcome(**(usual | {"status": OK, "tokens": 5, "prompt_tokens": 7} | given))


def within(work: Awaitable[Any], seconds: float = 60) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(limited())


# --- Sums


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
@settings(deadline=None)  # numpy's first percentile imports
def test_percentiles_are_numpys(values):
    found = percentiles(values)
    assert found == {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}


def test_percentiles_lie_between_neighbours():
    assert percentiles([4.0, 1.0, 3.0, 2.0, 5.0]) == pytest.approx(
        {"p50": 3.0, "p90": 4.6, "p99": 4.96}
    )
    assert percentiles([]) is None


def test_times_count_from_when_a_request_was_due():
    late = outcome(due_s=-2.0, sent_s=0.5)
    assert (late.ttft_s, late.tpot_s, late.e2e_s) == (3.0, 0.5, 6.0)
    assert outcome(tokens=1).tpot_s is None
    assert outcome(first_s=None, last_s=None).ttft_s is None


def test_only_what_succeeded_counts_and_failures_are_told():
    outcomes = [
        outcome(),
        outcome(ended_s=10.0, tokens=15),
        outcome(status="429", detail="full", ended_s=1.0, tokens=0, first_s=None),
        outcome(status="timeout", tokens=9, ended_s=8.0),
        outcome(status="429", tokens=0),
    ]
    found = summarise(outcomes, 15)
    assert found["failures"] == {"429": 2, "timeout": 1} and found["first_failure"] == "full"
    assert (found["requests"], found["succeeded"], found["short_answers"]) == (5, 2, 1)
    assert (found["wall_s"], found["tokens_per_s"], found["requests_per_s"]) == (10.0, 2.0, 0.2)
    assert found["e2e_s"]["p50"] == 7.0 and found["mean_prompt_tokens"] == 7.0


def test_a_cell_of_failures_has_no_times():
    found = summarise([outcome(status="500", first_s=None, last_s=None, tokens=0)], 4)
    assert found["ttft_s"] is found["tpot_s"] is found["e2e_s"] is None
    assert found["tokens_per_s"] == 0


# --- Loops


def test_a_closed_loop_keeps_its_users_busy():
    """Each request waits until all users have one; the first until nothing else is left."""
    under_way: list[int] = []
    ended: list[int] = []

    async def measure() -> list[Outcome]:
        others_ended, busy = asyncio.Event(), asyncio.Event()
        now: set[int] = set()

        async def ask(number: int, due_s: float) -> Outcome:
            now.add(number)
            if len(now) == 3:
                busy.set()
            await busy.wait()
            under_way.append(len(now))
            await asyncio.sleep(0)
            if number == 0:
                await others_ended.wait()
            now.remove(number)
            ended.append(number)
            if len(ended) == 9:
                others_ended.set()
            return outcome(due_s=due_s)

        return await closed_loop(ask, 3, 10)

    outcomes = within(measure())
    assert len(outcomes) == 10 and sorted(ended) == list(range(10)) and ended[-1] == 0
    assert under_way == [3] * 10


def test_arrivals_are_as_seeded():
    arrivals = poisson_arrivals(5.0, 4000, seed=3)
    assert arrivals == poisson_arrivals(5.0, 4000, seed=3) != poisson_arrivals(5.0, 4000, seed=4)
    gaps = np.diff([0.0, *arrivals])
    assert gaps.min() >= 0
    # Of an exponential distribution mean and deviation are the same.
    assert gaps.mean() == pytest.approx(0.2, rel=0.1) and gaps.std() == pytest.approx(0.2, rel=0.1)


def test_an_open_loop_waits_for_nobody_and_counts_from_the_arrival():
    arrivals = poisson_arrivals(2000.0, 20, seed=1)

    async def measure() -> list[Outcome]:
        asked: list[float] = []
        all_asked = asyncio.Event()

        async def ask(number: int, due_s: float) -> Outcome:
            asked.append(due_s)
            assert perf_counter() >= due_s - 1e-3, "not before it is due"
            if len(asked) == len(arrivals):
                all_asked.set()
            await all_asked.wait()  # no answer before the last question
            return outcome(due_s=due_s, tokens=number)

        return await open_loop(ask, arrivals)

    outcomes = within(measure())
    due = np.array([one.due_s for one in outcomes])
    assert [one.tokens for one in outcomes] == list(range(20))
    assert due - due[0] == pytest.approx(np.array(arrivals) - arrivals[0], abs=1e-6)


# --- An endpoint that fails


Write = Callable[[str], Awaitable[None]]
Behave = Callable[[dict[str, Any], Write], Awaitable[None]]
HEAD = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"


class Fake:
    """An endpoint that does what a function of the request's body says."""

    def __init__(self, behave: Behave) -> None:
        self.behave, self.bodies = behave, list[dict[str, Any]]()
        self.keys: list[str | None] = []

    async def __aenter__(self) -> "Fake":
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", "fake", "secret", timeout_s=30)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
        self.keys.append(headers.get("authorization"))
        self.bodies.append(json.loads(await reader.readexactly(int(headers["content-length"]))))

        async def write(text: str) -> None:
            writer.write(text.encode())
            await writer.drain()

        try:
            await self.behave(self.bodies[-1], write)
        finally:
            writer.close()


def event(text: str = "", **others: Any) -> str:
    choices = [{"index": 0, "text": text}] if text else []
    return f"data: {json.dumps({'choices': choices} | others)}\n\n"


async def whole(status: int, content: Any, write: Write) -> None:
    text = json.dumps(content)
    await write(
        f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n{text}"
    )


async def answer(body: dict[str, Any], write: Write) -> None:
    """As it should be: so many tokens, and how many they were.  Six characters are a token."""
    usage = {"prompt_tokens": len(body["prompt"]) // 6, "completion_tokens": body["max_tokens"]}
    if not body["stream"]:
        await whole(200, {"usage": usage}, write)
        return
    await write(HEAD + "\r\n")
    for _ in range(body["max_tokens"]):
        await write(event("a"))
    told = {"usage": usage} if "stream_options" in body else {}
    await write(event(**told) + "data: [DONE]\n\n")


def asking(behave: Behave, **options: Any) -> Outcome:
    async def work() -> Outcome:
        async with (
            Fake(behave) as fake,
            connect(replace(fake.endpoint, **options)) as client,
        ):
            return await client.ask("Once", 3, perf_counter())

    return within(work())


def test_an_answer_is_counted_by_its_usage():
    found = asking(answer)
    assert (found.status, found.tokens, found.prompt_tokens) == (OK, 3, 0)
    assert found.first_s is not None and found.last_s is not None
    assert found.due_s <= found.sent_s <= found.first_s <= found.last_s <= found.ended_s


def test_without_usage_the_events_with_text_count():
    assert asking(answer, usage=False).tokens == 3


def test_a_chat_is_read_as_well():
    async def chat(body, write):
        assert body["messages"] == [{"role": "user", "content": "Once"}] and "prompt" not in body
        deltas = [{"role": "assistant"}, {"reasoning_content": "a"}, {"content": "b"}]
        await write(HEAD + "\r\n")
        for delta in deltas:
            await write(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n")
        await write('data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n')

    found = asking(chat, chat=True)
    assert (found.status, found.tokens) == (OK, 2), "an end without [DONE] is one, too"


async def refuses(body, write):
    await whole(429, {"error": {"message": "full"}}, write)


async def breaks_off(body, write):
    await write(HEAD + "\r\n" + event("a"))


async def breaks_off_in_a_chunk(body, write):
    await write(HEAD + "transfer-encoding: chunked\r\n\r\n40\r\ndata: ")


async def hangs_up(body, write):
    pass


async def tells_an_error(body, write):
    await write(HEAD + "\r\n" + event("a") + event(error={"message": "the disk failed"}))


async def says_nonsense(body, write):
    await write(HEAD + "\r\ndata: <html>\n\n")


async def stalls(body, write):
    await write(HEAD + "\r\n" + event("a"))
    await asyncio.sleep(5)


@pytest.mark.parametrize(
    ("behave", "status", "detail"),
    [
        (refuses, "429", "full"),
        (breaks_off, "disconnected", "middle of the answer"),
        (breaks_off_in_a_chunk, "disconnected", "RemoteProtocolError"),
        (hangs_up, "unreachable", "RemoteProtocolError"),
        (tells_an_error, "error", "the disk failed"),
        (says_nonsense, "error", "<html>"),
    ],
)
def test_a_failure_is_told_by_its_status(behave, status, detail):
    found = asking(behave)
    assert found.status == status and detail in found.detail


def test_a_connection_that_ends_unanswered_is_tried_again_once():
    asked = list[int]()

    async def the_second_time(body, write):
        asked.append(1)
        if len(asked) > 1:
            await answer(body, write)

    assert asking(the_second_time).status == "ok" and len(asked) == 2
    asked.clear()

    async def never(body, write):
        asked.append(1)

    assert asking(never).status == "unreachable" and len(asked) == 2


def test_a_token_without_text_is_a_completions_first():
    """Half of a character has none yet, and its token was computed all the same."""

    async def late_text(body, write):
        silent = {"choices": [{"index": 0, "text": "", "finish_reason": None}]}
        await write(HEAD + "\r\n" + event(**silent))
        await asyncio.sleep(0.2)
        await write(event("é") + "data: [DONE]\n\n")

    found = asking(late_text)
    assert found.status == "ok" and found.tokens == 2 and found.first_s < found.last_s


def test_who_stalls_is_left_after_the_time_limit():
    found = asking(stalls, timeout_s=1.0)
    assert found.status == "timeout" and found.first_s is not None


def test_who_is_not_there_is_unreachable():
    async def work() -> Outcome:
        async with Fake(answer) as fake:
            pass
        await fake.server.wait_closed()
        async with connect(fake.endpoint) as client:
            return await client.ask("Once", 3, perf_counter())

    assert within(work()).status == "unreachable"


def settled(behave: Behave) -> Client:
    async def work() -> Client:
        async with Fake(behave) as fake, connect(fake.endpoint) as client:
            await client.settle("Once")
            assert fake.keys[0] == "Bearer secret"
            return client

    return within(work())


@pytest.mark.parametrize("unknown", [{"ignore_eos"}, {"stream_options"}, set()])
def test_what_an_endpoint_does_not_know_is_left_out(unknown):
    async def strict(body, write):
        if unknown & body.keys():
            await whole(422, {"error": "unknown"}, write)
        else:
            await answer(body, write)

    endpoint = settled(strict).endpoint
    assert endpoint.ignore_eos == ("ignore_eos" not in unknown)
    assert endpoint.usage == ("stream_options" not in unknown)


def test_an_endpoint_that_never_answers_is_an_error():
    with pytest.raises(HMTError, match=r"429 .*full"):
        settled(refuses)


# --- All of it


def test_prompts_are_as_long_as_the_endpoint_counts():
    async def work() -> None:
        async with Fake(answer) as fake, connect(fake.endpoint) as client:
            prompts = Prompts(TEXT, seed=0)
            for tokens in (10, 500):
                await prompts.measure(client, tokens)
                texts = [prompts.of(tokens, number) for number in range(4)]
                counts = [await client.count(text) for text in texts]
                assert counts == pytest.approx([tokens] * 4, rel=0.1)
                assert len(set(texts)) > 1
            assert Prompts(TEXT, 0).piece(40, 7) == prompts.piece(40, 7)

    within(work())


def test_a_matrix_counts_each_cell_and_warms_up_before():
    count = 0

    async def now_and_then(body, write):
        nonlocal count
        count += body["max_tokens"] == 6
        await (refuses if count % 4 == 3 and body["max_tokens"] == 6 else answer)(body, write)

    matrix = Matrix((20,), (4, 6), (1, 2), (500.0,), requests=5, warmup=3)

    async def work() -> dict[str, Any]:
        async with Fake(now_and_then) as fake:
            found = await _measure(matrix, TEXT, fake.endpoint, None, lambda what: None)
            lengths = [body["max_tokens"] for body in fake.bodies]
            assert lengths.count(4) == lengths.count(6) == 3 * 8
            return found

    found = within(work())
    cells = [(cell["output_tokens"], cell["users"], cell["rate"]) for cell in found["results"]]
    assert cells == [(n, *who) for n in (4, 6) for who in ((1, None), (2, None), (None, 500.0))]
    failed = [cell["failures"] for cell in found["results"]]
    assert failed[:3] == [{}] * 3 and all(set(one) == {"429"} for one in failed[3:])
    assert all(len(cell["each"]) == cell["requests"] == 5 for cell in found["results"])
    assert found["results"][0]["server_rss_bytes"] is None, "it is not ours"
    reads_as_a_page(found)


def reads_as_a_page(found: dict[str, Any]) -> None:
    machine = {"name": "<a> machine", "cpus": 2, "system": "", "hmt": "0", "date": ""}
    others = {"model": "a<b", "target": "http://x/v1", "form": "completions", "machine": machine}
    page = report_html(found | others)
    assert page.count("<svg") == page.count("</svg>") == 8, "by users and by rate"
    assert "a&lt;b" in page and "<a>" not in page and "x 429" in page
    assert "<script" not in page and "src=" not in page and "href=" not in page


def test_a_chart_is_xml_with_a_gap_where_there_is_nothing():
    chart = chart_svg(
        "a & b", "users", ["1", "4", "16"], {"x": [1.0, None, 2.0], "<y>*": [3, 5, 4]}
    )
    lines = [one for one in ElementTree.fromstring(chart).iter() if one.tag.endswith("circle")]
    assert len(lines) == 5 and len({one.get("fill") for one in lines}) == 1
    assert chart.count("stroke-dasharray") == 3
    assert [ceiling(value) for value in (0, 0.3, 1, 7, 9.5, 101)] == pytest.approx(
        [1, 0.4, 1, 8, 10, 200]
    )


def test_addresses():
    assert versioned("http://a:1") == versioned("http://a:1/") == "http://a:1/v1"
    assert versioned("https://a/openai/v1/") == "https://a/openai/v1"
    with pytest.raises(ConfigError, match="--url"):
        versioned("a:1")
