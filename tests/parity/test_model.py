"""The model against transformers, the loss against torch's own, and the compiler."""

import pytest
import torch
import torch.nn.functional as F

from littlelm_core.model import LanguageModel, ModelConfig, linear_cross_entropy

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip

# Our names in terms of transformers' LlamaForCausalLM.
HF_NAMES = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "ffn.w_gate": "mlp.gate_proj", "ffn.w_up": "mlp.up_proj",
    "ffn.w_down": "mlp.down_proj",
}  # fmt: skip


def _pair(tied=False, scaling=None):
    """Our model and transformers', with the same random weights, gains included."""
    transformers = pytest.importorskip("transformers")
    cfg = ModelConfig(
        48, 3, 4, 2, 80, 256, 40, head_dim=16, qk_norm=False, tied=tied,
        rope_theta=500.0, rope_scaling=scaling, norm_eps=1e-5,
    )  # fmt: skip
    ours = LanguageModel(cfg)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    rope = {"rope_type": "default"} if scaling is None else scaling
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=80, vocab_size=256, head_dim=16,
            max_position_embeddings=40, rms_norm_eps=1e-5, tie_word_embeddings=tied,
            rope_parameters=rope | {"rope_theta": 500.0}, attn_implementation="sdpa",
        )
    )  # fmt: skip
    state = {}
    for name, tensor in ours.state_dict().items():
        if name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            part = rest.removesuffix(".weight")
            state[f"model.layers.{layer}.{HF_NAMES[part]}.weight"] = tensor
        else:
            other = {"embedding": "model.embed_tokens", "norm": "model.norm",
                     "head": "lm_head"}[name.removesuffix(".weight")]  # fmt: skip
            state[f"{other}.weight"] = tensor
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state, strict=True)
    return ours.eval(), theirs.eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_logits_loss_and_gradients_equal_transformers(tied, scaling):
    ours, theirs = _pair(tied, scaling)
    row = torch.randint(0, 256, (3, 41))
    ids, targets = row[:, :-1], row[:, 1:]
    got, wanted = ours(ids), theirs(input_ids=ids).logits
    assert wanted.std() > 0.3, "the case needs logits that differ"
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

    loss = ours.loss(ids, targets)
    reference = F.cross_entropy(wanted.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-5)
    loss.backward()
    reference.backward()
    pairs = (
        (ours.embedding.weight, theirs.model.embed_tokens.weight),
        (ours.head_weight, theirs.lm_head.weight),
        (ours.norm.weight, theirs.model.norm.weight),
        (ours.blocks[0].attention.wk.weight,
         theirs.model.layers[0].self_attn.k_proj.weight),
        (ours.blocks[2].ffn.w_down.weight, theirs.model.layers[2].mlp.down_proj.weight),
    )  # fmt: skip
    for a, b in pairs:
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)


def test_parameters_equal_transformers():
    for tied in (False, True):
        ours, theirs = _pair(tied)
        assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters()


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 brings this function"
)
def test_loss_equals_torch_linear_cross_entropy():
    x = torch.randn(100, 24, requires_grad=True)
    weight = torch.randn(96, 24, requires_grad=True)
    targets = torch.randint(0, 96, (100,))
    targets[::7] = -100
    for reduction in ("mean", "sum"):
        got = linear_cross_entropy(x, weight, targets, chunk=16, reduction=reduction)
        wanted = F.linear_cross_entropy(x, weight, targets, reduction=reduction)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        for a, b in zip(
            torch.autograd.grad(got, (x, weight)),
            torch.autograd.grad(wanted, (x, weight)),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_whole_loss_compiles_without_a_break():
    # aot_eager traces forward and backward as the compiler does, and needs no C++.
    cfg = ModelConfig(
        48, 2, 4, 2, 64, 250, 24, ffn="relu2", softcap=5.0, value_embeddings=True,
        residual_scales=True, part_options={"loss": {"chunk": 16}},
    )  # fmt: skip
    model = LanguageModel(cfg)
    ids, targets = torch.randint(0, 250, (2, 2, 24)).unbind(0)
    plain = model.loss(ids, targets)
    wanted = torch.autograd.grad(plain, list(model.parameters()))
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        loss = compiled(ids, targets)
        torch.testing.assert_close(loss, plain)
        got = torch.autograd.grad(loss, list(model.parameters()))
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, targets), plain)
