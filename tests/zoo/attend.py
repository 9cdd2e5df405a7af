"""Manual attention and masks that are wrong in ways people have shipped."""

import math
from types import SimpleNamespace

import torch

from littlelm_core import attention
from littlelm_core.attention import attend, causal_mask


def _with(**changes):
    return SimpleNamespace(**{**vars(attention), **changes})


def _minus_infinity(q, k, v, mask=None):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


def _nan_hidden(q, k, v, mask=None):
    """The value is mended, the gradient is not."""
    return _minus_infinity(q, k, v, mask).nan_to_num(0.0)


def _lowest_number(q, k, v, mask=None):
    """A row with nothing to see reads the mean of everything."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


def _small_penalty(q, k, v, mask=None):
    """A hidden key is only made unlikely."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores - 10.0 * (~mask)
    return scores.softmax(-1) @ v


def _tiled(q, k, v, mask=None):
    group = q.shape[1] // k.shape[1]
    return attend(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), mask)


def _unscaled(q, k, v, mask=None):
    return attend(q * math.sqrt(q.shape[-1]), k, v, mask)


def _no_shift(q, k, v, mask=None):
    """exp without subtracting the largest score first."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).exp()
    if mask is not None:
        weights = weights * mask
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ v


def _any_heads(q, k, v, mask=None):
    at = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    return attend(q, k[:, at], v[:, at], mask)


def _top_left(queries, keys, window=None, device=None):
    return causal_mask(keys, keys, window, device)[:queries]


def _wide(queries, keys, window=None, device=None):
    return causal_mask(queries, keys, window and window + 1, device)


def _strict_window(queries, keys, window=None, device=None):
    """A window of 0 hides everything; one beyond the keys is still none."""
    mask = causal_mask(queries, keys, window, device)
    return mask & (window is None or window > 0)


ZOO = {
    "-inf in an empty row": (
        _with(attend=_minus_infinity),
        "test_a_row_with_nothing_to_see_is_zero",
    ),
    "NaN hidden, gradient not": (
        _with(attend=_nan_hidden),
        "test_a_row_with_nothing_to_see_is_zero",
    ),
    "an empty row reads the mean": (
        _with(attend=_lowest_number),
        "test_a_row_with_nothing_to_see_is_zero",
    ),
    "a small penalty for a mask": (_with(attend=_small_penalty), "test_equals_a_loop"),
    "heads read h % K": (_with(attend=_tiled), "test_groups_are_consecutive"),
    "scores not divided": (_with(attend=_unscaled), "test_equals_the_fused_kernel"),
    "softmax overflows": (
        _with(attend=_no_shift),
        "test_large_scores_do_not_overflow",
    ),
    "3 heads on 2": (_with(attend=_any_heads), "test_heads_that_do_not_divide_raise"),
    "top-left triangle": (
        _with(causal_mask=_top_left),
        "test_queries_are_the_last_positions",
    ),
    "window one too wide": (
        _with(causal_mask=_wide),
        "test_window_is_itself_and_those_before",
    ),
    "a window of 0 hides all": (
        _with(causal_mask=_strict_window),
        "test_window_that_is_none",
    ),
}
