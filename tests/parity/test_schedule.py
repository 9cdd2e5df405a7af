"""Our schedules against those of transformers, which people train with elsewhere."""

import math

import pytest
import torch

from littlelm_core.schedule import cosine, wsd

transformers = pytest.importorskip("transformers")

TOTAL, WARMUP, DECAY = 120, 10, 30


def theirs(make, **keys):
    """The multiplier of every step, as their stateful scheduler gives it."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer, num_warmup_steps=WARMUP, **keys)
    rates = []
    for _ in range(TOTAL):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("shape", ["linear", "1-sqrt", "cosine"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_wsd_holds_and_decays_as_theirs(shape, floor):
    keys = {"decay_type": shape, "min_lr_ratio": floor}
    make = transformers.get_wsd_schedule
    want = theirs(make, num_training_steps=TOTAL, num_decay_steps=DECAY, **keys)
    for step in range(WARMUP, TOTAL):
        got = wsd(step, TOTAL, WARMUP, DECAY, shape, floor)
        assert math.isclose(got, want[step], abs_tol=1e-9), f"step {step}"


def test_a_warm_up_counts_from_one_and_theirs_from_zero():
    """Theirs is 0 at step 0, which then learns nothing: ours is a step ahead."""
    make = transformers.get_wsd_schedule
    want = theirs(make, num_training_steps=TOTAL, num_decay_steps=DECAY)
    assert want[0] == 0.0
    for step in range(WARMUP):
        got = wsd(step, TOTAL, WARMUP, DECAY)
        assert math.isclose(got, want[step] + 1 / WARMUP), f"step {step}"


def test_cosine_falls_as_theirs():
    make = transformers.get_cosine_schedule_with_warmup
    want = theirs(make, num_training_steps=TOTAL)
    for step in range(WARMUP, TOTAL):
        assert math.isclose(cosine(step, TOTAL, WARMUP), want[step], abs_tol=1e-9)
