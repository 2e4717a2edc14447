"""Writes the figures of docs/speed.md from benchmarks/results; `--check` only compares."""

import json
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_PEERS = {
    "Llama, 1.1 billion parameters": "peer-llama-1b-epyc-2-cores.json",
    "Qwen3-MoE, 8 of 64 experts, 0.5 of 2.7 billion": "peer-qwen3-moe-epyc-2-cores.json",
}
_KERNELS = {
    "two Zen 4 cores (AVX-512)": "kernels-epyc-2-cores.json",
    "16 Xeon cores (AMX)": "kernels-xeon-amx-16-cores.json",
}
_LARGER = {
    "Llama, 11 billion parameters, 6.1 GB": "bigger-than-ram-dense-epyc-2-cores.json",
    "Qwen3-MoE, 8 of 128 experts, 8.1 GB": "bigger-than-ram-moe-epyc-2-cores.json",
}
_FLASH = "larger-than-ram-flash-next-xeon-2-cores.json"
_GLM_FLASH = "larger-than-ram-glm-flash-h200.json"
_PREFIX, _PAGES = "prefix-xeon-amx-2-cores.json", "pages-xeon-amx-2-cores.json"
_ON_A_GPU = {
    "Llama, 8 billion, all on the card": "gpu-8b-16gib-h200-beside-llama-cpp.json",
    "Llama, 70 billion, 16 GiB of the card": "gpu-70b-16gib-h200.json",
}
_BESIDE = {
    "all near": "near",
    "2GiB near, host int8": "offloaded",
    "2GiB near, host exact": "offloaded",
}
_BESIDE_TITLES = {
    "all near": "KV cache on the GPU",
    "2GiB near, host int8": "2 GiB of it on the GPU, host pages int8",
    "2GiB near, host exact": "2 GiB of it on the GPU, host pages exact",
}
_HYBRIDS = {
    "types of an IQ2_XXS file, 166 GiB, H100, 32 cores": ("gpu-hybrid-61-layers-iq2_xxs-h100.json"),
    "4 bits, experts of 30 of 58 layers (the others read these), H200, 30 cores": (
        "gpu-hybrid-61-layers-30-with-experts-h200.json"
    ),
}
_KV_SPEED = "kv-speed-8b-h200.json"
_BEGIN, _END = "<!-- figures: benchmarks/speed_figures.py {} -->", "<!-- /figures -->"


_GPU_KERNELS = "gpu-kernels-h200.json"
_GPU_ENCODINGS = {
    "int4 groups of 32": "w4a16:32",
    "int4 groups of 32, int8 activations": "w4a8:32",
    "NVFP4": "nvfp4a16",
    "MXFP4": "mxfp4a16",
    "FP8 in tiles of 128 x 128": "fp8 128x128",
    "int8": "w8a16",
    "bf16": "bf16",
}


def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((_RESULTS / name).read_text())
    return loaded


def peers() -> list[str]:
    """Tokens per second of HMT and of llama.cpp, medians of interleaved runs."""
    lines = ["| tokens/s | | HMT | llama.cpp | ratio |", "|---|---|---|---|---|"]
    for model, name in _PEERS.items():
        for number, result in enumerate(_load(name)["results"]):
            hmt, peer = result["hmt_tokens_per_s"], result["peer_tokens_per_s"]
            first = "" if number else model
            lines.append(
                f"| {first} | {result['case']} | {hmt:.0f} | {peer:.0f} | {result['ratio']:.2f} |"
            )
    return lines


def kernels() -> list[str]:
    """The int4 kernel beside torch's: GB/s with one token, and Gop/s with 256."""
    lines = [
        "| int4 groups of 32, int8 activations | 1 token | 256 tokens | torch int4 | torch bf16 |",
        "|---|---|---|---|---|",
    ]
    for machine, name in _KERNELS.items():
        # Later results are those of larger weights.
        found = {
            (result["tokens"], result["engine"], result["name"]): result
            for result in _load(name)["results"]
        }
        one, many = found[1, "hmt", "w4a8:32"], found[256, "hmt", "w4a8:32"]
        int4, bf16 = found[256, "torch", "w4a16:64"], found[256, "torch", "bf16"]
        lines.append(
            f"| {machine} | {one['rate'] / 1e9:.0f} GB/s, {one['read_share']:.0%} of memory's "
            f"| {many['operations_per_s'] / 1e12:.2f} Top/s "
            f"| {int4['operations_per_s'] / 1e12:.2f} | {bf16['operations_per_s'] / 1e12:.2f} |"
        )
    return lines


def gpu_kernels() -> list[str]:
    """Shares of the card's memory with one token, and of its products in bf16 with 2048."""
    content = _load(_GPU_KERNELS)
    found = {
        (result["case"], result["tokens"], result["name"]): result
        for result in content["results"]
        if result["engine"] == "hmt"
    }
    sizes = list(dict.fromkeys(case for case, _, name in found if name == "bf16"))
    head = " | ".join(f"{size}, 1 token" for size in sizes)
    lines = [
        f"| {content['gpu']}, share of memory's {content['read_rate'] / 1e12:.2f} TB/s | {head} | "
        f"{sizes[1]}, 2048 tokens, Top/s |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for title, name in _GPU_ENCODINGS.items():
        shares = [f"{found[size, 1, name]['read_share']:.0%}" for size in sizes]
        many = found[sizes[1], 2048, name]["operations_per_s"] / 1e12
        lines.append(f"| {title} | {' | '.join(shares)} | {many:.0f} |")
    reads = ", ".join(
        f"{found[f'attention to {length}', sequences, 'kv bf16']['read_share']:.0%}"
        for sequences, length in ((1, 32768), (1, 131072), (32, 4096))
    )
    lines += [
        "",
        "Attention of one token (32 query heads, 8 KV heads in bf16) reads the KV cache at this "
        f"share of that rate: {reads} with 32768 and 131072 positions of one sequence and 4096 of "
        "32. The 9 MB of a [4096, 4096] matrix in int4 take 2.4 us at that rate, about as long as "
        "a kernel needs to begin and to end. Torch's "
        f"own products reach {content['peaks']['bf16'] / 1e12:.0f} Top/s in bf16 and "
        f"{content['peaks']['int8'] / 1e12:.0f} in int8 (`hmt bench kernels --gpu 0`).",
    ]
    return lines


def larger() -> list[str]:
    """Models larger than RAM, under one hard limit."""
    lines = [
        "| tokens/s in 2 GiB | HMT | 8 at once | llama.cpp, mmap | accelerate | HMT of the disk |",
        "|---|---|---|---|---|---|",
    ]
    for model, name in _LARGER.items():
        found = {result["name"]: result for result in _load(name)["results"]}
        cells = [
            _speed(found.get(name))
            for name in ("hmt", "hmt, batch 8", "llama.cpp, mmap", "accelerate")
        ]
        own = found["hmt"]
        cells.append(f"{own['read_share']:.0%}")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    dense, moe = (_load(name)["results"][0] for name in _LARGER.values())
    return [
        *lines,
        "",
        "HMT reads every byte of the dense model for every token, and "
        f"{dense['overlap']:.0%} of the computing overlaps with the "
        "reading. Experts follow a recorded routing; they are read "
        f"after the router chose them, and {moe['hit_rate']:.0%} were in memory.",
        "",
        *_flash(),
    ]


def _flash() -> list[str]:
    """Large mixtures, some of their layers: one with tables of n-grams, one beside a GPU."""
    table = "rows of the table"
    next_, glm = _load(_FLASH), _load(_GLM_FLASH)
    rates = sorted(next_["drive_rates"])
    slowest, *_, fastest = sorted(glm["drive_rates"])
    return [
        *_large_mixture(next_, "Qwen3.8-Flash-Next", 48, "4 GiB", table),
        "",
        "Every layer has its 512 experts in 4 bits, each in a separate copy; the table is "
        "a 25th of the published one, in bf16. Routers are random, so tokens choose "
        "different experts, 221 MB each. Two Xeon cores and their disk, which gave "
        f"{rates[0] / 1e9:.1f} to {rates[-1] / 1e9:.1f} GB/s, had other work at the same time. "
        "The benchmark writes no GGUF file of this family, so llama.cpp is not beside it.",
        "",
        *_large_mixture(glm, "GLM-5.3-Flash", 45, "32 GiB and 12 GiB of an H200", "tables"),
        "",
        "Every layer has its 288 experts in 4 bits. 16 Xeon cores; the disk gave "
        f"{slowest / 1e9:.1f} to {fastest / 1e9:.1f} GB/s. One round.",
    ]


def _large_mixture(
    content: dict[str, Any], name: str, layers: int, memory: str, table: str
) -> list[str]:
    """A row for each contender that told what it read."""
    lines = [
        f"| {name}, {content['layers']} of {layers} layers, "
        f"{content['sizes']['hmt']:.0f} GiB, in {memory} | tokens/s | read for a token "
        f"| of the disk | while it had to read | useful bytes | waiting for it | {table} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in content["results"]:
        if found["disk_bytes_per_step"] is None:  # its time was over before it told
            continue
        shares = (found[share] for share in ("read_share", "busy_share"))
        lines.append(
            f"| {found['name']} | {found['tokens_per_s']:.2f} "
            f"| {found['disk_bytes_per_step'] / found['sequences'] / 1e6:.0f} MB "
            f"| {' | '.join(f'{share:.0%}' for share in shares)} "
            f"| {found['useful_share']:.1%} | {found['waiting_share']:.0%} "
            f"| {found['table_share']:.1%} of the time |"
        )
    return lines


def keys_and_values() -> list[str]:
    """What a prefix that was kept saves, and what pages waste."""
    prefix, pages = _load(_PREFIX), _load(_PAGES)
    first = {result["case"]: result["first_token_s"] for result in prefix["results"]}
    read, computed = first["from the disk"], first["computed"]
    wasted = {result["tokens"]: result["wasted"] for result in pages["results"]}
    lengths = pages["lengths"]
    return [
        f"A prompt of {prefix['tokens']} tokens that an earlier process computed has its first "
        f"token after {read:.2f} s with its KV cache from disk, and after {computed:.0f} s without "
        f"(small dense model, two Xeon cores): {computed / read:.0f} times sooner. Pages of 16 "
        f"tokens waste {wasted[16]:.1%} of their room where sequences have {lengths['mean']:.0f} "
        f"tokens on average; one page of 4096 for each sequence wastes {wasted[4096]:.0%}.",
    ]


def gpu() -> list[str]:
    """Models on one GPU, beside others, and long contexts whose KV cache is mostly offloaded."""
    lines = ["| tokens/s | | HMT | | ratio |", "|---|---|---|---|---|"]
    for model, name in _ON_A_GPU.items():
        [result] = _load(name)["results"]
        for number, case in enumerate(result["cases"]):
            peer = case["peer_tokens_per_s"]
            beside = "-" if peer is None else f"{result['peer']['name']} {_rounded(peer)}"
            ratio = "-" if peer is None else f"{case['ratio']:.{0 if case['ratio'] >= 10 else 2}f}"
            if peer is not None and "layers in host memory measured" in result["peer"]["note"]:
                beside += " (bf16, extrapolated from three layers)"
            first = "" if number else model
            own = _rounded(case["tokens_per_s"])
            lines.append(f"| {first} | {case['name']} | {own} | {beside} | {ratio} |")
    levels = _load(_KV_SPEED)
    far = {one["name"]: one["cases"][-1] for one in levels["results"] + levels["peers"]}
    for name, other in _BESIDE.items():
        own, its = far[name]["tokens_per_s"], far[f"transformers, {other}"]["tokens_per_s"]
        where = "on the GPU" if other == "near" else other
        what = f"after {far[name]['context']} positions, {_BESIDE_TITLES[name]}"
        lines.append(
            f"| {'Llama, 8 billion' if name == 'all near' else ''} | {what} | {_rounded(own)} "
            f"| transformers (bf16), {where} {its:.2g} | {own / its:.0f} |"
        )
    return [*lines, "", *_largest(), "", *gpu_kernels()]


def _largest() -> list[str]:
    """DeepSeek-V3's shape, whose experts GPU, link and CPU share out."""
    lines = [
        "DeepSeek-V3's shape with 671 billion parameters in host memory, 22.7GB of the card, the "
        "KV cache of 131,072 positions included; all experts are used equally. The share is of "
        "what link and CPU allow together:",
        "",
        "| tokens/s | 1 sequence | share | after 131072 positions | share | 16 together | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, file in _HYBRIDS.items():
        steps = {(s["routing"], s["batch"], s["context"]): s for s in _load(file)["steps"]}
        cells = [
            f"{step['tokens_per_s']:.1f} | {step['share']:.0%}"
            for step in (steps["uniform", *at] for at in ((1, 1024), (1, 131072), (16, 1024)))
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    whole = _load(next(iter(_HYBRIDS.values())))
    (one,) = (s for s in whole["steps"] if (s["batch"], s["context"]) == (1, 1024))
    waits, takes = one["waited_s"] * 1e3, one["step_s"] * 1e3
    return [
        *lines,
        "",
        f"A prompt of 4096 is read at {_rounded(whole['prompt']['tokens_per_s'])} tokens/s from "
        f"the first. Its CPU waits {waits:.1f} of {takes:.1f} ms of one sequence's step, while the "
        "GPU computes what comes before a layer's experts.",
    ]


def _rounded(rate: float) -> str:
    """Three digits, thousands apart."""
    return f"{round(rate, -2):,.0f}" if rate >= 1000 else f"{rate:.3g}"


def _speed(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    rate, most = result["tokens_per_s"], result["at_most_tokens_per_s"]
    return f"below {most:.3f}" if rate is None else f"{rate:.3g}"


def _fill(text: str, name: str, lines: list[str]) -> str:
    """`text` with `lines` between the markers called `name`."""
    begin = _BEGIN.format(name)
    before, rest = text.split(begin)
    return before + "\n".join([begin, *lines, _END]) + rest.split(_END, 1)[1]


def main() -> int:
    """Bring docs/speed.md up to date; 1 where `--check` finds that it is not."""
    page = _ROOT / "docs" / "speed.md"
    text = page.read_text()
    wanted = _fill(text, "speed", [*peers(), "", *kernels()])
    wanted = _fill(wanted, "larger", larger())
    wanted = _fill(wanted, "kv", keys_and_values())
    wanted = _fill(wanted, "gpu", gpu())
    if "--check" in sys.argv:
        return int(wanted != text)
    page.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
