"""Attention against torch's fused kernel and transformers' Llama."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from littlelm_core.attention import (
    Attention,
    KVCache,
    attend,
    causal_mask,
    rope_frequencies,
    rope_table,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SCALINGS = [None, {"rope_type": "linear", "factor": 3.0}, LLAMA3]


def _llama(**changes):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    scaling = changes.pop("scaling", None) or {"rope_type": "default"}
    theta = changes.pop("theta", 10000.0)
    fields = {
        "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 4096, "attention_dropout": 0.0,
        "rope_parameters": {"rope_theta": theta, **scaling},
    }  # fmt: skip
    config = LlamaConfig(**{**fields, **changes})
    config._attn_implementation = "eager"
    return config


@pytest.mark.parametrize("scaling", SCALINGS, ids=["none", "linear", "llama3"])
def test_tables_equal_transformers_bit_for_bit(scaling):
    config = _llama(scaling=scaling, head_dim=64, theta=500000.0)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.arange(4096)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = rope_table(positions, 64, 500000.0, scaling)
    for name, one, other in zip(("cos", "sin"), ours, theirs, strict=True):
        assert torch.equal(one, other[0]), f"{name} differs"


def test_llama3_numbers_touch_all_three_ranges():
    """The parity above proves nothing unless pairs are kept, blended and divided."""
    share = rope_frequencies(64, 500000.0, LLAMA3) / rope_frequencies(64, 500000.0)
    assert (share == 1.0).any()
    assert (share < 0.1251).any()
    assert ((share > 0.13) & (share < 0.99)).any()


@pytest.mark.parametrize("scaling", SCALINGS, ids=["none", "linear", "llama3"])
def test_layer_equals_transformers(scaling):
    config = _llama(scaling=scaling)
    from transformers.models.llama.modeling_llama import LlamaAttention

    torch.manual_seed(0)
    theirs = LlamaAttention(config, layer_idx=0)
    ours = Attention(48, 4, 2, head_dim=16, qk_norm=False)
    with torch.no_grad():
        for name in "qkvo":
            source = getattr(theirs, f"{name}_proj").weight
            getattr(ours, f"w{name}").weight.copy_(source)
    x = torch.randn(2, 33, 48)
    cos, sin = rope_table(33, 16, scaling=scaling)
    hidden = torch.zeros(33, 33).masked_fill(~causal_mask(33, 33), -torch.inf)
    wanted = theirs(
        x, position_embeddings=(cos[None], sin[None]), attention_mask=hidden[None, None]
    )[0]
    assert torch.allclose(ours(x, (cos, sin)), wanted, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("window", [None, 1, 9])
def test_manual_path_equals_the_fused_kernel(kv_heads, window):
    torch.manual_seed(0)
    q = torch.randn(2, 6, 40, 16, requires_grad=True)
    k = torch.randn(2, kv_heads, 40, 16, requires_grad=True)
    v = torch.randn(2, kv_heads, 40, 16, requires_grad=True)
    mask = causal_mask(40, 40, window)
    grad = torch.randn(2, 6, 40, 16)
    one = attend(q, k, v, mask)
    two = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(one, two, atol=1e-5)
    ours = torch.autograd.grad(one, (q, k, v), grad)
    theirs = torch.autograd.grad(two, (q, k, v), grad)
    for name, a, b in zip("qkv", ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5), f"gradient of {name}"


def test_both_paths_of_the_layer_agree_in_value_and_gradient():
    rope = rope_table(21, 8)
    for kv_heads, window, qk_norm in itertools.product(
        (1, 2, 4), (None, 1, 5), (True, False)
    ):
        torch.manual_seed(0)
        fused = Attention(32, 4, kv_heads, qk_norm=qk_norm, window=window)
        manual = Attention(32, 4, kv_heads, qk_norm=qk_norm, window=window, manual=True)
        manual.load_state_dict(fused.state_dict())
        x, grad = torch.randn(2, 21, 32), torch.randn(2, 21, 32)
        outs = [layer(x, rope) for layer in (fused, manual)]
        assert torch.allclose(*outs, atol=1e-5)
        grads = [
            torch.autograd.grad(y, list(layer.parameters()), grad)
            for y, layer in zip(outs, (fused, manual), strict=True)
        ]
        for a, b in zip(*grads, strict=True):
            assert torch.allclose(a, b, atol=1e-4)


def test_windowed_ring_equals_the_mask_over_a_long_text():
    """Forty windows of text through a ring of one window, in uneven chunks."""
    torch.manual_seed(0)
    layer = Attention(16, 2, 1, window=5)
    x = torch.randn(1, 200, 16)
    ring = KVCache(1, 1, 200, 8, window=5)
    assert ring.keys.shape[2] == 5
    out, start = [], 0
    sizes = itertools.cycle((1, 3, 1, 1, 7, 5, 4, 11))
    with torch.no_grad():
        whole = layer(x, rope_table(200, 8))
        while start < 200:
            tokens = min(next(sizes), 200 - start)
            rope = rope_table(torch.arange(start, start + tokens), 8)
            out.append(layer(x[:, start : start + tokens], rope, cache=ring))
            start += tokens
    assert torch.allclose(torch.cat(out, 1), whole, atol=1e-5)


def test_decoding_uses_no_mask(monkeypatch):
    """One token that sees everything must not pay for a mask."""
    seen = []
    kernel = F.scaled_dot_product_attention

    def spy(*args, **keys):
        seen.append(keys)
        return kernel(*args, **keys)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for window in (None, 4):
        layer = Attention(16, 2, 1, window=window)
        cache = KVCache(1, 1, 12, 8, window=window)
        with torch.no_grad():
            for t in range(12):
                rope = rope_table(torch.arange(t, t + 1), 8)
                layer(torch.randn(1, 1, 16), rope, cache=cache)
    assert len(seen) == 24
    assert not any(keys.get("attn_mask") is not None for keys in seen)


def test_compiled_layer_equals_eager():
    """torch.compile takes the layer in one graph, with and without a window."""
    for window in (None, 4):
        torch.manual_seed(0)
        layer = Attention(16, 2, 1, window=window)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        x, rope = torch.randn(1, 9, 16), rope_table(9, 8)
        assert torch.allclose(compiled(x, rope), layer(x, rope), atol=1e-6)
