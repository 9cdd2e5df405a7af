"""Losses that look right and are not."""

import torch
import torch.nn.functional as F

from littlelm_core.model import linear_cross_entropy


def chunked(
    x, weight, targets, *, softcap=None, ignore_index=-100, z_loss=0.0, chunk=None,
    reduction="mean", cap=True, per_chunk_mean=False, sum_dtype=torch.float32,
):  # fmt: skip
    """An autograd version that is right in value, with switches for mistakes."""
    if reduction not in ("mean", "sum"):
        raise ValueError(reduction)
    if chunk is not None and chunk < 1:
        raise ValueError("chunk")
    if targets.shape != x.shape[:1]:
        raise ValueError("flatten")
    total, parts = torch.zeros((), dtype=sum_dtype), 0
    for xs, ts in zip(x.split(chunk or 64), targets.split(chunk or 64), strict=True):
        z = (xs @ weight.T).to(sum_dtype)
        if softcap is not None and cap:
            z = softcap * torch.tanh(z / softcap)
        valid = ts != ignore_index
        loss = F.cross_entropy(z, ts, ignore_index=ignore_index, reduction="sum")
        loss = loss + z_loss * (z.logsumexp(-1)[valid] ** 2).sum()
        total = total + (loss / valid.sum().clamp(min=1) if per_chunk_mean else loss)
        parts += 1
    if reduction == "sum":
        return total
    count = (targets != ignore_index).sum().clamp(min=1)
    return total / (parts if per_chunk_mean else count)


def mean_of_chunk_means(*args, **keys):
    return chunked(*args, **keys, per_chunk_mean=True)


def forgets_the_softcap(*args, **keys):
    return chunked(*args, **keys, cap=False)


def sums_in_bf16(x, weight, targets, **keys):
    low = x.dtype == torch.bfloat16
    dtype = torch.bfloat16 if low else torch.float32
    return chunked(x, weight, targets, **keys, sum_dtype=dtype).float()


def keeps_every_chunk(*args, **keys):
    """Right in value and gradient: autograd holds each chunk's logits all the same."""
    return chunked(*args, **keys)


def divides_by_all_rows(x, weight, targets, *, reduction="mean", **keys):
    total = linear_cross_entropy(x, weight, targets, reduction="sum", **keys)
    return total / len(targets) if reduction == "mean" else total


def nan_when_all_is_masked(
    x, weight, targets, *, reduction="mean", ignore_index=-100, **keys
):
    total = linear_cross_entropy(
        x, weight, targets, reduction="sum", ignore_index=ignore_index, **keys
    )
    return total / (targets != ignore_index).sum() if reduction == "mean" else total


def cap_without_its_slope(x, weight, targets, *, softcap=None, **keys):
    """The capped value with the uncapped path's gradient."""
    plain = linear_cross_entropy(x, weight, targets, **keys)
    with torch.no_grad():
        value = linear_cross_entropy(x, weight, targets, softcap=softcap, **keys)
    return plain + (value - plain).detach()


class _IgnoresUpstream(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, keys):
        with torch.enable_grad():
            a, b = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = linear_cross_entropy(a, b, targets, **keys)
            ctx.save_for_backward(*torch.autograd.grad(loss, (a, b)))
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return (*ctx.saved_tensors, None, None)


def ignores_the_upstream_gradient(x, weight, targets, **keys):
    return _IgnoresUpstream.apply(x, weight, targets, keys)


ZOO = {
    "mean of the chunks' means": (
        mean_of_chunk_means,
        "test_equals_the_plain_loss_in_value_and_gradient",
    ),
    "no softcap": (
        forgets_the_softcap,
        "test_equals_the_plain_loss_in_value_and_gradient",
    ),
    "softcap without its slope": (
        cap_without_its_slope,
        "test_equals_the_plain_loss_in_value_and_gradient",
    ),
    "sums in bf16": (sums_in_bf16, "test_chunks_add_up_in_fp32"),
    "all chunks kept for the backward": (
        keeps_every_chunk,
        "test_peak_memory_is_a_fraction_of_the_plain_one",
    ),
    "mean over ignored rows too": (
        divides_by_all_rows,
        "test_ignored_rows_count_nothing",
    ),
    "NaN for a masked batch": (
        nan_when_all_is_masked,
        "test_all_targets_masked_give_zero_with_a_graph",
    ),
    "upstream gradient forgotten": (
        ignores_the_upstream_gradient,
        "test_upstream_gradient_multiplies",
    ),
}
