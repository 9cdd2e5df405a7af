"""Contract of rotary positions: a module with `rope_table` and `apply_rope`."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

PART = "littlelm_core.attention"

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def _angles(positions, head_dim, theta=10000.0, frequency=None):
    """Angles of every pair in fp64, from the formula alone."""
    rows = []
    for position in positions:
        row = []
        for i in range(head_dim // 2):
            f = theta ** (-2 * i / head_dim)
            row.append(position * (frequency(f) if frequency else f))
        rows.append(row + row)
    return torch.tensor(rows, dtype=torch.float64)


def _llama3(f):
    """Llama 3.1's rule for one frequency, in its own words: by wavelength."""
    old = LLAMA3["original_max_position_embeddings"]
    wavelength = 2 * math.pi / f
    if wavelength < old / LLAMA3["high_freq_factor"]:
        return f
    if wavelength > old / LLAMA3["low_freq_factor"]:
        return f / LLAMA3["factor"]
    share = (old / wavelength - LLAMA3["low_freq_factor"]) / (
        LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"]
    )
    return (1 - share) * f / LLAMA3["factor"] + share * f


def _agrees(table, angles, tolerance, what):
    for ours, exact in zip(table, (angles.cos(), angles.sin()), strict=True):
        error = (ours.double() - exact).abs().max().item()
        assert error < tolerance, f"{what}: the table is off by {error:.2g}"


def test_table_is_right_by_hand(part):
    cos, sin = part.rope_table(4, 4)
    assert cos.shape == sin.shape == (4, 4), f"shape {tuple(cos.shape)}, not (4, 4)"
    for i, angle in enumerate((3.0, 0.03, 3.0, 0.03)):
        assert cos[3, i].item() == pytest.approx(math.cos(angle), abs=1e-6), (
            f"cos of position 3, entry {i} is not that of the angle {angle}"
        )
        assert sin[3, i].item() == pytest.approx(math.sin(angle), abs=1e-6), (
            f"sin of position 3, entry {i} is not that of the angle {angle}"
        )


def test_theta_is_used(part):
    angles = _angles(range(10), 8, theta=500.0)
    _agrees(part.rope_table(10, 8, theta=500.0), angles, 1e-5, "theta 500")


def test_tables_are_fp32_whatever_surrounds_them(part):
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                cos, sin = part.rope_table(torch.tensor([4095]), 64)
            assert cos.dtype == sin.dtype == torch.float32, f"table is {cos.dtype}"
            # fp32 knows an angle of 4095 rad to 2.4e-4; bf16 only to 16 rad.
            _agrees((cos, sin), _angles([4095], 64), 1e-3, "position 4095")
    finally:
        torch.set_default_dtype(before)


def test_rows_belong_to_the_positions(part):
    whole = part.rope_table(12, 8)
    for first, last in ((5, 9), (0, 4), (11, 12)):
        rows = part.rope_table(torch.arange(first, last), 8)
        for ours, full in zip(rows, whole, strict=True):
            assert torch.equal(ours, full[first:last]), (
                f"positions {first} ... {last - 1} give other rows than the whole table"
            )


def test_nothing_is_remembered_by_length_alone(part):
    tables = [
        part.rope_table(6, 8)[1],
        part.rope_table(6, 8, theta=100.0)[1],
        part.rope_table(6, 8, scaling={"rope_type": "linear", "factor": 2.0})[1],
        part.rope_table(torch.arange(6, 12), 8)[1],
    ]
    for i, one in enumerate(tables):
        for other in tables[:i]:
            assert not torch.equal(one, other), (
                "tables of one length but other positions, theta or scaling are equal"
            )


def test_linear_scaling_stretches_positions(part):
    scaling = {"rope_type": "linear", "factor": 4.0}
    angles = _angles([p / 4 for p in range(40)], 16)
    _agrees(part.rope_table(40, 16, scaling=scaling), angles, 1e-5, "linear, factor 4")


def test_llama3_scaling_is_exact(part):
    # Head width 32 has fast, blended and slow pairs for these numbers.
    angles = _angles(range(40), 32, frequency=_llama3)
    _agrees(part.rope_table(40, 32, scaling=LLAMA3), angles, 1e-5, "llama3")


def test_no_scaling_has_a_name_too(part):
    plain = part.rope_table(5, 8)
    named = part.rope_table(5, 8, scaling={"rope_type": "default"})
    assert torch.equal(plain[0], named[0]), "rope_type default is not the plain table"


def test_what_is_unknown_raises(part):
    for scaling in (
        {"rope_type": "yarn", "factor": 2.0},
        {"factor": 2.0},
        {"rope_type": "linear"},
        {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"},
    ):
        with pytest.raises(ValueError):
            part.rope_table(4, 8, scaling=scaling)


def test_odd_head_width_raises(part):
    with pytest.raises(ValueError):
        part.rope_table(4, 7)


def test_pairs_are_the_two_halves(part):
    cos, sin = part.rope_table(torch.tensor([2]), 4)
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    turned = part.apply_rope(x, cos, sin).view(4)
    wanted = torch.tensor([math.cos(2.0), 0.0, math.sin(2.0), 0.0])
    assert torch.allclose(turned, wanted, atol=1e-6), (
        f"entry 0 turns with entry 2 (half-split), by +2 rad: {wanted.tolist()}, "
        f"not {[round(t, 4) for t in turned.tolist()]}"
    )


def test_position_zero_changes_nothing(part):
    x = torch.randn(2, 3, 1, 8)
    assert torch.equal(part.apply_rope(x, *part.rope_table(1, 8)), x)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 300), st.integers(0, 300), st.integers(0, 700), st.integers(0, 999)
)
def _score_depends_on_distance(part, m, n, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 1, 1, 16, generator=generator)
    k = torch.randn(1, 1, 1, 16, generator=generator)

    def score(at_q, at_k):
        q_at = part.apply_rope(q, *part.rope_table(torch.tensor([at_q]), 16))
        k_at = part.apply_rope(k, *part.rope_table(torch.tensor([at_k]), 16))
        return (q_at * k_at).sum().item()

    near, far = score(m, n), score(m + shift, n + shift)
    assert abs(near - far) < 5e-3, (
        f"q at {m}, k at {n} score {near:.4f}; both {shift} later {far:.4f}"
    )


def test_only_distance_counts(part):
    _score_depends_on_distance(part)


def test_length_is_kept(part):
    x = torch.randn(1, 2, 50, 32)
    turned = part.apply_rope(x, *part.rope_table(50, 32))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert not torch.allclose(turned[..., 1:, :], x[..., 1:, :], atol=1e-2), (
        "nothing was turned"
    )


def test_bf16_is_rounded_once(part):
    x = torch.randn(4, 4, 64, 64).bfloat16()
    positions = torch.arange(4000, 4064)
    cos, sin = part.rope_table(positions, 64)
    turned = part.apply_rope(x, cos, sin)
    assert turned.dtype == torch.bfloat16, f"bf16 in, {turned.dtype} out"
    exact = part.apply_rope(x.double(), cos.double(), sin.double())
    # One rounding to 8 bits: at most 2^-8 of the value. Tables or products in bf16
    # round three times more.
    error = ((turned.double() - exact).abs() / exact.abs().clamp(min=1e-2)).max()
    assert error <= 2**-8, f"relative error {error:.4f}: products are not in fp32"


def test_a_table_of_another_length_raises(part):
    x = torch.randn(1, 1, 5, 8)
    for rows in (1, 4, 6):
        with pytest.raises(ValueError):
            part.apply_rope(x, *part.rope_table(rows, 8))
