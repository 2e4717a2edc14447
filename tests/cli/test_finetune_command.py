"""`hmt finetune`."""

import json
from pathlib import Path

from hmt.cli.options import embedded_model


def test_finetune_trains_and_tells(hmt, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "One word or two."}) + "\n" + '{"text": ""}\n')
    out = tmp_path / "own"
    arguments = ("finetune", embedded_model(), out, "--data", data, "--rank", 1, "--targets")
    done = hmt(*arguments, "o_proj, v_proj", "--host-memory", "16MiB", "--epochs", 2)
    assert done.code == 0, done.err
    assert "step 1 of 2: loss" in done.err and "step 2 of 2" in done.err
    told = " ".join(done.out.split())
    assert "16 linear layers" in told and "1 examples" in told and "1 lines have nothing" in told
    report = json.loads((out / "finetune_report.json").read_text())
    assert report["losses"][1] < report["losses"][0] and report["options"]["alpha"] == 2.0
    refused = hmt(*arguments, "o_proj")
    assert refused.code != 0 and "--force" in refused.err
