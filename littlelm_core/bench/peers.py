"""The libraries that ours are measured against, by name and version."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch

from littlelm_core.config import LittleLMError
from littlelm_core.model import LanguageModel, ModelConfig

# The Llama shape of the bars: 8.5M parameters.
SHAPE_8M = ModelConfig(
    dim=256, layers=8, heads=4, kv_heads=4, ffn_dim=704, vocab_size=4096,
    context=1024, qk_norm=False,
)  # fmt: skip

# Our names in terms of transformers' LlamaForCausalLM.
NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn.w_gate": "mlp.gate_proj",
    "ffn.w_up": "mlp.up_proj",
    "ffn.w_down": "mlp.down_proj",
}


class NoPeer(LittleLMError):
    """A library to compare with is not installed."""


def peer(name: str) -> Any:
    """Import a peer. Raises NoPeer with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NoPeer(
            f"{name} is not installed: pip install -e '.[bench]' brings the peers"
        ) from error


def version(name: str) -> str:
    """Return "name 1.2.3"."""
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} (not installed)"


def llama_with_our_weights(model: LanguageModel) -> Any:
    """Return transformers' LlamaForCausalLM with a model's weights, in fp32.

    Raises LittleLMError for what a plain Llama has not (QK-norm, softcap, ...).
    """
    transformers, cfg = peer("transformers"), model.cfg
    extras = {
        "qk_norm": cfg.qk_norm,
        "softcap": cfg.softcap,
        "residual_scales": cfg.residual_scales,
        "value_embeddings": cfg.value_embeddings,
        "window": cfg.window,
        "ffn": cfg.ffn != "swiglu",
    }
    if any(extras.values()):
        has = ", ".join(name for name, on in extras.items() if on)
        raise LittleLMError(f"a plain Llama cannot express this model's {has}")
    settings = transformers.LlamaConfig(
        vocab_size=cfg.padded_vocab_size,
        hidden_size=cfg.dim,
        intermediate_size=cfg.ffn_dim,
        num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        max_position_embeddings=cfg.context,
        rms_norm_eps=cfg.norm_eps,
        tie_word_embeddings=cfg.tied,
        bos_token_id=None,
        eos_token_id=None,
        # Both spellings of the rotary keys: before and after transformers 5.
        rope_theta=cfg.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
    )
    theirs = transformers.LlamaForCausalLM(settings).eval()
    state = {}
    for name, tensor in model.state_dict().items():
        part = name.removesuffix(".weight")
        prefix = ""
        if part.startswith("blocks."):
            _, layer, part = part.split(".", 2)
            prefix = f"model.layers.{layer}."
        state[f"{prefix}{NAMES[part]}.weight"] = tensor
    if cfg.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.no_grad():
        theirs.load_state_dict(state, strict=True)
    return theirs
