"""Contract of a block: (cfg, layer) -> module on the residual stream."""

import math
from types import SimpleNamespace

import pytest
import torch

from littlelm_core.attention import KVCache, rope_table

PART = "littlelm_core.blocks:Block"


def _cfg(**changes):
    """The fields of a ModelConfig that a block reads."""
    fields = {
        "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "ffn_dim": 96, "vocab_size": 50, "padded_vocab_size": 64, "context": 32,
        "qk_norm": True, "window": None, "residual_scales": False,
        "value_embeddings": False, "norm_eps": 1e-6, "attention": "gqa",
        "ffn": "swiglu", "norm": "rmsnorm", "block": "llama", "part_options": {},
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def _scattered(block, seed=0):
    """Give every parameter numbers of its own, so that nothing hides behind 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in block.parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return block


def _full(**changes):
    return _cfg(residual_scales=True, value_embeddings=True, **changes)


def _inputs(tokens=9, batch=2):
    return torch.randn(batch, tokens, 32), torch.randint(0, 50, (batch, tokens))


def test_formula(part):
    x, ids = _inputs()
    rope = rope_table(9, 8)
    for scales in (False, True):
        block = _scattered(part(_cfg(residual_scales=scales), 0))
        a = block.attention_scale if scales else 1.0
        m = block.ffn_scale if scales else 1.0
        middle = x + a * block.attention(block.attention_norm(x), rope)
        wanted = middle + m * block.ffn(block.ffn_norm(middle))
        got = block(x, rope, ids_BT=ids)
        assert torch.allclose(got, wanted, atol=1e-5), (
            f"residual_scales = {scales}: x + a Attention(norm(x)), then x + m "
            "FFN(norm(x))"
        )
        assert torch.allclose(block(x, rope), wanted, atol=1e-5), "ids are not needed"


def test_residual_scales_are_one_number_each(part):
    with_scales = dict(part(_cfg(residual_scales=True), 0).named_parameters())
    without = dict(part(_cfg(), 0).named_parameters())
    extra = {n: p for n, p in with_scales.items() if n not in without}
    assert sorted(extra) == ["attention_scale", "ffn_scale"], f"got {sorted(extra)}"
    for name, parameter in extra.items():
        assert parameter.numel() == 1, f"{name} is one learned scalar"
        assert parameter.item() == 1.0, f"{name} starts at 1"


def test_value_tables_stand_on_every_other_layer_from_the_last(part):
    for layers, wanted in ((4, [1, 3]), (5, [0, 2, 4]), (1, [0])):
        cfg = _cfg(layers=layers, value_embeddings=True)
        has = [i for i in range(layers) if part(cfg, i).value_table is not None]
        assert has == wanted, f"of {layers} layers {wanted} have a table, not {has}"
    assert part(_cfg(), 3).value_table is None, "only when value_embeddings is set"


def test_value_table_has_padded_rows(part):
    block = part(_full(), 3)
    assert block.value_table.weight.shape == (64, 16), (
        "padded vocabulary × (kv_heads · head_dim), whatever head_dim says"
    )
    derived = part(_full(head_dim=None), 3)
    assert derived.value_table.weight.shape == (64, 16), "head_dim from dim / heads"


def test_value_embeddings_are_gated_by_head(part):
    x, ids = _inputs()
    rope = rope_table(9, 8)
    block = _scattered(part(_full(), 3))
    with torch.no_grad():
        block.value_gate.copy_(torch.tensor([0.7, -1.1]))
    gate = torch.tensor([2 / (1 + math.exp(-0.7)), 2 / (1 + math.exp(1.1))])
    embed = block.value_table.weight[ids].view(2, 9, 2, 8) * gate[:, None]
    read = block.attention(block.attention_norm(x), rope, value_embed=embed)
    middle = x + block.attention_scale * read
    wanted = middle + block.ffn_scale * block.ffn(block.ffn_norm(middle))
    assert torch.allclose(block(x, rope, ids_BT=ids), wanted, atol=1e-5), (
        "v + 2 sigmoid(g_k) E[token], one g per key/value head"
    )
    fresh = part(_full(), 3).value_gate
    assert fresh.shape == (2,), f"one gate per key/value head, not {tuple(fresh.shape)}"
    assert fresh.tolist() == [0.0, 0.0], "gates start at 0"


def test_value_embeddings_need_the_ids(part):
    with pytest.raises(ValueError):
        part(_full(), 3)(torch.randn(1, 4, 32), rope_table(4, 8))


def test_every_piece_is_swapped_by_name(part):
    here = "littlelm_core.blocks"
    assert part(_cfg(ffn="relu2"), 0).ffn.__class__.__name__ == "ReLU2"
    named = part(_cfg(ffn=f"{here}:ReLU2", norm="torch.nn:LayerNorm"), 0)
    assert named.ffn.__class__.__name__ == "ReLU2"
    assert isinstance(named.attention_norm, torch.nn.LayerNorm)
    assert isinstance(named.ffn_norm, torch.nn.LayerNorm)
    own = {"attention": {"manual": True}, "norm": {"bias": False}}
    block = part(_cfg(norm="torch.nn:LayerNorm", part_options=own), 0)
    assert block.attention.manual, "a part's own keys must reach it"
    assert block.ffn_norm.bias is None, "a part's own keys must reach it"
    with pytest.raises(ValueError):
        part(_cfg(ffn="swiglo"), 0)


def test_sizes_reach_the_parts(part):
    block = part(_cfg(head_dim=6, kv_heads=1, window=5, qk_norm=False), 0)
    assert block.attention.wq.weight.shape == (24, 32), "heads · head_dim × dim"
    assert block.attention.wk.weight.shape == (6, 32), "kv_heads · head_dim × dim"
    assert block.attention.window == 5
    assert block.attention.qk_norm is False
    x = torch.full((1, 1, 32), 1e-2)
    eps = part(_cfg(norm_eps=1.0), 0).attention_norm(x)
    assert eps.abs().max() < 0.02, "norm_eps must reach the norms"


def test_a_fresh_block_is_the_identity(part):
    x, ids = _inputs()
    block = part(_full(), 3)
    block.init_weights(1, "blocks.3.")
    x.requires_grad_()
    y = block(x, rope_table(9, 8), ids_BT=ids)
    assert torch.equal(y, x), "output matrices start at zero: nothing is added yet"
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, x, grad)[0]
    assert torch.allclose(got, grad, atol=1e-6), "the gradient must pass unchanged"


def test_matrices_start_at_their_size(part):
    wide = {"dim": 256, "head_dim": 64, "ffn_dim": 512, "layers": 8}
    for init, outputs in (("zero", 0.0), ("scaled", 0.25)):
        for ffn in ("swiglu", "relu2"):
            block = part(_full(**wide, ffn=ffn), 7, init=init)
            block.init_weights(3, "blocks.7.")
            for name, parameter in block.named_parameters():
                if parameter.ndim < 2:
                    wanted = 0.0 if name == "value_gate" else 1.0
                    assert (parameter == wanted).all(), f"{name} must start at {wanted}"
                    continue
                std = parameter.shape[-1] ** -0.5
                if name.split(".")[-2] in ("wo", "w_down"):
                    std *= outputs  # 1 / sqrt(2 · 8 layers) = 0.25
                got = parameter.std().item()
                assert abs(got - std) <= 0.03 * std, (
                    f"init {init}: {name} has std {got:.4f}, not {std:.4f}"
                )
                assert abs(parameter.mean().item()) <= 0.03 * std + 1e-12, f"{name}"
    with pytest.raises(ValueError):
        part(_cfg(), 0, init="scale")


def test_meta_construction_gives_the_same_bits(part):
    direct = part(_full(), 3, init="scaled")
    direct.init_weights(5, "blocks.3.")
    with torch.device("meta"):
        meta = part(_full(), 3, init="scaled")
    meta.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*meta.parameters(), *meta.buffers()):
            tensor.fill_(float("nan"))  # what fresh memory may hold
    torch.randn(7)  # and the global generator stands elsewhere
    meta.init_weights(5, "blocks.3.")
    names = [n for n, _ in direct.named_parameters()]
    assert names == [n for n, _ in meta.named_parameters()]
    for name, parameter in meta.named_parameters():
        assert torch.equal(parameter, direct.get_parameter(name)), (
            f"{name} differs after meta construction"
        )
    x, ids = _inputs()
    outs = [b(x, rope_table(9, 8), ids_BT=ids) for b in (direct, meta)]
    assert torch.equal(*outs), "a buffer was lost on the way through the meta device"


def test_initial_numbers_depend_on_seed_and_name_alone(part):
    def fill(seed, prefix, **changes):
        block = part(_full(**changes), 3, init="scaled")
        state = torch.get_rng_state()
        block.init_weights(seed, prefix)
        assert torch.equal(state, torch.get_rng_state()), (
            "the global generator was used: other code would change the weights"
        )
        return {n: p.detach() for n, p in block.named_parameters() if p.ndim > 1}

    one, again = fill(1, "blocks.3."), fill(1, "blocks.3.")
    seed, layer = fill(2, "blocks.3."), fill(1, "blocks.2.")
    other = fill(1, "blocks.3.", ffn="relu2", qk_norm=False)
    for name, values in one.items():
        assert torch.equal(values, again[name]), f"{name}: one seed, other numbers"
        assert not torch.equal(values, seed[name]), f"{name}: the seed is not used"
        assert not torch.equal(values, layer[name]), f"{name}: two layers are equal"
        if name in other and "ffn" not in name:
            assert torch.equal(values, other[name]), f"{name}: depends on other parts"
    for a, b in (("attention.wk.weight", "attention.wv.weight"),):
        assert not torch.equal(one[a], one[b]), f"{a} and {b} are the same numbers"


def test_a_part_may_initialize_itself(part):
    block = part(_cfg(), 0)

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.strange = torch.nn.Parameter(torch.zeros(3))

    block.ffn = Own()
    with pytest.raises(ValueError):  # no rule for it
        block.init_weights(1, "blocks.0.")
    Own.init_weights = lambda self, seed, prefix: self.strange.data.fill_(seed)
    block.init_weights(9, "blocks.0.")
    assert block.ffn.strange.tolist() == [9.0] * 3


def test_future_never_changes_the_past(part):
    for window in (None, 3):
        block = _scattered(part(_full(window=window), 3))
        x, ids = _inputs()
        y = block(x, rope_table(9, 8), ids_BT=ids)
        x[:, 5:] += 1.0
        ids[:, 5:] = (ids[:, 5:] + 1) % 50
        moved = (block(x, rope_table(9, 8), ids_BT=ids) - y).abs().amax((0, 2))
        assert moved[:5].max() < 1e-6, "changing token 5 changed what stands before it"
        assert moved[5] > 1e-4


def test_cached_equals_uncached(part):
    x, ids = _inputs()
    for window in (None, 3):
        block = _scattered(part(_full(window=window), 3))
        y = block(x, rope_table(9, 8), ids_BT=ids)
        for split in ([1] * 9, [4, 1, 4], [9]):
            cache = KVCache(2, 2, 9, 8, window=window)
            start = 0
            for tokens in split:
                at = slice(start, start + tokens)
                rope = rope_table(torch.arange(start, start + tokens), 8)
                step = block(x[:, at], rope, cache=cache, ids_BT=ids[:, at])
                assert torch.allclose(step, y[:, at], atol=1e-5), (
                    f"window {window}, chunks {split}, at token {start}"
                )
                start += tokens


def test_gradients_reach_every_parameter(part):
    block = _scattered(part(_full(), 3))
    x, ids = _inputs()
    block(x, rope_table(9, 8), ids_BT=ids).square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, f"{name}: no gradient"
        assert parameter.grad.abs().max() > 0, f"{name}: the gradient is zero"


def test_dtype_returns(part):
    x, ids = _inputs()
    block = _scattered(part(_full(), 3)).bfloat16()
    y = block(x.bfloat16(), rope_table(9, 8), ids_BT=ids)
    assert y.dtype == torch.bfloat16, f"bf16 in, {y.dtype} out"
    block = _scattered(part(_full(), 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(x, rope_table(9, 8), ids_BT=ids)
    assert y.dtype == torch.float32, "under autocast the stream stays fp32"
