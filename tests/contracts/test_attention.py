"""Contract of an attention layer: (dim, heads, kv_heads, ...) -> module.

The reference is a loop in fp64 over the part's own wq, wk, wv and wo. Equality is
tested in fp32; bf16 has a tolerance of its own.
"""

import copy
import inspect
import itertools
import math

import pytest
import torch

from littlelm_core.attention import KVCache, rope_table

PART = "littlelm_core.attention:Attention"

DIM, HEADS, WIDTH, TOKENS = 32, 4, 8, 14
SPLITS = ([TOKENS], [1] * TOKENS, [5, 1, 1, 4, 3], [1, 13], [6, 8])


def _rope(tokens, start=0, width=WIDTH):
    return rope_table(torch.arange(start, start + tokens), width)


def _paths(part):
    """Options of the paths a part has: fused, and manual where it takes the word."""
    paths = [{}]
    if "manual" in inspect.signature(part).parameters:
        paths.append({"manual": True})
    return paths


def _variants(part):
    for kv_heads, qk_norm, window, path in itertools.product(
        (1, 2, 4), (True, False), (None, 1, 4), _paths(part)
    ):
        layer = part(
            DIM, HEADS, kv_heads, head_dim=WIDTH, qk_norm=qk_norm, window=window, **path
        )
        yield f"kv_heads {kv_heads}, qk_norm {qk_norm}, window {window} {path}", layer


def _turn(vector, position):
    half = len(vector) // 2
    out = [0.0] * len(vector)
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return torch.tensor(out, dtype=torch.float64)


def _loop(layer, x, kv_heads, qk_norm, window, extra=None):
    """One row (T × C) through attention, head by head and token by token, in fp64."""
    weight = {n: p.detach().double() for n, p in layer.named_parameters()}
    x = x.double()
    tokens = len(x)
    q = (x @ weight["wq.weight"].T).view(tokens, HEADS, WIDTH)
    k = (x @ weight["wk.weight"].T).view(tokens, kv_heads, WIDTH)
    v = (x @ weight["wv.weight"].T).view(tokens, kv_heads, WIDTH)
    if extra is not None:
        v = v + extra.double()

    def place(vector, position):
        if qk_norm:
            vector = vector / (vector.square().mean() + 1e-6).sqrt()
        return _turn(vector.tolist(), position)

    read = torch.zeros(tokens, HEADS, WIDTH, dtype=torch.float64)
    for h in range(HEADS):
        g = h // (HEADS // kv_heads)
        keys = [place(k[s, g], s) for s in range(tokens)]
        for t in range(tokens):
            first = 0 if window is None else max(0, t - window + 1)
            query = place(q[t, h], t)
            scores = torch.stack([query @ keys[s] for s in range(first, t + 1)])
            weights = (scores / math.sqrt(WIDTH)).softmax(0)
            read[t, h] = weights @ v[first : t + 1, g]
    return read.view(tokens, -1) @ weight["wo.weight"].T


def _cached(layer, x, split, kv_heads, window=None, capacity=TOKENS + 3):
    cache = KVCache(len(x), kv_heads, capacity, WIDTH, window=window)
    out, start = [], 0
    for tokens in split:
        chunk = x[:, start : start + tokens]
        out.append(layer(chunk, _rope(tokens, start), cache=cache))
        start += tokens
    return torch.cat(out, dim=1)


def test_equals_a_loop(part):
    x = torch.randn(2, 7, DIM)
    for kv_heads, qk_norm, window, path in itertools.product(
        (1, 2, 4), (True, False), (None, 1, 3), _paths(part)
    ):
        layer = part(
            DIM, HEADS, kv_heads, head_dim=WIDTH, qk_norm=qk_norm, window=window, **path
        )
        y = layer(x, _rope(7))
        wanted = torch.stack([_loop(layer, r, kv_heads, qk_norm, window) for r in x])
        error = (y - wanted).abs().max()
        assert error < 1e-5, (
            f"kv_heads {kv_heads}, qk_norm {qk_norm}, window {window}, {path}: off by "
            f"{error:.2g}"
        )


def test_projections_have_their_names_and_shapes(part):
    layer = part(24, 4, 2, head_dim=10)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "wq.weight": (40, 24),
        "wk.weight": (20, 24),
        "wv.weight": (20, 24),
        "wo.weight": (24, 40),
    }, "wq, wk, wv, wo without bias, and QK-norm without gains"
    assert part(24, 4, 2).wq.weight.shape == (24, 24), "head_dim is dim / heads"


def test_heads_that_do_not_divide_raise(part):
    for heads, kv_heads in ((4, 3), (2, 4), (4, 0), (0, 0)):
        with pytest.raises(ValueError):
            part(32, heads, kv_heads, head_dim=8)
    with pytest.raises(ValueError):
        part(34, 4, 2)  # 34 // 4 would do, and lose two numbers
    with pytest.raises(ValueError):
        part(32, 4, 2, head_dim=7)  # RoPE turns pairs


def test_future_never_changes_the_past(part):
    for name, layer in _variants(part):
        x = torch.randn(1, TOKENS, DIM)
        y = layer(x, _rope(TOKENS))
        for t in (1, 5, TOKENS - 1):
            other = x.clone()
            other[:, t:] = torch.randn(1, TOKENS - t, DIM)
            moved = layer(other, _rope(TOKENS)) - y
            assert moved[:, :t].abs().max() < 1e-6, (
                f"{name}: changing token {t} changed what stands before it"
            )
            assert moved[:, t].abs().max() > 1e-4, f"{name}: token {t} is not read"


def test_future_never_changes_the_past_behind_a_cache(part):
    for window, start, tokens in itertools.product((None, 1, 3, 20), (1, 6), (2, 5)):
        layer = part(DIM, HEADS, 2, head_dim=WIDTH, window=window)
        x = torch.randn(1, start + tokens, DIM)
        for t in range(1, tokens):
            other = x.clone()
            other[:, start + t :] += 1.0
            outs = [_cached(layer, z, [start, tokens], 2, window) for z in (x, other)]
            moved = (outs[0] - outs[1])[:, : start + t].abs().max()
            assert moved < 1e-6, (
                f"window {window}: in a chunk of {tokens} behind {start} cached "
                f"tokens, token {start + t} changed an earlier one"
            )


def test_cached_equals_uncached(part):
    x = torch.randn(2, TOKENS, DIM)
    for name, layer in _variants(part):
        y = layer(x, _rope(TOKENS))
        kv_heads = layer.wk.weight.shape[0] // WIDTH
        window = int(name.split("window ")[1].split()[0].replace("None", "0"))
        for split in SPLITS:
            for kept in {0, window}:
                error = (_cached(layer, x, split, kv_heads, kept) - y).abs().max()
                assert error < 1e-5, (
                    f"{name}: in chunks {split} with a cache of window {kept}, off by "
                    f"{error:.2g}"
                )


def test_window_is_itself_and_those_before(part):
    for path in _paths(part):
        layer = part(DIM, HEADS, 2, head_dim=WIDTH, window=3, **path)
        x = torch.randn(1, 8, DIM)
        y = layer(x, _rope(8))
        for t, seen in ((3, (3, 4, 5)), (0, (0, 1, 2))):
            other = x.clone()
            other[:, t] += 1.0
            moved = (layer(other, _rope(8)) - y).abs().amax(-1)[0] > 1e-6
            assert moved.nonzero().flatten().tolist() == list(seen), (
                f"with a window of 3, token {t} is read by tokens {list(seen)}"
            )


def test_window_that_is_none(part):
    x = torch.randn(2, 9, DIM)
    layer = part(DIM, HEADS, 2, head_dim=WIDTH)
    y = layer(x, _rope(9))
    for window, path in itertools.product((0, -1, -9, 9, 10, 500), _paths(part)):
        other = part(DIM, HEADS, 2, head_dim=WIDTH, window=window, **path)
        other.load_state_dict(layer.state_dict())
        assert torch.allclose(other(x, _rope(9)), y, atol=1e-5), (
            f"a window of {window} over 9 tokens is no window"
        )
        cached = _cached(other, x, [5, 1, 3], 2, window, capacity=9)
        assert torch.allclose(cached, y, atol=1e-5), f"window {window}, cached"


def test_value_embeddings_are_added_to_the_values(part):
    x, extra = torch.randn(2, 6, DIM), torch.randn(2, 6, 2, WIDTH)
    for window, path in itertools.product((None, 2), _paths(part)):
        layer = part(DIM, HEADS, 2, head_dim=WIDTH, window=window, **path)
        y = layer(x, _rope(6), value_embed=extra)
        for row in range(2):
            wanted = _loop(layer, x[row], 2, True, window, extra[row])
            assert (y[row] - wanted).abs().max() < 1e-5, f"window {window}, {path}"


def test_value_embeddings_reach_the_cache(part):
    x, extra = torch.randn(1, 6, DIM), torch.randn(1, 6, 2, WIDTH)
    layer = part(DIM, HEADS, 2, head_dim=WIDTH)
    y = layer(x, _rope(6), value_embed=extra)
    cache = KVCache(1, 2, 6, WIDTH)
    for t in range(6):
        at = slice(t, t + 1)
        step = layer(x[:, at], _rope(1, t), cache=cache, value_embed=extra[:, at])
        assert torch.allclose(step, y[:, at], atol=1e-5), f"token {t}"


def test_qk_norm_fixes_the_size_of_scores(part):
    x = torch.randn(1, 6, DIM)
    layer = part(DIM, HEADS, 2, head_dim=WIDTH)
    y = layer(x, _rope(6))
    with torch.no_grad():
        layer.wq.weight.mul_(7.0)
        layer.wk.weight.mul_(0.2)
        layer.wk.weight[WIDTH:].mul_(5.0)
    assert torch.allclose(layer(x, _rope(6)), y, atol=1e-4), (
        "q and k are normed per head: the size of wq and wk must not matter"
    )


def test_rows_do_not_see_each_other(part):
    x = torch.randn(3, 6, DIM)
    layer = part(DIM, HEADS, 2, head_dim=WIDTH)
    y = layer(x, _rope(6))
    x[1] += 1.0
    moved = (layer(x, _rope(6)) - y).abs().amax((1, 2)) > 1e-6
    assert moved.tolist() == [False, True, False]


def test_gradients_reach_every_projection(part):
    for name, layer in _variants(part):
        layer(torch.randn(2, 9, DIM), _rope(9)).square().sum().backward()
        for weight, parameter in layer.named_parameters():
            grad = parameter.grad
            if "window 1" in name and weight in ("wq.weight", "wk.weight"):
                continue  # a token that sees only itself has nothing to choose
            assert grad is not None, f"{name}: no gradient for {weight}"
            assert torch.isfinite(grad).all(), f"{name}: {weight} is not finite"
            assert grad.abs().max() > 0, f"{name}: {weight} has a gradient of zero"


def test_past_the_end_of_the_cache_raises(part):
    layer = part(DIM, HEADS, 2, head_dim=WIDTH)
    cache = KVCache(1, 2, 8, WIDTH)
    layer(torch.randn(1, 6, DIM), _rope(6), cache=cache)
    with pytest.raises(ValueError):
        layer(torch.randn(1, 3, DIM), _rope(3, 6), cache=cache)
    assert cache.length == 6, "a refused chunk must not count"


def test_a_rope_table_of_another_length_raises(part):
    layer = part(DIM, HEADS, 2, head_dim=WIDTH)
    for rows in (1, 4, 6):
        with pytest.raises(ValueError):
            layer(torch.randn(1, 5, DIM), _rope(rows))


def test_a_cache_of_another_window_raises(part):
    layer = part(DIM, HEADS, 2, head_dim=WIDTH, window=4)
    with pytest.raises(ValueError):
        _cached(layer, torch.randn(1, 6, DIM), [1] * 6, 2, window=2)


def test_bf16_stays_near_fp32(part):
    x = torch.randn(2, TOKENS, DIM)
    for name, layer in _variants(part):
        y = layer(x, _rope(TOKENS))
        low = copy.deepcopy(layer).bfloat16()
        got = low(x.bfloat16(), _rope(TOKENS))
        assert got.dtype == torch.bfloat16, f"{name}: bf16 in, {got.dtype} out"
        # 8 bits (2^-8 per rounding): input, weights, q, k, v, weights and output are
        # rounded, and a score of a few units moves by 0.02 before the softmax.
        error = (got.float() - y).abs().max() / y.abs().max()
        assert error < 0.06, f"{name}: bf16 is off by {error:.3f} of the largest"


def test_autocast_works_with_and_without_a_cache(part):
    x = torch.randn(1, 6, DIM)
    layer = part(DIM, HEADS, 2, head_dim=WIDTH)
    y = layer(x, _rope(6))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole = layer(x, _rope(6))
        chunks = _cached(layer, x, [3, 1, 2], 2)
    for got in (whole, chunks):
        error = (got.float() - y).abs().max() / y.abs().max()
        assert error < 0.06, f"off by {error:.3f} of the largest value"
