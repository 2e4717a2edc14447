"""`hmt plan`, `probe`, `doctor`, `eval`, `bench`."""

import gzip
import json
import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest

from hmt.cli import doctor
from hmt.cli.options import EngineOptions, embedded_model
from hmt.contracts.machine import ComputeRates, Machine
from hmt.engine import EngineConfig
from hmt.hardware import machine
from hmt.hardware.machine import ProcessBytes
from hmt.hardware.machine_file import read_machine
from hmt.memory import DiskRate
from hmt.profiling import probe, step_overheads
from hmt.profiling.random_model import Shape, write_random_model


def test_every_engine_option_is_one_of_the_engines(tmp_path):
    values = {
        "preset": None,  # stands for others
        "host_memory": "8MiB",
        "gpu_memory": "1GiB",
        "gpus": "fake",
        "tp": 1,  # several go with few of the others
        "pp": 1,
        "ep": 1,
        "adapter": [f"own={tmp_path}"],
        "adapter_memory": "1MiB",
        "quant": "w4a8",
        "context": 512,
        "dtype": "float32",
        "executor": "plain",
        "depth": 0.5,
        "prefetch_distance": 2,
        "max_prefill_tokens": 32,
        "kv_gpu_memory": "4MiB",
        "kv_host_memory": "1MiB",
        "kv_offload_dir": tmp_path,
        "kv_offload_disk_memory": "1GiB",
        "kv_quant": "int8,int4",
        "kv_eviction": "lru",
        "kv_policy": "select",
        "kv_share": 0.25,
        "prefix_cache": True,
        "prefix_cache_dir": tmp_path,
        "prefix_cache_disk_memory": "1GiB",
        "prefix_shared": True,
        "idle_unload": 60.0,
        "spill_dir": tmp_path,
        "disk_reader": "mmap",
        "mmproj": tmp_path / "mmproj.gguf",
        "fallback_model": tmp_path,
        "verify_reads": "always",
        "threads": 1,
        "numa": "0",
        "activations": "exact",
        "speculate": "off",
        "expert_cache_policy": "lru",
        "expert_prefetch": False,
        "goal": "latency",
        "profile": None,  # not with a goal
        "trace": tmp_path / "timeline.json",
        "expert_trace": tmp_path / "trace.jsonl",
    }
    assert set(values) == {field.name for field in fields(EngineOptions)}
    config = EngineConfig.resolve(**EngineOptions(**values).arguments())
    assert config.numa == (0, 0) and config.host_memory_bytes == 8 << 20
    assert EngineOptions(numa="auto").arguments() == {"numa": "auto", "max_batch": 1}
    assert EngineOptions(numa="0,1").arguments() == {"numa": (0, 1), "max_batch": 1}


def test_a_plan_is_printed_without_loading(hmt):
    done = hmt("plan", "--host-memory", "6MiB")
    assert done.code == 0
    for word in ("LlamaForCausalLM", "6.00 MiB", "weights that stay", "one decoded token"):
        assert word in done.out


def test_a_plan_with_a_gpu_says_what_goes_there(hmt):
    moe = Path(__file__).parents[2] / "assets" / "mini-moe"
    gpu = ["--gpu-id", "fake", "--gpu-memory", "10MiB", "--quant", "w4a16:32"]
    done = hmt("plan", moe, *gpu, "--context", "512")
    assert done.code == 0, done.err
    for word in (
        "experts, cached or brought",
        "page tables",
        "a prompt copies",
        "--max-prefill-tokens",
    ):
        assert word in done.out


def test_a_plan_of_several_processes_says_what_each_has(hmt):
    asked = ("plan", "--tp", "3", "--host-memory", "60MiB", "--context", "256")
    done = hmt(*asked)
    assert done.code == 0 and "host memory, 20.0 MiB" in done.out
    weights = re.findall(r"rank (\d): (\S+) MiB of weights, 0 B .*of 20.0 MiB", done.out)
    assert [rank for rank, _ in weights] == ["1", "2"]
    assert all(6 < float(size) < 8 for _, size in weights), "a third of the layers, the embedding"
    staged = hmt("plan", "--pp", "2", "--host-memory", "60MiB", "--context", "256")
    (size,) = re.findall(r"rank 1: (\S+) MiB of weights", staged.out)
    assert 6 < float(size) < 8, "half of the layers"
    for refused in (
        (*asked, "--explain"),
        ("simulate", "--tp", "2"),
        ("simulate", "--pp", "2"),
        ("plan", "--ep", "2"),
    ):
        said = hmt(*refused)
        assert said.code and ("leave it out" in said.err or "has no experts" in said.err)


def test_a_plan_as_json_adds_up(hmt):
    plan = json.loads(hmt("plan", embedded_model(), "--host-memory", "6MiB", "--json").out)
    assert plan["budgets"] == {"host": 6 << 20}
    assert sum(plan["reserved"].values()) <= plan["budgets"]["host"]
    assert sum(entry["count"] for entry in plan["blocks"]) == len(plan["homes"])
    assert set(plan["homes"].values()) == {"host", "disk"}
    assert plan["machine"]["cores"] >= 1


def test_a_plan_that_cannot_be_says_what_could(hmt):
    asked = ("--host-memory", "2MiB", "--context", "512")
    planned, done = hmt("plan", *asked), hmt("run", *asked, "Hi")
    for said in (planned, done):
        assert said.code == 1 and "The smallest --host-memory that works" in said.err
        assert "these would fit: " in said.err and "of host memory" in said.err
    memory = planned.err.split("these would fit: ")[1].split(" of host memory")[0]
    assert hmt("plan", *asked[2:], "--host-memory", memory).code == 0
    for wrong, message in (
        (("--users", "100000"), "100000 users were asked for, and the plan has 8192 positions"),
        (("--prompt", "9000"), "longer than the context of 8192"),
    ):
        said = hmt("plan", *wrong)
        assert said.code == 2 and message in said.err
    said = hmt("plan", "--numa-node", "99")
    assert said.code == 1 and "NUMA node 99 was asked for" in said.err


def test_a_model_without_weights_and_a_profile_are_planned_for_this_machine(hmt):
    done = hmt("plan", embedded_model() / "config.json")
    assert done.code == 0 and "no weights are there" in done.out
    # As hmt serve has it: so many users in the usual context, not so many such contexts.
    room = ("--profile", "throughput", "--host-memory", "60MiB", "--json")
    found = json.loads(hmt("plan", *room).out)
    assert found["prediction"]["users"] == 32 and 512 < found["kv_tokens"] < 8192
    assert json.loads(hmt("plan", *room, "--users", "2").out)["prediction"]["users"] == 2


def test_requests_are_simulated_on_a_machine_that_is_not_here(hmt, tmp_path):
    asked = ("simulate", "llama-3.1-8b", "--machine", "16gb-card-gen5", "--quant", "w4a8")
    done = hmt(*asked, "--users", "8", "--prompt", "200", "--answer", "40", "--seconds", "2")
    assert "8 requests at once at most" in done.out and "first token after" in done.out
    assert "bound by the GPU" in done.out
    # Texts of 200 and 43 tokens take whole pages, and there are enough for all.
    done = hmt(*asked, "--users", "8", "--prompt", "200", "--answer", "43", "--seconds", "2")
    assert ", 8 at most; queue" in done.out
    file = tmp_path / "requests.jsonl"
    file.write_text('{"due_s": 3.5, "prompt_tokens": 90, "tokens": 12}\n' * 3)
    found = json.loads(hmt(*asked, "--requests", file, "--json").out)
    assert (found["answered"], found["tokens"], found["batch"]["most"]) == (3, 36, 1)
    assert found["bytes"]["GPU"] > 36 * 4e9 and found["ttft_s"]["p50"] > 0
    rates = (*asked, "--rate", "5", "--seconds", "20", "--seed", "4", "--json")
    assert hmt(*rates).out == hmt(*rates).out
    assert hmt(*asked, "--requests", file, "--rate", "5").code == 2


def test_a_plan_for_a_machine_that_is_not_here(hmt, tmp_path):
    asked = ("plan", "llama-3.1-8b", "--machine", "16gb-card-gen5", "--quant", "w4a8")
    done = hmt(*asked, "--context", "4096", "--users", "2", "--explain", "--plot")
    assert done.code == 0, done.err
    for word in (
        "RTX 4080",
        "tokens/s for 2 users",
        "16 users",
        "attention  G",
        "help most",
        "why:",
    ):
        assert word in done.out
    config = tmp_path / "config.json"
    config.write_text((files("hmt.planner") / "shapes" / "llama-3.1-8b.json").read_text())
    again = json.loads(hmt("plan", config, *asked[2:], "--json", "--explain").out)
    assert again["prediction"]["tokens_per_s"] > 10 and again["would_help"] and again["why"]
    goal = json.loads(hmt(*asked, "--context", "4096", "--goal", "latency", "--json").out)
    usual = json.loads(hmt(*asked, "--context", "4096", "--json").out)
    assert goal["prediction"]["ttft_s"] <= usual["prediction"]["ttft_s"]
    profiled = hmt(*asked, "--profile", "latency")
    assert profiled.code == 0 and "without them (--goal latency)" in profiled.out
    recorded = Path(__file__).parents[2] / "benchmarks" / "traces" / "mini-moe-chat.jsonl.gz"
    trace = tmp_path / "chat.jsonl.gz"  # of 200 steps, which are replayed in a fifth of the time
    lines = gzip.decompress(recorded.read_bytes()).splitlines()
    trace.write_bytes(gzip.compress(b"\n".join(lines[: 1 + 200 * 4])))
    experts = ("plan", "qwen3-30b-a3b", *asked[2:], "--gpu-memory", "8GiB", "--json")
    plans = [json.loads(hmt(*experts, *more).out) for more in ((), ("--routing", trace))]
    assert [plan["expert_hits"]["origin"].split()[0] for plan in plans] == ["published", "the"]
    speeds = [plan["prediction"]["tokens_per_s"] for plan in plans]
    assert speeds[1] < speeds[0], "published models choose less evenly than the small one"
    refused = hmt(*asked, "--gpu-memory", "100MiB")
    assert refused.code == 1 and "these would fit" in refused.err
    assert hmt("plan", "llama-3.1-8b", "--machine", "none").code == 1
    for wrong, message in (
        (("--goal", "latency", "--profile", "latency"), "not both"),
        (("--gpu-memory", "64GiB"), "64.0 GiB was asked for"),
        (("--host-memory", "1TiB"), "of RAM"),
        (("--prompt", "4097", "--context", "4096"), "longer than the context of 4096"),
        (("--numa-node", "1"), "nodes 0 to 0"),
    ):
        found = hmt(*asked, *wrong)
        assert found.code == 2 and message in found.err, wrong


@pytest.fixture
def measured(monkeypatch):
    """The probe with figures of its own."""

    def measure_disk(path, *, quick, progress):
        rates = [DiskRate("direct", 1 << 20, 1, 1e9), DiskRate("io_uring", 1 << 20, 4, 3e9)]
        for rate in rates:
            if progress is not None:
                progress(rate)
        return rates[1]

    monkeypatch.setattr(probe, "measured_ram", lambda quick: 4e10)
    monkeypatch.setattr(probe, "measured_disk", measure_disk)
    monkeypatch.setattr(probe, "cpu_gemm_rates", lambda seconds: {"w4a8@1": 2e10, "w4a8@512": 5e11})
    monkeypatch.setattr(probe, "FULL_S", 0.05)
    monkeypatch.setattr(step_overheads, "_STEPS", 20)
    # Processes of half a minute; one is measured in tests/hardware/test_machine.py.
    grown = ProcessBytes(1 << 20, 1 << 20, 1 << 20)
    monkeypatch.setattr(probe, "measured_process_bytes", lambda: grown)


def test_the_probe_prints_rates_and_saves_them(hmt, tmp_path, measured, monkeypatch):
    monkeypatch.setenv("HMT_CACHE", str(tmp_path / "cache"))
    written = tmp_path / "here.toml"
    done = hmt("probe", tmp_path, "--toml", written)
    assert done.code == 0 and read_machine(str(written)) == machine.machine_for(tmp_path)
    assert "40.0 GB/s" in done.out and "3.00 GB/s" in done.out and "1.00 GB/s" in done.out
    doctor_says = hmt("doctor", tmp_path).out
    assert "disk 3.00 GB/s" in " ".join(doctor_says.split())
    assert machine.machine_for(tmp_path).disk_read_rate == 3e9
    assert "saved in" in done.out
    monkeypatch.setenv("HMT_CACHE", str(written))
    monkeypatch.setattr(probe, "cpu_overheads", lambda known: known.cpu)
    monkeypatch.setattr(probe, "disk_block_overhead_s", lambda known: 0.0)
    assert "not saved" in hmt("probe", tmp_path, "--quick").out
    for wrong in (("--toml", tmp_path), ("--toml", "/no/such"), ("--gpu-id", "first")):
        done = hmt("probe", tmp_path, *wrong)
        assert done.code == 2 and str(wrong[1]) in done.err


def test_the_probe_says_when_there_is_nothing_to_read(hmt, tmp_path, measured, monkeypatch):
    monkeypatch.setenv("HMT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "measured_ram", lambda quick: 0.0)
    monkeypatch.setattr(probe, "measured_disk", lambda path, quick, progress: None)
    monkeypatch.setattr(probe, "cpu_gemm_rates", lambda seconds: {})
    done = hmt("probe", tmp_path, "--quick")
    assert done.code == 0 and "not measured" in done.out
    missing = hmt("probe", tmp_path / "missing")
    assert missing.code == 1 and "does not exist" in missing.err


def test_the_doctor_looks_at_everything(hmt):
    done = hmt("doctor", "--json", embedded_model())
    findings = {finding["what"]: finding for finding in json.loads(done.out)}
    assert done.code == 0
    assert {"Python", "torch", "CPU", "compiled kernels", "RAM", "cgroup memory limit", "NUMA",
            "huge pages", "lockable memory", "O_DIRECT", "io_uring", "GPU",
            "measured rates"} == set(findings)  # fmt: skip
    assert all(finding["state"] != doctor.BROKEN for finding in findings.values())
    assert findings["io_uring"]["found"].startswith(("available", "not used: "))


def test_the_doctor_fails_where_hmt_cannot_run(hmt, monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: "1.13.0")
    done = hmt("doctor")
    assert done.code == 1 and "install 2.11" in done.out


def test_the_doctor_says_why_kernels_are_missing(hmt, monkeypatch):
    from hmt.kernels.cpu import extension

    monkeypatch.setattr(extension, "load", lambda: None)
    monkeypatch.setenv("HMT_KERNELS", "reference")
    done = hmt("doctor")
    assert done.code == 0 and "plain torch computes" in " ".join(done.out.split())


def test_eval_prints_its_scores_beside_the_published_ones(hmt, tmp_path):
    file = tmp_path / "quality.json"
    done = hmt("eval", "--threads", "1", "--tasks", "4", "--retrieval", "", "--windows", "0",
               "--json", file)  # fmt: skip
    content = json.loads(file.read_text())
    assert done.code == 0
    assert "published" in done.out and "174 of 200" in done.out
    assert content["tasks"][1] == 4 and content["tasks"][0] >= 2
    assert content["retrieval"] == {}
    assert content["measured_on"]["hmt"]


def test_eval_asks_about_the_images_that_come_with_a_model(hmt, tmp_path):
    model, file = Path(__file__).parents[2] / "assets" / "mini-vision", tmp_path / "quality.json"
    parts = ("--tasks", "0", "--retrieval", "", "--windows", "0")
    done = hmt("eval", model, "--threads", "1", *parts, "--images", "2", "--json", file)
    assert done.code == 0, done.err
    assert json.loads(file.read_text())["images"] == {"colour": [1, 1], "number": [1, 1]}
    rows = [line.split() for line in done.out.splitlines()]
    assert ["images:", "colour", "1", "of", "1", "30", "of", "30"] in rows
    without = hmt("eval", model, "--threads", "1", *parts, "--images", "0")
    assert without.code == 0 and "colour" not in without.out


def test_eval_refuses_what_it_cannot_measure(hmt, tmp_path):
    assert hmt("eval", "--retrieval", "long").code == 2
    missing = hmt("eval", "--text", tmp_path / "missing.txt")
    assert missing.code == 2 and "--text" in missing.err


def test_the_decode_benchmark_reports_every_case(hmt, tmp_path, monkeypatch):
    model = tmp_path / "model"
    write_random_model(model, Shape(12, 256, 512, heads=4, kv_heads=2))
    known = Machine("a machine", 2, 1 << 34, 2e9, ComputeRates(4e10))
    monkeypatch.setattr(probe, "measure", lambda path, quick: known)
    file = tmp_path / "results" / "decode.json"
    done = hmt("bench", "decode", "--model", model, "--tokens", "2", "--threads", "1",
               "--json", file)  # fmt: skip
    assert done.code == 0, done.err
    content = json.loads(file.read_text())
    assert content["machine"]["name"] == "a machine"
    results = {result["case"]: result for result in content["results"]}
    assert set(results) == {"resident", "quarter plain", "quarter overlapped"}
    for case, result in results.items():
        assert case in done.out
        assert result["tokens_per_s"] > 0 and len(result["runs_tokens_per_s"]) == 3
        assert (result["link"] == "memory") == (case == "resident")
        ceiling = 4e10 if result["link"] == "memory" else 2e9
        assert result["share"] == pytest.approx(result["rate"] / ceiling)
    assert results["resident"]["disk_bytes_per_token"] == 0
    size = content["model"]["published_bytes"]
    assert results["quarter plain"]["disk_bytes_per_token"] > size / 2
    assert results["quarter plain"]["budget_bytes"] <= size / 4


def test_a_run_can_be_traced_and_what_is_no_trace_is_named(hmt, tmp_path):
    moe = Path(__file__).parents[2] / "assets" / "mini-moe"
    file = tmp_path / "run.jsonl"
    options = ("--max-new-tokens", "4", "--host-memory", "12MiB", "--no-expert-prefetch")
    assert hmt("run", moe, "Hello", "--expert-trace", file, *options).code == 0
    assert len(file.read_text().splitlines()) > 4
    plan = ("plan", moe, "--host-memory", "64MiB", "--routing")
    done = hmt(*plan, Path(__file__))
    assert done.code != 0 and "is not a trace of experts" in done.err
    assert hmt(*plan, file).code == 0
    done = hmt("run", "Hello", "--expert-trace", file, *options)
    assert done.code != 0 and "has no experts to trace" in done.err
    done = hmt("run", moe, "Hello", "--expert-cache-policy", "random", *options)
    assert done.code != 0 and "heat" in done.err
