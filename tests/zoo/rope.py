"""Rotary positions that are wrong in ways people have shipped."""

from types import SimpleNamespace

import torch

from littlelm_core import attention
from littlelm_core.attention import apply_rope, rope_frequencies, rope_table


def _with(**changes):
    return SimpleNamespace(**{**vars(attention), **changes})


def _interleaved(x, cos, sin):
    """Pairs (0, 1), (2, 3), ...: the other convention, on half-split tables."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, :half], sin[:, :half]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def _backwards(x, cos, sin):
    return apply_rope(x, cos, -sin)


def _low_precision(x, cos, sin):
    if x.dtype == torch.bfloat16:
        return apply_rope(x, cos.to(x.dtype), sin.to(x.dtype))
    return apply_rope(x, cos, sin)


def _promotes(x, cos, sin):
    return apply_rope(x.to(cos.dtype), cos, sin)


def _broadcasts(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[: x.shape[-2]], sin[: x.shape[-2]]
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def _bf16_table(positions, head_dim, theta=10000.0, scaling=None):
    if not isinstance(positions, torch.Tensor):
        positions = torch.arange(positions)
    frequency = rope_frequencies(head_dim, theta, scaling)
    angle = (positions.bfloat16()[:, None] * frequency.bfloat16()).repeat(1, 2).float()
    return angle.cos(), angle.sin()


def _default_dtype_table(positions, head_dim, theta=10000.0, scaling=None):
    table = rope_table(positions, head_dim, theta, scaling)
    return tuple(t.to(torch.get_default_dtype()) for t in table)


def _remembering():
    known = {}

    def table(positions, head_dim, theta=10000.0, scaling=None):
        length = positions if isinstance(positions, int) else len(positions)
        if (length, head_dim) not in known:
            known[length, head_dim] = rope_table(positions, head_dim, theta, scaling)
        return known[length, head_dim]

    return table


def _from_zero(positions, head_dim, theta=10000.0, scaling=None):
    length = positions if isinstance(positions, int) else len(positions)
    return rope_table(length, head_dim, theta, scaling)


def _lenient(positions, head_dim, theta=10000.0, scaling=None):
    try:
        return rope_table(positions, head_dim, theta, scaling)
    except ValueError:
        return rope_table(positions, head_dim - head_dim % 2, theta)


def _linear_inverted(positions, head_dim, theta=10000.0, scaling=None):
    if scaling and scaling.get("rope_type") == "linear":
        scaling = {**scaling, "factor": 1 / scaling["factor"]}
    return rope_table(positions, head_dim, theta, scaling)


def _llama3_without_blend(positions, head_dim, theta=10000.0, scaling=None):
    if scaling and scaling.get("rope_type") == "llama3":
        scaling = {**scaling, "high_freq_factor": scaling["low_freq_factor"] + 1e-6}
    return rope_table(positions, head_dim, theta, scaling)


def _theta_ignored(positions, head_dim, theta=10000.0, scaling=None):
    return rope_table(positions, head_dim, scaling=scaling)


ZOO = {
    "interleaved pairs": (
        _with(apply_rope=_interleaved),
        "test_pairs_are_the_two_halves",
    ),
    "turned backwards": (
        _with(apply_rope=_backwards),
        "test_pairs_are_the_two_halves",
    ),
    "products in bf16": (
        _with(apply_rope=_low_precision),
        "test_bf16_is_rounded_once",
    ),
    "bf16 becomes fp32": (_with(apply_rope=_promotes), "test_bf16_is_rounded_once"),
    "a table of one row is broadcast": (
        _with(apply_rope=_broadcasts),
        "test_a_table_of_another_length_raises",
    ),
    "angles in bf16": (
        _with(rope_table=_bf16_table),
        "test_tables_are_fp32_whatever_surrounds_them",
    ),
    "tables in the model's dtype": (
        _with(rope_table=_default_dtype_table),
        "test_tables_are_fp32_whatever_surrounds_them",
    ),
    "remembered by length alone": (
        _with(rope_table=_remembering()),
        "test_nothing_is_remembered_by_length_alone",
    ),
    "positions start at 0 always": (
        _with(rope_table=_from_zero),
        "test_rows_belong_to_the_positions",
    ),
    "unknown scaling is ignored": (
        _with(rope_table=_lenient),
        "test_what_is_unknown_raises",
    ),
    "linear scaling the wrong way": (
        _with(rope_table=_linear_inverted),
        "test_linear_scaling_stretches_positions",
    ),
    "llama3 without the blend": (
        _with(rope_table=_llama3_without_blend),
        "test_llama3_scaling_is_exact",
    ),
    "theta is ignored": (_with(rope_table=_theta_ignored), "test_theta_is_used"),
}
