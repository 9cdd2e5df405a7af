"""The mixture's statistics against scipy and a plain solution; both models agree."""

import numpy as np
import pytest

from littlelm_core.mixture import (
    PENALTIES,
    fit_mixture,
    fit_ridge,
    rank_correlation,
    ridge_features,
)


def runs(count=36, noise=0.02):
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(3), count)
    losses = 3 - np.log(weights + 0.05) @ [0.5, 0.3, 0.2]
    return weights, losses + rng.normal(0, noise, count)


def test_rank_correlation_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    for size in (3, 10, 50):
        for a, b in (rng.normal(size=(2, size)), rng.integers(0, 4, (2, size))):
            if np.ptp(a) and np.ptp(b):
                expected = stats.spearmanr(a, b).statistic
                assert rank_correlation(a, b) == pytest.approx(expected)


def test_ridge_is_the_penalty_that_leaves_out_best():
    """Fitted again without each run, once for each penalty: no formula."""
    weights, losses = runs()
    features = ridge_features(weights)
    scaled = (features - features.mean(0)) / (features.std(0) + 1e-12)

    def solve(x, y, penalty):
        columns = np.column_stack([np.ones(len(x)), x])
        shrink = penalty * len(losses) * np.eye(columns.shape[1])
        shrink[0, 0] = 0.0  # the mean is not shrunk
        return np.linalg.solve(columns.T @ columns + shrink, columns.T @ y)

    def left_out(penalty):
        errors = []
        for run in range(len(losses)):
            kept = np.arange(len(losses)) != run
            found = solve(scaled[kept], losses[kept], penalty)
            errors.append(losses[run] - found[0] - scaled[run] @ found[1:])
        return np.mean(np.square(errors))

    usable = [p for p in PENALTIES if p >= 1e-6]  # below it `solve` loses its digits
    best = min(usable, key=left_out)
    found = solve(scaled, losses, best)
    expected = found[0] + scaled @ found[1:]
    assert fit_ridge(weights, losses)(weights) == pytest.approx(expected, abs=1e-4)


def test_both_models_find_the_low_side():
    pytest.importorskip("lightgbm")
    weights, losses = runs(48)
    for model in ("ridge", "lightgbm"):
        fit = fit_mixture(weights, losses, model)
        assert fit.rank_correlation > 0.8, f"{model}: {fit.rank_correlation:.2f}"
        order = np.argsort(fit.weights_D)[::-1].tolist()
        assert order[0] == 0, f"{model} found {fit.weights_D}"
