"""A request that drifts says so: in a header, in usage, in metrics."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import app_on, http, run

import hmt
from hmt.cli.options import embedded_model
from hmt.engine import LoadedModel
from hmt.engine.drift import calibrate_activations, statistics_beside
from hmt.engine.loading.kv_scales import identity
from hmt.quantizing import calibration_sequences

COMPLETIONS = "/v1/completions"
HEADER = "x-hmt-precision"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = tmp_path_factory.mktemp("models") / "mini-dense"
    shutil.copytree(embedded_model(), folder)
    options = {"quantization": "w4a8", "host_memory": "96MiB", "context": 1024, "max_batch": 4}
    with hmt.Engine(**options) as engine:
        model = engine.load_model(folder)
        sequences = calibration_sequences("builtin", model.tokenizer, 8, 512)
        found = calibrate_activations(model, sequences)
        found.statistics.write(statistics_beside(folder), identity(model.prepared.source))
    with hmt.Engine(**options) as engine:
        yield engine.load_model(folder)


def test_header_usage_and_metrics(watched: LoadedModel) -> None:
    app = app_on(watched)
    text = (Path(__file__).parents[2] / "assets" / "text" / "valid.txt").read_text()
    ordinary = watched.tokenizer.encode(text[:2000])[:100]
    body = {"model": "mini-dense", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    strange = body | {"prompt": [777] * 90}

    async def work() -> None:
        async with http(app) as client:
            raised = await client.post(COMPLETIONS, json=strange)
            usual = await client.post(COMPLETIONS, json=body | {"prompt": ordinary})
            streamed = await client.post(
                COMPLETIONS,
                json=strange | {"stream": True, "stream_options": {"include_usage": True}},
            )
            metrics = (await client.get("/metrics")).text
        assert raised.status_code == usual.status_code == 200
        assert raised.headers[HEADER] == "raised" == raised.json()["usage"]["precision"]
        assert HEADER not in usual.headers and "precision" not in usual.json()["usage"]
        assert HEADER not in streamed.headers  # they come before the first token
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        assert json.loads(events[-2])["usage"]["precision"] == "raised"
        told = {line.partition("{")[0]: line for line in metrics.splitlines() if "hmt_" in line}
        assert told["hmt_drifted_requests_total"].endswith(" 2.0")
        assert told["hmt_raised_tokens_total"].endswith(" 14.0")

    run(work())
