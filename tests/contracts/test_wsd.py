"""A trapezoid: warm up, hold the peak, come down at the end.

The part is called as wsd(step, total, warmup, decay, shape, floor), the last two by
name. What it has in common with every schedule is in the contract `schedule`.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from littlelm_core import check
from littlelm_core.config import ConfigError

PART = "littlelm_core.schedule:wsd"

WAY_DOWN = {
    "linear": lambda x: 1 - x,
    "1-sqrt": lambda x: 1 - x**0.5,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


@st.composite
def _settings(draw):
    """total, warmup, decay, shape, floor; all lengths from 0 to the whole run."""
    total = draw(st.integers(1, 200))
    warmup = draw(st.integers(0, total))
    decay = draw(st.integers(0, total - warmup))
    shape = draw(st.sampled_from(sorted(WAY_DOWN)))
    return total, warmup, decay, shape, draw(st.sampled_from((0.0, 0.05, 0.5, 1.0)))


def test_it_is_a_schedule(part):
    failed = [r for r in check.run_contract("schedule", part) if not r.ok]
    assert not failed, f"{failed[0].test}: {failed[0].message}"


def test_ten_steps_by_hand(part):
    got = [part(step, 10, 2, 4) for step in range(10)]
    want = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert got == want, f"warm-up 2, decay 4 of 10 steps: {got}, by hand {want}"


def test_shapes_by_hand(part):
    """Sixteen steps of decay from step 84: a quarter of the way is step 88."""
    for shape, quarter, middle in (
        ("linear", 0.75, 0.5),
        ("1-sqrt", 0.5, 1 - math.sqrt(0.5)),
        ("cosine", (2 + math.sqrt(2)) / 4, 0.5),
    ):
        for step, want in ((84, 1.0), (88, quarter), (92, middle)):
            got = part(step, 100, 10, 16, shape=shape)
            assert got == pytest.approx(want), f"{shape} at step {step}: {got}, {want}"
        got = part(92, 100, 10, 16, shape=shape, floor=0.2)
        want = 0.2 + 0.8 * middle
        assert got == pytest.approx(want), f"the floor raises the whole of {shape}"


def test_hold_and_decay_are_exact(part):
    """Warm-up, then exactly 1, then the shape; whatever the lengths are."""

    @settings(max_examples=150, deadline=None)
    @given(_settings())
    def prove(case):
        total, warmup, decay, shape, floor = case
        for step in range(total):
            got = part(step, total, warmup, decay, shape=shape, floor=floor)
            if step < warmup:
                want = (step + 1) / warmup
            elif step < total - decay:
                assert got == 1.0, f"{case}: {got} at step {step}, before the decay"
                continue
            else:
                x = (step - total + decay) / decay
                want = floor + (1 - floor) * WAY_DOWN[shape](x)
            assert math.isclose(got, want, abs_tol=1e-9), (
                f"total, warmup, decay, shape, floor = {case}: {got} at step {step}, "
                f"not {want}"
            )

    prove()


def test_branches_share_their_trunk(part):
    """Until a decay begins it is the run that only holds: so it can branch there."""
    trunk = [part(step, 400, 20, 0) for step in range(400)]
    for share in (0.05, 0.1, 0.2, 0.5):
        decay = int(400 * share)
        branch = [part(step, 400, 20, decay) for step in range(400)]
        begins = 400 - decay
        assert branch[: begins + 1] == trunk[: begins + 1], (
            f"a decay of {decay} steps differs from the trunk before step {begins}"
        )
        assert branch[begins + 1] < 1.0, f"step {begins + 1} is the first below 1"


def test_without_a_decay_it_holds(part):
    rates = [part(step, 50, 5, 0, floor=0.1) for step in range(50)]
    assert rates[4:] == [1.0] * 46, "decay = 0 is no decay"
    assert part(49, 50, 0, 50, floor=0.0) == pytest.approx(0.02), "a decay alone"
    assert part(0, 50, 0, 50) == 1.0, "it starts at the peak"
    full = [part(step, 50, 20, 30) for step in (19, 20, 21)]
    assert full[:2] == [1.0, 1.0], "no hold: the peak ends the warm-up"
    assert full[2] < 1.0


def test_what_does_not_fit_is_refused(part):
    for keys, word in (
        ((10, 7, 4), "total"), ((10, 0, 11), "decay"), ((10, 2, -1), "decay"),
        ((10, 2, 2.5), "decay"), ((10, 2, True), "decay"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            part(0, *keys)
    with pytest.raises(ValueError, match=r"shape.*linear"):
        part(0, 10, 2, 4, shape="lineer")
    for floor in (-0.1, 1.5):
        with pytest.raises(ValueError, match="floor"):
            part(0, 10, 2, 4, floor=floor)


def test_momentum_and_weight_decay_move_when_asked(part):
    plain = part(7, 10, 2, 4)
    assert isinstance(plain, float), f"without their keys it is a number: {plain!r}"
    keys = {"momentum": (0.85, 0.95), "momentum_warmup": 5}
    got = [part(step, 10, 2, 4, **keys) for step in (0, 2, 5, 9)]
    assert all(set(g) == {"lr", "momentum"} for g in got), f"keys of {got[0]}"
    moved = [g["momentum"] for g in got]
    assert moved == pytest.approx([0.85, 0.89, 0.95, 0.95]), (
        f"a line, then .95: {moved}"
    )
    assert got[3]["lr"] == 0.25, "the rate is what it is without"
    follows = [part(s, 10, 2, 4, weight_decay_follows=True) for s in range(10)]
    rates = [part(s, 10, 2, 4) for s in range(10)]
    assert [f["lr"] for f in follows] == rates
    assert [f["weight_decay"] for f in follows] == rates, "its decay falls with it"
    for wrong in ((0.9,), (0.9, 1.0), (-0.1, 0.9)):
        with pytest.raises(ValueError, match="momentum"):
            part(0, 10, 2, 4, momentum=wrong)
    with pytest.raises(ValueError, match="momentum_warmup"):
        part(0, 10, 2, 4, **{**keys, "momentum_warmup": -1})


def test_lengths_may_be_shares_of_the_whole(part):
    """A run that gets another number of steps keeps the shape of its schedule."""
    for total in (10, 200, 33):
        steps = {"warmup": round(0.1 * total), "decay": round(0.4 * total)}
        for step in range(total):
            shares = part(step, total, warmup=0.1, decay=0.4, floor=0.1)
            assert shares == part(step, total, **steps, floor=0.1), "share != steps"
    for wrong in ({"warmup": 1.5}, {"decay": -0.2}, {"warmup": 0.7, "decay": 0.6}):
        with pytest.raises(ConfigError):
            part(0, 100, **{"warmup": 0, "decay": 0, **wrong})
