"""The server's own OpenAPI: whatever a client makes of it, no answer is a failure of the server."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from serving import app_on, at_rest

from hmt.engine import LoadedModel

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")
EXAMPLES = 2  # of each operation, as it wants them and as it does not; 5 s in all


def test_no_request_makes_the_server_fail(model: LoadedModel) -> None:
    local = {"Host": "localhost"}
    app = app_on(model, default_new_tokens=2)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=local)
    seen: dict[str, set[int]] = {}
    for operation in (found.ok() for found in schema.get_all_operations()):
        seen[operation.label] = set()
        modes = list(schemathesis.GenerationMode)
        for mode in modes if operation.method == "post" else modes[:1]:
            cases = operation.as_strategy(generation_mode=mode)
            seen[operation.label] |= statuses_of(cases, local)
        assert at_rest(model)
    assert seen.pop("GET /health") == {200}
    names = ("chat/completions", "completions", "messages", "responses")
    assert {f"POST /v1/{name}" for name in names} <= set(seen)
    assert {"POST /api/chat", "POST /api/generate", "POST /api/show"} <= set(seen)
    assert seen.pop("GET /api/tags") == {200}


def statuses_of(cases: Any, headers: dict[str, str]) -> set[int]:
    """Of all answers."""
    statuses: set[int] = set()

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def ask(case: Any) -> None:
        answer = case.call(headers=headers)
        timeout = case.body.get("timeout") if isinstance(case.body, dict) else None
        late = isinstance(timeout, float | int) and timeout < 30
        assert answer.status_code < 500 or (late and answer.status_code == 504), answer.text
        if answer.status_code >= 400:
            told = answer.json()["error"]
            sentence = case.path.startswith("/api/")  # Ollama's form
            assert told if sentence else told["message"] and told["type"]
        statuses.add(answer.status_code)

    ask()
    return statuses
