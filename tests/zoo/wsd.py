"""Trapezoids as people write them on a first try."""

import math

from littlelm_core.config import ConfigError

SHAPES = {
    "linear": lambda x: 1 - x,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


def _checked(step, total, warmup, decay, shape, floor):
    for name, value in {"warmup": warmup, "decay": decay, "step": step}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"schedule.{name} = {value!r}")
    if total < 1 or warmup + decay > total:
        raise ConfigError(f"warmup + decay = {warmup + decay} exceeds total = {total}")
    if shape not in SHAPES or not 0 <= floor <= 1:
        raise ConfigError(f"shape {shape} (valid: {sorted(SHAPES)}), floor {floor}")


def make(x_of, down=lambda shape, x, floor: floor + (1 - floor) * SHAPES[shape](x)):
    """A trapezoid with its own idea of how far down a step is, and of the way."""

    def wsd(step, total, warmup=0, decay=0, shape="linear", floor=0.0):
        _checked(step, total, warmup, decay, shape, floor)
        if step < warmup:
            return (step + 1) / warmup
        x = x_of(step, total, decay) if decay else 0.0
        return down(shape, min(max(x, 0.0), 1.0), floor)

    return wsd


def right(step, total, decay):
    return (step - total + decay) / decay


def knows_no_limits(step, total, warmup=0, decay=0, shape="linear", floor=0.0):
    if step < warmup:
        return (step + 1) / warmup
    x = right(step, total, decay) if decay else 0.0
    return floor + (1 - floor) * SHAPES.get(shape, SHAPES["linear"])(max(x, 0.0))


def decays_after_the_warm_up(step, total, warmup=0, decay=0, shape="linear", floor=0.0):
    """The hold comes last: a trapezoid turned round."""
    _checked(step, total, warmup, decay, shape, floor)
    if step < warmup:
        return (step + 1) / warmup
    x = min((step - warmup) / decay, 1.0) if decay else 0.0
    return floor + (1 - floor) * SHAPES[shape](x)


def divides(step, total, warmup=0, decay=0, shape="linear", floor=0.0):
    """No case for a decay of 0: the end of the hold falls on the floor."""
    _checked(step, total, warmup, decay, shape, floor)
    if step < warmup:
        return (step + 1) / warmup
    x = max(step - total + decay + 1, 0) / max(decay, 1)
    return floor + (1 - floor) * SHAPES[shape](min(x, 1.0))


def momentum_of_its_own_warm_up(
    step, total, warmup=0, decay=0, shape="linear", floor=0.0, momentum=(),
    momentum_warmup=300, weight_decay_follows=False,
):  # fmt: skip
    """The momentum rises with the rate's warm-up and falls with its decay."""
    rate = make(right)(step, total, warmup, decay, shape, floor)
    if momentum and (len(momentum) != 2 or not 0 <= min(momentum) <= max(momentum) < 1):
        raise ConfigError(f"schedule.momentum = {momentum}")
    if momentum_warmup < 0:
        raise ConfigError(f"schedule.momentum_warmup = {momentum_warmup}")
    values = {"lr": rate}
    if momentum:
        values["momentum"] = momentum[0] + rate * (momentum[1] - momentum[0])
    if weight_decay_follows:
        values["weight_decay"] = rate
    return values if len(values) > 1 else rate


ZOO = {
    "momentum tied to the rate": (
        momentum_of_its_own_warm_up,
        "test_momentum_and_weight_decay_move_when_asked",
    ),
    "a step early": (
        make(lambda step, total, decay: (step - total + decay + 1) / decay),
        "test_ten_steps_by_hand",
    ),
    "the floor at the last step": (
        make(lambda step, total, decay: (step - total + decay) / max(decay - 1, 1)),
        "test_hold_and_decay_are_exact",
    ),
    "root of the rest": (
        make(
            right,
            lambda s, x, f: (
                f + (1 - f) * (math.sqrt(1 - x) if s == "1-sqrt" else SHAPES[s](x))
            ),
        ),
        "test_shapes_by_hand",
    ),
    "floor as a clip": (
        make(right, lambda s, x, f: max(f, SHAPES[s](x))),
        "test_shapes_by_hand",
    ),
    "a decay of half the run": (
        make(lambda step, total, decay: right(step, total, total // 2)),
        "test_branches_share_their_trunk",
    ),
    "decay before hold": (decays_after_the_warm_up, "test_ten_steps_by_hand"),
    "a decay of nothing": (divides, "test_without_a_decay_it_holds"),
    "phases that overlap": (knows_no_limits, "test_what_does_not_fit_is_refused"),
    "no schedule at all": (
        make(lambda step, total, decay: 0.5),
        "test_it_is_a_schedule",
    ),
}
