"""KV caches that are wrong in ways people have shipped."""

import torch

from littlelm_core.attention import KVCache


class NoCheck(KVCache):
    """The newest tokens are cut to what fits."""

    def update(self, k, v):
        room = self.capacity - self.length
        return super().update(k[:, :, :room], v[:, :, :room])


class ChunkCheck(KVCache):
    """A chunk is compared with the cache, without what is in it already."""

    def update(self, k, v):
        if k.shape[2] > self.capacity:
            raise ValueError("too long")
        end = self.length + k.shape[2]
        if end > self.keys.shape[2] and self.window is None:
            shift = end - self.keys.shape[2]
            self.keys = self.keys.roll(-shift, 2)
            self.values = self.values.roll(-shift, 2)
            self.length -= shift
        elif end > self.capacity:
            self.capacity = end
        return super().update(k, v)


class CountsRefused(KVCache):
    """The length moves before the check."""

    def update(self, k, v):
        try:
            return super().update(k, v)
        except ValueError:
            self.length += k.shape[2]
            raise


class WriteFirst(KVCache):
    """A chunk overwrites what its first tokens still need."""

    def update(self, k, v):
        tokens, slots = k.shape[2], self.keys.shape[2]
        end = self.length + tokens
        if self.window is None or end <= slots or end > self.capacity or tokens == 1:
            return super().update(k, v)
        self.length = end
        at = torch.arange(end - tokens, end)[-slots:] % slots
        self.keys[:, :, at], self.values[:, :, at] = k[:, :, -slots:], v[:, :, -slots:]
        order = torch.arange(end - slots, end) % slots
        return self.keys[:, :, order], self.values[:, :, order]


class WindowPlusOne(KVCache):
    def __init__(self, batch, kv_heads, length, head_dim, *args, window=None, **keys):
        window = window + 1 if window and 0 < window < length else window
        super().__init__(
            batch, kv_heads, length, head_dim, *args, window=window, **keys
        )


class NoRing(KVCache):
    """The window is known to the layer alone; the memory is that of all tokens."""

    def __init__(self, *args, window=None, **keys):
        super().__init__(*args, **keys)


class BatchBroadcast(KVCache):
    """One row is copied into all of them."""

    def update(self, k, v):
        rows = self.keys.shape[0]
        return super().update(k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1))


class Swapped(KVCache):
    """Values are read from the slot before after the ring has turned."""

    def update(self, k, v):
        k_seen, v_seen = super().update(k, v)
        if self.window is not None and self.length > self.window:
            v_seen = v_seen.roll(1, 2)
        return k_seen, v_seen


class Growing(KVCache):
    """Concatenates: the dtype of the newest chunk wins."""

    def update(self, k, v):
        k_seen, v_seen = super().update(k, v)
        return k_seen.to(k.dtype), v_seen.to(v.dtype)


class KeepsLength(KVCache):
    def reset(self):
        self.keys.zero_()
        self.values.zero_()


class SelectsInOrder(KVCache):
    """The first rows are kept, whichever were asked for."""

    def select(self, rows, length):
        last = len(self.keys) - 1
        return super().select([min(i, last) for i in range(len(rows))], length)


class SelectsFromTheStart(KVCache):
    """The new cache does not know how much it has seen."""

    def select(self, rows, length):
        new = super().select(rows, length)
        new.length = 0
        return new


ZOO = {
    "cut to what fits": (NoCheck, "test_overflow_raises_before_anything_is_lost"),
    "only the chunk is checked": (
        ChunkCheck,
        "test_overflow_raises_before_anything_is_lost",
    ),
    "a refused chunk counts": (
        CountsRefused,
        "test_overflow_raises_before_anything_is_lost",
    ),
    "written before it is read": (WriteFirst, "test_a_window_keeps_what_it_must"),
    "one token too many": (WindowPlusOne, "test_a_window_keeps_what_it_must"),
    "no ring": (NoRing, "test_a_window_bounds_the_memory"),
    "one row for all": (BatchBroadcast, "test_another_batch_raises"),
    "values of another token": (Swapped, "test_a_window_keeps_what_it_must"),
    "dtype of the newest chunk": (Growing, "test_dtype_is_the_caches"),
    "reset keeps the length": (KeepsLength, "test_reset_forgets"),
    "other rows are selected": (
        SelectsInOrder,
        "test_rows_go_on_from_rows_that_were_read",
    ),
    "a selected cache starts at 0": (
        SelectsFromTheStart,
        "test_rows_go_on_from_rows_that_were_read",
    ),
}
