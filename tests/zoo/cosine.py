"""Cosines as people write them on a first try."""

import math


def _up(step, warmup):
    return (step + 1) / warmup if step < warmup else 1.0


def _down(x, floor):
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(x, 1.0)))


def floor_only_clips(step, total, warmup=0, floor=0.0):
    return max(
        floor, _up(step, warmup) * _down((step - warmup) / (total - warmup), 0.0)
    )


def counts_the_decay_from_step_0(step, total, warmup=0, floor=0.0):
    """The factor of a decay without warm-up, times the warm-up."""
    return _up(step, warmup) * _down(step / total, floor)


def a_line(step, total, warmup=0, floor=0.0):
    x = max(step - warmup, 0) / (total - warmup)
    return _up(step, warmup) * (1 - (1 - floor) * x)


def reaches_the_floor_a_step_early(step, total, warmup=0, floor=0.0):
    """x = 1 at the last step, which then learns nothing at floor 0."""
    x = max(step - warmup, 0) / max(total - warmup - 1, 1)
    return _up(step, warmup) * _down(x, floor)


def a_quarter_of_the_period(step, total, warmup=0, floor=0.0):
    x = max(step - warmup, 0) / (total - warmup)
    return _up(step, warmup) * (floor + (1 - floor) * math.cos(math.pi / 2 * x))


ZOO = {
    "floor as a clip": (floor_only_clips, "test_half_way_down_is_the_middle"),
    "the decay counted from step 0": (
        counts_the_decay_from_step_0,
        "test_half_way_down_is_the_middle",
    ),
    "a line": (a_line, "test_quarters_are_a_cosines"),
    "the floor a step early": (
        reaches_the_floor_a_step_early,
        "test_the_floor_belongs_to_the_step_after_the_last",
    ),
    "a quarter of the period": (
        a_quarter_of_the_period,
        "test_half_way_down_is_the_middle",
    ),
}
