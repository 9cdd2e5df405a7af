"""Contract of Muon: an optimizer for matrices, written out here as plain fp32 loops."""

import io

import pytest
import torch

from littlelm_core.config import ConfigError

PART = "littlelm_core.optim:Muon"

LIE, SQUARE, STAND = (12, 30), (16, 16), (40, 10)


def orthogonal(x):
    """Newton-Schulz, one matrix, fp32, from the formula."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x = x / x.norm() if x.any() else x
    for _ in range(5):
        xx = x @ x.T
        x = 3.4445 * x - 4.7750 * xx @ x + 2.0315 * xx @ xx @ x
    return x


class ByHand:
    """One matrix and its momentum."""

    def __init__(self, w, lr, momentum=0.95, nesterov=True, weight_decay=0.0,
                 scale="original"):  # fmt: skip
        self.w, self.m = w.detach().clone(), torch.zeros_like(w)
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.weight_decay = weight_decay
        rows, columns = w.shape
        self.scale = {
            "original": max(1.0, rows / columns) ** 0.5,
            "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
        }[scale]

    def step(self, grad):
        beta = self.momentum
        self.m = beta * self.m + (1 - beta) * grad
        step = beta * self.m + (1 - beta) * grad if self.nesterov else self.m
        self.w = self.w - self.lr * self.weight_decay * self.w
        self.w = self.w - self.lr * self.scale * orthogonal(step)
        return self.w


def weights(*shapes, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=draw).mul(0.1).to(dtype) for s in shapes]
    return [torch.nn.Parameter(w) for w in made]


def give_gradients(params, seed):
    draw = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)


def compare(part, steps=6, **keys):
    params = weights(LIE, SQUARE, STAND, LIE, LIE)
    optimizer = part(params, lr=0.02, **keys)
    plain = [ByHand(p, lr=0.02, **keys) for p in params]
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
        for p, one in zip(params, plain, strict=True):
            error = (p.detach() - one.step(p.grad)).abs().max().item()
            assert error < 1e-5, (
                f"after step {step + 1} with {keys} a {tuple(p.shape)} matrix is off "
                f"by {error:.2g}"
            )


def test_equals_the_formula(part):
    compare(part)


def test_momentum_with_and_without_nesterov(part):
    compare(part, nesterov=False)
    compare(part, momentum=0.6)
    compare(part, momentum=0.0)


def test_both_scale_rules(part):
    compare(part, scale="original")
    compare(part, scale="match_rms_adamw")


def test_decay_is_decoupled_and_visible(part):
    compare(part, weight_decay=0.3)
    (p,) = weights(SQUARE)
    before = p.detach().clone()
    optimizer = part([p], lr=0.5, weight_decay=0.2)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(p.detach(), 0.9 * before, rtol=1e-6), (
        "without a gradient a weight shrinks by lr · weight_decay = 0.1 of itself"
    )


def test_cautious_decay_only_where_the_update_shrinks_too(part):
    moved = {}
    for decay, cautious in ((0.0, False), (0.5, True), (0.5, False)):
        (p,) = weights(LIE)
        start = p.detach().clone()
        optimizer = part([p], lr=0.1, weight_decay=decay, cautious=cautious)
        give_gradients([p], 0)
        optimizer.step()
        moved[decay, cautious] = p.detach().clone()
    update = start - moved[0.0, False]
    agree = update * start > 0
    assert 0.3 < agree.float().mean() < 0.7, "this test needs weights of both kinds"
    wanted = torch.where(agree, moved[0.5, False], moved[0.0, False])
    assert torch.allclose(moved[0.5, True], wanted, atol=1e-6), (
        "decay where update and weight have one sign, leave the others alone"
    )


def test_one_of_many_moves_as_it_would_alone(part):
    shapes = [LIE] * 5 + [STAND] * 3
    together, apart = weights(*shapes), weights(*shapes)
    many, alone = part(together, lr=0.02), [part([p], lr=0.02) for p in apart]
    for step in range(3):
        give_gradients(together, step)
        give_gradients(apart, step)
        many.step()
        for one in alone:
            one.step()
    for a, b in zip(together, apart, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_stack_is_a_batch_of_matrices(part):
    for rows, columns in (LIE, STAND):
        stack, second = weights((3, rows, columns), (3, rows, columns))
        each = [torch.nn.Parameter(m.detach().clone()) for m in stack]
        for name in ("original", "match_rms_adamw"):
            one, three = (
                part(ps, lr=0.1, scale=name) for ps in ([stack, second], each)
            )
            give_gradients([stack, second], 4)
            for p, grad in zip(each, stack.grad, strict=True):
                p.grad = grad.clone()
            one.step()
            three.step()
            for p, m in zip(each, stack, strict=True):
                assert torch.allclose(p, m, atol=1e-5), (
                    "a (3, R, C) weight is three matrices: each its own norm, and rows "
                    "and columns are the last two dimensions"
                )


def test_without_a_gradient_nothing_moves(part):
    a, b = weights(LIE, LIE)
    optimizer = part([a, b], lr=0.1, weight_decay=0.5)
    before = b.detach().clone()
    give_gradients([a], 0)
    optimizer.step()
    assert torch.equal(b.detach(), before), "no gradient is not a gradient of zero"
    assert not optimizer.state.get(b), "nor does it get a momentum"


def test_the_rate_is_read_at_every_step(part):
    (p,) = weights(LIE)
    optimizer = part([p], lr=0.1, weight_decay=0.5)
    optimizer.param_groups[0]["lr"] = 0.0
    before = p.detach().clone()
    give_gradients([p], 0)
    optimizer.step()
    assert torch.equal(p.detach(), before), 'a schedule sets group["lr"]'


def test_normuon_evens_out_the_rows_and_keeps_the_norm(part):
    sizes = {}
    for normuon in (False, True):
        (p,) = weights(STAND)
        start = p.detach().clone()
        give_gradients([p], 0)
        p.grad[0] *= 30
        part([p], lr=1.0, normuon=normuon).step()
        sizes[normuon] = (start - p.detach()).square().mean(1).sqrt()
    spread = {k: float(v.max() / v.min()) for k, v in sizes.items()}
    assert spread[False] > 1.5, "this test needs uneven rows"
    assert spread[True] < 1.001, f"rows of the first update differ: {spread[True]:.3f}x"
    norms = {k: float(v.norm()) for k, v in sizes.items()}
    assert abs(norms[True] / norms[False] - 1) < 1e-3, "the update's norm must stay"


def test_normuon_remembers_the_rows(part):
    """Two steps: the mean square after them weighs the first .95, the second 1."""
    (p,) = weights(LIE)
    plain = ByHand(p, lr=1.0, momentum=0.0, nesterov=False)
    optimizer = part([p], lr=1.0, momentum=0.0, nesterov=False, normuon=True)
    square = torch.zeros(LIE[0], 1)
    for step in range(3):
        give_gradients([p], step)
        start, before = p.detach().clone(), plain.w
        update = before - plain.step(p.grad)
        square = 0.95 * square + 0.05 * update.square().mean(1, keepdim=True)
        wanted = update / square.sqrt()
        wanted *= update.norm() / wanted.norm()
        optimizer.step()
        error = float((start - p.detach() - wanted).abs().max())
        assert error < 1e-4, f"step {step + 1} is off by {error:.2g}"


def drift(part, dtype, **keys):
    """How far weights at 1 come in 40 steps that are each too small for bf16."""
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = part([p], lr=0.004, nesterov=False, momentum=0.0, **keys)
    draw = torch.Generator().manual_seed(5)
    grad = torch.rand(64, 64, generator=draw) - 0.5  # one direction, again and again
    update = orthogonal(grad)
    for _ in range(40):
        p.grad = grad.to(dtype)
        optimizer.step()
    moved = 1 - p.detach().float()
    return float((moved * update).sum() / update.square().sum())


def test_stochastic_rounding_keeps_small_updates(part):
    wanted = 40 * 0.004
    assert abs(drift(part, torch.float32) / wanted - 1) < 0.01
    nearest = drift(part, torch.bfloat16)
    random = drift(part, torch.bfloat16, stochastic_rounding=True)
    assert nearest < 0.1 * wanted, "this test needs updates that bf16 loses"
    assert abs(random / wanted - 1) < 0.15, (
        f"bf16 weights came {random:.4f} of {wanted:.4f} in 40 small steps"
    )


def test_a_resume_is_exact(part):
    """Also of bf16 weights with random rounding, and of NorMuon's fp32 statistics."""
    for dtype in (torch.float32, torch.bfloat16):
        keys = {"lr": 0.02, "normuon": True, "stochastic_rounding": True}
        keys["weight_decay"] = 0.1
        params = weights(LIE, STAND, LIE, dtype=dtype)
        optimizer = part(params, **keys)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        resumed = part(copies, **keys)
        resumed.load_state_dict(torch.load(file))
        torch.manual_seed(99)  # whatever has been drawn in between
        for step in range(3, 6):
            for some, one in ((params, optimizer), (copies, resumed)):
                give_gradients(some, step)
                one.step()
        for a, b in zip(params, copies, strict=True):
            assert torch.equal(a, b), f"{dtype}: the resumed run is another one"


def test_what_cannot_be_used_is_refused(part):
    for shape in ((5,), (2, 3, 4, 5)):
        with pytest.raises(ConfigError, match="matri"):
            part([torch.nn.Parameter(torch.zeros(shape))], lr=0.1)
    wrong = (
        {"lr": -0.1}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0},
        {"scale": "orginal"}, {"coefficients": "quintik"}, {"steps": 0},
    )  # fmt: skip
    for keys in wrong:
        (key,) = keys
        with pytest.raises(ConfigError, match=key if key != "scale" else "original"):
            part(weights(LIE), **keys)
