# From chapters/02_attention.md by `littlelm book export`: edit the chapter.
"""Attention: how a token reads the tokens before it.

Every other layer of the model treats each token alone; this one moves information from
earlier positions to later ones. Without it a language model is a table of bigrams.

What is here: rotary positions (tables are computed on demand, always in fp32), the mask
(one definition of causal and of the window, for training, prefill and decoding), a
manual path to read and a fused one to run, grouped key/value heads, and the KV cache.

What the hardware wants: no score matrix in memory (the fused kernel keeps tiles of it
on chip), as few bytes as possible in the cache (decoding reads all of it for each
token), and no mask where the kernel knows the pattern by itself.

Shapes: B rows, T tokens (queries), S keys seen, H query heads, K key/value heads,
D head width, C model width.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from littlelm_core.config import ConfigError, LittleLMError, register

__all__ = [
    "Attention",
    "KVCache",
    "apply_rope",
    "attend",
    "causal_mask",
    "rope_frequencies",
    "rope_table",
]


# ---- Positions: turn the pairs


def rope_frequencies(
    head_dim: int,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the head_dim / 2 angles per position, in radians, fp32.

    scaling: None, or a table with "rope_type": "default" (none), "linear" (needs
    factor) or "llama3" (needs factor, low_freq_factor, high_freq_factor and
    original_max_position_embeddings). Names and formulas are Hugging Face's.
    Raises ConfigError: odd head width, unknown type, missing key.
    Source: RoFormer (arXiv 2104.09864); llama3: Meta's Llama 3.1 reference code.
    """
    if head_dim % 2:
        raise ConfigError(f"RoPE turns pairs: head_dim = {head_dim} must be even")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequency = 1.0 / theta ** (exponent / head_dim)
    scaling = dict(scaling or {"rope_type": "default"})
    kind = scaling.get("rope_type")
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"unknown rope_type {kind!r} in rope_scaling: "
            "default, linear and llama3 are known"
        )
    try:
        if kind == "linear":
            return frequency / scaling["factor"]
        if kind == "llama3":
            return _llama3(frequency, **{key: scaling[key] for key in _LLAMA3_KEYS})
    except KeyError as error:
        raise ConfigError(
            f"rope_scaling of type {kind!r} lacks the key {error.args[0]!r}"
        ) from error
    return frequency


_LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def _llama3(
    frequency: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Tensor:
    """Slow pairs are divided by factor, fast ones kept, those between blended."""
    wavelength = 2 * math.pi / frequency  # tokens in a turn
    turns = original_max_position_embeddings / wavelength
    keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequency / factor + keep * frequency


def rope_table(
    positions: Tensor | int,
    head_dim: int,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (cos_TD, sin_TD) for these positions, always fp32.

    positions: a 1-D tensor of T positions, or a count n that stands for 0 ... n-1.
    Half-split convention, as in Hugging Face's Llama: entry i is paired with i + D/2,
    so both halves of a row are equal.
    Nothing is stored: the caller knows when positions, theta or scaling change.
    """
    if not isinstance(positions, Tensor):
        positions = torch.arange(positions)
    frequency = rope_frequencies(head_dim, theta, scaling, positions.device)
    # A product of fp32 numbers: bf16 has 8 bits and cannot tell position 257 from 256.
    angle_TD = (positions.float()[:, None] * frequency).repeat(1, 2)
    return angle_TD.cos(), angle_TD.sin()


def apply_rope(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of every head by its angle; the dtype of x returns.

    The products are taken in fp32 (the tables' dtype) and rounded once at the end.
    Raises ValueError when the table has not exactly one row a token.
    """
    if cos_TD.shape[-2] != x_BHTD.shape[-2]:
        raise ValueError(
            f"RoPE table has {cos_TD.shape[-2]} rows for {x_BHTD.shape[-2]} tokens: "
            "make it for exactly these positions"
        )
    first, second = x_BHTD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    # One call for the second product and the sum: decoding pays by the call.
    return torch.addcmul(x_BHTD * cos_TD, turned, sin_TD).to(x_BHTD.dtype)


# ---- What may see what


def causal_mask(
    queries: int,
    keys: int,
    window: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return mask_TS, True where a query may attend to a key.

    The queries are the last `queries` of the `keys` positions, so a chunk behind a
    cache sees all that was cached. With a window of W a token sees itself and the W-1
    before it; a window that is None, zero, negative or >= keys means none.
    """
    at = torch.arange(keys - queries, keys, device=device)[:, None]
    key_at = torch.arange(keys, device=device)
    mask = key_at <= at
    if window is not None and 0 < window < keys:
        mask &= key_at > at - window
    return mask


# ---- Attention written out


def attend(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return softmax(q kᵀ / √D) v, written out; softmax in fp32.

    mask: True = may attend, any shape that broadcasts to B, H, T, S; None = everything.
    A query that may attend to nothing gives 0, with finite gradients.
    Query heads of one group are consecutive: head h reads key/value head h // (H / K).
    Raises ValueError when H is not a multiple of K.
    """
    heads, kv_heads = q_BHTD.shape[1], k_BKSD.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} key/value heads")
    k_BHSD = k_BKSD.repeat_interleave(heads // kv_heads, dim=1)
    v_BHSD = v_BKSD.repeat_interleave(heads // kv_heads, dim=1)
    scores_BHTS = q_BHTD @ k_BHSD.mT / math.sqrt(q_BHTD.shape[-1])
    if mask is None:
        weights_BHTS = scores_BHTS.softmax(-1, dtype=torch.float32)
    else:
        # The lowest number, not -inf: softmax of a row of -inf is NaN, and so is its
        # gradient. The second fill makes such a row 0 and changes no other.
        lowest = torch.finfo(scores_BHTS.dtype).min
        scores_BHTS = scores_BHTS.masked_fill(~mask, lowest)
        weights_BHTS = scores_BHTS.softmax(-1, dtype=torch.float32)
        weights_BHTS = weights_BHTS.masked_fill(~mask, 0.0)
    return weights_BHTS.to(v_BHSD.dtype) @ v_BHSD


# ---- Keep keys and values


class KVCache:
    """Keys and values of one layer, for the tokens seen so far.

    Two buffers (batch, kv_heads, slots, head_dim) are made at once: slots = length, or
    the window when that is shorter, as a ring in which the newest token takes the place
    of the one that just left the window.
    `length` is the number of tokens seen: the position of the next one.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        window: int | None = None,
    ) -> None:
        self.capacity = length
        self.window = window if window and 0 < window < length else None
        shape = (batch, kv_heads, self.window or length, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.keys.nbytes + self.values.nbytes

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self.length = 0

    def select(self, rows: Sequence[int] | Tensor, length: int) -> "KVCache":
        """Return a new cache whose row i goes on from row rows[i], for `length` tokens.

        A row may be taken several times: its text was then read once for all of them.
        Raises LittleLMError when `length` is less than what has been seen.
        """
        if length < self.length:
            raise LittleLMError(
                f"a cache of {length} tokens cannot go on from {self.length} seen"
            )
        batch, kv_heads, _, head_dim = self.keys.shape
        dtype, device = self.keys.dtype, self.keys.device
        new = KVCache(len(rows), kv_heads, length, head_dim, dtype, device, self.window)
        seen = min(self.length, self.keys.shape[2])
        at: Any = slice(None)  # a single row is broadcast
        if batch > 1:
            at = torch.as_tensor(rows, device=device)
        new.keys[:, :, :seen] = self.keys[at, :, :seen]
        new.values[:, :, :seen] = self.values[at, :, :seen]
        new.length = self.length
        return new

    def update(self, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store T tokens; return the (k_BKSD, v_BKSD) that these T may need.

        They end at the newest token, in order; only for one token in a full ring they
        are in the ring's order, and all of them are visible.
        Raises LittleLMError before anything is stored when they do not fit.
        """
        start, tokens = self.length, k_BKTD.shape[2]
        end = start + tokens
        if end > self.capacity:
            raise LittleLMError(
                f"the cache holds {self.capacity} tokens: {start} seen + {tokens} new "
                "do not fit; make it longer or the text shorter"
            )
        if k_BKTD.shape[0] != self.keys.shape[0]:
            raise LittleLMError(
                f"the cache has {self.keys.shape[0]} rows, the batch {k_BKTD.shape[0]}"
            )
        slots = self.keys.shape[2]
        self.length = end
        if end <= slots:
            self.keys[:, :, start:end] = k_BKTD
            self.values[:, :, start:end] = v_BKTD
            return self.keys[:, :, :end], self.values[:, :, :end]
        if tokens == 1:
            slot = start % slots
            self.keys[:, :, slot : slot + 1] = k_BKTD
            self.values[:, :, slot : slot + 1] = v_BKTD
            return self.keys, self.values
        # The first of the new tokens still sees slots - 1 old ones, which the last of
        # them overwrite: read before writing.
        at = torch.arange(start - min(start, slots - 1), end, device=self.keys.device)
        old = at[:-tokens] % slots
        k = torch.cat((self.keys[:, :, old], k_BKTD.to(self.keys.dtype)), dim=2)
        v = torch.cat((self.values[:, :, old], v_BKTD.to(self.values.dtype)), dim=2)
        new = at[-slots:] % slots
        self.keys[:, :, new] = k[:, :, -slots:]
        self.values[:, :, new] = v[:, :, -slots:]
        return k, v


# ---- The layer


@register("attention", "gqa")
class Attention(nn.Module):
    """Causal attention with grouped key/value heads, RoPE and QK-norm.

    dim: model width C. heads, kv_heads: H and K, with H a multiple of K. head_dim: D,
    dim / heads unless given. qk_norm: q and k of each head are divided by their root
    mean square before RoPE, without gains. window: see `causal_mask`. manual: run
    `attend` in place of the fused kernel (to read, to debug; same values to 1e-5).
    Projections wq, wk, wv, wo carry no bias.
    Raises ConfigError: heads that do not divide, an odd head width.
    Sources: GQA (arXiv 2305.13245), QK-norm (arXiv 2010.04245).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int | None = None,
        qk_norm: bool = True,
        window: int | None = None,
        manual: bool = False,
    ) -> None:
        super().__init__()
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ConfigError(
                f"heads = {heads} must be a multiple of kv_heads = {kv_heads}"
            )
        if head_dim is None:
            if dim % heads:
                raise ConfigError(
                    f"dim = {dim} is no multiple of heads = {heads}: give head_dim"
                )
            head_dim = dim // heads
        if head_dim % 2:
            raise ConfigError(f"RoPE turns pairs: head_dim = {head_dim} must be even")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.qk_norm = qk_norm
        self.window = window if window is not None and window > 0 else None
        self.manual = manual
        self.wq = nn.Linear(dim, heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(
        self,
        x_BTC: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        value_embed: Tensor | None = None,
    ) -> Tensor:
        """Return what each token read, B × T × C.

        rope: `rope_table` of exactly these T positions (with a cache they start at
        cache.length). value_embed: B × T × K × D, added to the values.
        """
        batch, tokens, _ = x_BTC.shape
        q_BHTD = self._split(self.wq(x_BTC), self.heads)
        k_BKTD = self._split(self.wk(x_BTC), self.kv_heads)
        v_BKTD = self._split(self.wv(x_BTC), self.kv_heads)
        if value_embed is not None:
            v_BKTD = v_BKTD + value_embed.transpose(1, 2).to(v_BKTD.dtype)
        if tokens == 1:  # decoding pays by the call, so q and k share theirs: -15 %
            both = self._place(torch.cat((q_BHTD, k_BKTD), dim=1), rope)
            q_BHTD, k_BKTD = both.split((self.heads, self.kv_heads), dim=1)
        else:
            q_BHTD, k_BKTD = self._place(q_BHTD, rope), self._place(k_BKTD, rope)
        k_BKSD, v_BKSD = k_BKTD, v_BKTD
        if cache is not None:
            if cache.window not in (None, self.window):
                raise LittleLMError(
                    f"the cache keeps {cache.window} tokens, the layer's window is "
                    f"{self.window}: make both the same"
                )
            k_BKSD, v_BKSD = cache.update(k_BKSD, v_BKSD)
        y_BHTD = self._read(q_BHTD, k_BKSD, v_BKSD)
        return self.wo(y_BHTD.transpose(1, 2).reshape(batch, tokens, -1))

    def _split(self, x_BTC: Tensor, heads: int) -> Tensor:
        batch, tokens, _ = x_BTC.shape
        return x_BTC.view(batch, tokens, heads, self.head_dim).transpose(1, 2)

    def _place(self, x_BHTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Norm each head, then turn it to its position."""
        if self.qk_norm:
            x_BHTD = F.rms_norm(x_BHTD, (self.head_dim,), eps=1e-6)
        return apply_rope(x_BHTD, *rope)

    def _read(self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
        """Choose the cheapest form of the same attention."""
        batch, heads, tokens, width = q_BHTD.shape
        seen = k_BKSD.shape[2]
        windowed = self.window is not None and self.window < seen
        if self.manual:
            mask = causal_mask(tokens, seen, self.window, q_BHTD.device)
            return attend(q_BHTD, k_BKSD, v_BKSD, mask)
        if tokens == 1 and not windowed:
            # One query sees every key, so no mask; and the heads of a group can stand
            # in the place of the tokens, so that keys are not repeated for them.
            q_BKGD = q_BHTD.reshape(batch, self.kv_heads, -1, width)
            y_BKGD = F.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD)
            return y_BKGD.reshape(batch, heads, 1, width)
        grouped = heads != self.kv_heads
        if tokens == seen and not windowed:
            # "is_causal" is the top-left triangle: right only when nothing is cached.
            return F.scaled_dot_product_attention(
                q_BHTD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped
            )
        mask = causal_mask(tokens, seen, self.window, q_BHTD.device)
        return F.scaled_dot_product_attention(
            q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, enable_gqa=grouped
        )
