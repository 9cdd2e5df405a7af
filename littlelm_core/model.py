# From chapters/04_model.md by `littlelm book export`: edit the chapter.
"""The model and its loss: ids in, logits out, one number to make smaller.

An embedding, a stack of blocks, a norm and a head are all of a language model. What
this module adds to the blocks is where runs get expensive or go wrong: a description
that refuses impossible shapes, construction without memory, a loss that never holds all
logits at once, and counts (parameters by role, FLOPs, bits per byte) that every plan
and every optimizer reads.

What the hardware wants: a vocabulary padded to a multiple of 64 for the largest matrix
product of the model, and no tensor of tokens x vocabulary in memory. For the reference
run that tensor is 40,960 x 50,304 numbers: 8 GB in fp32, three times over.

Shapes: B rows, T tokens of a row, N = B T tokens, C model width, V padded vocabulary.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from littlelm_core.attention import KVCache, rope_frequencies, rope_table
from littlelm_core.blocks import fill_normal, init_parameter
from littlelm_core.config import (
    ROLES,
    ConfigError,
    LittleLMError,
    RunConfig,
    nearest,
    register,
    resolve,
)

__all__ = [
    "CHUNK_LOGITS",
    "LanguageModel",
    "ModelConfig",
    "PART_FIELDS",
    "bits_per_byte",
    "count_parameters",
    "flops_per_token",
    "linear_cross_entropy",
    "matrix_product_parameters",
    "model_config",
    "parameter_role",
]


# ---- What a model is

# The parts inside a model: fields of ModelConfig, sections of a run file.
PART_FIELDS = ("attention", "ffn", "norm", "block", "loss")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model's shape. Frozen; checked when it is made.

    dim C, layers, heads and kv_heads (a divisor of heads), ffn_dim, context (the most
    tokens a row may have). vocab_size counts real ids; the tables are padded to a
    multiple of vocab_multiple. head_dim: dim / heads unless given. softcap c bounds the
    logits by c tanh(z / c); window limits attention; both None or -1 for off.
    tied: the head uses the embedding's matrix. rope_scaling: see `rope_table`.
    attention, ffn, norm, block, loss: part names ("gqa", "file.py:Name"); part_options
    holds each part's own keys under the same word.
    Raises ConfigError in one line for anything that cannot be built.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab_size: int
    context: int
    head_dim: int | None = None
    ffn: str = "swiglu"
    qk_norm: bool = True
    softcap: float | None = None
    residual_scales: bool = False
    value_embeddings: bool = False
    tied: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    norm_eps: float = 1e-6
    vocab_multiple: int = 64
    window: int | None = None
    attention: str = "gqa"
    norm: str = "rmsnorm"
    block: str = "llama"
    loss: str = "chunked"
    part_options: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict, hash=False
    )

    def __post_init__(self) -> None:
        # A TOML file has no None: -1 takes its place, so that a run can switch off
        # what the run it extends had switched on.
        for key in ("head_dim", "softcap", "window"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                object.__setattr__(self, key, None)
        if not self.rope_scaling:
            object.__setattr__(self, "rope_scaling", None)
        self._check_sizes()
        if self.head_dim is None:
            if self.dim % self.heads:
                raise ConfigError(
                    f"model.dim = {self.dim} is no multiple of model.heads = "
                    f"{self.heads}: change one, or give model.head_dim"
                )
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model.heads = {self.heads} must be a multiple of model.kv_heads = "
                f"{self.kv_heads}: each key/value head serves a group of equal size"
            )
        # Raises for an odd head width and for a scaling it does not know.
        rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)
        for kind in self.part_options:
            if kind not in PART_FIELDS:
                raise ConfigError(
                    f"part_options has no {kind!r}{nearest(kind, PART_FIELDS)}"
                )

    def _check_sizes(self) -> None:
        for key in (
            "dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size", "context",
            "head_dim", "vocab_multiple", "window",
        ):  # fmt: skip
            value = getattr(self, key)
            if value is None and key in ("head_dim", "window"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"model.{key} = {value!r} must be an integer above 0")
        for key in ("rope_theta", "norm_eps", "softcap"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"model.{key} = {value!r} must be above 0 and finite")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head: vocab_size rounded up."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def model_config(run: RunConfig, vocab_size: int | None = None) -> ModelConfig:
    """Return the ModelConfig that a run describes.

    [model] gives the shape, [tokenizer] the vocabulary, and the sections of the parts
    their names and keys. vocab_size: what the tokenizer really has, if that is known.
    Raises ConfigError: a key that is missing, a shape that cannot be built.
    """
    keys = run.model.options
    vocab_size = vocab_size or run.tokenizer.options.get("vocab_size")
    if vocab_size is None:
        raise ConfigError(f"run {run.name!r} lacks the key tokenizer.vocab_size")
    for key in ("dim", "layers", "heads", "kv_heads", "ffn_dim", "context"):
        if key not in keys:
            raise ConfigError(f"run {run.name!r} lacks the key model.{key}")
    parts = {kind: getattr(run, kind) for kind in PART_FIELDS}
    return ModelConfig(
        **keys,
        vocab_size=vocab_size,
        **{kind: part.use for kind, part in parts.items()},
        part_options={k: part.options for k, part in parts.items() if part.options},
    )


# ---- A loss that never holds all logits

# Logits of one chunk, in numbers. On a CPU they should stay in the cache; on a GPU the
# matrix product should be large enough to be fast (2^27 fp32 numbers are 512 MiB).
CHUNK_LOGITS = {"cpu": 2**21, "gpu": 2**27}


def _chunk_rows(rows: int, vocab: int, device: torch.device) -> int:
    logits = CHUNK_LOGITS["cpu" if device.type == "cpu" else "gpu"]
    if device.type == "cpu" and torch.compiler.is_compiling():
        logits *= 4  # the compiler unrolls the loop, at a second or so a chunk
    return max(1, min(rows, 2 ** int(math.log2(max(1, logits // vocab)))))


def _logits(x_NC: Tensor, weight_VC: Tensor, softcap: float | None) -> Tensor:
    """Capped logits in fp32; the product itself has its inputs' dtype."""
    z_NV = (x_NC @ weight_VC.T).float()
    return z_NV if softcap is None else z_NV.div_(softcap).tanh_().mul_(softcap)


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the loss; the gradients are made in the forward, chunk by chunk.

    The gradient of softmax and cross-entropy needs the logits only: p - onehot. Making
    it while they are there costs no second pass (checkpointing would), and what stays
    for the backward is as large as the inputs. The upstream gradient is one number, so
    it can be multiplied in at the end. Source of the idea: Liger Kernel (2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_VC: Tensor,
        targets_N: Tensor,
        softcap: float | None,
        ignore_index: int,
        z_loss: float,
        rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        x_low, weight_low = x_NC.to(dtype), weight_VC.to(dtype)
        need_x, need_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_NC) if need_x else None
        # Chunks add up in fp32, whatever the weights are: in bf16 a sum of many small
        # terms stops growing at 256 times their size.
        grad_weight = (
            torch.zeros_like(weight_VC, dtype=torch.float32) if need_weight else None
        )
        total = torch.zeros((), dtype=torch.float32, device=x_NC.device)
        for start in range(0, len(x_NC), rows):
            chunk = slice(start, start + rows)
            x_chunk, valid = x_low[chunk], targets_N[chunk] != ignore_index
            target = targets_N[chunk].masked_fill(~valid, 0)[:, None]
            z_NV = _logits(x_chunk, weight_low, softcap)
            at_target = z_NV.gather(1, target)[:, 0]
            # Softmax by hand, in place where the logits are not needed again.
            top = z_NV.amax(-1, keepdim=True)
            p_NV = (z_NV.sub_(top) if softcap is None else z_NV - top).exp_()
            norm = p_NV.sum(-1)
            lse = norm.log() + top[:, 0]
            loss = lse - at_target + z_loss * lse.square()
            total += loss.masked_fill(~valid, 0.0).sum()
            p_NV *= ((1.0 + 2.0 * z_loss * lse) / norm)[:, None]
            p_NV.scatter_add_(1, target, torch.full_like(top, -1.0))
            if softcap is not None:  # d tanh = 1 - tanh²
                p_NV *= z_NV.div_(softcap).square_().neg_().add_(1.0)
            grad_z = p_NV.masked_fill_(~valid[:, None], 0.0).to(dtype)
            if grad_x is not None:
                grad_x[chunk] = grad_z @ weight_low
            if grad_weight is not None and dtype == torch.float32:
                grad_weight.addmm_(grad_z.T, x_chunk)  # no second V x C tensor
            elif grad_weight is not None:
                grad_weight += grad_z.T @ x_chunk
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VC.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = (grad_x * grad).to(grad_x.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_x, grad_weight, *[None] * 6


@register("loss", "chunked")
def linear_cross_entropy(
    x_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    *,
    softcap: float | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    chunk: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of softcap(x Wᵀ) in nats, fp32, without all logits in memory.

    x_NC: N hidden states. weight_VC: the head. targets_N: the next ids; those equal to
    ignore_index count nothing, and if all of them are, the loss is 0 (with a graph).
    softcap: c tanh(z / c) on every logit. z_loss: adds z_loss * logsumexp² to each
    token's loss (PaLM, 2204.02311). chunk: rows at a time, chosen by device if None.
    reduction: "mean" over valid targets, "sum", or "none" (N losses, no gradient).
    Matrix products run in the autocast dtype, else in the inputs' own; softmax, sums
    and the gradient of W are fp32. Second derivatives raise.
    Raises ValueError: another reduction, shapes that do not fit, a chunk below 1.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r} must be mean, sum or none")
    if x_NC.ndim != 2 or targets_N.shape != x_NC.shape[:1]:
        raise ValueError(
            f"x of shape {tuple(x_NC.shape)} and targets of shape "
            f"{tuple(targets_N.shape)} must be N x C and N: flatten rows and tokens"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk = {chunk} must be at least 1 row")
    rows = chunk or _chunk_rows(len(x_NC), len(weight_VC), x_NC.device)
    kind = x_NC.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = (
        torch.get_autocast_dtype(kind)
        if autocast
        else torch.promote_types(x_NC.dtype, weight_VC.dtype)
    )
    valid_N = targets_N != ignore_index
    learns = x_NC.requires_grad or weight_VC.requires_grad
    if learns and torch.is_grad_enabled():
        if reduction == "none":
            raise ValueError('reduction "none" has no gradient: use torch.no_grad()')
        total = _ChunkedLoss.apply(
            x_NC, weight_VC, targets_N, softcap, ignore_index, z_loss, rows, dtype
        )
    else:
        losses, weight_low = [], weight_VC.to(dtype)
        for x, target in zip(
            x_NC.to(dtype).split(rows),
            targets_N.masked_fill(~valid_N, 0).split(rows),
            strict=True,
        ):
            z_NV = _logits(x, weight_low, softcap)
            lse = z_NV.logsumexp(-1)
            at_target = z_NV.gather(1, target[:, None])[:, 0]
            losses.append(lse - at_target + z_loss * lse.square())
        losses_N = torch.cat(losses).masked_fill(~valid_N, 0.0)
        if reduction == "none":
            return losses_N
        total = losses_N.sum()
    return total / valid_N.sum().clamp(min=1) if reduction == "mean" else total


# ---- The model


@register("model", "llama")
class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head: B x T ids to B x T x V logits.

    Made on a real device it is initialized with seed 0; made under
    `torch.device("meta")` it takes no memory: `to_empty(device=...)` and `init_weights`
    then give the same bits. It has no buffers: rotary tables are made where they are
    used, so that no cast or move can round or lose them.
    With cfg.tied there is no head module: the embedding's matrix is the only copy.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        options = cfg.part_options
        block, norm = resolve("block", cfg.block), resolve("norm", cfg.norm)
        self.embedding = nn.Embedding(cfg.padded_vocab_size, cfg.dim)
        self.blocks = nn.ModuleList(
            block(cfg, layer, **options.get("block", {})) for layer in range(cfg.layers)
        )
        self.norm = norm(cfg.dim, eps=cfg.norm_eps, **options.get("norm", {}))
        self.head = (
            None if cfg.tied else nn.Linear(cfg.dim, cfg.padded_vocab_size, bias=False)
        )
        self._token_loss = resolve("loss", cfg.loss)
        self._rope_tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        if not self.embedding.weight.is_meta:
            self.init_weights(0)

    @property
    def head_weight(self) -> Tensor:
        """The V x C matrix that makes logits: the head's own, or the embedding's."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, ids_BT: Tensor, cache: Sequence[KVCache] | None = None) -> Tensor:
        """Return logits_BTV in fp32, softcapped. Row t predicts the id at t + 1.

        V is the padded vocabulary, as the loss sees it; `next_token_logits` sets the
        padding to -inf. cache: from `make_cache`; ids then continue what it has seen.
        Raises LittleLMError when the tokens run past cfg.context.
        """
        return self.logits(self.hidden(ids_BT, cache))

    def next_token_logits(
        self, ids_BT: Tensor, cache: Sequence[KVCache] | None = None
    ) -> Tensor:
        """Return logits_BV after the last token, padding ids at -inf: for sampling."""
        logits_BV = self.logits(self.hidden(ids_BT, cache)[:, -1])
        logits_BV[:, self.cfg.vocab_size :] = -math.inf
        return logits_BV

    def loss(
        self, ids_BT: Tensor, targets_BT: Tensor, reduction: str = "mean"
    ) -> Tensor:
        """Return the loss of predicting targets_BT[b, t] from ids_BT[b, : t + 1].

        Nothing is shifted here: the loader cuts rows of T + 1 ids into both. Targets of
        -100 count nothing. In nats; reduction: "mean" over valid targets or "sum".
        """
        return self._token_loss(
            self.hidden(ids_BT).flatten(0, 1),
            self.head_weight,
            targets_BT.flatten(),
            softcap=self.cfg.softcap,
            reduction=reduction,
            **self.cfg.part_options.get("loss", {}),
        )

    def make_cache(
        self, batch: int, length: int, dtype: torch.dtype | None = None
    ) -> list[KVCache]:
        """Return an empty key/value cache for each layer: batch rows, length tokens.

        dtype: the autocast dtype where that is on, else the weights'.
        """
        cfg, weight = self.cfg, self.embedding.weight
        if not 1 <= length <= cfg.context:
            raise LittleLMError(
                f"a cache of {length} tokens: the context is {cfg.context}; cut the "
                "text or raise model.context"
            )
        if dtype is None:
            kind = weight.device.type
            autocast = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if autocast else weight.dtype
        return [
            KVCache(
                batch, cfg.kv_heads, length, cfg.head_dim, dtype, weight.device,
                cfg.window,
            )
            for _ in self.blocks
        ]  # fmt: skip

    def init_weights(self, seed: int = 0) -> None:
        """Fill every parameter; a seed gives the same bits on every device.

        Each parameter has a generator of its own, seeded by (seed, name), so that one
        more part changes no other part's numbers. Embedding: std 1 / sqrt(C), which
        Adam moves fast enough. Head: std 0.5 / sqrt(C), logits of size 0.5, a loss of
        ln V + 1/8. Tied: std 2 / C, since a token's own logit is C times that.
        """
        cfg = self.cfg
        if self.embedding.weight.is_meta:
            raise LittleLMError(
                "no memory to initialize: call to_empty(device=...) on the model first"
            )
        std = 2.0 / cfg.dim if cfg.tied else cfg.dim**-0.5
        fill_normal(self.embedding.weight, "embedding.weight", seed, std)
        if self.head is not None:
            fill_normal(self.head.weight, "head.weight", seed, 0.5 * cfg.dim**-0.5)
        for layer, block in enumerate(self.blocks):
            block.init_weights(seed, f"blocks.{layer}.")
        for name, parameter in self.norm.named_parameters(prefix="norm"):
            init_parameter(parameter, name, seed, 1.0)

    def hidden(self, ids_BT: Tensor, cache: Sequence[KVCache] | None = None) -> Tensor:
        """Return the stream behind the last norm, B x T x C; `logits` reads it."""
        start = cache[0].length if cache else 0
        end = start + ids_BT.shape[1]
        if end > self.cfg.context:
            raise LittleLMError(
                f"{ids_BT.shape[1]} tokens after {start} run past the context of "
                f"{self.cfg.context}: cut the text or raise model.context"
            )
        rope = self._rope(start, end, ids_BT.device)
        x_BTC = self.embedding(ids_BT)
        for layer, block in enumerate(self.blocks):
            layer_cache = cache[layer] if cache else None
            x_BTC = block(x_BTC, rope, cache=layer_cache, ids_BT=ids_BT)
        return self.norm(x_BTC)

    def _rope(
        self, start: int, end: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Rows start ... end of the fp32 tables, made once per device."""
        cfg = self.cfg

        def table(first: int, last: int) -> tuple[Tensor, Tensor]:
            positions = torch.arange(first, last, device=device)
            return rope_table(positions, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)

        if torch.compiler.is_compiling():  # the compiler fuses it into its uses
            return table(start, end)
        if device not in self._rope_tables:
            # A table made by generation must also serve training.
            with torch.inference_mode(False):
                self._rope_tables[device] = table(0, cfg.context)
        cos_TD, sin_TD = self._rope_tables[device]
        return cos_TD[start:end], sin_TD[start:end]

    def logits(self, x: Tensor) -> Tensor:
        """Return fp32 logits, softcapped, of streams x of shape ... x C."""
        logits = F.linear(x, self.head_weight).float()
        cap = self.cfg.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


# ---- Counts: parameters by role

_ROLE_PATTERNS = (
    ("embedding", r"embedding\.weight"),
    ("head", r"head\.weight"),
    ("norm", r"norm\..+|blocks\.\d+\.(.+\.)?\w*norm\.\w+"),
    ("value_embeddings", r"blocks\.\d+\.value_table\.weight"),
    ("scalars", r"blocks\.\d+\.(.+\.)?(\w+_scale|\w+_gate|bias)"),
    ("matrix", r"blocks\.\d+\.(.+\.)?weight"),
)


def parameter_role(name: str) -> str:
    """Return the role of a model's parameter, which decides how it is optimized.

    "embedding", "head", "matrix" (weights of a block's products), "value_embeddings",
    "norm" (gains), "scalars" (scales, gates, biases).
    Raises ConfigError for a name that fits none: no parameter is routed by accident.
    """
    for role, pattern in _ROLE_PATTERNS:
        if re.fullmatch(pattern, name):
            return role
    raise ConfigError(
        f"parameter {name!r} has no known role: in a block, end its name with .weight "
        "(a matrix), norm.weight, _scale, _gate or .bias"
    )


def count_parameters(model: nn.Module | ModelConfig) -> dict[str, int]:
    """Return parameters by role and their "total"; padding included, tied ones once.

    A ModelConfig is built on the meta device: no memory, whatever its size.
    """
    if isinstance(model, ModelConfig):
        with torch.device("meta"):
            model = LanguageModel(model)
    counts = dict.fromkeys(ROLES, 0)
    for name, parameter in model.named_parameters():
        counts[parameter_role(name)] += parameter.numel()
    return counts | {"total": sum(counts.values())}


def matrix_product_parameters(cfg: ModelConfig) -> int:
    """Return the parameters that multiply every token: block matrices and the head.

    A tied matrix counts here, since it is multiplied as a head; lookups do not.
    """
    return count_parameters(cfg)["matrix"] + cfg.padded_vocab_size * cfg.dim


# ---- Counts: arithmetic and bits


def flops_per_token(cfg: ModelConfig, context: int | None = None) -> float:
    """Return the training FLOPs of one token, forward and backward.

    6 per parameter in matrix products, and 12 heads * head_dim * context * layers for
    scores and their use. Causal masking is not discounted (as in nanochat and PaLM,
    2204.02311), a window is. context: cfg.context unless given.
    """
    seen = min(context or cfg.context, cfg.window or math.inf)
    attention = 12 * cfg.heads * cfg.head_dim * seen * cfg.layers
    return float(6 * matrix_product_parameters(cfg) + attention)


def bits_per_byte(
    losses_nats: Tensor, targets: Tensor, byte_counts: Tensor | Sequence[int]
) -> float:
    """Return the bits that the model needs for a byte of text.

    losses_nats: each target's loss. targets: ids of the same shape. byte_counts: bytes
    of each id, 0 for special tokens: those count neither loss nor bytes, and neither do
    negative targets (ignored). Unlike the loss, it does not depend on the tokenizer.
    Raises ValueError: shapes that differ, an id without a count, no bytes at all.
    """
    losses_nats, targets = losses_nats.flatten(), targets.flatten()
    if losses_nats.shape != targets.shape:
        raise ValueError(
            f"{len(losses_nats)} losses for {len(targets)} targets: one each is needed"
        )
    bytes_V = torch.as_tensor(byte_counts, device=targets.device)
    if len(targets) and int(targets.max()) >= len(bytes_V):
        raise ValueError(
            f"target {int(targets.max())} has no byte count: there are {len(bytes_V)}"
        )
    bytes_N = bytes_V[targets.clamp(min=0)].masked_fill(targets < 0, 0)
    total = int(bytes_N.sum())
    if total == 0:
        raise ValueError("no target stands for a byte of text: nothing to measure")
    nats = losses_nats.double().masked_fill(bytes_N == 0, 0.0).sum().item()
    return nats / math.log(2) / total
