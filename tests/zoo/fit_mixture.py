"""Fits that are wrong in ways people have shipped."""

import numpy as np

from littlelm_core.mixture import fit_mixture, rank_correlation


def worst_run(weights, losses, model="ridge", **keys):
    """Looks for the highest loss instead of the lowest."""
    fit = fit_mixture(weights, losses, model, **keys)
    best = np.asarray(weights)[np.argsort(_means(losses))[-1]]
    return fit._replace(weights_D=best, loss=float(fit.predict(best[None])[0]))


def judged_on_what_it_saw(weights, losses, model="ridge", **keys):
    """Judges the fit by the runs that it was made from."""
    fit = fit_mixture(weights, losses, model, **keys)
    own = fit.predict(np.asarray(weights))
    losses = _means(losses)
    error = float(np.sqrt(np.mean((own - losses) ** 2)))
    seen = rank_correlation(own, losses)
    return fit._replace(held_out_R=own, rank_correlation=seen, error=error)


def remembers(weights, losses, model="ridge", **keys):
    """Predicts what the nearest run had, and is judged by those runs."""
    weights, means = np.asarray(weights), _means(losses)

    def predict(some):
        return means[((some[:, None] - weights) ** 2).sum(-1).argmin(1)]

    fit, own = fit_mixture(weights, losses, model, **keys), predict(weights)
    seen = rank_correlation(own, means)
    return fit._replace(predict=predict, held_out_R=own, rank_correlation=seen)


def optimist(weights, losses, model="ridge", **keys):
    """Reports the error of the fit as that of held-out runs."""
    fit = fit_mixture(weights, losses, model, **keys)
    own = fit.predict(np.asarray(weights))
    return fit._replace(error=float(np.sqrt(np.mean((own - _means(losses)) ** 2))))


def anywhere(weights, losses, model="ridge", **keys):
    """Searches all mixtures, also where no proxy has been."""
    fit = fit_mixture(weights, losses, model, **keys)
    domains = np.asarray(weights).shape[1]
    some = np.random.default_rng(1).dirichlet(np.ones(domains) / 2, 5000)
    return fit._replace(weights_D=some[fit.predict(some).argmin()])


def first_column(weights, losses, model="ridge", **keys):
    """Fits the first of several scores alone."""
    losses = np.asarray(losses)
    return fit_mixture(weights, losses.reshape(len(losses), -1)[:, 0], model, **keys)


def sums(weights, losses, model="ridge", **keys):
    """Adds several scores up: the numbers are no longer those of a run."""
    losses = np.asarray(losses)
    return fit_mixture(weights, losses.reshape(len(losses), -1).sum(1), model, **keys)


def straight_line(weights, losses, model="ridge", **keys):
    """Takes the loss for a straight line: its lowest point is always a corner."""
    weights = np.asarray(weights)
    fit = fit_mixture(weights, losses, model, **keys)
    slope = np.linalg.lstsq(weights, _means(losses), rcond=None)[0]
    best = weights[np.argmin(weights @ slope)]
    value = float((best[None] @ slope)[0])
    return fit._replace(predict=lambda w: w @ slope, weights_D=best, loss=value)


def normalizes(weights, losses, model="ridge", **keys):
    """Divides each row by its sum, whatever was meant."""
    weights = np.asarray(weights)
    return fit_mixture(weights / weights.sum(1, keepdims=True), losses, model, **keys)


def no_seed(weights, losses, model="ridge", **keys):
    """Searches with another seed each time."""
    seed = int(np.random.default_rng().integers(2**31))
    return fit_mixture(weights, losses, model, **{**keys, "seed": seed})


def _means(losses):
    losses = np.asarray(losses)
    return losses.reshape(len(losses), -1).mean(1)


ZOO = {
    "the highest for the lowest": (
        worst_run,
        "test_it_finds_a_lowest_point_that_is_known",
    ),
    "judged on what it saw": (
        judged_on_what_it_saw,
        "test_held_out_predictions_and_their_error_belong_together",
    ),
    "remembers its runs": (remembers, "test_noise_is_called_noise"),
    "the error of seen runs": (
        optimist,
        "test_held_out_predictions_and_their_error_belong_together",
    ),
    "beyond all runs": (anywhere, "test_the_answer_is_a_mixture_of_what_was_tried"),
    "the first score alone": (first_column, "test_several_losses_count_equally"),
    "scores added up": (sums, "test_several_losses_count_equally"),
    "a straight line": (straight_line, "test_it_ranks_runs_that_it_has_not_seen"),
    "weights of any sum": (normalizes, "test_what_cannot_be_fitted_is_refused"),
    "another seed each time": (no_seed, "test_it_repeats_itself_and_leaves_its_input"),
}
