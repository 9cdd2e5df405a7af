"""A cosine schedule: after the warm-up half a period, from the peak to the floor.

The part is called as cosine(step, total, warmup=..., floor=...). What it has in common
with every schedule is in the contract `schedule`.
"""

import math

import pytest

PART = "littlelm_core.schedule:cosine"


def test_half_way_down_is_the_middle(part):
    # Ten steps of decay from step 10: five of them is half a cosine's middle.
    assert part(15, 20, warmup=10) == pytest.approx(0.5)
    assert part(15, 20, warmup=10, floor=0.2) == pytest.approx(0.6), (
        "the floor raises the whole curve"
    )


def test_quarters_are_a_cosines(part):
    first, last = (0.5 * (1 + s * math.cos(math.pi / 4)) for s in (1, -1))
    assert part(25, 100, warmup=0) == pytest.approx(first), "after a quarter of the way"
    assert part(75, 100, warmup=0) == pytest.approx(last), "after three quarters"
    assert part(55, 100, warmup=40, floor=0.1) == pytest.approx(0.1 + 0.9 * first)


def test_the_floor_belongs_to_the_step_after_the_last(part):
    assert part(10, 20, warmup=10) == 1.0, "the fall begins at the peak"
    want = 0.5 * (1 + math.cos(math.pi * 0.9))
    assert part(19, 20, warmup=10) == pytest.approx(want), (
        "the last step still learns: the floor would be reached at step total"
    )
