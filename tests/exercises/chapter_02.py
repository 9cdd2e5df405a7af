"""Graders of chapter 02's exercises."""

import math

import torch


def exercise_2_1(answer):
    """A causal softmax without a loop."""
    scores = torch.randn(6, 6, requires_grad=True)
    weights = answer(scores)
    assert weights.shape == (6, 6), f"shape {tuple(weights.shape)}, not (6, 6)"
    assert torch.equal(weights, weights.tril()), "a token looks ahead"
    for t in range(6):
        wanted = scores[t, : t + 1].softmax(0)
        assert torch.allclose(weights[t, : t + 1], wanted, atol=1e-6), (
            f"row {t} is not the softmax of its first {t + 1} scores"
        )
    (weights * torch.arange(6.0)).sum().backward()
    assert torch.isfinite(scores.grad).all(), "the gradient is not finite"
    large = answer(torch.full((3, 3), 1e4))
    assert torch.allclose(large[2], torch.full((3,), 1 / 3)), "large scores overflow"


def exercise_2_2(answer):
    """Tokens in a full turn of a pair."""
    for pair, width, theta in ((0, 64, 1e4), (31, 64, 1e4), (5, 16, 500.0)):
        wanted = 2 * math.pi * theta ** (2 * pair / width)
        got = float(answer(pair, width, theta))
        assert math.isclose(got, wanted, rel_tol=1e-6), (
            f"pair {pair} of width {width} at theta {theta:g}: {wanted:.2f} tokens, "
            f"not {got:.2f}"
        )


def exercise_2_3(answer):
    """The earliest position that reaches the output."""
    for layers, window, position, wanted in (
        (1, 4, 10, 7), (3, 4, 10, 1), (4, 4, 10, 0), (5, 1, 10, 10), (2, 100, 10, 0),
        (2, None, 10, 0), (2, 0, 10, 0), (2, -1, 10, 0),
    ):  # fmt: skip
        got = answer(layers, window, position)
        assert got == wanted, (
            f"{layers} layers, window {window}: position {position} is reached from "
            f"{wanted} on, not {got}"
        )


def exercise_2_4(answer):
    """Average the key/value heads of a group."""
    weight = torch.arange(6.0).repeat_interleave(2)[:, None].repeat(1, 5)  # 6 heads
    got = answer(weight, 6, 2)
    assert got.shape == (4, 5), f"2 heads of width 2: 4 rows, not {tuple(got.shape)}"
    assert got[:, 0].tolist() == [1.0, 1.0, 4.0, 4.0], (
        f"heads 0, 1, 2 become one and 3, 4, 5 the other: 1, 1, 4, 4, not "
        f"{got[:, 0].tolist()}"
    )
    weight = torch.randn(8, 3)
    assert torch.equal(answer(weight, 4, 4), weight), "as many heads: nothing changes"
    one = answer(weight, 4, 1)
    wanted = (weight[:2] + weight[2:4] + weight[4:6] + weight[6:]) / 4
    assert torch.allclose(one, wanted, atol=1e-6), "one head is the mean of all four"


def exercise_2_5(answer):
    """Attention over blocks that are read once."""
    query, keys, values = torch.randn(8), torch.randn(23, 8), torch.randn(23, 4)
    wanted = (keys @ query / 8**0.5).softmax(0) @ values
    for size in (23, 1, 5, 7):
        blocks = zip(keys.split(size), values.split(size), strict=True)
        got = answer(query, iter(blocks))
        assert torch.allclose(got, wanted, atol=1e-5), f"wrong in blocks of {size}"
    rising = torch.linspace(0, 300, 23)[:, None] * torch.ones(8)
    wanted = (rising.double() @ torch.ones(8).double() / 8**0.5).softmax(0).float()
    blocks = zip(rising.split(5), values.split(5), strict=True)
    got = answer(torch.ones(8), iter(blocks))
    assert torch.isfinite(got).all(), "scores of 800 overflow: subtract the maximum"
    assert torch.allclose(got, wanted @ values, atol=1e-4), "rescale when it grows"
