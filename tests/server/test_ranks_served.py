"""A server whose model several processes compute says which of them run."""

import asyncio

from rank_threads import ranks_as_threads
from serving import CHAT, NAME, app_on, asking, http, run
from test_metrics import scrape

import hmt
from hmt.cli.options import embedded_model


def test_a_rank_that_ends_is_named_and_requests_are_refused() -> None:
    async def work() -> None:
        async with http(app) as client:
            answer = (await client.post(CHAT, json=asking(max_tokens=16))).json()
            assert answer["choices"][0]["message"]["content"] == "42"
            health = (await client.get("/health")).json()
            assert health == {"status": "ok", "ranks": {"0": True, "1": True}}
            assert (await client.get("/ready")).status_code == 200
            up = ("hmt_rank_up", f"model_name={NAME}", "rank=1")
            assert (await scrape(app))[up] == 1
            ranks.end_all()
            while not model.ranks[0].failure:
                await asyncio.sleep(0.01)
            assert (await client.get("/health")).json()["ranks"] == {"0": True, "1": False}
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "failed"})
            assert (await scrape(app))[up] == 0
            refused = await client.post(CHAT, json=asking())
            assert refused.status_code == 500
            assert "rank 1" in refused.json()["error"]["message"]

    options = {"host_memory": "64MiB", "context": 512, "max_batch": 2, "tp": 2}
    with ranks_as_threads() as ranks, hmt.Engine(**options) as engine:
        model = engine.load_model(embedded_model())
        app = app_on(model)
        run(work())
