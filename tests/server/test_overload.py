"""Clients that go, clients that are too many, and time that runs out."""

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from serving import CHAT, NAME, Call, app_on, asking, at_rest, events_of, held, http, run

import hmt
from hmt.engine import LoadedModel

TEXT = "/v1/completions"
LONG = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True}


async def until(true: Any) -> None:
    while not await asyncio.to_thread(true):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_pages(
    app: FastAPI, model: LoadedModel, stream: bool, n: int
) -> None:
    async def work() -> None:
        call = Call(app, TEXT, LONG | {"stream": stream, "n": n})
        running = asyncio.create_task(call.run())
        if stream:
            await call.wrote.wait()
        await until(lambda: model.load.running == n)
        assert model.load.free_tokens < model.load.capacity_tokens
        call.gone.set()
        await running
        await until(lambda: at_rest(model))
        assert app.state.service.limit.inside == 0
        assert "[DONE]" not in call.text

    run(work())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_while_it_waits_is_forgotten(
    app: FastAPI, model: LoadedModel, stream: bool
) -> None:
    async def work() -> None:
        with held(model):
            calls = [Call(app, TEXT, LONG | {"stream": stream}) for _ in range(3)]
            running = [asyncio.create_task(call.run()) for call in calls]
            await until(lambda: app.state.service.limit.inside == 3)
            for call in calls:
                call.gone.set()
            await asyncio.gather(*running)
            assert app.state.service.limit.inside == 0
        await until(lambda: at_rest(model))

    run(work())


def test_a_reader_that_fails_while_it_is_written_to_frees_its_pages(
    app: FastAPI, model: LoadedModel
) -> None:
    class Broken(Call):
        async def run(self) -> None:
            async def send(message: dict[str, Any]) -> None:
                self.messages.append(message)
                if len(self.messages) > 3:
                    raise OSError("broken pipe")

            app, self.app = self.app, lambda scope, receive, _: app(scope, receive, send)
            await super().run()

    async def work() -> None:
        await Broken(app, TEXT, LONG | {"stream": True}).run()
        await until(lambda: at_rest(model))
        assert app.state.service.limit.inside == 0

    run(work())


def test_too_many_are_refused_at_once(model: LoadedModel) -> None:
    """While the engine is in the middle of a long step: nobody waits to hear that it is full."""
    app = app_on(model, max_waiting=2)  # and 4 that run

    async def work() -> None:
        async with http(app) as client:
            with held(model):
                inside = [asyncio.create_task(client.post(CHAT, json=asking(n=2))) for _ in "abc"]
                await until(lambda: app.state.service.limit.inside == 6)
                refused = await client.post(CHAT, json=asking())
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "overloaded"
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                streamed = await client.post(CHAT, json=asking(stream=True))
                assert streamed.status_code == 429
                assert (await client.get("/ready")).status_code == 503
                assert (await client.get("/health")).status_code == 200
                # What the engine would refuse is refused without it, too.
                bad = await client.post(CHAT, json=asking(max_tokens=5000))
                assert bad.status_code == 429
            done = await asyncio.gather(*inside)
            assert [one.status_code for one in done] == [200] * 3
            assert (await client.post(CHAT, json=asking())).status_code == 200
            assert (await client.get("/ready")).status_code == 200
            never = await client.post(CHAT, json=asking(n=7))
            assert (never.status_code, never.json()["error"]["code"]) == (400, "too_many_answers")

    run(work())


def test_many_more_than_run_at_once_are_all_answered(app: FastAPI, model: LoadedModel) -> None:
    questions = [f"What is {a} + {b}?" for a in (3, 17, 40, 8) for b in (5, 21, 36, 9)]
    wanted = []
    for question in questions:
        ids = model.tokenizer.chat_prompt([{"role": "user", "content": question}])
        wanted.append(model.infer(hmt.Request(ids, 64)).text)

    async def work() -> None:
        async with http(app) as client:
            done = await asyncio.gather(
                *(client.post(CHAT, json=asking(question)) for question in questions)
            )
        texts = [one.json()["choices"][0]["message"]["content"] for one in done]
        assert texts == wanted
        assert at_rest(model)

    run(work())


@pytest.mark.parametrize("stream", [True, False])
def test_time_that_runs_out_is_told(app: FastAPI, model: LoadedModel, stream: bool) -> None:
    async def work() -> None:
        async with http(app) as client:
            with held(model):
                asked = client.post(CHAT, json=asking(timeout=0.02, stream=stream))
                asking_ = asyncio.create_task(asked)
                await until(lambda: app.state.service.limit.inside == 1)
                await asyncio.sleep(0.03)
            done = await asking_
        if stream:  # it had begun with 200
            error = events_of(done.text)[-1]["error"]
        else:
            assert done.status_code == 504
            error = done.json()["error"]
        assert (error["code"], error["type"]) == ("timeout", "server_error")
        assert at_rest(model)

    run(work())


def test_an_answer_that_fails_is_told_and_others_go_on(
    app: FastAPI, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hmt.base.errors import DiskReadError
    from hmt.engine.outputs.output_processor import OutputProcessor

    accept = OutputProcessor.accept

    def faulty(output: OutputProcessor, *others: Any) -> None:
        if output.request.ignore_eos:
            raise DiskReadError("the disk said no")
        accept(output, *others)

    monkeypatch.setattr(OutputProcessor, "accept", faulty)

    async def work() -> None:
        async with http(app) as client:
            bad, good, stream = await asyncio.gather(
                client.post(CHAT, json=asking(ignore_eos=True, n=2)),
                client.post(CHAT, json=asking()),
                client.post(CHAT, json=asking(ignore_eos=True, stream=True)),
            )
        assert (bad.status_code, bad.json()["error"]["code"]) == (500, "engine_failed")
        assert good.status_code == 200
        assert events_of(stream.text)[-1]["error"]["message"] == "the disk said no"
        assert at_rest(model)

    run(work())


def test_a_quiet_stream_says_that_it_lives(app: FastAPI, model: LoadedModel) -> None:
    from hmt.server import stream

    async def slow() -> Any:
        await asyncio.sleep(0.1)
        yield {"a": 1}

    class Nothing:
        async def __aenter__(self) -> None: ...
        async def __aexit__(self, *raised: object) -> None: ...

    async def work() -> None:
        response = stream.EventStream(Nothing(), slow(), quiet_s=0.02)
        call = Call(response, "/", {})
        await call.run()
        assert call.text.startswith(": still at it\n\n")
        assert events_of(call.text) == [{"a": 1}]

    run(work())


def test_a_closed_model_says_so(tmp_path: Any) -> None:
    from hmt.cli.options import embedded_model

    with hmt.Engine(host_memory="64MiB", context=512) as engine:
        model = engine.load_model(embedded_model())
        app = app_on(model)

        async def work() -> None:
            async with http(app) as client:
                with held(model):
                    inside = asyncio.create_task(client.post(CHAT, json=asking()))
                    await until(lambda: app.state.service.limit.inside == 1)
                    closing = asyncio.create_task(asyncio.to_thread(model.close))
                    await until(lambda: model.closed)
                await closing
                done = await inside
                assert done.status_code in (200, 503)  # it had ended, or was cut off
                assert (await client.get("/ready")).json() == {"status": "closed"}
                late = await client.post(CHAT, json=asking())
                assert late.status_code == 503
                assert (await client.get("/metrics")).status_code == 200

        run(work())


def test_nothing_waits_for_the_engine(app: FastAPI, model: LoadedModel) -> None:
    """What does not need it answers while a step takes long."""

    async def work() -> None:
        async with http(app) as client:
            with held(model) as over:
                for path in ("/health", "/ready", "/v1/models", "/metrics"):
                    assert (await client.get(path)).status_code == 200
                assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
                assert (await client.post(CHAT, json=asking(n=17))).status_code == 400
                assert not over.is_set()

    run(work())
