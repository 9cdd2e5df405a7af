# From chapters/10_fp8.md by `littlelm book export`: edit the chapter.
"""Eight bits: matrix products in FP8, weights and sums in more.

A GPU multiplies 8-bit floating-point numbers twice as fast as 16-bit ones. There are
two formats: e4m3 (3 bits of fraction, largest value 448) for inputs and weights, e5m2
(2 bits, largest 57,344) for gradients, which need range more than precision. Neither
covers what a network holds, so every tensor is scaled first: its largest value becomes
the format's largest. Without that, small gradients vanish and large ones saturate.

What the hardware wants: both operands with the contracted dimension contiguous, every
dimension a multiple of 16, and the scaling fused into its neighbors by torch.compile.
Where a machine has no FP8 products they are emulated, with the same rounding: 8-bit
values are exact in bf16 and fp32, and the sums are fp32 in both.

Shapes: N tokens, C inputs, F outputs of a linear; M x K times (P x K) transposed.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from littlelm_core.config import ConfigError, nearest, register
from littlelm_core.trainer import Precision, multiplies_bf16

__all__ = [
    "AMAX_FLOOR",
    "ConversionReport",
    "E4M3",
    "E5M2",
    "EXCLUDED",
    "Float8",
    "Float8Linear",
    "MULTIPLES",
    "Operand",
    "RECIPES",
    "Recipe",
    "TORCHAO_NEEDS",
    "check_torchao",
    "convert_to_fp8",
    "emulated_product",
    "keep_reason",
    "largest_magnitude",
    "multiplies_fp8",
    "operands",
    "quantize",
    "scaled_product",
    "torchao_product",
    "widen",
]


# ---- The largest magnitude


def largest_magnitude(
    x: Tensor, scaling: str = "tensor", group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return amax, fp32: of a tensor (a number) or of each row of its last dimension.

    Rows give the shape (..., 1). Anything that is not finite gives inf, never a number
    that hides it. group: the processes that hold shards of one tensor; all of them get
    the largest value of all. Raises ValueError for another scaling.
    """
    if scaling not in ("tensor", "row"):
        raise ValueError(f'scaling {scaling!r} must be "tensor" or "row"')
    if x.numel() == 0:
        amax = x.new_zeros(() if scaling == "tensor" else (*x.shape[:-1], 1))
    elif scaling == "row":
        amax = x.detach().abs().amax(-1, keepdim=True)
    else:
        low, high = torch.aminmax(x.detach())  # one pass, and no copy of x
        amax = torch.maximum(-low, high)
    amax = amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    if group is not None:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return amax


# ---- Quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
AMAX_FLOOR = 1e-12  # torchao's; the product of two scales stays a normal fp32 number


def quantize(
    x: Tensor,
    dtype: torch.dtype = E4M3,
    scaling: str = "tensor",
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (q, scale) with x ≈ q.float() * scale; q has x's shape and `dtype`.

    scale: fp32, one number ("tensor") or one for each row (..., 1) ("row"): amax, at
    least AMAX_FLOOR, over the format's largest value. Zeros stay zeros, and what
    rounding puts beyond the range saturates here, not by grace of the cast. What is
    not finite is seen in amax, before the cast: its scale is NaN, and so is all that is
    computed with it, up to the loss. group: see `largest_magnitude`.
    Raises ValueError: another dtype or scaling. Numbers as torchao's dynamic scaling.
    """
    if dtype not in (E4M3, E5M2):
        raise ValueError(f"dtype {dtype} must be float8_e4m3fn or float8_e5m2")
    limit = torch.finfo(dtype).max
    amax = largest_magnitude(x, scaling, group)
    # The quotient in fp64: eager and compiled code then agree on every bit.
    multiplier = (limit / amax.clamp(min=AMAX_FLOOR).double()).float()
    scale = torch.where(amax.isfinite(), multiplier.reciprocal(), torch.nan)
    wide = x.detach().to(torch.float32, copy=True)  # ours: the rest is in place
    return wide.mul_(multiplier).clamp_(-limit, limit).to(dtype), scale


# ---- Multiply


class Operand(NamedTuple):
    """One side of a product: M x K values in FP8, summed over K, and their scale."""

    q: Tensor
    scale: Tensor  # fp32: a number, or M x 1


@torch.compiler.assume_constant_result
def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device has FP8 products: NVIDIA, compute capability 8.9 and up."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_product(
    a: Operand, b: Operand, dtype: torch.dtype, fast_sums: bool = False
) -> Tensor:
    """Return (a.q a.scale) (b.q b.scale)ᵀ, M x P, in `dtype` (fp32 or bf16).

    Sums are fp32, scaled, and rounded to `dtype` once. fast_sums: let the hardware keep
    fewer bits in its sums (Hopper does), as is usual in the forward pass.
    Two numbers or two columns as scales, no mixture.
    """
    if not multiplies_fp8(a.q.device):
        return emulated_product(a, b, dtype)
    return torch._scaled_mm(
        a.q.contiguous(),
        b.q.contiguous().T,
        scale_a=a.scale,
        scale_b=b.scale.T if b.scale.ndim else b.scale,
        out_dtype=dtype,
        use_fast_accum=fast_sums,
    )


# ---- Emulate


def widen(q: Tensor) -> Tensor:
    """Return q.float() for finite q, by the shortest way that a CPU has."""
    if q.device.type != "cpu" or torch.compiler.is_compiling():
        return q.float()
    bits = q.view(torch.int8).to(torch.int16)  # keeps the sign: ssssssss seeeefff
    if q.dtype == E5M2:  # the upper half of an fp16 number
        return bits.bitwise_left_shift_(8).view(torch.float16).float()
    bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return bits.view(torch.float16).float().mul_(256.0)


@contextmanager
def _inputs_as_bf16() -> Iterator[None]:
    """Let fp32 products on this CPU read their inputs as bf16; sums stay fp32."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def emulated_product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Return `scaled_product` where the hardware has no FP8: as wide, as exact."""
    wide_a, wide_b = widen(a.q), widen(b.q)
    one_scale = not (a.scale.ndim or b.scale.ndim)
    eager = not torch.compiler.is_compiling()
    if eager and a.q.device.type == "cpu" and multiplies_bf16(a.q.device):
        if one_scale and dtype == torch.bfloat16:
            low_a, low_b, scale = (
                wide_a.bfloat16(),
                wide_b.bfloat16(),
                a.scale * b.scale,
            )
            ignored = low_a.new_zeros(1)
            return torch.addmm(ignored, low_a, low_b.T, beta=0, alpha=scale.item())
        with _inputs_as_bf16():
            sums = wide_a @ wide_b.T
    else:
        sums = wide_a @ wide_b.T
    if one_scale:
        return sums.mul(a.scale * b.scale).to(dtype)
    return sums.mul(a.scale).mul(b.scale.T).to(dtype)


# ---- Three products


def operands(
    x: Tensor, dtype: torch.dtype, scaling: str, group: dist.ProcessGroup | None = None
) -> tuple[Operand, Operand]:
    """Return x for sums over its columns, and xᵀ for sums over its rows."""
    first = Operand(*quantize(x, dtype, scaling, group))
    if scaling == "tensor":
        return first, Operand(first.q.T, first.scale)
    return first, Operand(*quantize(x.T, dtype, scaling, group))


class Recipe(NamedTuple):
    """How tensors are scaled, and the format of the gradients."""

    scaling: str
    gradients: torch.dtype


RECIPES = {"tensorwise": Recipe("tensor", E5M2), "rowwise": Recipe("row", E4M3)}


class _Float8Product(torch.autograd.Function):
    """y = x Wᵀ and both gradients, each a product of FP8 numbers."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_FC: Tensor,
        dtype: torch.dtype,
        recipe: Recipe,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        x, x_t = operands(x_NC, E4M3, recipe.scaling, group)
        w, w_t = operands(weight_FC, E4M3, recipe.scaling, group)
        ctx.save_for_backward(*x_t, *w_t)
        ctx.recipe, ctx.group = recipe, group
        ctx.dtypes = x_NC.dtype, weight_FC.dtype
        return scaled_product(x, w, dtype, fast_sums=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, ...]:
        xq, x_scale, wq, w_scale = ctx.saved_tensors
        recipe, dtype = ctx.recipe, grad_NF.dtype
        g, g_t = operands(grad_NF, recipe.gradients, recipe.scaling, ctx.group)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = scaled_product(g, Operand(wq, w_scale), dtype).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            grad_w = scaled_product(g_t, Operand(xq, x_scale), dtype).to(ctx.dtypes[1])
        return grad_x, grad_w, None, None, None


# ---- The layer

# Sizes of a product must be multiples of this.
MULTIPLES = {"tensorwise": 16, "rowwise": 16, "mxfp8": 32}


class Float8Linear(nn.Linear):
    """nn.Linear with FP8 products while it trains; its weights stay as they are.

    recipe: "tensorwise" or "rowwise". group: processes that hold shards of x, W and g,
    and so share their scales. product: what computes product(x_NC, weight_FC, dtype) in
    our place. The output has the autocast dtype, else x's. In eval mode: nn.Linear.
    Raises ConfigError: unknown recipe; in training, sizes that do not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: str = "tensorwise",
        group: dist.ProcessGroup | None = None,
        product: Callable[[Tensor, Tensor, torch.dtype], Tensor] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        known = RECIPES if product is None else MULTIPLES
        if recipe not in known:
            raise ConfigError(
                f"no FP8 recipe is called {recipe!r}{nearest(recipe, known)}"
            )
        self.recipe, self.group, self.product = recipe, group, product

    @classmethod
    def from_linear(cls, linear: nn.Linear, **keys: Any) -> "Float8Linear":
        """Return a Float8Linear that holds the very parameters of `linear`."""
        sizes = linear.in_features, linear.out_features
        new = cls(*sizes, bias=False, device="meta", **keys)
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        kind, x_NC = x.device.type, x.reshape(-1, x.shape[-1])
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
        self._check_sizes(len(x_NC))
        with torch.autocast(kind, enabled=False):  # here the formats are our own
            if self.product is None:
                recipe = RECIPES[self.recipe]
                y = _Float8Product.apply(x_NC, self.weight, dtype, recipe, self.group)
            else:
                y = self.product(x_NC, self.weight, dtype)
            y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.unflatten(0, x.shape[:-1])

    def _check_sizes(self, tokens: int) -> None:
        multiple = MULTIPLES[self.recipe]
        if any(n % multiple for n in (tokens, self.in_features, self.out_features)):
            raise ConfigError(
                f"FP8 products of {tokens} tokens, {self.in_features} inputs and "
                f"{self.out_features} outputs: each must be a multiple of {multiple}"
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"


# ---- Which linears

EXCLUDED = ("head", "lm_head", "embedding")


def keep_reason(
    name: str,
    module: nn.Module,
    multiple: int = 16,
    exclude: tuple[str, ...] = EXCLUDED,
) -> str | None:
    """Return why a module keeps its precision; None when it becomes FP8.

    A pure function of name and shape. exclude: whole words of dotted names that stay.
    """
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is no plain nn.Linear"
    if words := [word for word in name.split(".") if word in exclude]:
        return f"{words[0]} is excluded"
    for key in ("in_features", "out_features"):
        if (size := getattr(module, key)) % multiple:
            return f"{key} = {size} is no multiple of {multiple}"
    return None


@dataclass(frozen=True)
class ConversionReport:
    """What became FP8, and why the rest did not."""

    recipe: str
    engine: str
    converted: tuple[str, ...]
    skipped: dict[str, str]  # name: reason

    def __str__(self) -> str:
        """Return one line: counts, and each reason with the first name it holds for."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            reasons.setdefault(reason, []).append(name)
        kept = [
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}"
            for reason, names in reasons.items()
        ]
        done = f"{len(self.converted)} linears in FP8 ({self.recipe}, {self.engine})"
        return "; not ".join([done, *kept])


def convert_to_fp8(
    model: nn.Module,
    recipe: str = "tensorwise",
    *,
    engine: str = "littlelm",
    exclude: tuple[str, ...] = EXCLUDED,
    group: dist.ProcessGroup | None = None,
) -> ConversionReport:
    """Put Float8Linear in the place of a model's linears; return what was done.

    Parameters stay the same objects under the same names: optimizers, roles and weights
    on disk notice nothing. engine: who multiplies, "littlelm" or "torchao".
    exclude, group: see `keep_reason`, `Float8Linear`.
    Raises ConfigError, before anything changes: an unknown recipe or engine, an engine
    that is not installed or that the device cannot run.
    """
    engines = {"littlelm": RECIPES, "torchao": MULTIPLES}
    if engine not in engines:
        raise ConfigError(
            f"no FP8 engine is called {engine!r}{nearest(engine, engines)}"
        )
    if recipe not in engines[engine]:
        close = nearest(recipe, engines[engine])
        raise ConfigError(f"engine {engine!r} has no recipe {recipe!r}{close}")
    if engine == "torchao":
        check_torchao(recipe, next(model.parameters()).device)
    product = torchao_product(recipe) if engine == "torchao" else None
    reasons = {
        name: keep_reason(name, module, MULTIPLES[recipe], exclude)
        for name, module in model.named_modules()
        if name and isinstance(module, nn.Linear | nn.Embedding)
    }
    converted = tuple(name for name, reason in reasons.items() if reason is None)
    for name in converted:
        parent, _, leaf = name.rpartition(".")
        owner, old = model.get_submodule(parent), model.get_submodule(name)
        keys = {"recipe": recipe, "group": group, "product": product}
        setattr(owner, leaf, Float8Linear.from_linear(old, **keys))
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    return ConversionReport(recipe, engine, converted, skipped)


# ---- Another engine

# Compute capability that torchao's kernels need.
TORCHAO_NEEDS = {"tensorwise": (8, 9), "rowwise": (9, 0), "mxfp8": (10, 0)}


def check_torchao(recipe: str, device: torch.device) -> None:
    """Raise ConfigError in one line where torchao has no kernels for a device."""
    needs, has = TORCHAO_NEEDS[recipe], (0, 0)
    if device.type == "cuda" and torch.version.hip is None:
        has = torch.cuda.get_device_capability(device)
    if has < needs:
        raise ConfigError(
            f"torchao's {recipe} recipe needs a GPU of compute capability {needs[0]}."
            f'{needs[1]}, and this is {device}: use precision.engine = "littlelm"'
        )


def torchao_product(
    recipe: str, emulate: bool = False
) -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """Return torchao's FP8 product(x_NC, weight_FC, dtype), with its own gradients.

    emulate: its arithmetic without its kernels (tensorwise and rowwise), to compare.
    Raises ConfigError when torchao, or what is needed of it, does not import.
    """
    try:
        if recipe == "mxfp8":
            where = "torchao.prototype.moe_training.mxfp8_linear"
            layer = importlib.import_module(where).MXFP8Linear
            keys: dict[str, Any] = {}
        else:
            config = importlib.import_module("torchao.float8").Float8LinearConfig
            layer = importlib.import_module("torchao.float8.float8_linear").Float8Linear
            config = config.from_recipe_name(recipe)
            keys = {"config": dataclasses.replace(config, emulate=emulate)}
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"torchao cannot be used ({error}): pip install torchao, or use "
            'precision.engine = "littlelm"'
        ) from error
    size = MULTIPLES[recipe]
    shell = layer(size, size, bias=False, device="meta", **keys)

    def product(x_NC: Tensor, weight_FC: Tensor, dtype: torch.dtype) -> Tensor:
        return functional_call(shell, {"weight": weight_FC}, (x_NC.to(dtype),))

    return product


# ---- The part


@register("precision", "fp8")
class Float8(Precision):
    """FP8 products in the blocks; all else as the precision "autocast" has it.

    recipe: "tensorwise", "rowwise", or torchao's "mxfp8". engine: "littlelm" or
    "torchao". The other keys are those of Precision.
    Raises ConfigError before training: nothing to convert, a context that is no
    multiple of 16 (32 with mxfp8), and what `convert_to_fp8` raises.
    """

    def __init__(
        self,
        dtype: str = "auto",
        compile: bool = False,
        masters: str = "fp32",
        recipe: str = "tensorwise",
        engine: str = "littlelm",
    ) -> None:
        super().__init__(dtype, compile, masters)
        self.recipe, self.engine = recipe, engine

    def prepare(self, model: nn.Module, device: torch.device) -> Callable[..., Tensor]:
        """Convert the model's linears in place, then do what Precision does."""
        self.report = convert_to_fp8(model, self.recipe, engine=self.engine)
        multiple = MULTIPLES[self.recipe]
        context = getattr(getattr(model, "cfg", None), "context", multiple)
        if context % multiple:
            raise ConfigError(
                f"model.context = {context} is no multiple of {multiple}, which the "
                "tokens of an FP8 product must be"
            )
        if not self.report.converted:
            raise ConfigError(f"precision fp8 has nothing to do: {self.report}")
        return super().prepare(model, device)
