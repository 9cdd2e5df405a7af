"""A fit of losses on mixture weights: finds a known lowest point, and admits noise.

The part is called as fit_mixture(weights_RD, losses, **keys); losses are one value a
run or several that count equally.
"""

import numpy as np

PART = "littlelm_core.mixture:fit_mixture"


def _runs(runs=40, domains=3, seed=0):
    return np.random.default_rng(seed).dirichlet(np.ones(domains), runs)


def _loss(weights_RD, truth_D, noise=0.0, seed=1):
    """A loss that is lowest where the weights are `truth_D` (nearly)."""
    quiet_R = 3 - np.log(weights_RD + 0.02) @ np.asarray(truth_D)
    return quiet_R + np.random.default_rng(seed).normal(0, noise, len(weights_RD))


def test_it_finds_a_lowest_point_that_is_known(part):
    for truth in ((0.2, 0.2, 0.6), (0.5, 0.3, 0.2), (0.1, 0.2, 0.3, 0.4)):
        weights = _runs(60, len(truth))
        found = part(weights, _loss(weights, truth, 0.005)).weights_D
        off = np.abs(found - truth).max()
        assert off < 0.1, f"lowest at {truth}, found {np.round(found, 2)}"


def test_the_answer_is_a_mixture_of_what_was_tried(part):
    """Low losses at an edge do not lead it beyond the runs."""
    weights = 0.3 + 0.1 * _runs(30, 3)  # each from 0.3 to 0.4
    found = part(weights, 3 - 5 * weights[:, 0]).weights_D
    assert abs(found.sum() - 1) < 1e-9, f"{found} sum to {found.sum()}"
    assert (found >= weights.min(0) - 1e-9).all(), f"{found} lies below all runs"
    assert (found <= weights.max(0) + 1e-9).all(), f"{found} lies above all runs"
    assert found[0] > weights[:, 0].mean(), f"{found} is not the low side"


def test_it_ranks_runs_that_it_has_not_seen(part):
    weights = _runs(40)
    fit = part(weights, _loss(weights, (0.5, 0.3, 0.2), 0.02))
    assert fit.rank_correlation > 0.85, f"rank correlation {fit.rank_correlation:.2f}"
    fresh = _runs(200, seed=9)
    wanted = _loss(fresh, (0.5, 0.3, 0.2))
    error = np.sqrt(np.mean((fit.predict(fresh) - wanted) ** 2))
    assert error < wanted.std() / 4, f"fresh runs are {error:.3f} off"


def test_noise_is_called_noise(part):
    """On losses without a pattern, held-out predictions know nothing."""
    weights, found = _runs(40), []
    for seed in range(6):
        losses = np.random.default_rng(seed).normal(size=40)
        found.append(part(weights, losses).rank_correlation)
    assert np.mean(found) < 0.4, f"rank correlations of noise: {np.round(found, 2)}"


def test_held_out_predictions_and_their_error_belong_together(part):
    weights = _runs(24)
    losses = _loss(weights, (0.5, 0.3, 0.2), 0.05)
    fit = part(weights, losses)
    assert fit.held_out_R.shape == (24,), f"held_out_R is {fit.held_out_R.shape}"
    error = np.sqrt(np.mean((fit.held_out_R - losses) ** 2))
    assert abs(fit.error - error) < 1e-9, f"error {fit.error}, held out it is {error}"
    inside = np.sqrt(np.mean((fit.predict(weights) - losses) ** 2))
    assert error > inside, "runs that were held out are predicted as well as seen ones"
    assert abs(fit.loss - fit.predict(fit.weights_D[None])[0]) < 1e-9


def test_several_losses_count_equally(part):
    weights = _runs(60)
    columns = np.stack([_loss(weights, np.eye(3)[d]) for d in range(3)], 1)
    fit = part(weights, columns)
    found = np.round(fit.weights_D, 2)
    assert np.abs(fit.weights_D - 1 / 3).max() < 0.08, (
        f"three domains alike are best at a third each, not {found}"
    )
    level = fit.predict(weights).mean() - columns.mean()
    assert abs(level) < 0.05, f"predictions are {level:+.2f} off the mean of the losses"


def test_it_repeats_itself_and_leaves_its_input(part):
    weights = _runs()
    losses = _loss(weights, (0.5, 0.3, 0.2), 0.05)
    before = weights.copy(), losses.copy()
    first, second = part(weights, losses), part(weights, losses)
    assert np.array_equal(first.weights_D, second.weights_D), "two calls, two answers"
    assert np.array_equal(weights, before[0]), "the weights were changed"
    assert np.array_equal(losses, before[1]), "the losses were changed"


def test_what_cannot_be_fitted_is_refused(part):
    weights = _runs(20)
    losses = _loss(weights, (0.5, 0.3, 0.2))
    broken = losses.copy()
    broken[3] = np.nan
    for what, args, keys in (
        ("a loss that is NaN", (weights, broken), {}),
        ("three runs", (weights[:3], losses[:3]), {}),
        ("one loss too few", (weights, losses[:-1]), {}),
        ("weights that sum to 2", (2 * weights, losses), {}),
        ("negative weights", (weights - [0.5, 0, -0.5], losses), {}),
        ("an unknown model", (weights, losses), {"model": "forest"}),
        ("one fold", (weights, losses), {"folds": 1}),
    ):
        message = None
        try:
            part(*args, **keys)
        except ValueError as error:
            message = str(error)
        assert message is not None, f"{what} was accepted"
        assert "\n" not in message, f"the error has more than one line: {message}"
