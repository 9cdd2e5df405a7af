# From chapters/09_schedule.md by `littlelm book export`: edit the chapter.
"""The learning rate over a run, as a pure function of the optimizer step.

A schedule returns a multiplier of the peak rate, the same for every parameter group, or
a mapping with a momentum and a share of the weight decay beside it. It holds no state:
a resumed run asks for step 7,001 and gets what the unbroken run would have got. Without
a warm-up the first, largest steps are taken in directions that Adam's statistics do not
know yet; without a decay the noise of the last steps stays in the weights.

Steps are optimizer steps, counted from 0 to total - 1.
"""

import math
from collections.abc import Callable
from typing import Literal

from littlelm_core.config import ConfigError, nearest, register

__all__ = [
    "SHAPES",
    "check_floor",
    "check_phases",
    "come_down",
    "cosine",
    "momentum_at",
    "steps_of",
    "warm_up",
    "wsd",
]


# ---- Warm-up


def steps_of(length: int | float, total: int) -> int | float:
    """Return a phase's steps: a length between 0 and 1 is a share of the total."""
    return round(length * total) if 0 < length < 1 else length


def check_phases(step: int, total: int, **phases: int | float) -> None:
    """Raise ConfigError unless the phases of a schedule fit into its steps.

    phases: lengths in steps by name (warmup=..., decay=...), 0 for none.
    """
    for name, value in {"step": step, "total": total, **phases}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"schedule.{name} = {value!r} must be a number of steps, 0 or more, "
                "or a share below 1 of the total"
            )
    if total < 1:
        raise ConfigError("schedule.total = 0: a run has at least 1 step")
    if sum(phases.values()) > total:
        raise ConfigError(
            f"schedule: {' + '.join(phases)} = {sum(phases.values())} exceeds total = "
            f"{total} steps: shorten a phase"
        )


def check_floor(floor: float) -> None:
    """Raise ConfigError unless floor is a share of the peak, 0 to 1."""
    if not 0.0 <= floor <= 1.0:
        raise ConfigError(
            f"schedule.floor = {floor!r} is a share of the peak rate: 0 to 1"
        )


def warm_up(step: int, warmup: int) -> float:
    """Return (step + 1) / warmup while that is below 1, else 1.

    The first step is above 0, and the peak is reached exactly at step warmup - 1.
    """
    return (step + 1) / warmup if step < warmup else 1.0


# ---- The cosine


@register("schedule", "cosine")
def cosine(step: int, total: int, warmup: int | float = 0, floor: float = 0.0) -> float:
    """Return the multiplier of the peak rate: linear warm-up, then half a cosine.

    step: 0 ... total - 1; later steps stay at the floor, which step = total would be
    the first to reach. warmup: steps, or a share of total. floor: share of the peak
    at the end.
    Raises ConfigError: a warm-up longer than the run, a negative length, a floor
    outside 0 ... 1. Source: SGDR (arXiv 1608.03983), without restarts.
    """
    warmup = steps_of(warmup, total)
    check_phases(step, total, warmup=warmup)
    check_floor(floor)
    if step < warmup:
        return warm_up(step, warmup)
    if step >= total:
        return floor
    x = (step - warmup) / (total - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * x))


# ---- The trapezoid

SHAPES: dict[str, Callable[[float], float]] = {  # x in 0 ... 1 -> 1 ... 0
    "linear": lambda x: 1.0 - x,
    "1-sqrt": lambda x: 1.0 - math.sqrt(x),
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
}


def come_down(x: float, shape: str = "linear", floor: float = 0.0) -> float:
    """Return floor + (1 - floor) * f(x), at x of the way from the peak to the floor.

    x: 0 ... 1; beyond 1 the floor. shape: one of SHAPES.
    Raises ConfigError for another shape, or a floor outside 0 ... 1.
    """
    check_floor(floor)
    if shape not in SHAPES:
        raise ConfigError(f"schedule.shape = {shape!r}{nearest(shape, SHAPES)}")
    return floor + (1.0 - floor) * SHAPES[shape](min(x, 1.0))


# ---- Momentum and weight decay may move too


def momentum_at(step: int, momentum: tuple[float, ...], warmup: int) -> float:
    """Return the momentum: in a line from the first value to the second, then that.

    step `warmup` is the first at the second value; a warmup of 0 starts there.
    Raises ConfigError: not two values of at least 0 and below 1, a negative warmup.
    """
    if len(momentum) != 2 or not all(0.0 <= value < 1.0 for value in momentum):
        raise ConfigError(
            f"schedule.momentum = {momentum!r} must be two values, 0 to below 1: "
            "where it starts and where it stays"
        )
    if warmup < 0:
        raise ConfigError(f"schedule.momentum_warmup = {warmup!r} must be 0 or more")
    way = min(step / warmup, 1.0) if warmup else 1.0
    return momentum[0] + way * (momentum[1] - momentum[0])


@register("schedule", "wsd")
def wsd(
    step: int,
    total: int,
    warmup: int | float = 0,
    decay: int | float = 0,
    shape: Literal["linear", "1-sqrt", "cosine"] = "linear",
    floor: float = 0.0,
    momentum: tuple[float, ...] = (),
    momentum_warmup: int = 300,
    weight_decay_follows: bool = False,
) -> float | dict[str, float]:
    """Return the multiplier of the peak rate: warm up, hold at 1, decay at the end.

    step: 0 ... total - 1. From step total - decay on, which is still at the peak, the
    rate comes down in `shape`, to reach the floor at step total; later ones stay there.
    decay = 0 holds to the end: a trunk, from which decays may branch. Both lengths are
    steps, or, between 0 and 1, shares of total.
    momentum: (from, to), a line over the first `momentum_warmup` steps.
    weight_decay_follows: the weight decay falls with the rate. With either the return
    value is {"lr": multiplier, "momentum": value, "weight_decay": multiplier}.
    Raises ConfigError: warmup + decay > total, a negative length, an unknown shape.
    Sources: MiniCPM (arXiv 2404.06395); 1-sqrt from Hagele et al. (arXiv 2405.18392);
    the momentum warm-up from the modded-nanogpt speed runs.
    """
    warmup, decay = steps_of(warmup, total), steps_of(decay, total)
    check_phases(step, total, warmup=warmup, decay=decay)
    past = step - (total - decay)
    x = past / decay if decay and past > 0 else 0.0
    rate = warm_up(step, warmup) * come_down(x, shape, floor)
    also = {}
    if momentum:
        also["momentum"] = momentum_at(step, momentum, momentum_warmup)
    if weight_decay_follows:
        also["weight_decay"] = rate
    return {"lr": rate, **also} if also else rate
