"""Replicas as processes: what each is told, and what happens to requests when one is killed."""

import asyncio
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from serving import CHAT, asking, http, run

from hmt.base.errors import BudgetError, ConfigError
from hmt.cli.options import EngineOptions, embedded_model
from hmt.cli.replicas import Replicas, divided, order_of
from hmt.cli.serve import ServerOptions
from hmt.engine import EngineConfig
from hmt.server import KeyRing, ServerConfig
from hmt.server.router import create_router

pytestmark = pytest.mark.usefixtures("quick_processes")

KEY = "sk-correct-horse"
ENGINE = EngineOptions(host_memory="64MiB", context=1024, threads=1)


def orders(engine: EngineOptions = ENGINE, count: int = 2) -> list[dict[str, Any]]:
    keys = [f"sha256:{one.hex()}" for one in KeyRing.of([KEY]).hashes]
    server = asdict(ServerOptions(max_batch=4, shutdown_timeout=5.0))
    return [order_of(embedded_model(), part, server, keys) for part in divided(engine, count)]


def test_every_request_ends_although_a_replica_is_killed() -> None:
    """Some have begun, some wait: they come whole from another, or end with an error.

    Another process takes the place of the one that was killed.
    """
    config = ServerConfig(keys=KeyRing.of([KEY]))

    async def ask(client: Any, number: int) -> str:
        body = asking(f"What is {number} + 30?", stream=bool(number // 2 % 2), max_tokens=24)
        answer = await client.post(CHAT, json=body | {"ignore_eos": True})
        assert answer.status_code == 200
        text: str = answer.text
        return text

    async def work(replicas: Replicas) -> None:
        app = create_router(replicas.replicas, config, at_once=4)
        async with http(app, authorization=f"Bearer {KEY}") as client:
            asked = [asyncio.create_task(ask(client, n)) for n in range(24)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            killed = replicas.pids[1]
            os.kill(killed, signal.SIGKILL)
            texts = await asyncio.gather(*asked)
            cut = [text for text in texts if "replica 1) has ended" in text]
            whole = [text for text in texts if '"finish_reason"' in text and text not in cut]
            assert len(cut) + len(whole) == 24 and len(whole) >= 12
            assert all(text.startswith("data: ") for text in cut), "others are asked again"
            again = [await ask(client, n) for n in range(2)]
            assert not any("has ended" in text for text in again)
            while replicas.pids[1] == killed or replicas.replicas[1].failure:
                await asyncio.sleep(0.01)  # until another process has its place
            health = await client.get("/health")
            assert health.json() == {"status": "ok", "replicas": {"0": True, "1": True}}
            taken = replicas.replicas[1].taken
            await asyncio.gather(*(ask(client, n) for n in range(4)))
            assert replicas.replicas[1].taken > taken

    with Replicas(orders(), 5.0) as replicas:
        replicas.wait()
        run(work(replicas))
        pids = replicas.pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_what_keeps_a_replica_from_loading_is_said() -> None:
    poor = EngineOptions(host_memory="2MiB", context=1024)
    refused = pytest.raises(BudgetError, match="replica 0: ")
    with Replicas(orders(poor, 1), 1.0) as replicas, refused:
        replicas.wait()


def test_replicas_divide_what_there_is(tmp_path: Path) -> None:
    given = EngineOptions(
        host_memory="1GiB", threads=6, gpus="0,1,2,3", gpu_memory="1GiB,2GiB,3GiB,4GiB", tp=2,
        prefix_cache_dir=None,
    )  # fmt: skip
    parts = [EngineConfig.resolve(**part.arguments()) for part in divided(given, 2)]
    assert [one.gpus for one in parts] == [("0", "1"), ("2", "3")]
    assert [one.gpu_memory_bytes for one in parts] == [(1 << 30, 2 << 30), (3 << 30, 4 << 30)]
    assert {(one.host_memory_bytes, one.threads) for one in parts} == {(1 << 29, 6)}
    kept = divided(EngineOptions(prefix_cache_dir=tmp_path), 2)
    assert [one.prefix_cache_dir for one in kept] == [tmp_path / f"replica-{n}" for n in (0, 1)]
    for refused, said in (
        (EngineOptions(gpus="0"), "needs 2 GPUs"),
        (EngineOptions(trace=tmp_path / "trace"), "trace is of one process"),
    ):
        with pytest.raises(ConfigError, match=said):
            divided(refused, 2)
