"""Norm, MLP and block against torch and transformers' Llama."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from littlelm_core import check
from littlelm_core.attention import causal_mask, rope_table
from littlelm_core.blocks import Block, ReLU2, RMSNorm, SwiGLU, fill_normal


def _cfg(**changes):
    fields = {
        "dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16,
        "ffn_dim": 80, "vocab_size": 50, "padded_vocab_size": 64, "context": 64,
        "qk_norm": False, "window": None, "residual_scales": False,
        "value_embeddings": False, "norm_eps": 1e-5, "attention": "gqa",
        "ffn": "swiglu", "norm": "rmsnorm", "block": "llama", "part_options": {},
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def _llama_config():
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=80, rms_norm_eps=1e-5, max_position_embeddings=64,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


def test_norm_equals_torch_and_transformers():
    _llama_config()
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    x = torch.randn(4, 9, 48)
    ours, torchs = RMSNorm(48, eps=1e-5), nn.RMSNorm(48, eps=1e-5)
    theirs = LlamaRMSNorm(48, eps=1e-5)
    gain = torch.rand(48) + 0.5
    with torch.no_grad():
        for norm in (ours, torchs, theirs):
            norm.weight.copy_(gain)
    assert torch.equal(ours(x), torchs(x))
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)


def test_swiglu_equals_transformers():
    config = _llama_config()
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    ours, theirs = SwiGLU(48, 80), LlamaMLP(config)
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            source = getattr(theirs, f"{name}_proj").weight
            getattr(ours, f"w_{name}").weight.copy_(source)
    x = torch.randn(2, 7, 48)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)


def test_relu2_keeps_the_same_contract():
    results = check.run_contract("mlp", ReLU2)
    assert all(r.ok for r in results), [r for r in results if not r.ok]


def test_block_equals_transformers():
    config = _llama_config()
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    torch.manual_seed(0)
    theirs, ours = LlamaDecoderLayer(config, layer_idx=0), Block(_cfg(), 0)
    names = {
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
        "ffn.w_gate": "mlp.gate_proj", "ffn.w_up": "mlp.up_proj",
        "ffn.w_down": "mlp.down_proj",
    }  # fmt: skip
    with torch.no_grad():
        for mine, other in names.items():
            target = ours.get_parameter(f"{mine}.weight")
            source = theirs.get_parameter(f"{other}.weight")
            source.copy_(torch.rand_like(source) if source.ndim == 1 else source)
            target.copy_(source)
    assert len(names) == len(list(ours.parameters()))
    x = torch.randn(2, 20, 48)
    cos, sin = rope_table(20, 16)
    hidden = torch.zeros(20, 20).masked_fill(~causal_mask(20, 20), -torch.inf)
    wanted = theirs(
        x, position_embeddings=(cos[None], sin[None]), attention_mask=hidden[None, None]
    )
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert torch.allclose(ours(x, (cos, sin)), wanted, atol=1e-5)


def test_the_reference_run_has_its_parameters():
    """28 blocks of the 3.8B run: matrices, value tables and gains, to the last one."""
    cfg = _cfg(
        dim=3072, layers=28, heads=24, kv_heads=8, head_dim=128, ffn_dim=12288,
        ffn="relu2", qk_norm=True, residual_scales=True, value_embeddings=True,
        vocab_size=50257, padded_vocab_size=50304,
    )  # fmt: skip
    with torch.device("meta"):
        blocks = [Block(cfg, layer) for layer in range(28)]
    count = {"matrix": 0, "value_table": 0, "gain": 0, "scalar": 0}
    for block in blocks:
        for name, parameter in block.named_parameters():
            if "value_table" in name:
                count["value_table"] += parameter.numel()
            elif parameter.ndim == 2:
                count["matrix"] += parameter.numel()
            else:
                count["gain" if "norm" in name else "scalar"] += parameter.numel()
    assert count == {
        "matrix": 28 * 100_663_296,
        "value_table": 721_158_144,
        "gain": 172_032,
        "scalar": 28 * 2 + 14 * 8,
    }


def test_draws_are_the_same_in_every_dtype():
    """bf16 weights are the rounded fp32 ones, not other numbers."""
    one, two = torch.empty(40, 30), torch.empty(40, 30, dtype=torch.bfloat16)
    for tensor in (one, two):
        fill_normal(tensor, "blocks.0.attention.wq.weight", 1, 0.3)
    assert torch.equal(one.bfloat16(), two)


def test_compiled_block_equals_eager():
    cfg = _cfg(residual_scales=True, value_embeddings=True, qk_norm=True)
    block = Block(cfg, 2, init="scaled")
    block.init_weights(1, "blocks.2.")
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    x, ids = torch.randn(2, 9, 48), torch.randint(0, 50, (2, 9))
    rope = rope_table(9, 16)
    assert torch.allclose(compiled(x, rope, None, ids), block(x, rope, None, ids))
