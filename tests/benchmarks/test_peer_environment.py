"""Peers' processes are not made to wait as ours do."""

import pytest

from hmt_bench.peer_environment import peer_environment


def test_workers_of_peers_wait_as_they_do_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HMT_PEER", "kept")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert peer_environment()["GOMP_SPINCOUNT"] == "300000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    found = peer_environment()
    assert found["GOMP_SPINCOUNT"] == "7" and found["HMT_PEER"] == "kept"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # which a user has said
    assert "GOMP_SPINCOUNT" not in peer_environment()
