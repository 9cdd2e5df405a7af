"""A schedule: a pure function of the step that warms up, peaks and comes down.

The part is called as schedule(step, total, warmup=..., floor=...) and returns a
multiplier of the peak rate, or a mapping with it under "lr"; steps are 0 ... total - 1.
One that has a key `decay` is asked to come down all the way from its warm-up. What a
certain curve promises beside this is in the contracts `cosine` and `wsd`.
"""

import inspect
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PART = "littlelm_core.schedule:cosine"


@st.composite
def _settings(draw):
    total = draw(st.integers(1, 300))
    warmup = draw(st.integers(0, total))
    return total, warmup, draw(st.sampled_from((0.0, 0.05, 0.1, 0.5, 1.0)))


def _share(part, step, total, warmup, **keys):
    """The multiplier of one step."""
    if "decay" in inspect.signature(part).parameters:
        keys["decay"] = max(total - warmup, 0) if isinstance(warmup, int) else 0
    given = part(step, total, warmup=warmup, **keys)
    return given["lr"] if isinstance(given, Mapping) else given


def _rates(part, total, warmup, floor):
    return [_share(part, s, total, warmup, floor=floor) for s in range(total)]


def test_warm_up_counts_from_one(part):
    got = _rates(part, 20, 4, 0.1)[:4]
    assert got == [0.25, 0.5, 0.75, 1.0], (
        f"a warm-up of 4 steps is 1/4, 2/4, 3/4, 4/4, not {got}"
    )
    assert _share(part, 0, 1000, 1000) == 0.001, "the first of 1000 steps is 1/1000"


def test_first_step_learns_and_the_peak_is_reached_exactly(part):
    @settings(max_examples=60, deadline=None)
    @given(_settings())
    def prove(case):
        rates = _rates(part, *case)
        assert rates[0] > 0, f"total, warmup, floor = {case}: the first rate is 0"
        assert max(rates) == 1.0, f"{case}: the peak is {max(rates)}, not exactly 1"
        assert min(rates) >= 0, f"{case}: a rate is negative"

    prove()


def test_never_rises_after_the_warm_up(part):
    @settings(max_examples=60, deadline=None)
    @given(_settings())
    def prove(case):
        total, warmup, _ = case
        rates = _rates(part, *case)
        for step in range(max(warmup, 1), total):
            assert rates[step] <= rates[step - 1], (
                f"total, warmup, floor = {case}: the rate rises at step {step}"
            )
        for step in range(1, warmup):
            assert rates[step] > rates[step - 1], f"{case}: no rise at step {step}"

    prove()


def test_comes_down_to_the_floor_and_stays(part):
    for floor in (0.0, 0.05, 0.5, 1.0):
        last = _share(part, 999, 1000, 100, floor=floor)
        assert floor <= last <= floor + 0.02, f"ends at {last}, floor {floor}"
        for late in (1000, 1001, 5000):
            rate = _share(part, late, 1000, 100, floor=floor)
            assert rate == pytest.approx(floor), "a step after the end stays down"


def test_phases_of_length_zero_work(part):
    assert _share(part, 0, 10, 0) == 1.0, "without a warm-up the first step is the peak"
    rates = _rates(part, 10, 10, 0.1)
    assert rates[-1] == 1.0, "a run that only warms up ends at its peak"
    assert _share(part, 0, 1, 0) == 1.0, "a run of one step takes it at the peak"
    assert _share(part, 0, 1, 1) == 1.0, "a warm-up of one step is the peak"


def test_a_pure_function_of_the_step(part):
    forward = _rates(part, 50, 5, 0.1)
    backward = [_share(part, s, 50, 5, floor=0.1) for s in reversed(range(50))]
    assert forward == backward[::-1], "the order of the calls changes the rates"
    resumed = [_share(part, s, 50, 5, floor=0.1) for s in range(31, 50)]
    assert resumed == forward[31:], "a resumed run gets other rates"


def test_total_and_not_the_stop_decides_the_shape(part):
    long = [_share(part, s, 1000, 10) for s in range(100)]
    short = [_share(part, s, 100, 10) for s in range(100)]
    assert long[99] > max(short[99], 0.6), (
        "stopping at 100 of 1000 planned steps must not pull the decay forward"
    )


def test_phases_that_do_not_fit_raise(part):
    for total, warmup in ((10, 11), (1, 2), (0, 0)):
        with pytest.raises(ValueError, match="total"):
            _share(part, 0, total, warmup)
    for keys in (
        {"warmup": -1},
        {"warmup": 2, "floor": -0.1},
        {"warmup": 2, "floor": 2},
    ):
        with pytest.raises(ValueError, match=r"warmup|floor"):
            _share(part, 0, 10, **keys)
    with pytest.raises(ValueError, match="step"):
        _share(part, -1, 10, 2)
