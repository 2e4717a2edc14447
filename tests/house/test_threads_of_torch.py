"""Torch's workers sleep between its operations, unless the user has said how they shall wait."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_torchs_workers_leave_the_cores_to_our_kernels(given: str | None) -> None:
    theirs = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        theirs["OMP_WAIT_POLICY"] = given
    script = "import hmt, os; print(os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run(
        [sys.executable, "-c", script], env=theirs, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (given or "PASSIVE")
