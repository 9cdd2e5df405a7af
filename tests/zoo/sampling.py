"""Samplers that are wrong in ways people have shipped."""

import math

import torch

from littlelm_core.generate import GenerationError, sample


def _check(temperature, top_k, top_p):
    sample(torch.zeros(1, 2), temperature, top_k, top_p)


def _build(
    temper=lambda z, t: (z - z.amax(-1, keepdim=True)) / t,
    cut_k=lambda z, k: z.masked_fill(
        z < z.topk(min(k, z.shape[-1]))[0][:, -1:], -math.inf
    ),
    cut_p=None,
    draw=lambda p, g: torch.multinomial(p, 1, generator=g)[:, 0],
    check=_check,
    greedy=True,
    p_first=False,
    finite=True,
):
    """A sampler made of steps, so that one of them can be wrong."""

    def smallest_set(z, p):
        probability, order = z.softmax(-1).sort(descending=True)
        cut = probability.cumsum(-1) - probability >= p - 1e-6
        cut[:, 0] = False
        return z.masked_fill(cut.scatter(1, order, cut), -math.inf)

    cut_p = cut_p or smallest_set

    def wrong(logits_BV, temperature=1.0, top_k=None, top_p=None, generator=None):
        check(temperature, top_k, top_p)
        z = logits_BV.float()
        if finite and not z.amax(-1).isfinite().all():
            raise GenerationError("no finite score")
        if temperature == 0 and greedy:
            return z.argmax(-1)
        if p_first and top_p is not None:
            z = cut_p(z, top_p)
        z = temper(z, temperature)
        if top_k:
            z = cut_k(z, top_k)
        if top_p is not None and top_p < 1 and not p_first:
            z = cut_p(z, top_p)
        return draw(z.softmax(-1), generator)

    return wrong


def _stops_short(z, p):
    """The id that reaches p is left out."""
    probability, order = z.softmax(-1).sort(descending=True)
    cut = probability.cumsum(-1) > p
    cut[:, 0] = False
    return z.masked_fill(cut.scatter(1, order, cut), -math.inf)


def _one_too_many(z, p):
    probability, order = z.softmax(-1).sort(descending=True)
    before = probability.cumsum(-1) - probability
    cut = before.roll(1, -1) >= p
    cut[:, :2] = False
    return z.masked_fill(cut.scatter(1, order, cut), -math.inf)


def _in_vocabulary_order(z, p):
    """The cut is made on sorted ids and applied without sorting back."""
    probability, _ = z.softmax(-1).sort(descending=True)
    cut = probability.cumsum(-1) - probability >= p - 1e-6
    cut[:, 0] = False
    return z.masked_fill(cut, -math.inf)


def _loses_the_best(z, p):
    probability, order = z.softmax(-1).sort(descending=True)
    cut = probability.cumsum(-1) - probability >= p - 1e-6
    return z.masked_fill(cut.scatter(1, order, cut), -1e9)


def _one_number_for_all_rows(p, generator):
    u = torch.rand(1, 1, generator=generator)
    return (p.cumsum(-1) < u).sum(-1).clamp(max=p.shape[-1] - 1)


def _global_generator(p, generator):
    return torch.multinomial(p, 1)[:, 0]


def _from_the_first_row(z, p):
    """One threshold, taken from row 0, for every row."""
    probability, _ = z[:1].softmax(-1).sort(descending=True)
    kept = int((probability.cumsum(-1) - probability < p).sum())
    floor = z.topk(max(kept, 1))[0][:, -1:]
    return z.masked_fill(z < floor, -math.inf)


def _in_place(logits_BV, temperature=1.0, top_k=None, top_p=None, generator=None):
    ids = sample(logits_BV, temperature, top_k, top_p, generator)
    if temperature:
        logits_BV /= temperature
    return ids


def _no_negative_check(temperature, top_k, top_p):
    _check(abs(temperature), top_k, top_p)


def _topk_exact(z, k):
    values, ids = z.topk(min(k, z.shape[-1]))
    return torch.full_like(z, -math.inf).scatter(1, ids, values)


def _raises_beyond_v(z, k):
    values, ids = z.topk(k)
    return torch.full_like(z, -math.inf).scatter(1, ids, values)


ZOO = {
    "multiplies by the temperature": (
        _build(temper=lambda z, t: z * t, cut_k=_topk_exact),
        "test_temperature_divides_the_logits",
    ),
    "tempers the probabilities": (
        _build(temper=lambda z, t: z.softmax(-1) / t, cut_k=_topk_exact),
        "test_frequencies_follow_the_softmax",
    ),
    "temperature 0 becomes 1e-1": (
        _build(temper=lambda z, t: z / max(t, 0.1), greedy=False, cut_k=_topk_exact),
        "test_temperature_0_is_argmax",
    ),
    "overflow at a tiny temperature": (
        _build(temper=lambda z, t: (z / t).nan_to_num(0.0), cut_k=_topk_exact),
        "test_a_tiny_temperature_is_argmax_too",
    ),
    "a negative temperature is taken": (
        _build(check=_no_negative_check, cut_k=_topk_exact),
        "test_wrong_settings_raise",
    ),
    "top-k by threshold keeps ties": (
        _build(),
        "test_top_k_keeps_k_of_equal_scores",
    ),
    "top-k beyond the vocabulary": (
        _build(cut_k=_raises_beyond_v),
        "test_top_k_off_and_too_large",
    ),
    "top-p leaves out the id that reaches p": (
        _build(cut_p=_stops_short, cut_k=_topk_exact),
        "test_top_p_keeps_the_smallest_set",
    ),
    "top-p keeps one too many": (
        _build(cut_p=_one_too_many, cut_k=_topk_exact),
        "test_top_p_keeps_the_smallest_set",
    ),
    "top-p not sorted back": (
        _build(cut_p=_in_vocabulary_order, cut_k=_topk_exact),
        "test_top_p_keeps_the_smallest_set",
    ),
    "top-p of 0 cuts the best too": (
        _build(cut_p=_loses_the_best, cut_k=_topk_exact),
        "test_top_p_keeps_the_best_always",
    ),
    "top-p before the temperature": (
        _build(p_first=True, cut_k=_topk_exact),
        "test_top_p_comes_after_temperature_and_top_k",
    ),
    "one cut for all rows": (
        _build(cut_p=_from_the_first_row, cut_k=_topk_exact),
        "test_rows_draw_independently",
    ),
    "one random number for all rows": (
        _build(draw=_one_number_for_all_rows, cut_k=_topk_exact),
        "test_rows_draw_independently",
    ),
    "the generator is ignored": (
        _build(draw=_global_generator, cut_k=_topk_exact),
        "test_same_seed_same_ids",
    ),
    "NaN is drawn from": (
        _build(finite=False, draw=lambda p, g: p.argmax(-1), cut_k=_topk_exact),
        "test_scores_without_a_choice_raise",
    ),
    "-inf filled with a small number": (
        _build(
            temper=lambda z, t: z.clamp(min=-10) / t,
            cut_k=_topk_exact,
        ),
        "test_minus_infinity_is_never_drawn",
    ),
    "writes into the logits": (_in_place, "test_logits_are_not_changed"),
}
