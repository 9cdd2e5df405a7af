"""FP8 as people write it on a first try."""

import types

import torch
from torch import nn

from littlelm_core import fp8
from littlelm_core.fp8 import (
    E4M3,
    E5M2,
    ConversionReport,
    Float8Linear,
    keep_reason,
    quantize,
)

SMALL = 1e-12


def _with(**changes):
    """The module with some of its functions exchanged."""
    part = types.ModuleType("fp8")
    vars(part).update({n: getattr(fp8, n) for n in fp8.__all__}, **changes)
    return part


# ---- quantize


def _quantize(x, dtype, scaling, amax=None, limit=None, floor=SMALL, clamp=True):
    """The real one with its parts laid open."""
    if dtype not in (E4M3, E5M2) or scaling not in ("tensor", "row"):
        raise ValueError(f"float8 {dtype} scaling {scaling}")
    x = x.detach().float()
    if amax is None:
        amax = x.abs().amax(-1, True) if scaling == "row" else x.abs().max()
    limit = limit or torch.finfo(dtype).max
    multiplier = limit / amax.clamp(min=floor)
    scaled = x * multiplier
    largest = torch.finfo(dtype).max
    scaled = scaled.clamp(-largest, largest) if clamp else scaled
    return scaled.to(dtype), 1 / multiplier


def without_scale(x, dtype=E4M3, scaling="tensor"):
    _, scale = _quantize(x, dtype, scaling)
    limit = torch.finfo(dtype).max
    return x.detach().float().clamp(-limit, limit).to(dtype), torch.ones_like(scale)


def zero_over_zero(x, dtype=E4M3, scaling="tensor"):
    return _quantize(x, dtype, scaling, floor=0.0)


def scale_upside_down(x, dtype=E4M3, scaling="tensor"):
    q, scale = _quantize(x, dtype, scaling)
    return q, 1 / scale


def one_scale_for_all(x, dtype=E4M3, scaling="tensor"):
    q, scale = _quantize(x, dtype, "tensor" if scaling == "row" else scaling)
    shape = (*x.shape[:-1], 1) if scaling == "row" else ()
    return q, scale.expand(shape).clone()


def e4m3s_limit_for_both(x, dtype=E4M3, scaling="tensor"):
    return _quantize(x, dtype, scaling, limit=448.0)


def hides_nan(x, dtype=E4M3, scaling="tensor"):
    x = x.detach().nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)
    return _quantize(x, dtype, scaling)


def truncates(x, dtype=E4M3, scaling="tensor"):
    """Cuts the bits off instead of rounding."""
    q, scale = _quantize(x, dtype, scaling)
    wide = x.detach().float() / scale
    down = (q.float().abs() > wide.abs()) & (q.float() != 0)
    lower = (q.view(torch.uint8) - down.to(torch.uint8)).view(dtype)
    return lower, scale


def scale_in_bf16(x, dtype=E4M3, scaling="tensor"):
    q, scale = _quantize(x, dtype, scaling)
    return q, scale.bfloat16()


def mean_for_amax(x, dtype=E4M3, scaling="tensor"):
    """A scale from the mean: most values saturate."""
    x32 = x.detach().float().abs()
    amax = x32.mean(-1, True) if scaling == "row" else x32.mean()
    return _quantize(x, dtype, scaling, amax=amax)


# ---- The layer


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gradients, dtype, exact):
        xr, wr = (_round(t, E4M3) for t in (x, weight))
        ctx.save_for_backward(*((x, weight) if exact else (xr, wr)))
        ctx.gradients = gradients
        return (xr @ wr.T).to(dtype)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        g = g.float()
        g = g if ctx.gradients is None else _round(g, ctx.gradients)
        return g @ weight, g.T @ x, None, None, None


def _round(x, dtype):
    q, scale = quantize(x, dtype)
    return q.float() * scale


class _Wrong(Float8Linear):
    gradients, exact = E5M2, False

    def forward(self, x):
        if not self.training:
            return nn.functional.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, x.shape[-1])
        self._check_sizes(len(flat))
        autocast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype
        with torch.autocast("cpu", enabled=False):
            y = _Product.apply(
                flat.float(), self.weight.float(), self.gradients, dtype, self.exact
            )
        y = y if self.bias is None else y + self.bias.to(dtype)
        return y.unflatten(0, x.shape[:-1])


class GradientsInE4M3(_Wrong):
    gradients = E4M3


class OnlyTheForward(_Wrong):
    """Rounds the output and takes the gradients of the exact tensors."""

    gradients, exact = None, True


class OneScaleInEveryRecipe(_Wrong):
    """Accepts "rowwise" and does not do it."""


class LosesTheBias(Float8Linear):
    def forward(self, x):
        bias, self.bias = self.bias, None
        y = super().forward(x)
        self.bias = bias
        return y


class AlsoInEval(Float8Linear):
    def forward(self, x):
        before, self.training = self.training, True
        y = super().forward(x)
        self.training = before
        return y


class NoSizes(Float8Linear):
    def _check_sizes(self, tokens):
        pass


class ReturnsFp32(Float8Linear):
    def forward(self, x):
        return super().forward(x).float()


class RoundsItsWeights(Float8Linear):
    """Keeps 8 bits of its weights, so that small updates are lost."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(_round(self.weight, E4M3))
        return super().forward(x)


class ZeroesWhatIsNotFinite(Float8Linear):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: g.nan_to_num(0.0, 0.0, 0.0))
        return y


# ---- The conversion


def _swap(model, exclude=fp8.EXCLUDED, make=None, multiple=16, reasons=True):
    make = make or (lambda old: Float8Linear.from_linear(old))
    found = {
        n: keep_reason(n, m, multiple, exclude)
        for n, m in model.named_modules()
        if n and isinstance(m, nn.Linear | nn.Embedding)
    }
    converted = tuple(n for n, reason in found.items() if reason is None)
    for name in converted:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, make(model.get_submodule(name)))
    skipped = {n: reason for n, reason in found.items() if reason and reasons}
    return ConversionReport("tensorwise", "littlelm", converted, skipped)


def converts_the_head(model, recipe="tensorwise", **keys):
    return _swap(model, exclude=())


def any_size(model, recipe="tensorwise", **keys):
    return _swap(model, multiple=1)


def no_reasons(model, recipe="tensorwise", **keys):
    return _swap(model, reasons=False)


def by_substring(model, recipe="tensorwise", **keys):
    """Excludes whatever has "head" somewhere in its name, "overhead" too."""
    words = {w for n, _ in model.named_modules() for w in n.split(".") if "head" in w}
    return _swap(model, exclude=(*words, "embedding"))


def copies_the_weights(model, recipe="tensorwise", **keys):
    def make(old):
        new = Float8Linear.from_linear(old, recipe=recipe)
        new.weight = nn.Parameter(old.weight.detach().clone())
        return new

    return _swap(model, make=make)


def starts_in_training_mode(model, recipe="tensorwise", **keys):
    return _swap(model, make=lambda old: Float8Linear.from_linear(old).train())


def any_recipe(model, recipe="tensorwise", **keys):
    return _swap(model)


ZOO = {
    "no scale": (
        _with(quantize=without_scale), "test_off_by_half_a_step_at_most"
    ),
    "zero over zero": (_with(quantize=zero_over_zero), "test_zeros_stay_zeros"),
    "scale upside down": (
        _with(quantize=scale_upside_down), "test_off_by_half_a_step_at_most"
    ),
    "one scale called rows": (
        _with(quantize=one_scale_for_all), "test_rows_have_scales_of_their_own"
    ),
    "448 for both formats": (
        _with(quantize=e4m3s_limit_for_both),
        "test_the_largest_value_uses_the_whole_range",
    ),
    "hides NaN": (_with(quantize=hides_nan), "test_not_finite_is_never_hidden"),
    "truncates": (_with(quantize=truncates), "test_off_by_half_a_step_at_most"),
    "scale in bf16": (_with(quantize=scale_in_bf16), "test_shapes_and_types"),
    "scale from the mean": (
        _with(quantize=mean_for_amax), "test_off_by_half_a_step_at_most"
    ),
    "gradients in e4m3": (
        _with(Float8Linear=GradientsInE4M3),
        "test_tensorwise_is_three_products_of_rounded_numbers",
    ),
    "only the forward": (
        _with(Float8Linear=OnlyTheForward),
        "test_tensorwise_is_three_products_of_rounded_numbers",
    ),
    "rowwise in name": (
        _with(Float8Linear=OneScaleInEveryRecipe),
        "test_rowwise_scales_do_not_change_along_a_sum",
    ),
    "loses the bias": (
        _with(Float8Linear=LosesTheBias), "test_leading_dimensions_and_bias"
    ),
    "FP8 in eval": (
        _with(Float8Linear=AlsoInEval),
        "test_eval_mode_is_the_plain_linear_at_any_length",
    ),
    "no size check": (
        _with(Float8Linear=NoSizes),
        "test_sizes_that_do_not_fit_are_refused_in_a_line",
    ),
    "returns fp32": (
        _with(Float8Linear=ReturnsFp32), "test_output_has_the_autocast_type"
    ),
    "rounds its weights": (
        _with(Float8Linear=RoundsItsWeights), "test_weights_are_not_rounded"
    ),
    "drops gradients that are not finite": (
        _with(Float8Linear=ZeroesWhatIsNotFinite),
        "test_a_gradient_that_is_not_finite_arrives",
    ),
    "converts the head": (
        _with(convert_to_fp8=converts_the_head),
        "test_conversion_is_by_rule_and_reported",
    ),
    "converts any size": (
        _with(convert_to_fp8=any_size), "test_conversion_is_by_rule_and_reported"
    ),
    "gives no reasons": (
        _with(convert_to_fp8=no_reasons), "test_conversion_is_by_rule_and_reported"
    ),
    "excludes by substring": (
        _with(convert_to_fp8=by_substring), "test_conversion_is_by_rule_and_reported"
    ),
    "copies the weights": (
        _with(convert_to_fp8=copies_the_weights),
        "test_conversion_keeps_the_parameters",
    ),
    "starts in training mode": (
        _with(convert_to_fp8=starts_in_training_mode),
        "test_conversion_keeps_the_parameters",
    ),
    "takes any recipe": (
        _with(convert_to_fp8=any_recipe),
        "test_unknown_recipe_or_engine_changes_nothing",
    ),
}  # fmt: skip
