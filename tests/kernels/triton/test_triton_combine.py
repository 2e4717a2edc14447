"""Attention in parts on the device: f32 results, and two of them as one."""

import pytest
import torch
from test_triton_paged_attention import DTYPES, Scene

from hmt.kernels import reference
from hmt.kernels.reference import AttentionMetadata, PageEncoding, PageLayout

attention = pytest.importorskip("hmt.kernels.triton.attention.paged")
joining = pytest.importorskip("hmt.kernels.triton.attention.combine_host_part")

LAYOUTS = {
    "grouped": PageLayout(PageEncoding.F32, 2, 64, 64),
    "latent": PageLayout(PageEncoding.F32, 1, 80, 64, latent=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_f32_and_leave_other_rows(device, layout, dtype):
    layout = LAYOUTS[layout]
    layout = PageLayout(PageEncoding.of(dtype), *(layout.heads, layout.key_dim, layout.value_dim),
                        layout.latent)  # fmt: skip
    scene = Scene(device, layout, [(700, 1), (3, 2), (40, 20)], dtype)
    query = scene.query(8)
    wanted, logs = scene.exact(query, scale=0.2, softcap=20.0)
    out = torch.full((scene.tokens, 8, layout.value_dim), 7.0, device=device)
    lse = torch.full((scene.tokens, 8), 7.0, device=device)
    runs = AttentionMetadata([scene.runs[0], scene.runs[2]])
    attention.attend_part(
        scene.on_device, 1, runs, query.to(device), out, lse, scale=0.2, softcap=20.0
    )
    for run in runs.runs:
        rows = slice(run.offset, run.offset + run.length)
        near = 2e-5 if dtype == torch.float32 else 4e-3
        assert (out[rows].cpu() - wanted[rows]).norm() / wanted[rows].norm() < near
        assert (lse[rows].cpu() - logs[rows]).abs().max() < max(near, 1e-4)
    left = scene.runs[1]
    assert (out[left.offset : left.offset + left.length] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_two_parts_are_joined(device, dtype):
    random = torch.Generator().manual_seed(1)
    parts = [
        (torch.randn(5, 3, 40, generator=random), 30 * torch.randn(5, 3, generator=random))
        for _ in "ab"
    ]
    parts[0][1][1], parts[1][1][2] = -torch.inf, -torch.inf
    parts[0][0][1], parts[1][0][2] = torch.nan, torch.nan
    parts[0][1][3] = parts[1][1][3] = -torch.inf
    for out, _ in parts:
        out[3] = 0
    clean = [(out.nan_to_num(), lse) for out, lse in parts]
    wanted, logs = reference.merge_attention(clean)
    here = [x.to(device) for x in parts[0]]
    there = [x.pin_memory() if device.type == "cuda" else x for x in parts[1]]
    joined = torch.empty(5, 3, 40, dtype=dtype, device=device)
    joining.join(*here, *there, joined)
    torch.testing.assert_close(joined.cpu(), wanted.to(dtype), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(here[1].cpu(), logs, rtol=1e-6, atol=1e-6)
