"""Attention layers that are wrong in ways people have shipped."""

import torch
import torch.nn.functional as F
from torch import nn

from littlelm_core.attention import Attention, apply_rope, attend, causal_mask


class NoMask(Attention):
    def _read(self, q, k, v):
        return attend(q, k, v)


class TopLeft(Attention):
    """The triangle starts at the first key, also behind a cache."""

    def _read(self, q, k, v):
        queries, seen = q.shape[2], k.shape[2]
        mask = causal_mask(seen, seen, self.window)[:queries]
        return attend(q, k, v, mask)


class FirstStepOnly(Attention):
    """No mask behind a cache: right token by token, wrong in chunks."""

    def _read(self, q, k, v):
        if q.shape[2] < k.shape[2] and self.window is None:
            return attend(q, k, v)
        return super()._read(q, k, v)


class WideWindow(Attention):
    """A window of W that means W tokens before this one."""

    def _read(self, q, k, v):
        window = self.window + 1 if self.window else None
        return attend(q, k, v, causal_mask(q.shape[2], k.shape[2], window))


class TrainingWindow(Attention):
    """The window is forgotten behind a cache."""

    def _read(self, q, k, v):
        window = self.window if q.shape[2] == k.shape[2] else None
        return attend(q, k, v, causal_mask(q.shape[2], k.shape[2], window))


class Interleaved(Attention):
    """Query head h reads key/value head h % K."""

    def _read(self, q, k, v):
        groups = self.heads // self.kv_heads
        return _masked(self, q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1))


def _masked(layer, q, k, v):
    return attend(q, k, v, causal_mask(q.shape[2], k.shape[2], layer.window))


class ModelWidth(Attention):
    """Scores are divided by the root of the model's width."""

    def _read(self, q, k, v):
        scale = (self.head_dim / self.wq.in_features) ** 0.5
        return _masked(self, q * scale, k, v)


class NormAllHeads(Attention):
    """One root mean square over all heads together."""

    def _place(self, x, rope):
        if self.qk_norm:
            x = x * torch.rsqrt(x.square().mean((1, 3), keepdim=True) + 1e-6)
        return apply_rope(x, *rope)


class GainedNorm(Attention):
    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.q_norm = nn.Parameter(torch.ones(self.head_dim))

    def _place(self, x, rope):
        if self.qk_norm:
            x = F.rms_norm(x, (self.head_dim,), self.q_norm, 1e-6)
        return apply_rope(x, *rope)


class UnplacedKeys(Attention):
    """Only the queries are turned."""

    def _place(self, x, rope):
        if x.shape[1] == self.kv_heads != self.heads:
            rope = tuple(torch.full_like(rope[0], number) for number in (1.0, 0.0))
        return super()._place(x, rope)


class LostValues(Attention):
    """Value embeddings take the values' place."""

    def forward(self, x, rope, cache=None, value_embed=None):
        if value_embed is not None:
            value_embed = value_embed - self.wv(x).view_as(value_embed)
        return super().forward(x, rope, cache, value_embed)


class AnyHeads(Attention):
    """Heads that do not divide are cut in silence."""

    def __init__(self, dim, heads, kv_heads, **keys):
        super().__init__(dim, heads - heads % max(kv_heads, 1), kv_heads, **keys)


class ZeroWindow(Attention):
    """A window of 0 or less is taken as 1."""

    def __init__(self, *args, window=None, **keys):
        window = window if window is None else max(window, 1)
        super().__init__(*args, window=window, **keys)


class Biased(Attention):
    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.wo = nn.Linear(self.wo.in_features, self.wo.out_features)


ZOO = {
    "no mask": (NoMask, "test_future_never_changes_the_past"),
    "top-left triangle behind a cache": (TopLeft, "test_cached_equals_uncached"),
    "no mask in chunks": (
        FirstStepOnly,
        "test_future_never_changes_the_past_behind_a_cache",
    ),
    "window one too wide": (WideWindow, "test_window_is_itself_and_those_before"),
    "window only in training": (TrainingWindow, "test_cached_equals_uncached"),
    "a window of 0 sees one token": (ZeroWindow, "test_window_that_is_none"),
    "heads read h % K": (Interleaved, "test_equals_a_loop"),
    "scaled by the model's width": (ModelWidth, "test_equals_a_loop"),
    "QK-norm over all heads": (NormAllHeads, "test_qk_norm_fixes_the_size_of_scores"),
    "QK-norm with gains": (
        GainedNorm,
        "test_projections_have_their_names_and_shapes",
    ),
    "keys without positions": (UnplacedKeys, "test_equals_a_loop"),
    "value embeddings replace values": (
        LostValues,
        "test_value_embeddings_are_added_to_the_values",
    ),
    "heads cut in silence": (AnyHeads, "test_heads_that_do_not_divide_raise"),
    "a bias on the output": (Biased, "test_projections_have_their_names_and_shapes"),
}
