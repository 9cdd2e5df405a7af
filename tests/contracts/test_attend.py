"""Contract of the manual path: a module with `attend` and `causal_mask`."""

import math

import pytest
import torch
import torch.nn.functional as F

PART = "littlelm_core.attention"


def _loop(q, k, v, mask):
    """Attention of one row, one head and one query at a time, in fp64."""
    batch, heads, queries, width = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(batch, heads, queries, width, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for t in range(queries):
                at = [s for s in range(k.shape[2]) if mask[t][s]]
                key, value = k[b, h // group].double(), v[b, h // group].double()
                scores = [
                    float(q[b, h, t].double() @ key[s]) / math.sqrt(width) for s in at
                ]
                top = max(scores, default=0.0)
                weights = [math.exp(score - top) for score in scores]
                for s, weight in zip(at, weights, strict=True):
                    out[b, h, t] += value[s] * (weight / sum(weights))
    return out


def test_equals_a_loop(part):
    for kv_heads in (1, 2, 4):
        q = torch.randn(2, 4, 5, 8)
        k, v = torch.randn(2, kv_heads, 7, 8), torch.randn(2, kv_heads, 7, 8)
        mask = part.causal_mask(5, 7, 3)
        error = (part.attend(q, k, v, mask) - _loop(q, k, v, mask)).abs().max()
        assert error < 1e-5, f"{kv_heads} key/value heads: off by {error:.2g}"


def test_equals_the_fused_kernel(part):
    q, k, v = torch.randn(3, 2, 6, 33, 16).unbind()
    mask = part.causal_mask(33, 33)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(part.attend(q, k, v, mask), fused, atol=1e-5)
    everything = F.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(part.attend(q, k, v), everything, atol=1e-5), "mask=None"


def test_groups_are_consecutive(part):
    q = torch.randn(1, 4, 1, 8)
    k = torch.randn(1, 2, 3, 8)
    v = torch.zeros(1, 2, 3, 8)
    v[:, 1] = 1.0
    seen = part.attend(q, k, v)[0, :, 0, 0].round().tolist()
    assert seen == [0.0, 0.0, 1.0, 1.0], (
        f"of 4 query heads the last two read key/value head 1; here {seen}"
    )


def test_heads_that_do_not_divide_raise(part):
    with pytest.raises(ValueError):
        part.attend(torch.randn(1, 3, 2, 4), *torch.randn(2, 1, 2, 2, 4).unbind())


def test_a_row_with_nothing_to_see_is_zero(part):
    q, k, v = (torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(3))
    mask = torch.tensor(
        [[True, True, False], [False, False, False], [False, True, False]]
    )
    out = part.attend(q, k, v, mask)
    assert torch.equal(out[:, :, 1], torch.zeros(1, 2, 8)), "row 1 sees nothing: 0"
    assert torch.allclose(out[:, :, 2], v[:, :, 1], atol=1e-6), "row 2 sees key 1 only"
    out.square().sum().backward()
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert torch.isfinite(x.grad).all(), f"the gradient of {name} is not finite"
    assert v.grad[:, :, 2].abs().max() == 0, "nobody sees key 2, yet it has a gradient"


def test_large_scores_do_not_overflow(part):
    q, k = torch.full((1, 1, 2, 4), 1e4), torch.full((1, 1, 2, 4), 1e4)
    v = torch.ones(1, 1, 2, 4)
    out = part.attend(q, k, v, part.causal_mask(2, 2))
    assert torch.allclose(out, v), "scores of 2e8 must not overflow the softmax"


def test_mask_is_the_lower_triangle(part):
    mask = part.causal_mask(3, 3)
    assert mask.dtype == torch.bool, f"True = may attend, not {mask.dtype}"
    assert mask.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_queries_are_the_last_positions(part):
    mask = part.causal_mask(2, 5)
    assert mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], (
        "two new tokens behind three cached ones see all three"
    )


def test_window_is_itself_and_those_before(part):
    mask = part.causal_mask(5, 5, 2)
    assert mask.sum(-1).tolist() == [1, 2, 2, 2, 2], (
        "a window of 2 is the token itself and one before it"
    )
    assert part.causal_mask(5, 5, 1).equal(torch.eye(5, dtype=torch.bool))
    assert part.causal_mask(1, 9, 4)[0].int().tolist() == [0] * 5 + [1] * 4


def test_window_that_is_none(part):
    plain = part.causal_mask(4, 6)
    for window in (None, 0, -1, -7, 6, 7, 1000):
        assert part.causal_mask(4, 6, window).equal(plain), f"window = {window}"
