"""Graders of chapter 10's exercises."""

import math

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def exercise_10_1(answer):
    """Decode e5m2."""
    every = torch.arange(256, dtype=torch.uint8).view(E5M2).double().tolist()
    for byte, right in enumerate(every):
        ours = answer(byte)
        same = ours == right or (math.isnan(ours) and math.isnan(right))
        assert same, f"byte {byte:08b} is {right}, not {ours}"
        assert math.isnan(right) or math.copysign(1, ours) == math.copysign(1, right), (
            f"byte {byte:08b} has the other sign: zero has two"
        )


def exercise_10_2(answer):
    """A NaN that a maximum passes over."""
    row = answer()
    assert any(math.isnan(v) for v in row), "the list holds no NaN"
    found = max(abs(v) for v in row)
    assert math.isfinite(found), f"max finds {found}: that NaN was not passed over"


def exercise_10_3(answer):
    """The smallest power of two that keeps amax in range."""
    for amax, limit in (
        (3.0, 448.0), (448.0, 448.0), (448.1, 448.0), (1e-7, 448.0), (1e30, 57344.0),
        (57344.0 * 2**-40, 57344.0), (0.875, 448.0),
    ):  # fmt: skip
        scale = answer(amax, limit)
        assert math.frexp(scale)[0] == 0.5, f"{scale} is no power of two"
        assert amax / scale <= limit, f"{amax} / {scale} exceeds {limit}"
        assert amax / (scale / 2) > limit, f"{scale / 2} would do for {amax}"


def exercise_10_4(answer):
    """Whether a scale from the past saturates."""
    for history, amax, limit, right in (
        ([], 448.0, 448.0, False), ([], 449.0, 448.0, True),
        ([2.0, 5.0, 1.0], 4.0, 448.0, False), ([2.0, 5.0, 1.0], 6.0, 448.0, True),
        ([1e-6], 2e-6, 57344.0, True), ([1e-6], 1e-7, 57344.0, False),
    ):  # fmt: skip
        got = answer(history, amax, limit)
        assert bool(got) == right, (
            f"history {history}, amax {amax}: {got}, and it is {right}"
        )


def exercise_10_5(answer):
    """A scale for each block of 32."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 128, generator=generator)
    x[1] = 0.0
    x[2] *= 1e-6
    x[3, :32] *= 1e6  # one block far above its row
    q, scale = answer(x)
    assert q.dtype == E4M3, f"q is {q.dtype}"
    assert q.shape == x.shape, f"q has shape {tuple(q.shape)}"
    assert tuple(scale.shape) == (6, 4), f"scale has shape {tuple(scale.shape)}"
    mantissa = torch.frexp(scale.float()).mantissa
    assert (mantissa == 0.5).all(), "a scale is no power of two"
    assert q.float().isfinite().all(), "something overflowed"
    back = (q.float().unflatten(-1, (4, 32)) * scale.float()[..., None]).flatten(-2)
    assert (back[1] == 0).all(), "zeros do not stay zeros"
    blocks, rest = x.unflatten(-1, (4, 32)), (back - x).unflatten(-1, (4, 32))
    for row in (0, 2, 3, 4, 5):
        off = (rest[row].norm(dim=-1) / blocks[row].norm(dim=-1)).max()
        assert off < 0.05, f"row {row}: a block is off by {off:.1%} of its norm"
    amax, top = blocks.abs().amax(-1), q.float().unflatten(-1, (4, 32)).abs().amax(-1)
    assert (top[amax > 1e-9] >= 200).all(), "a scale is larger than it need be"
