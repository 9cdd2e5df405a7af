"""Rows of FP8: an emulated linear, forward and backward, against torch's in fp32."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import nn

from littlelm_core.bench.measure import Row, against, rounds
from littlelm_core.bench.peers import version
from littlelm_core.fp8 import Float8Linear

# Tokens, inputs and outputs of a linear: tiny's, the 8.5M shape's, and a large one.
SHAPES = [(1024, 192, 512), (1024, 256, 704), (1024, 768, 2048)]
QUICK = [(32, 32, 48), (64, 32, 32)]


def _step(
    layer: nn.Linear, x: torch.Tensor, grad: torch.Tensor, low: bool
) -> Callable[[], torch.Tensor]:
    """One forward and backward, as training has it: gradients are fresh each time."""
    kind = torch.bfloat16 if low else torch.float32
    grad = grad.to(kind)

    def step() -> torch.Tensor:
        x.grad = layer.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = layer(x)
        y.backward(grad)
        return layer.weight.grad

    return step


def emulation(quick: bool = False) -> list[Row]:
    """A linear of three shapes; the bar, 1.5 times fp32's time, is 0.67 its speed."""
    rows = []
    for tokens, inputs, outputs in QUICK if quick else SHAPES:
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(tokens, inputs, generator=draw, requires_grad=True)
        grad = torch.randn(tokens, outputs, generator=draw)
        plain = nn.Linear(inputs, outputs, bias=False)
        tensorwise = Float8Linear.from_linear(plain)
        rowwise = Float8Linear.from_linear(plain, recipe="rowwise")
        steps = {
            "theirs": _step(plain, x, grad, low=False),
            "ours": _step(tensorwise, x, grad, low=False),
            "rowwise": _step(rowwise, x, grad, low=False),
            "bf16 out": _step(tensorwise, x, grad, low=True),
            "plain bf16": _step(plain, x, grad, low=True),
        }
        right = steps["theirs"]()
        for name in ("ours", "rowwise", "bf16 out"):
            off = float((steps[name]() - right).norm() / right.norm())
            if not 0.001 < off < 0.12:
                raise AssertionError(f"{name} is {off:.2%} from fp32: not FP8's work")
        seconds = rounds(steps, 3 if quick else 9)
        times = {
            name: statistics.median(
                a / b for a, b in zip(taken, seconds["theirs"], strict=True)
            )
            for name, taken in seconds.items()
        }
        rows.append(
            against(
                f"fp8 emulated, {inputs} to {outputs}", version("torch") + " fp32",
                seconds, tokens, "tok/s", 1 / 1.5,
                note=f"{times['ours']:.2f} times fp32's time; rowwise "
                f"{times['rowwise']:.2f}, bf16 out {times['bf16 out']:.2f} (bf16 "
                f"without FP8 {times['plain bf16']:.2f})",
            )
        )  # fmt: skip
    return rows
