"""Contract of the KV cache of one layer."""

import pytest
import torch

PART = "littlelm_core.attention:KVCache"

SPLITS = ([1] * 12, [12], [5, 1, 1, 3, 2], [3, 3, 3, 3], [1, 7, 1, 3], [7, 5])


def _keys(first, last, batch=2, kv_heads=3, head_dim=4):
    """Keys that say their own position; the values are their negatives."""
    at = torch.arange(first, last, dtype=torch.float32).view(1, 1, -1, 1)
    return at.expand(batch, kv_heads, -1, head_dim)


def _chunks(split):
    start = 0
    for tokens in split:
        yield start, start + tokens
        start += tokens


def test_returns_everything_seen(part):
    for split in SPLITS:
        cache = part(2, 3, 12, 4)
        for first, last in _chunks(split):
            assert cache.length == first, "length is the number of tokens seen"
            k, v = cache.update(_keys(first, last), -_keys(first, last))
            assert torch.equal(k, _keys(0, last)), f"keys after {last} tokens: {split}"
            assert torch.equal(v, -_keys(0, last)), f"values after {last}: {split}"


def test_a_window_keeps_what_it_must(part):
    for window in (1, 2, 3, 5, 11):
        for split in SPLITS:
            cache = part(2, 3, 12, 4, window=window)
            for first, last in _chunks(split):
                k, v = cache.update(_keys(first, last), -_keys(first, last))
                assert torch.equal(v, -k), "keys and values of different tokens"
                seen = [int(p) for p in k[1, 2, :, 3]]
                need = list(range(max(0, first - window + 1), last))
                what = f"window {window}, split {split}, tokens {first} ... {last - 1}"
                if last - first == 1:
                    assert sorted(seen) == need, f"{what}: sees {sorted(seen)}"
                else:
                    kept = seen[len(seen) - len(need) :]
                    assert kept == need, f"{what}: sees {seen}, needs {need}"


def test_a_window_bounds_the_memory(part):
    full, ring = part(1, 2, 64, 8), part(1, 2, 64, 8, window=16)
    assert full.nbytes == 2 * 2 * 64 * 8 * 4, f"{full.nbytes} bytes, not 8192"
    assert ring.nbytes * 4 == full.nbytes, "16 of 64 tokens take a quarter of the bytes"


def test_window_that_is_none(part):
    for window in (None, 0, -1, 12, 50):
        cache = part(2, 3, 12, 4, window=window)
        assert cache.window is None, f"a window of {window} over 12 tokens is none"
        cache.update(_keys(0, 11), -_keys(0, 11))
        k, _ = cache.update(_keys(11, 12), -_keys(11, 12))
        assert torch.equal(k, _keys(0, 12)), f"window {window}"


def test_overflow_raises_before_anything_is_lost(part):
    for window in (None, 4):
        cache = part(2, 3, 10, 4, window=window)
        cache.update(_keys(0, 8), -_keys(0, 8))
        with pytest.raises(ValueError):  # 3 tokens fit the cache, but not behind 8
            cache.update(_keys(8, 11), -_keys(8, 11))
        assert cache.length == 8, "a refused chunk must not count"
        k, _ = cache.update(_keys(8, 10), -_keys(8, 10))
        assert [int(p) for p in k[0, 0, -3:, 0]] == [7, 8, 9], "the cache was damaged"
        with pytest.raises(ValueError):
            cache.update(_keys(10, 11), -_keys(10, 11))


def test_another_batch_raises(part):
    cache = part(2, 3, 10, 4)
    with pytest.raises(ValueError):
        cache.update(_keys(0, 2, batch=1), _keys(0, 2, batch=1))


def test_reset_forgets(part):
    cache = part(2, 3, 10, 4)
    cache.update(_keys(0, 9), -_keys(0, 9))
    cache.reset()
    k, _ = cache.update(_keys(5, 7), -_keys(5, 7))
    assert cache.length == 2
    assert torch.equal(k, _keys(5, 7))


def test_dtype_is_the_caches(part):
    for window in (None, 4):
        cache = part(2, 3, 10, 4, dtype=torch.bfloat16, window=window)
        for first, last in ((0, 3), (3, 9), (9, 10)):
            k, v = cache.update(_keys(first, last), -_keys(first, last))
            assert k.dtype == v.dtype == torch.bfloat16, f"got {k.dtype}"


def test_rows_go_on_from_rows_that_were_read(part):
    for window, length in ((None, 9), (3, 9), (None, 5)):
        cache = part(2, 3, 5, 4, window=window)
        first = _keys(0, 5) + 100 * torch.arange(2.0).view(2, 1, 1, 1)
        cache.update(first, -first)
        chosen = cache.select([1, 0, 1], length)
        assert chosen.length == 5, "the position of the next token"
        before = cache.keys.clone()
        new = _keys(5, length, batch=3) + 1000
        k, v = chosen.update(new, -new) if length > 5 else (chosen.keys, chosen.values)
        assert torch.equal(v, -k), "keys and values of different tokens"
        kept = 5 if window is None else window - 1
        for row, source in enumerate((1, 0, 1)):
            want = torch.cat((first[source, :, 5 - kept :], new[row]), dim=1)
            assert torch.equal(k[row, :, -want.shape[1] :], want), f"row {row}"
        assert torch.equal(cache.keys, before), "the cache read from has changed"
        with pytest.raises(ValueError, match="5"):
            cache.select([0], 4)
