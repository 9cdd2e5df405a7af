"""MLPs that are wrong in ways people have shipped."""

import torch
import torch.nn.functional as F
from torch import nn

from littlelm_core.blocks import ReLU2, SwiGLU


class Swapped(SwiGLU):
    """The activation sits on the other branch."""

    def forward(self, x):
        return self.w_down(F.silu(self.w_up(x)) * self.w_gate(x))


class Gelu(SwiGLU):
    def forward(self, x):
        return self.w_down(F.gelu(self.w_gate(x)) * self.w_up(x))


class Added(SwiGLU):
    """The gate is added, not multiplied."""

    def forward(self, x):
        return self.w_down(F.silu(self.w_gate(x)) + self.w_up(x))


class NotSquared(ReLU2):
    def forward(self, x):
        return self.w_down(F.relu(self.w_up(x)))


class SquaredFirst(ReLU2):
    """relu(x²): the sign is gone before relu sees it."""

    def forward(self, x):
        return self.w_down(F.relu(self.w_up(x).square()))


class Biased(SwiGLU):
    def __init__(self, dim, ffn_dim):
        super().__init__(dim, ffn_dim)
        self.w_down = nn.Linear(ffn_dim, dim)


class MixesTokens(SwiGLU):
    """A softmax over the tokens in place of a gate of each."""

    def forward(self, x):
        return self.w_down(self.w_gate(x).softmax(1) * self.w_up(x))


class Halved(SwiGLU):
    """Llama's two thirds are taken off a width that already has them off."""

    def __init__(self, dim, ffn_dim):
        super().__init__(dim, 2 * dim)


class Linear(nn.Module):
    """No activation: two matrices that are one."""

    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.first = nn.Linear(dim, ffn_dim, bias=False)
        self.second = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x):
        return self.second(self.first(x))


class Promotes(SwiGLU):
    def forward(self, x):
        return super().forward(x).float()


class DeadGate(SwiGLU):
    """The gate is cut from the graph."""

    def forward(self, x):
        with torch.no_grad():
            gate = F.silu(self.w_gate(x))
        return self.w_down(gate * self.w_up(x))


ZOO = {
    "silu on the other branch": (Swapped, "test_formula"),
    "gelu in place of silu": (Gelu, "test_formula"),
    "gate added": (Added, "test_formula"),
    "relu not squared": (NotSquared, "test_formula"),
    "squared before relu": (SquaredFirst, "test_formula"),
    "a bias on the output": (Biased, "test_no_parameter_is_hidden"),
    "tokens mixed": (MixesTokens, "test_tokens_do_not_see_each_other"),
    "another width": (Halved, "test_width_is_ffn_dim"),
    "no activation": (Linear, "test_it_is_not_linear"),
    "bf16 becomes fp32": (Promotes, "test_shape_and_dtype_return"),
    "gate without a gradient": (DeadGate, "test_gradients_reach_every_parameter"),
}
