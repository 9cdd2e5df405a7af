"""The loss: equal to the plain one in value and gradient, in a fraction of its memory.

The reference writes all logits down and calls torch's cross-entropy, in fp64 where only
the mathematics is compared and in fp32 where memory is.
"""

import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PART = "littlelm_core.model:linear_cross_entropy"


def _case(rows=37, width=16, vocab=53, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator) * size
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), targets


def _plain(x, weight, targets, softcap=None, z_loss=0.0, reduction="mean", ignore=-100):
    """All logits at once, in the inputs' own dtype."""
    logits = x @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    valid = targets != ignore
    total = F.cross_entropy(logits, targets, ignore_index=ignore, reduction="sum")
    total = total + z_loss * (logits.logsumexp(-1)[valid] ** 2).sum()
    return total / valid.sum().clamp(min=1) if reduction == "mean" else total


def _with_gradients(loss, x, weight):
    return (loss.detach(), *torch.autograd.grad(loss, (x, weight)))


def _same(got, wanted, what, rtol=2e-4, atol=2e-5):
    for name, a, b in zip(("value", "gradient of x", "of W"), got, wanted, strict=True):
        assert torch.isfinite(a).all(), f"{what}: {name} is not finite"
        worst = (a.double() - b.double()).abs().max().item()
        assert torch.allclose(a.double(), b.double(), rtol=rtol, atol=atol), (
            f"{what}: {name} differs from the plain loss by {worst:.2g}"
        )


class _PeakBytes(TorchDispatchMode):
    """The most bytes alive at once in tensors that were made inside."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        inputs = {id(x.untyped_storage()) for x in tree_leaves(args) if _tensor(x)}
        for tensor in filter(_tensor, tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage not in self.known and id(storage) not in inputs:
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return out

    def _freed(self, size):
        self.now -= size


def _tensor(x):
    return isinstance(x, torch.Tensor)


def test_equals_the_plain_loss_in_value_and_gradient(part):
    x, weight, targets = _case()
    targets[3:9] = -100
    exact = x.double(), weight.double()
    for softcap, z_loss, reduction, chunk in itertools.product(
        (None, 2.0), (0.0, 0.01), ("mean", "sum"), (1, 8, 37, 1000)
    ):
        got = part(
            x, weight, targets, softcap=softcap, z_loss=z_loss, chunk=chunk,
            reduction=reduction,
        )  # fmt: skip
        wanted = _plain(*exact, targets, softcap, z_loss, reduction)
        what = f"softcap={softcap} z_loss={z_loss} {reduction} chunk={chunk}"
        _same(_with_gradients(got, x, weight), _with_gradients(wanted, x, weight), what)


def test_default_chunk_is_right_for_any_number_of_rows(part):
    for rows in (1, 2, 300):
        x, weight, targets = _case(rows=rows)
        got, wanted = part(x, weight, targets), _plain(x, weight, targets)
        _same(
            _with_gradients(got, x, weight),
            _with_gradients(wanted, x, weight),
            f"{rows} rows",
        )


def test_value_is_the_same_without_gradients(part):
    x, weight, targets = _case()
    targets[:5] = -100
    for keys in ({}, {"softcap": 2.0, "z_loss": 0.01}, {"reduction": "sum"}):
        learned = part(x, weight, targets, chunk=8, **keys)
        with torch.no_grad():
            scored = part(x, weight, targets, chunk=8, **keys)
        assert torch.allclose(learned, scored, rtol=1e-5), (
            f"{keys}: {learned.item()} while training, {scored.item()} while scoring"
        )
        assert not scored.requires_grad, "scoring must not build a graph"


def test_all_targets_masked_give_zero_with_a_graph(part):
    for reduction in ("mean", "sum"):
        x, weight, targets = _case(rows=10)
        loss = part(
            x, weight, torch.full_like(targets, -100), z_loss=0.1, chunk=4,
            reduction=reduction,
        )  # fmt: skip
        assert loss.item() == 0.0, f"no valid target: the loss is 0, not {loss.item()}"
        assert loss.requires_grad, "the loss of a masked batch needs a graph"
        loss.backward()
        assert not x.grad.any(), "no valid target, so x has no gradient"
        assert not weight.grad.any(), "no valid target, so W has no gradient"


def test_ignored_rows_count_nothing(part):
    x, weight, targets = _case(rows=20)
    for ignore in (-100, 7):
        masked = targets.clone()
        masked[masked == ignore] = 8
        masked[::3] = ignore
        keep = masked != ignore
        got = part(x, weight, masked, ignore_index=ignore, chunk=6)
        wanted = part(x[keep], weight, masked[keep], ignore_index=ignore, chunk=6)
        _same(
            _with_gradients(got, x, weight),
            _with_gradients(wanted, x, weight),
            f"ignore_index={ignore}",
        )


def test_any_split_of_a_batch_adds_up(part):
    x, weight, targets = _case(rows=30)
    targets[20:28] = -100
    whole = part(x, weight, targets, reduction="sum", chunk=7)
    pieces = [
        part(x[a:b], weight, targets[a:b], reduction="sum", chunk=7)
        for a, b in ((0, 4), (4, 21), (21, 30))
    ]
    _same(
        _with_gradients(sum(pieces), x, weight),
        _with_gradients(whole, x, weight),
        "three micro-batches",
    )
    valid = int((targets != -100).sum())
    mean = part(x, weight, targets, chunk=7)
    assert torch.allclose(mean * valid, whole, rtol=1e-5), (
        "mean is the sum divided by the number of valid targets"
    )


def test_upstream_gradient_multiplies(part):
    x, weight, targets = _case()
    one = _with_gradients(part(x, weight, targets), x, weight)
    half = torch.autograd.grad(0.5 * part(x, weight, targets), (x, weight))
    for a, b in zip(half, one[1:], strict=True):
        assert torch.allclose(a, 0.5 * b, rtol=1e-5, atol=1e-8), (
            "half of the loss has half of the gradient"
        )
    loss = part(x, weight, targets)
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.allclose(x.grad, 2 * one[1], rtol=1e-5, atol=1e-8), (
        "two backward passes add the same gradient twice"
    )


def test_only_what_learns_gets_a_gradient(part):
    x, weight, targets = _case()
    wanted = torch.autograd.grad(part(x, weight, targets), (x, weight))
    frozen = part(x, weight.detach(), targets)
    (got,) = torch.autograd.grad(frozen, (x,))
    assert torch.allclose(got, wanted[0], atol=1e-6), (
        "a frozen head changes x's gradient"
    )
    (got,) = torch.autograd.grad(part(x.detach(), weight, targets), (weight,))
    assert torch.allclose(got, wanted[1], atol=1e-6), "frozen x changes W's gradient"


def test_chunks_add_up_in_fp32(part):
    # 4096 rows of ones: each chunk adds the same to every weight. In bf16 the sum stops
    # growing when one chunk's part falls below half a unit in the last place.
    rows, vocab, chunk = 4096, 4, 8
    x = torch.ones(rows, 2, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(vocab, 2, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.long)
    loss = part(x, weight, targets, chunk=chunk, reduction="sum")
    assert loss.dtype == torch.float32, f"the loss is {loss.dtype}, not fp32"
    wanted = rows * torch.log(torch.tensor(4.0))
    assert torch.allclose(loss, wanted, rtol=1e-4), (
        f"4096 rows of ln 4 are {wanted.item():.1f}, not {loss.item():.1f}"
    )
    loss.backward()
    assert weight.grad.dtype == torch.bfloat16, "a gradient has its weight's dtype"
    got = weight.grad[1, 0].item()
    assert abs(got - rows / 4) <= 4, (
        f"gradient of W over 512 chunks: {got} in place of {rows / 4}: sum it in fp32"
    )


def test_bf16_autocast_is_close_and_returns_fp32(part):
    x, weight, targets = _case(rows=64, width=32, vocab=128, size=0.2)
    exact = _with_gradients(_plain(x, weight, targets, softcap=15.0), x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = part(x, weight, targets, softcap=15.0, chunk=16)
    got = _with_gradients(loss, x, weight)
    assert loss.dtype == torch.float32, f"under autocast the loss is {loss.dtype}"
    assert got[2].dtype == torch.float32, "an fp32 weight has an fp32 gradient"
    # bf16 keeps 8 bits: logits of size 1 are off by about 2^-9, and so are gradients.
    assert abs(got[0] - exact[0]) < 0.02, f"bf16 moves the loss by {got[0] - exact[0]}"
    for a, b in zip(got[1:], exact[1:], strict=True):
        error = ((a - b).norm() / b.norm()).item()
        assert error < 0.02, f"bf16 moves a gradient by {error:.1%}"


def test_large_logits_stay_finite(part):
    x = torch.tensor([[300.0, 0.0], [-300.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    targets = torch.tensor([0, 0])
    got = _with_gradients(part(x, weight, targets), x, weight)
    _same(got, _with_gradients(_plain(x, weight, targets), x, weight), "logits of 300")
    assert got[0].item() == pytest.approx(300.0), "(0 + 600) / 2 nats"


def test_peak_memory_is_a_fraction_of_the_plain_one(part):
    rows, vocab = 2048, 2048
    x, weight, targets = _case(rows=rows, width=16, vocab=vocab)

    def peak(loss):
        with _PeakBytes() as alive:
            loss().backward()
        x.grad = weight.grad = None
        return alive.peak

    plain = peak(lambda: _plain(x, weight, targets, softcap=15.0))
    ours = peak(lambda: part(x, weight, targets, softcap=15.0, chunk=64))
    assert plain > 3 * 4 * rows * vocab, "the plain loss holds at least three copies"
    assert ours < plain / 8, (
        f"peak of {ours / 2**20:.1f} MiB where the plain loss needs "
        f"{plain / 2**20:.1f}: logits of all rows are alive at once"
    )


def test_wrong_calls_raise_in_one_line(part):
    x, weight, targets = _case(rows=4)
    with pytest.raises(ValueError, match="average"):
        part(x, weight, targets, reduction="average")
    with pytest.raises(ValueError, match="flatten"):
        part(x, weight, targets.view(2, 2))
    with pytest.raises(ValueError, match="chunk"):
        part(x, weight, targets, chunk=0)
