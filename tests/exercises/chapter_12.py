"""Graders of chapter 12's exercises (written together with chapters/12_mixture.md)."""

import math
from collections import Counter

import numpy as np

from littlelm_core.mixture import Mixture, rank_correlation, token_shares


def exercise_12_1(answer):
    """Shares by temperature."""
    tokens = {"web": 900, "books": 90, "math": 10}
    before = dict(tokens)
    for temperature in (1, 2, 0.5, 7.5):
        got = answer(tokens, temperature)
        wanted = token_shares(None, tokens, temperature)
        assert isinstance(got, dict), f"a dict is asked, not a {type(got).__name__}"
        assert set(got) == set(tokens), f"the domains are {sorted(got)}"
        for name, share in wanted.items():
            assert math.isclose(got[name], share, rel_tol=1e-9), (
                f"temperature {temperature}: {name} has {share:.4f}, not {got[name]}"
            )
    assert tokens == before, "the input was changed"


def exercise_12_2(answer):
    """The next domain, against the order of the mixture itself."""
    got = answer({"a": 0.7, "b": 0.3}, {"a": 0, "b": 0}, {"a": 10, "b": 10})
    assert got == "a", f"at the start the first date is a's, 10 / 0.7; not {got!r}"
    got = answer({"a": 0.7, "b": 0.3}, {"a": 0, "b": 0}, {"a": 70, "b": 10})
    assert got == "b", (
        f"b's short sample is due at 33, a's long one at 100; not {got!r}"
    )
    got = answer({"a": 0.5, "b": 0.5}, {"a": 30, "b": 10}, {"a": 1, "b": 90})
    assert got == "b", f"a has had more than its half and must wait; not {got!r}"
    got = answer({"a": 0.0, "b": 1.0}, {"a": 0, "b": 5}, {"a": 1, "b": 1})
    assert got == "b", "a domain of share 0 is never drawn"
    rng = np.random.default_rng(0)
    sources = {n: [[0] * int(k) for k in rng.integers(1, 9, 50)] for n in "abc"}
    shares = {"a": 0.25, "b": 0.25, "c": 0.5}  # exact in binary: no tie is by rounding
    mixture, given = Mixture(sources, shares, 1), Counter(a=0, b=0, c=0)
    for _ in range(120):
        lengths = {n: mixture.domains[n].next()[2] for n in sources}
        got, pick = answer(shares, dict(given), lengths), mixture.pick()
        assert got == pick.domain, (
            f"given {dict(given)}, next samples {lengths}: {pick.domain}, not {got}"
        )
        given[pick.domain] += lengths[pick.domain]


def exercise_12_3(answer):
    """Tokens until the first domain has run out."""
    tokens, shares = {"a": 1000, "b": 50}, {"a": 0.9, "b": 0.1}
    got = answer(tokens, shares, 1)
    assert math.isclose(got, 500), f"50 tokens at a tenth last for 500, not {got}"
    got = answer(tokens, shares, 4)
    assert math.isclose(got, 2000), f"read four times they last for 2000, not {got}"
    got = answer({"a": 10, "b": 1000}, {"a": 0.0, "b": 1.0}, 2)
    assert math.isclose(got, 2000), f"a domain of share 0 never runs out: {got}"
    got = answer({"a": 90, "b": 1000}, {"a": 0.9, "b": 0.1}, 1)
    assert math.isclose(got, 100), f"a large share of a small domain: 100, not {got}"


def exercise_12_4(answer):
    """Spearman's correlation."""
    assert math.isclose(answer([1, 2, 3], [10, 20, 30]), 1), "equal order is 1"
    assert math.isclose(answer([1, 2, 3], [3, 2, 1]), -1), "turned order is -1"
    rng = np.random.default_rng(2)
    for size in (4, 9, 30):
        a, b = rng.normal(size=size), rng.normal(size=size)
        got, wanted = answer(a.tolist(), b.tolist()), rank_correlation(a, b)
        assert math.isclose(got, wanted, abs_tol=1e-9), (
            f"{size} random values: {wanted:.4f}, not {got}"
        )


def exercise_12_5(answer):
    """The lowest point of c - sum of b log w."""
    rng = np.random.default_rng(4)
    for b_D in ([0.3, 0.2, 0.1], [1.0, 0.25], [0.1, 0.2, 0.3, 0.4]):
        weights_RD = rng.dirichlet(np.full(len(b_D), 2.0), 40)
        losses_R = 2.5 - np.log(weights_RD) @ b_D
        before = weights_RD.copy()
        got = np.asarray(answer(weights_RD, losses_R))
        wanted = np.array(b_D) / sum(b_D)
        assert got.shape == wanted.shape, f"{len(b_D)} weights are asked: {got.shape}"
        assert np.allclose(got, wanted, atol=1e-6), f"b = {b_D}: {wanted}, not {got}"
        assert np.array_equal(weights_RD, before), "the input was changed"
