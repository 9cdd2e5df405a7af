"""Schedules as people write them on a first try."""

import math

from littlelm_core.config import ConfigError


def _checked(step, total, warmup, floor):
    if step < 0 or total < 1 or warmup < 0 or warmup > total or not 0 <= floor <= 1:
        raise ConfigError(f"step {step} total {total} warmup {warmup} floor {floor}")


def _down(x, floor):
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(x, 1.0)))


def starts_at_zero(step, total, warmup=0, floor=0.0):
    _checked(step, total, warmup, floor)
    if step < warmup:
        return step / warmup
    return _down((step - warmup) / max(1, total - warmup), floor)


def skips_the_peak(step, total, warmup=0, floor=0.0):
    _checked(step, total, warmup, floor)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return _down((step + 1 - warmup) / max(1, total - warmup), floor)


def no_limits(step, total, warmup=0, floor=0.0):
    if step < warmup:
        return (step + 1) / warmup
    return _down((step - warmup) / max(1, total - warmup), floor)


def divides_by_zero(step, total, warmup=0, floor=0.0):
    _checked(step, total, warmup, floor)
    up = min(1.0, (step + 1) / warmup)
    return up if step < warmup else _down((step - warmup) / (total - warmup), floor)


def comes_up_again(step, total, warmup=0, floor=0.0):
    _checked(step, total, warmup, floor)
    if step < warmup:
        return (step + 1) / warmup
    x = (step - warmup) / max(1, total - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x))


def forgets_the_total(step, total, warmup=0, floor=0.0):
    """Falls over the first hundred steps, however many there are."""
    _checked(step, total, warmup, floor)
    if step < warmup:
        return (step + 1) / warmup
    return _down((step - warmup) / max(1, min(total, 100) - warmup), floor)


class RemembersItsCalls:
    """Keeps a counter, as stateful schedulers do: wrong after a resume."""

    def __init__(self):
        self.calls = -1

    def __call__(self, step, total, warmup=0, floor=0.0):
        _checked(step, total, warmup, floor)
        self.calls = 0 if step == 0 else self.calls + 1
        if self.calls < warmup:
            return (self.calls + 1) / warmup
        return _down((self.calls - warmup) / max(1, total - warmup), floor)


ZOO = {
    "first step at rate 0": (
        starts_at_zero,
        "test_first_step_learns_and_the_peak_is_reached_exactly",
    ),
    "peak never reached": (
        skips_the_peak,
        "test_first_step_learns_and_the_peak_is_reached_exactly",
    ),
    "warm-up longer than the run": (no_limits, "test_phases_that_do_not_fit_raise"),
    "division by an empty phase": (
        divides_by_zero,
        "test_phases_of_length_zero_work",
    ),
    "rises again after the end": (
        comes_up_again,
        "test_comes_down_to_the_floor_and_stays",
    ),
    "a shape of its own length": (
        forgets_the_total,
        "test_total_and_not_the_stop_decides_the_shape",
    ),
    "counts its own calls": (RemembersItsCalls(), "test_a_pure_function_of_the_step"),
}
