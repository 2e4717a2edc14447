"""The environment of the processes of other engines."""

import os


def peer_environment() -> dict[str, str]:
    """Of a peer's process: its OpenMP workers wait by their own default, or as the user set it.

    HMT sets its own to sleep (hmt/__init__).  300000 is libgomp's default.
    """
    ours = os.environ.get("OMP_WAIT_POLICY") == "PASSIVE"
    return {**({"GOMP_SPINCOUNT": "300000"} if ours else {}), **os.environ}
