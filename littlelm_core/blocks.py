# From chapters/03_blocks.md by `littlelm book export`: edit the chapter.
"""The Llama block: one attention and one MLP, each added to the residual stream.

A model is a stack of these. The stream x carries every token's state from the embedding
to the head; a block reads it through a norm and adds what it found. Without the norms
the sums grow until training breaks; without the additions gradients do not reach the
first layers; without the MLP, tokens are only ever averaged.

What the hardware wants: three or two large matrix products a token, which is where the
FLOPs belong, and few passes over memory between them: norms, gates and scales move
bytes and compute next to nothing.

Shapes: B rows, T tokens, C model width, F MLP width, K key/value heads, D head width.
"""

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from littlelm_core.attention import KVCache
from littlelm_core.config import ConfigError, register, resolve

__all__ = [
    "Block",
    "RESIDUAL_OUTPUTS",
    "RMSNorm",
    "ReLU2",
    "SwiGLU",
    "fill_normal",
    "has_value_table",
    "init_parameter",
]


# ---- The norm


@register("norm", "rmsnorm")
class RMSNorm(nn.Module):
    """x / rms(x) times a gain per channel; computed in fp32, returned in x's dtype.

    dim: C. eps is added to the mean square, so that a row of zeros stays zero.
    Source: Zhang and Sennrich (arXiv 1910.07467).
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BTC: Tensor) -> Tensor:
        shape = self.weight.shape
        if x_BTC.dtype == self.weight.dtype:  # the kernel computes in fp32 by itself
            return F.rms_norm(x_BTC, shape, self.weight, self.eps)
        x_fp32 = F.rms_norm(x_BTC.float(), shape, self.weight.float(), self.eps)
        return x_fp32.to(x_BTC.dtype)


# ---- The MLP


@register("ffn", "swiglu")
class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x): three matrices, no bias.

    dim: C. ffn_dim: F. Source: Shazeer (arXiv 2002.05202).
    """

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w_gate = nn.Linear(dim, ffn_dim, bias=False)
        self.w_up = nn.Linear(dim, ffn_dim, bias=False)
        self.w_down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x_BTC)) * self.w_up(x_BTC))


@register("ffn", "relu2")
class ReLU2(nn.Module):
    """W_down relu(W_up x)²: two matrices, no gate, no bias.

    dim: C. ffn_dim: F. Source: So et al., Primer (arXiv 2109.08668).
    """

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w_up = nn.Linear(dim, ffn_dim, bias=False)
        self.w_down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.w_down(F.relu(self.w_up(x_BTC)).square())


# ---- Numbers for the start

# Matrices whose output is added to the residual stream, by the name of their layer.
RESIDUAL_OUTPUTS = ("wo", "w_down")


@torch.no_grad()
def fill_normal(parameter: Tensor, name: str, seed: int, std: float) -> None:
    """Fill a parameter with normal numbers that depend on (seed, name) alone.

    They are drawn in fp32 on the CPU from a generator of the parameter's own: the same
    on every device and in every dtype (up to its rounding), after meta construction,
    and whatever other parameters the model has.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    parameter.copy_(values.normal_(0.0, std, generator=generator))


@torch.no_grad()
def init_parameter(
    parameter: Tensor, name: str, seed: int, residual_scale: float
) -> None:
    """Fill one parameter of a block by its role, which its name tells.

    Matrices: normal with std 1 / sqrt(fan-in), so that a normed input gives outputs of
    size 1; those whose output is added to the stream, residual_scale times that (0:
    zeros). Norm gains and residual scalars: 1. Value gates and biases: 0. Value tables:
    normal with std 1 / sqrt(their width), small beside the values they are added to.
    Raises ConfigError for a parameter that no rule knows.
    """
    owner, _, leaf = name.rpartition(".")
    owner = owner.rpartition(".")[2]
    if leaf == "value_gate" or leaf == "bias":
        parameter.zero_()
    elif leaf in ("attention_scale", "ffn_scale"):
        parameter.fill_(1.0)
    elif parameter.ndim >= 2:
        std = parameter.shape[-1] ** -0.5
        std *= residual_scale if owner in RESIDUAL_OUTPUTS else 1.0
        fill_normal(parameter, name, seed, std)
    elif leaf == "weight":
        parameter.fill_(1.0)
    else:
        raise ConfigError(
            f"no rule initializes {name} of shape {tuple(parameter.shape)}: give its "
            "part a method init_weights(seed, prefix)"
        )


# ---- The block


def has_value_table(layer: int, layers: int) -> bool:
    """Every other layer counted from the last one has value embeddings."""
    return (layers - 1 - layer) % 2 == 0


@register("block", "llama")
class Block(nn.Module):
    """x + a Attention(norm(x)), then x + m FFN(norm(x)).

    cfg: a ModelConfig (chapter 04), of which the block reads dim, layers, heads,
    kv_heads, head_dim, ffn_dim, qk_norm, window, norm_eps, residual_scales,
    value_embeddings, padded_vocab_size, the part names attention, ffn and norm, and
    part_options. layer: 0 ... layers - 1.
    init: what the output matrices of attention and MLP start as: "zero", or "scaled",
    1 / sqrt(2 layers) of the other matrices' size (GPT-2's rule).
    a and m are one learned scalar each, when cfg.residual_scales. With
    cfg.value_embeddings every other layer adds 2 sigmoid(g_k) E[token] to the values of
    its key/value head k.
    Raises ConfigError: unknown part, unknown init.
    """

    def __init__(self, cfg: Any, layer: int, init: str = "zero") -> None:
        super().__init__()
        if init not in ("zero", "scaled"):
            raise ConfigError(f'block.init = {init!r} must be "zero" or "scaled"')
        self.residual_scale = 0.0 if init == "zero" else (2 * cfg.layers) ** -0.5

        def options(kind: str) -> dict[str, Any]:
            return dict(cfg.part_options.get(kind, {}))

        norm = resolve("norm", cfg.norm)
        self.attention_norm = norm(cfg.dim, eps=cfg.norm_eps, **options("norm"))
        self.attention = resolve("attention", cfg.attention)(
            cfg.dim,
            cfg.heads,
            cfg.kv_heads,
            head_dim=cfg.head_dim,
            qk_norm=cfg.qk_norm,
            window=cfg.window,
            **options("attention"),
        )
        self.ffn_norm = norm(cfg.dim, eps=cfg.norm_eps, **options("norm"))
        self.ffn = resolve("ffn", cfg.ffn)(cfg.dim, cfg.ffn_dim, **options("ffn"))
        # Shape 1, not a 0-d tensor: sharding cuts the first dimension (chapter 14).
        scaled = cfg.residual_scales
        self.attention_scale = nn.Parameter(torch.ones(1)) if scaled else None
        self.ffn_scale = nn.Parameter(torch.ones(1)) if scaled else None
        self.value_table = self.value_gate = None
        if cfg.value_embeddings and has_value_table(layer, cfg.layers):
            width = cfg.kv_heads * (cfg.head_dim or cfg.dim // cfg.heads)
            self.value_table = nn.Embedding(cfg.padded_vocab_size, width)
            self.value_gate = nn.Parameter(torch.zeros(cfg.kv_heads))

    def forward(
        self,
        x_BTC: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        ids_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the stream after this block.

        rope: `rope_table` of exactly these T positions. ids_BT: the tokens themselves,
        needed where the layer has a value table (ValueError without).
        """
        extra = {}
        if self.value_table is not None:
            if ids_BT is None:
                raise ValueError("a block with value embeddings needs ids_BT")
            extra["value_embed"] = self._value_embed(ids_BT)
        read = self.attention(self.attention_norm(x_BTC), rope, cache=cache, **extra)
        x_BTC = x_BTC + _scaled(read, self.attention_scale)
        return x_BTC + _scaled(self.ffn(self.ffn_norm(x_BTC)), self.ffn_scale)

    def _value_embed(self, ids_BT: Tensor) -> Tensor:
        embed_BTKD = self.value_table(ids_BT).unflatten(-1, (len(self.value_gate), -1))
        return embed_BTKD * (2.0 * self.value_gate.sigmoid())[:, None]

    def init_weights(self, seed: int, prefix: str = "") -> None:
        """Fill every parameter; the same seed and prefix give the same bits.

        prefix: the block's own name in its model ("blocks.3."), so that layers differ.
        A part with an init_weights(seed, prefix) of its own fills itself.
        """
        for name, parameter in self.named_parameters(recurse=False):
            init_parameter(parameter, prefix + name, seed, self.residual_scale)
        for child, module in self.named_children():
            if hasattr(module, "init_weights"):
                module.init_weights(seed, f"{prefix}{child}.")
                continue
            for name, parameter in module.named_parameters(prefix=prefix + child):
                init_parameter(parameter, name, seed, self.residual_scale)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale
