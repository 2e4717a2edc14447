"""What /metrics tells is what was done."""

import asyncio

from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from serving import CHAT, NAME, app_on, asking, held, http, run

from hmt.engine import LoadedModel

OURS = f"model_name={NAME}"
Samples = dict[tuple[str, ...], float]


async def scrape(app: FastAPI, key: str = "") -> Samples:
    async with http(app, **{"x-api-key": key} if key else {}) as client:
        done = await client.get("/metrics")
    assert done.status_code == 200 and done.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))):
        sample.value
        for family in text_string_to_metric_families(done.text)
        for sample in family.samples
    }  # fmt: skip


def test_answers_are_counted_and_timed(model: LoadedModel) -> None:
    app = app_on(model)

    async def work() -> None:
        before = await scrape(app)
        async with http(app) as client:
            done = (await client.post(CHAT, json=asking(n=3, max_tokens=64))).json()
            await client.post(CHAT, json=asking(max_tokens=1, stream=True))
            await client.post(CHAT, json=asking(n=0))
        after = await scrape(app)

        def grown(*name: str) -> float:
            return after[name] - before.get(name, 0.0)

        tokens = done["usage"]["completion_tokens"] + 1
        prompt = done["usage"]["prompt_tokens"]
        assert grown("hmt_answers_total", "end=stop", OURS) == 3
        assert grown("hmt_answers_total", "end=length", OURS) == 1
        assert grown("hmt_tokens_total", OURS) == tokens
        for name in ("time_to_first_token", "answer", "queue"):
            assert grown(f"hmt_{name}_seconds_count", OURS) == 4
        assert grown("hmt_time_per_output_token_seconds_count", OURS) == 3
        # Three answers share their prompt; the first token of each is the prompt's.
        assert grown("hmt_computed_tokens_total", OURS, "phase=prompt") == 2 * prompt
        assert grown("hmt_computed_tokens_total", OURS, "phase=generation") == tokens - 4
        assert grown("hmt_http_responses_total", f"path={CHAT}", "status=200") == 2
        assert grown("hmt_http_responses_total", f"path={CHAT}", "status=400") == 1
        assert after[("hmt_answers_inside", OURS)] == 0
        # All three answers went on together, after the prompt that they share.
        steps = [grown("hmt_batch_size_bucket", f"le={size}.0", OURS) for size in (1, 2, 4, 128)]
        assert steps[0] < steps[2] == steps[3] == grown("hmt_batch_size_count", OURS)
        guessed = grown("hmt_speculated_tokens_total", OURS, "result=accepted")
        assert grown("hmt_batch_size_sum", OURS) + guessed == tokens - 4 + 2
        assert grown("hmt_preemptions_total", "kind=parked", OURS) == 0
        assert after[("hmt_preemptions_total", "kind=dropped", OURS)] >= 0
        assert after[("hmt_pressure", OURS)] == after[("hmt_kv_used_ratio", OURS)] == 0
        assert after[("hmt_batch_limit", OURS)] == 4
        assert after[("hmt_kv_pages", OURS, "state=free")] == model.load.capacity_tokens // 16
        assert after[("hmt_budget_bytes", OURS, "tier=host")] == 96 << 20
        assert after[("hmt_weight_bytes", OURS, "tier=host")] > 10 << 20
        assert after[("hmt_peak_resident_bytes",)] > 10 << 20
        assert ("hmt_stall_seconds_total", "cause=disk", OURS, "phase=prompt") in after
        assert ("hmt_link_bytes_total", "link=disk", OURS, "phase=generation") in after

    run(work())


def test_what_is_under_way_is_seen_while_the_engine_is_busy(model: LoadedModel) -> None:
    app = app_on(model)

    async def work() -> None:
        async with http(app) as client:
            with held(model):
                asked = [asyncio.create_task(client.post(CHAT, json=asking())) for _ in range(2)]
                while app.state.service.limit.inside < 2:
                    await asyncio.sleep(0.005)
                assert (await scrape(app))[("hmt_answers_inside", OURS)] == 2
            await asyncio.gather(*asked)
        assert (await scrape(app))[("hmt_answers_inside", OURS)] == 0

    run(work())


def test_paths_that_are_nothing_make_no_series(model: LoadedModel) -> None:
    app = app_on(model)

    async def work() -> None:
        async with http(app) as client:
            for number in range(5):
                await client.get(f"/nothing/{number}")
        found = await scrape(app)
        assert found[("hmt_http_responses_total", "path=", "status=404")] == 5

    run(work())
