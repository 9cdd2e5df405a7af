"""Graders of chapter 03's exercises."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from littlelm_core.attention import KVCache, rope_table
from littlelm_core.check import run_contract


def exercise_3_1(answer):
    """RMSNorm in fp32, dtype kept."""
    x, gain = 2 * torch.randn(3, 5, 16) + 1, torch.rand(16) + 0.5
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    got = answer(x, gain, 1e-6)
    assert torch.allclose(got.double(), exact * gain, atol=1e-5), (
        "x / sqrt(mean(x²) + eps) * gain, the mean over the last dimension"
    )
    small = answer(torch.full((1, 4), 1e-3), torch.ones(4), 1e-6)
    assert abs(small[0, 0].item() - 0.5**0.5) < 1e-3, "eps is added under the root"
    half = (300 * torch.randn(2, 512)).half()
    got = answer(half, torch.ones(512), 1e-6)
    assert got.dtype == torch.float16, f"fp16 in, {got.dtype} out"
    exact = half.double() / half.double().square().mean(-1, keepdim=True).sqrt()
    assert torch.allclose(got.double(), exact, atol=3e-3), "squares must be fp32"


def exercise_3_2(answer):
    """SwiGLU's width at equal parameters."""
    for relu2, multiple, wanted in (
        (12288, 64, 8192), (768, 64, 512), (1024, 64, 704), (1024, 1, 683),
        (3072, 256, 2048), (720, 64, 512), (1008, 64, 704),
    ):  # fmt: skip
        got = answer(relu2, multiple)
        assert got == wanted, (
            f"F = {relu2} for relu², multiples of {multiple}: {wanted}, not {got}"
        )


def exercise_3_3(answer):
    """A GeGLU with a fused input matrix."""
    ffn = answer(8, 20)
    shapes = {n: tuple(p.shape) for n, p in ffn.named_parameters()}
    assert shapes == {"w_in.weight": (40, 8), "w_down.weight": (8, 20)}, (
        f"two matrices without bias, w_in of 2 F x C and w_down of C x F: {shapes}"
    )
    x = torch.randn(2, 3, 8)
    gate, up = x @ ffn.w_in.weight[:20].T, x @ ffn.w_in.weight[20:].T
    wanted = (F.gelu(gate) * up) @ ffn.w_down.weight.T
    assert torch.allclose(ffn(x), wanted, atol=1e-5), (
        "w_down(gelu(gate) * up); the gate is the first half of w_in"
    )
    for result in run_contract("mlp", answer):
        assert result.ok, f"{result.test}: {result.message}"


def exercise_3_4(answer):
    """Size of a sum of independent terms."""
    for layers, size in ((0, 1.0), (12, 1.0), (24, 48**-0.5), (5, 0.3)):
        wanted = math.sqrt(1 + 2 * layers * size**2)
        got = answer(layers, size)
        assert math.isclose(got, wanted, rel_tol=1e-6), (
            f"{layers} layers, size {size:.3f}: squares add up to {wanted**2:.3f}, the "
            f"size is {wanted:.4f}, not {got:.4f}"
        )


def exercise_3_5(answer):
    """Layers with a value table, and their parameters."""
    at, count = answer(28, 50257, 8, 128)
    assert list(at) == list(range(1, 28, 2)), f"28 layers: 1, 3, ..., 27, not {at}"
    assert count == 721_158_144, f"the reference run has 721,158,144, not {count:,}"
    at, count = answer(5, 64, 2, 4)
    assert list(at) == [0, 2, 4], f"5 layers: 0, 2, 4 counted from the last, not {at}"
    assert count == 3 * 64 * 8, f"3 tables of 64 x 8, not {count}"


def exercise_3_6(answer):
    """Attention and MLP side by side."""
    cfg = SimpleNamespace(
        dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=64,
        padded_vocab_size=64, qk_norm=True, window=None, residual_scales=False,
        value_embeddings=False, norm_eps=1e-6, attention="gqa", ffn="swiglu",
        norm="rmsnorm", part_options={},
    )  # fmt: skip
    block = answer(cfg, 0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    x, rope = torch.randn(2, 6, 32), rope_table(6, 8)
    normed = block.attention_norm(x)
    wanted = x + block.attention(normed, rope) + block.ffn(normed)
    got = block(x, rope)
    assert torch.allclose(got, wanted, atol=1e-5), (
        "x + Attention(norm(x)) + MLP(norm(x)), one norm for both"
    )
    cache = KVCache(2, 2, 6, 8)
    parts = [
        block(x[:, t : t + 1], rope_table(torch.arange(t, t + 1), 8), cache=cache)
        for t in range(6)
    ]
    assert torch.allclose(torch.cat(parts, 1), wanted, atol=1e-5), (
        "the cache must reach the attention"
    )
    got.sum().backward()
    idle = [n for n, p in block.named_parameters() if p.grad is None]
    assert not idle, (
        f"{idle} never get a gradient: the optimizer would carry them along"
    )
