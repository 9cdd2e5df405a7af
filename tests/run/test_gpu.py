"""The GPU paths, against the CPU's answers. Skipped where no GPU is present.

LITTLELM_TEST_DEVICE=cpu runs the same tests on the CPU, to check the tests themselves.
"""

import os

import pytest
import torch

from littlelm_core.attention import Attention, rope_table
from littlelm_core.generate import generate
from littlelm_core.model import LanguageModel, ModelConfig, linear_cross_entropy

DEVICE = os.environ.get("LITTLELM_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"
)


@pytest.fixture(autouse=True)
def exact_products():
    """fp32 products in fp32: TF32 rounds far more than the tolerances allow."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def small_model(**keys):
    shape = {
        "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 96,
        "vocab_size": 130, "context": 48, "softcap": 15.0, "residual_scales": True,
        "value_embeddings": True,
    }  # fmt: skip
    model = LanguageModel(ModelConfig(**{**shape, **keys}))
    model.init_weights(3)
    torch.manual_seed(3)
    for name, weight in model.named_parameters():  # zero starts would hide the layers
        if name.endswith(("wo.weight", "w_down.weight")):
            torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.mark.parametrize("window", [None, 7])
def test_fused_and_manual_attention_agree(window):
    torch.manual_seed(0)
    layer = Attention(64, 4, 2, window=window).to(DEVICE)
    x_BTC = torch.randn(2, 40, 64, device=DEVICE)
    rope = rope_table(torch.arange(40, device=DEVICE), layer.head_dim)
    fused = layer(x_BTC, rope=rope)
    layer.manual = True
    torch.testing.assert_close(layer(x_BTC, rope=rope), fused, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_logits_loss_and_gradients_equal_the_cpus(window):
    torch.manual_seed(1)
    ids_BT, targets_BT = torch.randint(130, (2, 3, 32))
    results = []
    for device in ("cpu", DEVICE):
        model = small_model(window=window).to(device)
        loss = model.loss(ids_BT.to(device), targets_BT.to(device))
        loss.backward()
        gradients = [p.grad.cpu() for p in model.parameters()]
        logits = model(ids_BT.to(device)).detach().cpu()
        results.append([loss.detach().cpu(), logits, *gradients])
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-4, atol=1e-5)


def test_the_chunked_loss_equals_the_plain_one():
    torch.manual_seed(2)
    x_NC = torch.randn(300, 32, device=DEVICE, requires_grad=True)
    weight_VC = torch.randn(96, 32, device=DEVICE, requires_grad=True)
    targets_N = torch.randint(96, (300,), device=DEVICE)
    ours = linear_cross_entropy(x_NC, weight_VC, targets_N, chunk=64)
    plain = torch.nn.functional.cross_entropy(x_NC @ weight_VC.T, targets_N)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    inputs = (x_NC, weight_VC)
    for got, wanted in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(plain, inputs),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
def test_cached_generation_equals_uncached(window):
    model = small_model(window=window).to(DEVICE).eval()
    prompt = [1, 5, 9, 2]
    cached = generate(model, prompt, 30, temperature=0)
    assert cached == generate(model, prompt, 30, temperature=0, cache=False)
    assert len(set(cached)) > 1, "a constant text compares nothing"


def test_the_compiled_bf16_loss_is_near_the_plain_one():
    model = small_model().to(DEVICE)
    ids_BT, targets_BT = torch.randint(130, (2, 3, 32), device=DEVICE)
    plain = model.loss(ids_BT, targets_BT).detach()
    with torch.autocast(DEVICE, torch.bfloat16):
        compiled = torch.compile(model.loss)(ids_BT, targets_BT)
    compiled.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    # bf16 has 8 bits of precision; a mean over 96 targets is well inside 2 %.
    torch.testing.assert_close(compiled.detach(), plain, rtol=0.02, atol=0.0)
