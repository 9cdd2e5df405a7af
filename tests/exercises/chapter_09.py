"""Graders of chapter 09's exercises."""

import math

from littlelm_core import check
from littlelm_core.schedule import cosine, wsd


def exercise_9_1(answer):
    """Mean multiplier of a whole run."""
    for total, warmup, floor in (
        (1000, 50, 0.0), (1000, 0, 0.1), (300, 300, 0.0), (500, 100, 1.0),
        (40, 10, 0.5),
    ):  # fmt: skip
        wanted = sum(cosine(s, total, warmup, floor) for s in range(total)) / total
        got = answer(total, warmup, floor)
        assert math.isclose(got, wanted, rel_tol=0.01), (
            f"total={total} warmup={warmup} floor={floor}: {got:.4f}, not {wanted:.4f}"
        )


def exercise_9_2(answer):
    """The warm-up that starts at zero."""
    for warmup in (1, 4, 100):
        first, last = answer(warmup)
        assert first == 0, f"step 0 of warmup {warmup} is 0 / {warmup}"
        assert math.isclose(last, (warmup - 1) / warmup), (
            f"the last warm-up step is {warmup - 1} / {warmup}, not {last}"
        )


def exercise_9_3(answer):
    """The step at which a rate is reached."""
    for total, warmup, floor, share in (
        (1000, 100, 0.0, 0.5), (1000, 0, 0.1, 0.55), (777, 33, 0.05, 0.2),
        (100, 10, 0.0, 0.9),
    ):  # fmt: skip
        wanted = next(
            s
            for s in range(warmup, total + 1)
            if cosine(s, total, warmup, floor) <= share + 1e-12
        )
        got = answer(total, warmup, floor, share)
        assert abs(got - wanted) <= (1 if floor else 0), (
            f"total={total} warmup={warmup} floor={floor} share={share}: step {got}, "
            f"not {wanted}"
        )


def exercise_9_4(answer):
    """A linear schedule that keeps the contract."""
    answer(0, 10, warmup=2)
    failed = [r for r in check.run_contract("schedule", answer) if not r.ok]
    assert not failed, f"{failed[0].test}: {failed[0].message}"
    for step, wanted in ((9, 1.0), (10, 1.0), (15, 0.6), (19, 0.28), (20, 0.2)):
        got = answer(step, 20, warmup=10, floor=0.2)
        assert math.isclose(got, wanted), f"step {step}: {got}, a line gives {wanted}"


def exercise_9_5(answer):
    """Checkpoints and steps of a trunk with branches."""
    for total, shares, starts, steps in (
        (400, (0.05, 0.1, 0.2, 0.5), {380, 360, 320, 200}, 380 + 340),
        (1000, (0.2,), {800}, 1000),
        (2000, (0.5, 0.5), {1000}, 1000 + 2000),
    ):
        kept, taken = answer(total, shares)
        assert set(kept) == starts, f"{total}, {shares}: keep {sorted(starts)}"
        assert taken == steps, (
            f"{total}, {shares}: trunk and branches take {steps} steps, not {taken}"
        )


def exercise_9_6(answer):
    """The sum of a decay's multipliers."""
    for decay in (40, 100, 1600):
        for shape in ("linear", "1-sqrt", "cosine"):
            wanted = sum(wsd(s, decay, 0, decay, shape) for s in range(decay))
            got = answer(decay, shape)
            assert math.isclose(got, wanted, rel_tol=0.01), (
                f"{shape} over {decay} steps: {got:.2f}, the sum is {wanted:.2f}"
            )
