"""Peers' processes are not made to wait as ours do."""

import pytest

from hmt.bench.environment import of_peers


def test_workers_of_peers_wait_as_they_do_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HMT_PEER", "kept")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert of_peers()["GOMP_SPINCOUNT"] == "300000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    found = of_peers()
    assert found["GOMP_SPINCOUNT"] == "7" and found["HMT_PEER"] == "kept"
