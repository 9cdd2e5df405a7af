"""A precision: settles formats before training, and leaves the weights plain.

The part is called with its keys (dtype, compile, ...); prepare(model, device) returns
the loss to train with, context() the context of every forward pass.
"""

import pytest
import torch

from littlelm_core.model import LanguageModel, ModelConfig

PART = "littlelm_core.trainer:Precision"

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=64, vocab_size=64, context=32
)


def _model():
    model = LanguageModel(CONFIG)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.15, generator=generator)
    return model.train()


def _batch(rows=4, tokens=32):
    ids = torch.arange(rows * (tokens + 1)).reshape(rows, -1) * 7 % 61
    return ids[:, :-1], ids[:, 1:]


def _loss_and_gradient(model, precision=None):
    loss = precision.prepare(model, CPU) if precision else model.loss
    if precision:
        with precision.context():
            value = loss(*_batch())
    else:
        value = loss(*_batch())
    value.backward()
    return value.detach(), {n: p.grad.flatten() for n, p in model.named_parameters()}


def test_dtype_is_settled_by_prepare(part):
    for asked in ("fp32", "bf16", "auto"):
        precision = part(dtype=asked)
        precision.prepare(_model(), CPU)
        assert precision.dtype in ("fp32", "bf16"), (
            f"dtype = {asked!r} is still {precision.dtype!r} after prepare"
        )
        assert asked in ("auto", precision.dtype), f"{asked} became {precision.dtype}"


def test_the_loss_is_close_to_fp32_and_has_its_type(part):
    right, _ = _loss_and_gradient(_model())
    for dtype, most in (("fp32", 0.02), ("bf16", 0.03)):
        value, _ = _loss_and_gradient(_model(), part(dtype=dtype))
        assert value.dtype == torch.float32, f"{dtype}: the loss is {value.dtype}"
        off = abs(float(value) / float(right) - 1)
        assert off < most, f"{dtype}: loss {float(value):.4f}, fp32 {float(right):.4f}"


def test_gradients_point_where_those_of_fp32_do(part):
    _, right = _loss_and_gradient(_model())
    for dtype in ("fp32", "bf16"):
        _, ours = _loss_and_gradient(_model(), part(dtype=dtype))
        for name, gradient in right.items():
            cosine = torch.cosine_similarity(ours[name].float(), gradient, dim=0)
            assert cosine > 0.95, f"{dtype}: {name} has a cosine of {cosine:.3f}"


def test_bf16_really_multiplies_in_fewer_bits(part):
    value, _ = _loss_and_gradient(_model(), part(dtype="bf16"))
    exact, _ = _loss_and_gradient(_model())
    assert float(value) != float(exact), "the same bits as fp32: nothing was rounded"


def test_parameters_stay_what_they_were(part):
    model = _model()
    before = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    state = {name: t.clone() for name, t in model.state_dict().items()}
    _loss_and_gradient(model, part(dtype="bf16"))
    now = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    assert set(now) == set(before), f"names changed: {set(now) ^ set(before)}"
    assert now == before, "a parameter is another object, or of another type"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), f"{name} was changed by a forward pass"


def test_bf16_masters_keep_the_objects(part):
    model = _model()
    before = {name: id(p) for name, p in model.named_parameters()}
    value, _ = _loss_and_gradient(model, part(dtype="bf16", masters="bf16"))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    matrices = [p for p in model.parameters() if p.ndim == 2]
    assert all(p.dtype == torch.bfloat16 for p in matrices), "masters are not bf16"
    assert value.isfinite()


def test_validation_measures_the_plain_weights(part):
    model, plain = _model(), _model()
    precision = part(dtype="fp32")
    precision.prepare(model, CPU)
    model.eval()
    for tokens in (32, 7):  # a prompt has any length
        with torch.no_grad(), precision.context():
            ours = model.loss(*_batch(1, tokens))
            right = plain.loss(*_batch(1, tokens))
        assert torch.equal(ours, right), (
            f"eval at {tokens} tokens is {float(ours):.5f}; the saved weights give "
            f"{float(right):.5f}"
        )


def test_the_context_ends(part):
    precision = part(dtype="bf16")
    precision.prepare(_model(), CPU)
    for _ in range(2):
        with precision.context():
            pass
    assert not torch.is_autocast_enabled("cpu"), "autocast stays on behind the context"
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_wrong_keys_raise(part):
    for keys in (
        {"dtype": "fp16"},
        {"masters": "fp16"},
        {"masters": "bf16", "dtype": "fp32"},
    ):
        with pytest.raises(ValueError, match="precision"):
            part(**keys)
