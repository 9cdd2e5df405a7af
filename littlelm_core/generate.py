# From chapters/07_generate.md by `littlelm book export`: edit the chapter.
"""Generation: from logits to the next id, and from ids to text that streams.

A trained model only scores the next token. Here one is drawn: the temperature sharpens
or flattens the scores, top-k and top-p cut the tail off, a generator makes the draw
repeatable. Without the tail cut a small error is drawn sooner or later, and the text
that follows it follows the error.

What the hardware wants: one token reads every weight once, so generation is bound by
memory, not by arithmetic. The KV cache keeps the work per token constant, weights are
laid out column by column for CPU matrix-vector products, and the loop around the model
does as little as it can.

Shapes: B rows, T tokens, V vocabulary, K tokens kept as candidates.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from littlelm_core.attention import Attention, KVCache, apply_rope
from littlelm_core.blocks import Block, ReLU2, RMSNorm, SwiGLU
from littlelm_core.config import LittleLMError
from littlelm_core.model import LanguageModel, ModelConfig
from littlelm_core.tokenizer import Tokenizer

__all__ = [
    "DecodeBlock",
    "GenerationError",
    "can_fuse",
    "candidates",
    "check_prompts",
    "check_settings",
    "columns",
    "cut_at_stop",
    "for_decoding",
    "generate",
    "normed",
    "sample",
    "steps",
    "stream",
    "stream_rows",
    "stream_text",
]


# ---- From scores to one id


class GenerationError(LittleLMError):
    """Settings, scores, a prompt or a length from which nothing can be drawn."""


def check_settings(
    temperature: float, top_k: int | None = None, top_p: float | None = None
) -> None:
    """Raise GenerationError for settings that mean nothing."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise GenerationError(
            f"temperature = {temperature} must be a number of at least 0 "
            "(0 takes the likeliest token)"
        )
    if top_k is not None and top_k < 0:
        raise GenerationError(f"top_k = {top_k} must be at least 1, or 0 for off")
    if top_p is not None and not 0 <= top_p <= 1:
        raise GenerationError(f"top_p = {top_p} must lie between 0 and 1 (1 is off)")


def candidates(
    logits_BV: Tensor, top_k: int | None = None, top_p: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the (logits_BK, ids_BK) that may be drawn, best first.

    top_k keeps the k best (None, 0 or at least V: all). Of those, top_p keeps the
    smallest set whose probability reaches p, and always the best; the rest of the row
    is -inf. Temperature comes first: divide the logits before the cut.
    Source of top-p: Holtzman et al., arXiv 1904.09751.
    """
    vocab_size = logits_BV.shape[-1]
    kept = min(top_k or vocab_size, vocab_size)
    sorted_BK, ids_BK = logits_BV.topk(kept, dim=-1)
    if top_p is not None and top_p < 1:
        p_BK = sorted_BK.softmax(-1, dtype=torch.float32)
        before_BK = p_BK.cumsum(-1) - p_BK
        # A millionth of slack: .5 + .3 reaches .8, whatever rounding makes of it.
        cut_BK = before_BK >= top_p - 1e-6
        cut_BK[..., 0] = False
        sorted_BK = sorted_BK.masked_fill(cut_BK, -math.inf)
    return sorted_BK, ids_BK


def sample(
    logits_BV: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one id for each row: ids_B (int64).

    temperature divides the logits; 0 takes the best id (the lowest among equals).
    top_k, top_p: see `candidates`. Rows draw independently, from `generator` or from
    torch's default one. An id at -inf is never drawn.
    Raises GenerationError (a ValueError): settings out of range, a row that holds NaN
    or inf, or has no finite score at all.
    """
    check_settings(temperature, top_k, top_p)
    best_B, ids_B = logits_BV.max(-1)
    # NaN and inf get through max, and so does a row of -inf: one check finds all.
    wrong = [row for row, best in enumerate(best_B.tolist()) if not math.isfinite(best)]
    if wrong:
        raise GenerationError(
            f"rows {wrong} of the logits hold NaN or inf, or no finite score at all"
        )
    if temperature == 0:
        return ids_B
    # Less the best first: a low temperature then cannot overflow.
    least = torch.finfo(torch.float32).tiny  # 0 / 0 where it rounds to nothing
    scaled_BV = (logits_BV.float() - best_B.float()[:, None]) / max(temperature, least)
    if not top_k and (top_p is None or top_p == 1):
        p_BV = scaled_BV.softmax(-1)
        return torch.multinomial(p_BV, 1, generator=generator)[:, 0]
    kept_BK, ids_BK = candidates(scaled_BV, top_k, top_p)
    drawn_B1 = torch.multinomial(kept_BK.softmax(-1), 1, generator=generator)
    return ids_BK.gather(-1, drawn_B1)[:, 0]


# ---- One token after another


def check_prompts(
    prompts: Sequence[Sequence[int]],
    cfg: ModelConfig,
    max_new_tokens: int,
    slide: bool = False,
) -> None:
    """Raise GenerationError before the first wrong token could be drawn."""
    if max_new_tokens < 0:
        raise GenerationError(f"max_new_tokens = {max_new_tokens} must be at least 0")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise GenerationError(f"prompt {row} is empty: start it with BOS")
        wrong = [i for i in (min(prompt), max(prompt)) if not 0 <= i < cfg.vocab_size]
        if wrong:
            raise GenerationError(
                f"prompt {row} holds the id {wrong[0]}, the vocabulary {cfg.vocab_size}"
                " ids: is this the model's own tokenizer?"
            )
        # The last token drawn is never fed back, so it needs no position.
        most = cfg.context - len(prompt) + 1
        if max_new_tokens > most and not slide:
            raise GenerationError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones do "
                f"not fit the context of {cfg.context}: at most {max(most, 0)} new "
                "ones, or let the context slide"
            )


@torch.inference_mode()
def steps(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    cache: bool = True,
    slide: bool = False,
) -> Iterator[list[int | None]]:
    """Yield the new id of each row, step by step; None while a row reads its prompt.

    A row with a longer prompt goes on reading while the others draw already: nothing is
    padded, and each row sees its own tokens only, at their own positions. The iterator
    ends when the longest prompt has its new tokens.
    """
    context, device = model.cfg.context, next(model.parameters()).device
    shown = min(map(len, prompts))  # tokens that every row has
    longest = max(map(len, prompts))
    window = [list(prompt[:shown]) for prompt in prompts]  # what the model is shown
    kv, feed_BT = None, None
    training = model.training
    model.eval()
    try:
        for at in range(shown, longest + max_new_tokens):
            if len(window[0]) > context:
                # Slide: the first id (BOS) and the newest half of the context stay, and
                # move to the first positions. Cached or not, the model sees the same.
                newest = max(context // 2 - 1, 1)
                window = [row[:1] + row[-newest:] for row in window]
                kv = feed_BT = None
            if cache and kv is None:
                room = min(context, longest + max_new_tokens)
                kv = model.make_cache(len(window), room)
            if feed_BT is None or not cache:
                feed_BT = torch.tensor(window, device=device)
            logits_BV = model.next_token_logits(feed_BT, kv)
            ids_B = sample(logits_BV, temperature, top_k, top_p, generator)
            feed_BT, new = ids_B[:, None], ids_B.tolist()
            if at < longest:  # some rows still read their prompts
                reads = [at < len(prompt) for prompt in prompts]
                for row, prompt in enumerate(prompts):
                    new[row] = prompt[at] if reads[row] else new[row]
                feed_BT = torch.tensor(new, device=device)[:, None]
                yield [None if r else i for r, i in zip(reads, new, strict=True)]
            else:
                yield new
            for row, id_ in zip(window, new, strict=True):
                row.append(id_)
    finally:
        model.train(training)


# ---- What one token costs


def columns(*weights_OI: Tensor, gain_I: Tensor | None = None) -> Tensor:
    """Return `x @ w`'s matrix, I x O, of one or several O x I matrices side by side.

    One row times such a matrix adds up scaled rows, eight or sixteen numbers at a time;
    torch's product with an O x I matrix adds along each row, at half the speed or so.
    gain_I multiplies the inputs: a norm's gain need not be applied to each token.
    """
    # Joined first: copying a whole matrix across is fast, into a slice it is not.
    joined_OI = torch.cat(weights_OI) if len(weights_OI) > 1 else weights_OI[0]
    # A clone: contiguous() would hand back a matrix that lies by columns already.
    w_IO = joined_OI.detach().t().clone(memory_format=torch.contiguous_format)
    return w_IO if gain_I is None else w_IO.mul_(gain_I.detach()[:, None])


class DecodeBlock(nn.Module):
    """A Llama block for decoding on a CPU: the same numbers in fewer operations.

    Query, key and value are one product, gate and up another; the norms' gains and the
    residual scalars are multiplied into the matrices, once. Built from a Block of this
    course's own parts, whose values it copies.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        attention, ffn = block.attention, block.ffn
        self.attention, self.gated = attention, isinstance(ffn, SwiGLU)
        self.eps = block.attention_norm.eps, block.ffn_norm.eps
        qkv = [w.weight for w in (attention.wq, attention.wk, attention.wv)]
        up = ([ffn.w_gate] if self.gated else []) + [ffn.w_up]
        self.w_qkv = columns(*qkv, gain_I=block.attention_norm.weight)
        self.w_up = columns(*(w.weight for w in up), gain_I=block.ffn_norm.weight)
        self.w_o = columns(attention.wo.weight)
        self.w_down = columns(ffn.w_down.weight)
        if block.attention_scale is not None:
            self.w_o *= block.attention_scale.detach()
            self.w_down *= block.ffn_scale.detach()
        self.value_table = block.value_table
        if self.value_table is not None:
            self.value_gate = 2.0 * block.value_gate.detach().sigmoid()[:, None]

    def forward(
        self,
        x_BTC: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        ids_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the stream after this block, as Block does."""
        layer, (batch, tokens, dim) = self.attention, x_BTC.shape
        heads, both = layer.heads, layer.heads + layer.kv_heads
        x_NC = x_BTC.view(-1, dim)
        qkv_NE = normed(x_NC, self.eps[0]) @ self.w_qkv
        qkv_BTHD = qkv_NE.view(batch, tokens, -1, layer.head_dim)
        if self.value_table is not None:
            embed_BTKD = self.value_table(ids_BT).view_as(qkv_BTHD[:, :, both:])
            qkv_BTHD[:, :, both:] += embed_BTKD * self.value_gate
        qkv_BHTD = qkv_BTHD.transpose(1, 2)
        qk_BHTD, v_BKSD = qkv_BHTD[:, :both], qkv_BHTD[:, both:]
        if layer.qk_norm:
            qk_BHTD = F.rms_norm(qk_BHTD, (layer.head_dim,), eps=1e-6)
        qk_BHTD = apply_rope(qk_BHTD, *rope)
        k_BKSD = qk_BHTD[:, heads:]
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(k_BKSD, v_BKSD)
        y_BHTD = layer._read(qk_BHTD[:, :heads], k_BKSD, v_BKSD)
        y_NE = y_BHTD.transpose(1, 2).reshape(batch * tokens, -1)
        x_NC = torch.addmm(x_NC, y_NE, self.w_o)
        up_NF = normed(x_NC, self.eps[1]) @ self.w_up
        if self.gated:
            gate_NF, up_NF = up_NF.chunk(2, dim=-1)
            up_NF = F.silu(gate_NF).mul_(up_NF)
        else:
            up_NF = F.relu(up_NF).square_()
        return torch.addmm(x_NC, up_NF, self.w_down).view(batch, tokens, dim)


def normed(x_NC: Tensor, eps: float) -> Tensor:
    """Return x / rms(x). A single row takes a dot product: two operations, not ten."""
    if len(x_NC) > 1:
        return F.rms_norm(x_NC, x_NC.shape[1:], eps=eps)
    x_C = x_NC[0]
    return x_NC * (torch.dot(x_C, x_C).item() / len(x_C) + eps) ** -0.5


def can_fuse(block: nn.Module) -> bool:
    """Only blocks made of exactly the parts that DecodeBlock knows."""
    if type(block) is not Block or type(block.ffn) not in (SwiGLU, ReLU2):
        return False
    attention, norms = block.attention, (block.attention_norm, block.ffn_norm)
    if type(attention) is not Attention or attention.manual:
        return False
    projections = [*attention.children(), *block.ffn.children()]
    return all(type(norm) is RMSNorm for norm in norms) and all(
        type(w) is nn.Linear and w.bias is None for w in projections
    )


def for_decoding(model: nn.Module, most_bytes: int = 1 << 31) -> nn.Module:
    """Return a copy of a model that decodes faster on a CPU; the model is left alone.

    Blocks of this course's parts become DecodeBlocks; all other matrices are laid out
    by columns. Values are the same up to rounding. The model itself is returned on a
    GPU, in another dtype than fp32, and when the copy would exceed `most_bytes`.
    """
    weights = list(model.parameters())
    plain = all(w.device.type == "cpu" and w.dtype == torch.float32 for w in weights)
    plain = plain and not torch.is_autocast_enabled("cpu")
    if not plain or sum(w.nbytes for w in weights) > most_bytes:
        return model
    # deepcopy looks into its memo first: what stands there is not copied but used.
    memo: dict[int, Any] = {id(x): x for x in (*weights, *model.buffers())}
    fused: set[int] = set()
    for module in model.modules():  # a block comes before what it holds
        if can_fuse(module):
            memo[id(module)] = DecodeBlock(module)
            fused.update(id(inner) for inner in module.modules())
        elif type(module) is nn.Linear and id(module) not in fused:
            memo[id(module.weight)] = _by_columns(module.weight)
    if isinstance(model, LanguageModel) and model.cfg.tied:
        memo[id(model.embedding.weight)] = _by_columns(model.embedding.weight)
    return copy.deepcopy(model, memo).eval()


def _by_columns(weight: Tensor) -> nn.Parameter:
    """The same matrix, of the same shape, in another order in memory."""
    return nn.Parameter(columns(weight).t(), requires_grad=False)


# ---- All of it together


def stream_rows(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    cache: bool = True,
    slide: bool = False,
) -> Iterator[list[int | None]]:
    """Check everything, prepare the model and return the iterator of `steps`.

    The model generates in eval mode. Raises before the first token: see `generate`.
    """
    check_settings(temperature, top_k, top_p)
    check_prompts(prompts, model.cfg, max_new_tokens, slide)
    if seed is not None and generator is not None:
        raise GenerationError("give a seed or a generator, not both")
    if seed is not None:
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
    # The copy costs about as much as ten tokens.
    worth_it = cache and max_new_tokens >= 32
    decoder = for_decoding(model) if worth_it else model
    settings = (temperature, top_k, top_p, generator, cache, slide)
    return steps(decoder, prompts, max_new_tokens, *settings)


def stream(
    model: LanguageModel,
    ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    *,
    stop: Iterable[int] = (),
    **settings: Any,
) -> Iterator[int]:
    """Return an iterator over the new ids of one prompt, each as soon as it is drawn.

    It ends after max_new_tokens, or at an id in `stop`, which is not given out.
    settings: see `generate`. Raises as `generate` does, at once.
    """
    how = (max_new_tokens, temperature, top_k, top_p)
    rows = stream_rows(model, [[int(i) for i in ids]], *how, **settings)
    stop = frozenset(stop)
    return itertools.takewhile(lambda id_: id_ not in stop, (row[0] for row in rows))


def generate(
    model: LanguageModel,
    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    *,
    stop: Iterable[int] = (),
    seed: int | None = None,
    generator: torch.Generator | None = None,
    cache: bool = True,
    slide: bool = False,
) -> list[int] | list[list[int]]:
    """Return the new ids of one prompt, or of each of several prompts.

    ids: one prompt (a list or a 1-D tensor), or rows of them, of equal length or not.
    max_new_tokens: for each row. temperature, top_k, top_p: see `sample`.
    stop: ids that end a row; they are not returned. seed or generator: same seed, same
    text. cache: False reads everything again for each token, with the same result.
    slide: at the end of the context go on with the first id and the newest half of it;
    without, what does not fit is refused.
    Raises GenerationError (a ValueError) before the first token: settings out of range,
    an empty prompt, an id outside the vocabulary, more tokens than the context holds.
    """
    how = (max_new_tokens, temperature, top_k, top_p)
    settings = {"seed": seed, "generator": generator, "cache": cache, "slide": slide}
    ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if not ids or not hasattr(ids[0], "__len__"):
        return list(stream(model, ids, *how, stop=stop, **settings))
    prompts, stop = [[int(i) for i in row] for row in ids], frozenset(stop)
    found: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts))) if max_new_tokens else set()
    for new in stream_rows(model, prompts, *how, **settings):
        for row in [r for r in open_rows if new[r] is not None]:
            if new[row] not in stop:
                found[row].append(new[row])
            if new[row] in stop or len(found[row]) == max_new_tokens:
                open_rows.remove(row)
        if not open_rows:
            break
    return found


# ---- Text that streams


def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    stop: Iterable[str] = (),
    **settings: Any,
) -> Iterator[str]:
    """Return an iterator over pieces of the text that follows a prompt.

    The prompt is put behind BOS; the text ends before any special token (the model then
    began another document) or before a text in `stop`. A piece never holds half a
    character, nor text that might still become a stop.
    settings: see `generate`. Raises as `generate` does, at once.
    """
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    special = tokenizer.special_ids
    new = stream(model, ids, max_new_tokens, stop=special.values(), **settings)
    return cut_at_stop(_pieces(tokenizer, new), [s for s in stop if s not in special])


def _pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    decoder = tokenizer.stream()
    for id_ in ids:
        yield decoder.push(id_)
    yield decoder.flush()


def cut_at_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield a text's pieces up to the first of `stops`, which is held back.

    Text is given out once it can no longer be the beginning of a stop.
    """
    held = ""
    for piece in pieces:
        held += piece
        found = [held.index(stop) for stop in stops if stop and stop in held]
        if found:
            yield held[: min(found)]
            return
        keep = max((_begun(held, stop) for stop in stops), default=0)
        if len(held) > keep:
            yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    if held:
        yield held


def _begun(text: str, stop: str) -> int:
    """Characters at the end of text with which `stop` could begin."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
