"""A server on a socket, and what its clients find around them."""

import os
from collections.abc import Iterator

import pytest
from answering import Served, replying, said_to
from listening import listening
from serving import app_on, tooled_model

import hmt


@pytest.fixture(scope="module")  # not longer: it replaces every sampler of this process
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tooled_model(tmp_path_factory.mktemp("models") / "tools", "<tool_call>")
    with hmt.Engine(host_memory="96MiB", context=4096, max_batch=4) as engine:
        model = engine.load_model(folder)
        with replying(model, said_to), listening(app_on(model, max_waiting=64)) as url:
            yield Served(url, "tools", str(folder))


@pytest.fixture(scope="session")
def surroundings() -> dict[str, str]:
    """Environment of a client: it finds this server, and nothing beyond this machine."""
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    nowhere |= {name.lower(): value for name, value in nowhere.items()}
    local = "127.0.0.1,localhost"
    return os.environ | nowhere | {
        "NO_PROXY": local, "no_proxy": local, "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "AI_SDK_LOG_WARNINGS": "false", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
