"""Graders of chapter 06's exercises."""

import math
from types import SimpleNamespace

import torch
from torch import nn


def exercise_6_1(answer):
    """Loss of a step from micro-batches."""
    assert math.isclose(answer([(4.0, 1), (1.0, 2)]), 2.0), (
        "4 once and 1 twice are 6 nats over 3 targets"
    )
    assert math.isclose(answer([(2.0, 3), (math.nan, 0), (5.0, 6)]), 4.0), (
        "a micro-batch without targets counts nothing, not nan"
    )
    assert answer([(math.nan, 0)]) == 0.0, "no target at all: the loss is 0"


def exercise_6_2(answer):
    """Clipping by the global norm."""
    three, four = torch.tensor([3.0]), torch.tensor([[0.0], [4.0]])
    norm, scaled = answer([three, four], 1.0)
    assert math.isclose(float(norm), 5.0), f"3 and 4 have the norm 5, not {norm}"
    want = [three / 5, four / 5]
    close = [torch.allclose(a, b) for a, b in zip(scaled, want, strict=True)]
    assert all(close), "all gradients are divided by the same number"
    assert three.item() == 3.0, "the given tensors must stay as they are"
    norm, scaled = answer([three, four], 7.0)
    assert torch.equal(scaled[0], three), "a gradient that is short enough stays"
    norm, scaled = answer([three, torch.tensor([math.inf])], 1.0)
    assert not math.isfinite(float(norm)), "the norm of an infinite gradient"
    assert torch.equal(scaled[0], three), "nothing is scaled by an infinite norm"


def exercise_6_3(answer):
    """Retention of checkpoints."""
    whole = [300, 100, 200, 500, 400]
    assert answer(whole, 2, [], None) == {100, 200, 300}
    assert answer(whole, 2, [200], 100) == {300}, "200 is pinned, 100 resumed from"
    assert answer(whole, 0, [], None) == {100, 200, 300, 400}, "the newest stays"
    assert answer([100], 3, [], 100) == set()
    assert answer(whole, 2, [999], 500) == {100, 200, 300}


def exercise_6_4(answer):
    """Young's interval in steps."""
    assert answer(20, 4_000_000, 10.0) == 1265, "sqrt(2 * 20 * 4e6) s are 1,265 steps"
    assert answer(0.5, 10_000, 1.0) == 100
    assert answer(0.01, 10, 60.0) == 1, "never less than one step"


def exercise_6_5(answer):
    """Exponential average of the weights, as a callback."""
    model = nn.Linear(2, 1)
    trainer = SimpleNamespace(model=model)
    callback = answer(0.75)
    state = torch.get_rng_state()
    seen = []
    callback.on_start(trainer)
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight.fill_(float(step))
        callback.on_step(trainer, {"step": step})
        seen.append(callback.average["weight"].mean().item())
    assert seen[0] == 1.0, "after the first step the average is the weights"
    want = 0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 3
    assert math.isclose(seen[2], want, rel_tol=1e-6), f"{seen[2]}, wanted {want}"
    assert set(callback.average) == {"weight", "bias"}
    assert torch.all(model.weight == 3.0), "the model's own weights must not move"
    callback.average["weight"].fill_(9.0)
    assert torch.all(model.weight == 3.0), "the average must be a copy"
    assert torch.equal(torch.get_rng_state(), state), "it drew random numbers"
    assert not callback.average["weight"].requires_grad, "it holds a graph: detach"
