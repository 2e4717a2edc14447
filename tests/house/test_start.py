"""What starting HMT imports: each command and each process pays for it."""

import subprocess
import sys


def test_the_engine_starts_without_modelling_code_of_transformers():
    """It takes as long to import as all else, and models of HMT's own need none of it."""
    code = "import sys, hmt.engine, hmt.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "hmt.engine" in loaded
    assert not loaded & {"transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor"}


def test_help_does_not_wait_for_torch():
    program = "import sys, hmt.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers", "numpy", "tokenizers"} & set(done.stdout.split())
