"""Norms that are wrong in ways people have shipped."""

import torch
from torch import nn

from littlelm_core.blocks import RMSNorm


class Centered(RMSNorm):
    """LayerNorm's habit: the mean is taken away."""

    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class InputPrecision(RMSNorm):
    """Everything in the input's dtype."""

    def forward(self, x):
        mean_square = x.square().sum(-1, keepdim=True) / x.shape[-1]
        scaled = x * torch.rsqrt(mean_square + self.eps)
        return scaled * self.weight.to(x.dtype)


class StaysFp32(RMSNorm):
    def forward(self, x):
        return super().forward(x.float() if x.dtype != torch.float64 else x)


class EpsOutside(RMSNorm):
    """eps is added to the root."""

    def forward(self, x):
        root = x.float().square().mean(-1, keepdim=True).sqrt()
        return (x.float() / (root + self.eps) * self.weight).to(x.dtype)


class NoEps(RMSNorm):
    def forward(self, x):
        root = x.float().square().mean(-1, keepdim=True).sqrt()
        return (x.float() / root * self.weight).to(x.dtype)


class WholeTensor(RMSNorm):
    """One root mean square for all tokens."""

    def forward(self, x):
        root = (x.float().square().mean() + self.eps).sqrt()
        return (x.float() / root * self.weight).to(x.dtype)


class SumOfSquares(RMSNorm):
    """Divided by the length, not by the root mean square."""

    def forward(self, x):
        return super().forward(x) / x.shape[-1] ** 0.5


class NoGain(RMSNorm):
    def forward(self, x):
        return super().forward(x) / self.weight.to(x.dtype)


class ZeroGain(RMSNorm):
    """1 + weight, weight 0 at the start: another convention, other checkpoints."""

    def __init__(self, dim, eps=1e-6):
        super().__init__(dim, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x):
        return super().forward(x) / self.weight * (1.0 + self.weight)


class DetachedRoot(RMSNorm):
    """The root mean square is taken as a constant in the backward pass."""

    def forward(self, x):
        root = (x.square().mean(-1, keepdim=True) + self.eps).sqrt().detach()
        return x / root * self.weight


ZOO = {
    "the mean is removed": (Centered, "test_formula"),
    "computed in the input's dtype": (
        InputPrecision,
        "test_low_precision_is_computed_in_fp32",
    ),
    "returns fp32": (StaysFp32, "test_low_precision_is_computed_in_fp32"),
    "eps beside the root": (EpsOutside, "test_eps_is_under_the_root"),
    "no eps": (NoEps, "test_zeros_stay_zero_with_finite_gradients"),
    "one norm for all tokens": (WholeTensor, "test_tokens_are_normed_one_by_one"),
    "divided by the length": (SumOfSquares, "test_by_hand"),
    "no gain": (NoGain, "test_formula"),
    "gain counted from zero": (ZeroGain, "test_gains_start_at_one"),
    "root without a gradient": (DetachedRoot, "test_gradients_are_right"),
}
