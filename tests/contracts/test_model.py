"""The model: ids to logits, the same whole, in chunks, after a cast, a move, a reload.

A model is called as Model(cfg) with a ModelConfig and has `blocks`, `loss`,
`make_cache`, `init_weights` and `next_token_logits`. Equalities hold in fp32; sums in
another order (cached against whole) may differ in the last bits.
"""

import contextlib
import copy
import math

import pytest
import torch
import torch.nn.functional as F

from littlelm_core.attention import rope_table
from littlelm_core.model import ModelConfig

PART = "littlelm_core.model:LanguageModel"

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


def _config(**changes):
    """A small model in which no switch is at its default."""
    keys = {
        "dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 64,
        "vocab_size": 250, "context": 24, "head_dim": 16, "ffn": "relu2",
        "softcap": 5.0, "residual_scales": True, "value_embeddings": True,
        "rope_theta": 500.0,
    }  # fmt: skip
    return ModelConfig(**keys | changes)


def _shaken(part, cfg, seed=0, dtype=None):
    """A model whose every parameter is random: fresh blocks would add nothing."""
    model = part(cfg)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise)
    return model if dtype is None else model.to(dtype)


def _ids(cfg, rows=2, tokens=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, tokens or cfg.context)
    return torch.randint(0, cfg.vocab_size, shape, generator=generator)


@contextlib.contextmanager
def _rope_seen(model):
    """Record the rotary tables that the first block gets."""
    seen = []

    def note(module, args, kwargs):
        seen.append(kwargs["rope"] if "rope" in kwargs else args[1])

    handle = model.blocks[0].register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


def test_logits_are_fp32_and_as_wide_as_the_padded_vocabulary(part):
    cfg = _config()
    for dtype in (torch.float32, torch.bfloat16):
        logits = _shaken(part, cfg, dtype=dtype)(_ids(cfg))
        assert logits.shape == (2, cfg.context, 256), f"shape {tuple(logits.shape)}"
        assert logits.dtype == torch.float32, f"{dtype} weights give {logits.dtype}"
        assert torch.isfinite(logits).all(), "padding is at -inf only for sampling"


def test_the_future_never_changes_the_past(part):
    for changes in ({}, {"window": 4}, {"ffn": "swiglu", "qk_norm": False}):
        cfg = _config(**changes)
        model, ids = _shaken(part, cfg), _ids(cfg)
        before = model(ids)
        for at in (1, 7, cfg.context - 1):
            other = ids.clone()
            other[:, at] = (other[:, at] + 1) % cfg.vocab_size
            after = model(other)
            assert torch.allclose(before[:, :at], after[:, :at], atol=1e-6), (
                f"{changes}: token {at} changes logits before it"
            )
            assert not torch.allclose(before[:, at], after[:, at], atol=1e-3), (
                f"{changes}: token {at} does not change its own logits"
            )


def test_softcap_bounds_the_logits_smoothly(part):
    model = _shaken(part, _config(softcap=None))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    capped = part(_config(softcap=5.0))
    capped.load_state_dict(model.state_dict())
    ids = _ids(model.cfg)
    raw, logits = model(ids), capped(ids)
    assert raw.abs().max() > 10, "the case needs logits beyond the cap"
    assert logits.abs().max() <= 5.0, "a cap of 5 keeps logits within 5"
    assert torch.allclose(logits, 5.0 * torch.tanh(raw / 5.0), atol=1e-5), (
        "the cap is c tanh(z / c), on fp32 logits"
    )


def test_loss_is_the_cross_entropy_of_the_logits(part):
    for tied in (False, True):
        cfg = _config(tied=tied)
        model, ids, targets = _shaken(part, cfg), _ids(cfg), _ids(cfg, seed=2)
        targets[0, 3:9] = -100
        flat = model(ids).flatten(0, 1)
        for reduction in ("mean", "sum"):
            got = model.loss(ids, targets, reduction=reduction)
            wanted = F.cross_entropy(flat, targets.flatten(), reduction=reduction)
            assert torch.allclose(got, wanted, rtol=1e-4), (
                f"tied={tied} {reduction}: loss {got.item()}, of the logits "
                f"{wanted.item()}: same softcap, same rows, nothing shifted"
            )


def test_a_perfect_predictor_has_no_loss(part):
    # Untrained blocks add nothing, so the logits are head x norm(embedding).
    cfg = ModelConfig(64, 2, 4, 4, 64, 64, 16)
    model = part(cfg)
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(64))
        model.head.weight.copy_(30 * torch.eye(64).roll(1, dims=0))  # i says i + 1
        for block in model.blocks:
            for parameter in block.parameters():
                parameter.zero_()
    row = torch.arange(17)[None]
    loss = model.loss(row[:, :-1], row[:, 1:]).item()
    assert loss < 1e-4, (
        f"a model that always knows the next id has loss {loss}: targets are shifted "
        "once, by the loader"
    )


def test_a_fresh_model_knows_nothing(part):
    for dim, vocab, tied in ((48, 64, True), (48, 250, False), (256, 8000, True),
                             (256, 8000, False)):  # fmt: skip
        for changes in ({}, {"softcap": None, "ffn": "swiglu"}):
            cfg = _config(dim=dim, vocab_size=vocab, tied=tied, **changes)
            model = part(cfg)
            ids = _ids(cfg, rows=8)
            loss = model.loss(ids, _ids(cfg, rows=8, seed=2)).item()
            assert abs(loss - math.log(vocab)) < 0.3, (
                f"C={dim} V={vocab} tied={tied}: a fresh model's loss is {loss:.2f}, "
                f"ln V is {math.log(vocab):.2f}"
            )


def test_cached_equals_uncached(part):
    for changes in ({}, {"window": 5}, {"value_embeddings": False, "tied": True}):
        cfg = _config(**changes)
        model, ids = _shaken(part, cfg), _ids(cfg)
        whole = model(ids)
        for cuts in ([24], [5, 1, 11, 7], [1] * 24):
            cache = model.make_cache(2, cfg.context)
            assert len(cache) == cfg.layers, "one cache for each layer"
            pieces = [model(piece, cache) for piece in ids.split(cuts, dim=1)]
            worst = (torch.cat(pieces, dim=1) - whole).abs().max().item()
            assert worst < 1e-4, (
                f"{changes}, chunks {cuts}: cached logits differ by {worst:.2g}"
            )


def test_running_past_the_context_raises_before_a_wrong_token(part):
    cfg = _config(context=8)
    model = part(cfg)
    ids = _ids(cfg, tokens=9)
    with pytest.raises(ValueError, match="context"):
        model(ids)
    with pytest.raises(ValueError, match="context"):
        model.loss(ids, ids)
    cache = model.make_cache(2, 8)
    model(ids[:, :6], cache)
    with pytest.raises(ValueError, match="context"):
        model(ids[:, 6:], cache)  # 3 tokens fit by themselves, 6 + 3 do not
    with pytest.raises(ValueError, match="context"):
        model.make_cache(2, 9)


def test_rotary_tables_stay_fp32_and_belong_to_their_positions(part):
    for scaling in (None, LLAMA3):
        cfg = _config(context=4096, layers=1, rope_scaling=scaling)
        wanted = rope_table(4096, cfg.head_dim, cfg.rope_theta, scaling)
        with torch.device("meta"):
            model = part(cfg)
        model.to_empty(device="cpu")
        model.init_weights(0)
        for dtype in (torch.float32, torch.bfloat16):
            model = model.to(dtype)
            cache = model.make_cache(1, 4096)
            with _rope_seen(model) as seen, torch.no_grad():
                model(_ids(cfg, rows=1, tokens=7))
                model(_ids(cfg, rows=1, tokens=4089), cache)
                model(_ids(cfg, rows=1, tokens=7), cache)
            for start, got in ((0, seen[0]), (0, seen[1]), (4089, seen[2])):
                for name, a, b in zip(("cos", "sin"), got, wanted, strict=True):
                    assert a.dtype == torch.float32, f"{name} is {a.dtype} in {dtype}"
                    assert torch.allclose(a, b[start : start + len(a)], atol=1e-6), (
                        f"{dtype} {scaling and 'llama3'}: {name} of tokens from "
                        f"{start} on is another position's"
                    )


def test_meta_construction_gives_the_same_bits(part):
    for changes in (
        {},
        {"tied": True},
        {"part_options": {"block": {"init": "scaled"}}},
    ):
        cfg = _config(**changes)
        direct = part(cfg)
        direct.init_weights(3)
        with torch.device("meta"):
            model = part(cfg)
        assert all(p.is_meta for p in model.parameters()), "something took memory"
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(float("nan"))
        model.init_weights(3)
        assert list(model.state_dict()) == list(direct.state_dict())
        for name, wanted in direct.state_dict().items():
            assert torch.equal(model.state_dict()[name], wanted), (
                f"{changes}: {name} is left as it was or initialized otherwise"
            )
        for name, buffer in model.named_buffers():
            assert torch.isfinite(buffer).all(), f"buffer {name} keeps junk"
        ids = _ids(cfg)
        assert torch.equal(model(ids), direct(ids)), f"{changes}: other logits"


def test_the_seed_decides_the_start(part):
    cfg = _config()
    torch.manual_seed(11)
    first = part(cfg)
    first.init_weights(1)
    torch.manual_seed(12)
    second = part(cfg)
    second.init_weights(1)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), f"{name} depends on torch's global seed"
    second.init_weights(2)
    changed = [
        name
        for (name, a), b in zip(
            first.named_parameters(), second.parameters(), strict=True
        )
        if not torch.equal(a, b)
    ]
    assert "embedding.weight" in changed, f"another seed changes only {changed}"
    drawn = [p for p in second.parameters() if p.ndim == 2 and p.any()]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            same = a.shape == b.shape and torch.equal(a, b)
            assert not same, "two matrices start with the same numbers"


def test_tied_weights_are_one_storage_all_the_way(part):
    cfg = _config(tied=True)
    untied = sum(p.numel() for p in part(_config()).parameters())
    with torch.device("meta"):
        model = part(cfg)
    model.to_empty(device="cpu")
    model.init_weights(0)
    clone = part(cfg)
    clone.load_state_dict(model.state_dict(), strict=True)
    for name, one in (
        ("meta construction", model), ("a cast", copy.deepcopy(model).bfloat16()),
        ("a copy", copy.deepcopy(model)), ("a reload", clone),
    ):  # fmt: skip
        count = sum(p.numel() for p in one.parameters())
        assert count == untied - cfg.padded_vocab_size * cfg.dim, (
            f"after {name} a tied model has {count} parameters"
        )
        with torch.no_grad():
            one.embedding.weight.zero_()
        logits = one(_ids(cfg))
        assert not logits.any(), f"after {name} the head is not the embedding"
    stored = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    assert len(stored) == len(model.state_dict()), "one tensor is stored twice"


def test_every_parameter_learns(part):
    for tied in (False, True):
        model = _shaken(part, _config(tied=tied))
        ids = _ids(model.cfg, rows=8)
        model.loss(ids, _ids(model.cfg, rows=8, seed=2)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} gets no gradient"
            assert parameter.grad.any(), f"the gradient of {name} is 0"
            assert torch.isfinite(parameter.grad).all(), f"{name}: not finite"


def test_all_targets_masked_give_zero_and_no_gradient(part):
    model = _shaken(part, _config())
    ids = _ids(model.cfg)
    loss = model.loss(ids, torch.full_like(ids, -100))
    assert loss.item() == 0.0, f"nothing to predict, yet the loss is {loss.item()}"
    loss.backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is None or not grad.any(), f"{name} learns from masked targets"


def test_generation_before_training_leaves_training_intact(part):
    model = _shaken(part, _config())
    ids = _ids(model.cfg)
    with torch.inference_mode():
        model.next_token_logits(ids, model.make_cache(2, model.cfg.context))
    model.loss(ids, ids).backward()  # inference tensors cannot enter a graph


def test_padding_is_never_sampled(part):
    cfg = _config()
    model, ids = _shaken(part, cfg), _ids(cfg)
    with torch.no_grad():
        last = model.next_token_logits(ids)
        wanted = model(ids)[:, -1]
    assert last.shape == (2, cfg.padded_vocab_size)
    assert (last[:, cfg.vocab_size :] == -math.inf).all(), "padding ids can be drawn"
    assert torch.allclose(
        last[:, : cfg.vocab_size], wanted[:, : cfg.vocab_size], atol=1e-5
    ), "next_token_logits are the last row of the logits"
    cached = model.next_token_logits(ids, model.make_cache(2, cfg.context))
    assert torch.allclose(last, cached, atol=1e-4), "with a cache they differ"


def test_own_parts_get_their_keys(part):
    cfg = _config(part_options={"loss": {"z_loss": 0.5}, "attention": {"manual": True}})
    model, ids = _shaken(part, cfg), _ids(cfg)
    plain = part(_config())
    plain.load_state_dict(model.state_dict())
    logits = plain(ids)
    assert torch.allclose(model(ids), logits, atol=1e-4), "manual attention differs"
    extra = 0.5 * logits.logsumexp(-1).square().mean()
    assert torch.allclose(
        model.loss(ids, ids), plain.loss(ids, ids) + extra, rtol=1e-4
    ), "part_options of the loss do not reach it"
