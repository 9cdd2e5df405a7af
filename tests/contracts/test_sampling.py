"""Contract of sampling: a function `sample(logits_BV, temperature, top_k, top_p,
generator) -> ids_B`."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

PART = "littlelm_core.generate:sample"

INF = math.inf


def _seed(number=0):
    return torch.Generator().manual_seed(number)


def _draws(part, logits, count=4000, **settings_):
    """Draw `count` times from one row, as that many equal rows."""
    rows = torch.tensor(logits, dtype=torch.float32).expand(count, -1)
    ids = part(rows, generator=_seed(), **settings_)
    assert ids.shape == (count,), f"ids of shape {tuple(ids.shape)}, not ({count},)"
    assert ids.dtype == torch.int64, f"ids are {ids.dtype}, not int64"
    return torch.bincount(ids, minlength=len(logits))


def _logits(*probabilities):
    return [math.log(p) if p else -INF for p in probabilities]


def _drawn(part, logits, **settings_):
    return set(_draws(part, logits, **settings_).nonzero().flatten().tolist())


def test_temperature_0_is_argmax(part):
    logits = torch.randn(64, 50, generator=_seed(1))
    for top_k, top_p in ((None, None), (3, None), (None, 0.5)):
        ids = part(logits, temperature=0.0, top_k=top_k, top_p=top_p)
        assert torch.equal(ids, logits.argmax(-1)), (
            f"temperature 0 with top_k {top_k}, top_p {top_p} is not the best id"
        )
    ids = part(logits, temperature=0)
    assert ids.dtype == torch.int64, f"ids are {ids.dtype}, not int64"


def test_a_tiny_temperature_is_argmax_too(part):
    logits = torch.tensor([[80.0, 90.0, -INF, 89.0]] * 20)
    for temperature in (1e-3, 1e-38, 1e-300):
        ids = part(logits, temperature=temperature, generator=_seed())
        assert ids.tolist() == [1] * 20, (
            f"temperature {temperature} drew {set(ids.tolist())}: divide after taking "
            "the best score away, or it overflows"
        )


def test_frequencies_follow_the_softmax(part):
    logits = _logits(0.5, 0.3, 0.15, 0.05)
    counts = _draws(part, logits, count=20000, temperature=1.0)
    share = counts / counts.sum()
    wanted = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert (share - wanted).abs().max() < 0.02, f"shares {share.tolist()}"


def test_temperature_divides_the_logits(part):
    logits = _logits(0.8, 0.2)
    for temperature in (0.5, 2.0):
        odds = 4 ** (1 / temperature)  # of the first, by hand
        counts = _draws(part, logits, count=20000, temperature=temperature)
        share = (counts[0] / counts.sum()).item()
        assert share == pytest.approx(odds / (1 + odds), abs=0.02), (
            f"at temperature {temperature} the likelier id came {share:.3f} of the "
            f"time, not {odds / (1 + odds):.3f}"
        )


def test_wrong_settings_raise(part):
    logits = torch.zeros(1, 4)
    for wrong in (
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": INF},
        {"top_k": -1},
        {"top_p": -0.1},
        {"top_p": 1.1},
    ):
        with pytest.raises(ValueError):
            part(logits, **wrong)


def test_top_k_keeps_the_k_best(part):
    logits = _logits(0.1, 0.4, 0.2, 0.3)
    for top_k, kept in ((1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3})):
        drawn = _drawn(part, logits, top_k=top_k)
        assert drawn == kept, f"top_k {top_k} drew {drawn}, not {kept}"


def test_top_k_off_and_too_large(part):
    logits = _logits(0.25, 0.25, 0.25, 0.25)
    for top_k in (None, 0, 4, 5, 1000):
        drawn = _drawn(part, logits, top_k=top_k)
        assert drawn == {0, 1, 2, 3}, f"top_k {top_k} drew only {drawn}"


def test_top_k_keeps_k_of_equal_scores(part):
    drawn = _drawn(part, [2.0, 2.0, 2.0, 2.0, 1.0], top_k=2)
    assert len(drawn) == 2, f"top_k 2 among equal scores drew {len(drawn)} ids"


def test_top_p_keeps_the_smallest_set(part):
    logits = _logits(0.05, 0.5, 0.15, 0.3)
    for top_p, kept in (
        (0.3, {1}),
        (0.45, {1}),
        (0.6, {1, 3}),
        (0.79, {1, 3}),
        (0.9, {1, 2, 3}),
        (0.96, {0, 1, 2, 3}),
    ):
        drawn = _drawn(part, logits, top_p=top_p)
        assert drawn == kept, (
            f"top_p {top_p} of .5 .3 .15 .05 drew {drawn}, not {kept}: the id that "
            "reaches p belongs to the set, the next one does not"
        )


def test_top_p_keeps_the_best_always(part):
    for top_p in (0.0, 1e-6):
        drawn = _drawn(part, _logits(0.2, 0.5, 0.3), top_p=top_p)
        assert drawn == {1}, f"top_p {top_p} drew {drawn}, not only the best id"


def test_top_p_of_1_and_none_are_off(part):
    logits = _logits(0.4, 0.3, 0.2, 0.1)
    for top_p in (None, 1.0):
        drawn = _drawn(part, logits, top_p=top_p)
        assert drawn == {0, 1, 2, 3}, f"top_p {top_p} drew only {drawn}"


def test_top_p_comes_after_temperature_and_top_k(part):
    # At temperature 2 the shares .81 .09 .09 .01 become .643 .214 .214 .071 / 1.142.
    logits = _logits(0.81, 0.1, 0.08, 0.01)
    drawn = _drawn(part, logits, temperature=2.0, top_p=0.8)
    assert drawn == {0, 1, 2}, (
        f"drew {drawn}: the cut looks at the probabilities after the temperature"
    )
    # Of .4 .3 .2 .1 the best two are .571 .429 among themselves.
    drawn = _drawn(part, _logits(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.55)
    assert drawn == {0}, f"drew {drawn}: top_p is a share of what top_k kept"


def test_minus_infinity_is_never_drawn(part):
    logits = [0.0, -INF, 1.0, -INF, -INF]
    for how in (
        {},
        {"temperature": 100.0},
        {"top_k": 4},
        {"top_p": 0.999},
        {"temperature": 0.0},
    ):
        drawn = _drawn(part, logits, **how)
        assert drawn <= {0, 2}, f"with {how} an id at -inf was drawn: {drawn}"


def test_scores_without_a_choice_raise(part):
    for row in ([-INF, -INF], [math.nan, 0.0], [INF, 0.0]):
        for temperature in (0.0, 1.0):
            with pytest.raises(ValueError):
                part(torch.tensor([[0.0, 0.0], row]), temperature=temperature)


def test_same_seed_same_ids(part):
    logits = torch.randn(8, 100, generator=_seed(2))
    for how in ({}, {"top_k": 20}, {"top_p": 0.9}):
        first = part(logits, generator=_seed(5), **how)
        assert torch.equal(first, part(logits, generator=_seed(5), **how)), (
            "the same seed gave other ids"
        )
        others = [part(logits, generator=_seed(s), **how) for s in range(6, 10)]
        assert any(not torch.equal(first, other) for other in others), (
            "another seed gave the same ids: the generator is not used"
        )


def test_the_global_generator_is_left_alone(part):
    logits = torch.randn(4, 10, generator=_seed(3))
    before = torch.get_rng_state()
    part(logits, generator=_seed(1))
    assert torch.equal(before, torch.get_rng_state()), (
        "a draw from an own generator changed torch's global one"
    )


def test_rows_draw_independently(part):
    for how in ({}, {"top_k": 50}, {"top_p": 0.9}):
        ids = part(torch.zeros(64, 50), generator=_seed(), **how)
        assert len(set(ids.tolist())) > 16, (
            f"64 equal rows drew only {len(set(ids.tolist()))} of 50 ids: every row "
            "needs its own number"
        )
    # A row's cut is its own: a sure row beside an unsure one.
    rows = torch.tensor(
        [_logits(0.97, 0.01, 0.01, 0.01), _logits(0.3, 0.27, 0.23, 0.2)]
    )
    ids = part(rows.repeat_interleave(500, 0), top_p=0.9, generator=_seed())
    assert set(ids[:500].tolist()) == {0}, "a sure row kept its tail"
    assert len(set(ids[500:].tolist())) == 4, "an unsure row lost ids to its neighbor"


def test_logits_are_not_changed(part):
    logits = torch.randn(3, 20, generator=_seed(4))
    kept = logits.clone()
    part(logits, temperature=0.7, top_k=5, top_p=0.8, generator=_seed())
    assert torch.equal(logits, kept), "sampling wrote into the logits it was given"


def test_half_precision_logits(part):
    logits = torch.tensor([_logits(0.6, 0.4)] * 4000).bfloat16()
    ids = part(logits, generator=_seed())
    assert 0.3 < (ids == 1).float().mean() < 0.5, "bf16 logits give other shares"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-200, 200).map(lambda n: n / 10), min_size=1, max_size=12),
    st.integers(0, 14),
    st.floats(0, 1),
    st.floats(0.05, 5),
    st.integers(0, 1000),
)
def test_what_is_drawn_was_allowed(part, scores, top_k, top_p, temperature, seed):
    logits = torch.tensor([scores])
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    id_ = int(part(logits, **how, generator=_seed(seed)))
    order = sorted(scores, reverse=True)
    k = min(top_k or len(scores), len(scores))
    assert scores[id_] >= order[k - 1], f"id {id_} is not among the {k} best"
    kept = [math.exp((s - order[0]) / temperature) for s in order[:k]]
    better = sum(kept[: sum(s > scores[id_] for s in order[:k])]) / sum(kept)
    assert better < top_p + 1e-4 or scores[id_] == order[0], (
        f"ids better than {id_} hold {better:.4f} already, top_p is {top_p}"
    )
