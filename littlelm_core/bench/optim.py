"""Row of the optimizer: Muon's whole step against torch's, products in bf16."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from littlelm_core.bench.measure import Row, against, rounds
from littlelm_core.bench.peers import version
from littlelm_core.optim import Muon

# Short side, long side and how many: half of them lie, half of them stand.
SHAPES = [(256, 704, 12), (768, 2048, 4), (768, 3072, 4)]
QUICK = [(24, 64, 4), (32, 64, 2)]


def _step(
    optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]
) -> Callable[[], None]:
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def step() -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()

    return step


def _contestants(short: int, long: int, count: int) -> tuple[dict, Callable[[], float]]:
    """Return both steps over matrices of one shape, and how far they end apart."""
    draw = torch.Generator().manual_seed(1)
    sizes = [(short, long), (long, short)] * (count // 2)
    start, grads = (
        [torch.randn(size, generator=draw) for size in sizes] for _ in range(2)
    )
    ours, theirs = ([w.clone().requires_grad_() for w in start] for _ in range(2))
    keys = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    steps = {
        "ours": _step(Muon(ours, dtype="bf16", **keys), grads),
        "theirs": _step(torch.optim.Muon(theirs, **keys), grads),
    }

    @torch.no_grad()
    def apart() -> float:
        triples = zip(ours, theirs, start, strict=True)
        return max(float((a - b).norm() / (b - w).norm()) for a, b, w in triples)

    return steps, apart


def muon(quick: bool = False) -> list[Row]:
    """A step over matrices of three shapes; the note says how each of them fared."""
    shapes = QUICK if quick else SHAPES
    total: dict[str, list[float]] = {"ours": [], "theirs": []}
    each = []
    for shape in shapes:
        steps, apart = _contestants(*shape)
        seconds = rounds(steps, 3 if quick else 9)
        if apart() > 0.01:
            raise AssertionError(
                f"weights of {shape} are {apart():.1%} of a step apart"
            )
        pairs = zip(seconds["ours"], seconds["theirs"], strict=True)
        ratio = statistics.median(b / a for a, b in pairs)
        each.append(f"{shape[0]}x{shape[1]} {ratio:.2f}x")
        for name, sums in total.items():
            before = sums or [0.0] * len(seconds[name])
            total[name] = [a + b for a, b in zip(before, seconds[name], strict=True)]
    return [
        against(
            "Muon step, bf16", version("torch") + " optim.Muon", total,
            sum(count for *_, count in shapes), "matrices/s", 1.0,
            note=f"by shape {', '.join(each)}",
        )
    ]  # fmt: skip
