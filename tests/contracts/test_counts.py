"""Shapes refused, parameters by role, FLOPs and bits per byte, against hand counts.

The part is a module with ModelConfig, LanguageModel, model_config, count_parameters,
parameter_role, flops_per_token and bits_per_byte.
"""

import dataclasses
import math

import pytest
import torch

from littlelm_core.config import load_run

PART = "littlelm_core.model"

SMALL = {
    "dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 64,
    "vocab_size": 250, "context": 24,
}  # fmt: skip


def test_impossible_shapes_raise_in_one_line(part):
    for changes, word in (
        ({"heads": 5}, "heads"), ({"kv_heads": 3}, "kv_heads"), ({"dim": 50}, "dim"),
        ({"layers": 0}, "layers"), ({"context": -4}, "context"), ({"dim": 48.0}, "dim"),
        ({"vocab_size": True}, "vocab_size"), ({"head_dim": 7}, "head_dim"),
        ({"vocab_multiple": 0}, "vocab_multiple"), ({"softcap": math.nan}, "softcap"),
        ({"norm_eps": 0.0}, "norm_eps"), ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "magic"}}, "magic"),
        ({"part_options": {"ffm": {}}}, "ffm"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=word) as caught:
            part.ModelConfig(**SMALL | changes)
        assert "\n" not in str(caught.value), f"{changes}: more than one line"


def test_a_config_is_frozen_and_resolves_what_it_can(part):
    cfg = part.ModelConfig(**SMALL)
    assert cfg.head_dim == 12, f"48 / 4 heads is 12, not {cfg.head_dim}"
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.dim = 64
    off = part.ModelConfig(**SMALL, softcap=-1, window=-1, head_dim=-1, rope_scaling={})
    assert off == cfg, "-1 is off: a run file has no None"
    assert hash(off) == hash(cfg), "equal configs have equal hashes"


def test_the_vocabulary_is_padded_up(part):
    for vocab, multiple, padded in (
        (50257, 64, 50304), (64, 64, 64), (65, 64, 128), (250, 1, 250), (1, 64, 64),
    ):  # fmt: skip
        cfg = part.ModelConfig(
            **SMALL | {"vocab_size": vocab, "vocab_multiple": multiple}
        )
        got = cfg.padded_vocab_size
        assert got == padded, f"{vocab} padded to {multiple}: {got}, not {padded}"


def test_a_run_becomes_a_config(part):
    run = load_run("tiny", ["ffn.use=relu2", "block.init=scaled", "model.softcap=9.0"])
    cfg = part.model_config(run)
    assert (cfg.ffn, cfg.softcap) == ("relu2", 9.0), "keys of the run are lost"
    assert cfg.vocab_size == run.tokenizer.options["vocab_size"]
    assert cfg.part_options["block"] == {"init": "scaled"}, (
        "own keys of a part are lost"
    )
    assert part.model_config(run, vocab_size=300).vocab_size == 300
    options = {k: v for k, v in run.model.options.items() if k != "layers"}
    lacking = run.model_copy(update={"model": type(run.model)(use="llama", **options)})
    with pytest.raises(ValueError, match=r"model\.layers"):
        part.model_config(lacking)


def test_the_reference_run_has_its_parameters(part):
    cfg = part.model_config(load_run("littlelm-3.8b"))
    with torch.device("meta"):
        model = part.LanguageModel(cfg)
    counts = part.count_parameters(model)
    assert counts["embedding"] == counts["head"] == 154_533_888
    assert counts["matrix"] == 28 * 100_663_296
    assert counts["value_embeddings"] == 721_158_144
    assert counts["norm"] == 172_032 + 3072, (
        "56 gains of 3072 in blocks, one at the end"
    )
    assert counts["scalars"] == 28 * 2 + 14 * 8, "two scales a layer, 8 gates on 14"
    plain = counts["total"] - counts["norm"] - counts["scalars"]
    assert plain == 3_848_798_208, f"{plain:,} parameters before gains and scalars"


def test_counts_are_those_of_the_model(part):
    for changes in ({}, {"tied": True}, {"ffn": "relu2", "value_embeddings": True,
                    "residual_scales": True}):  # fmt: skip
        cfg = part.ModelConfig(**SMALL | changes)
        model = part.LanguageModel(cfg)
        counts = part.count_parameters(model)
        assert counts == part.count_parameters(cfg), "a config counts as its model"
        total = sum(p.numel() for p in model.parameters())
        assert counts["total"] == total, f"{changes}: {counts['total']} of {total}"
        assert sum(counts.values()) == 2 * total, f"{changes}: a role is counted twice"
        assert (counts["head"] == 0) == cfg.tied, "a tied matrix is counted once"


def test_every_parameter_has_one_role_and_unknown_names_raise(part):
    cfg = part.ModelConfig(**SMALL, value_embeddings=True, residual_scales=True)
    roles = {
        name: part.parameter_role(name)
        for name, _ in part.LanguageModel(cfg).named_parameters()
    }
    for name, role in {
        "embedding.weight": "embedding", "head.weight": "head", "norm.weight": "norm",
        "blocks.0.attention.wq.weight": "matrix",
        "blocks.2.ffn.w_down.weight": "matrix",
        "blocks.0.attention_norm.weight": "norm", "blocks.1.ffn_norm.weight": "norm",
        "blocks.2.value_table.weight": "value_embeddings",
        "blocks.2.value_gate": "scalars", "blocks.0.ffn_scale": "scalars",
    }.items():  # fmt: skip
        assert roles.get(name) == role, f"{name} is {roles.get(name)}, not {role}"
    assert part.parameter_role("blocks.11.ffn.w_up.bias") == "scalars"
    assert part.parameter_role("blocks.0.attention.q_norm.weight") == "norm"
    for name in ("blocks.0.attention.sink", "module.head.weight", "lm_head.weight", ""):
        with pytest.raises(ValueError, match="role"):
            part.parameter_role(name)


def test_flops_per_token_follow_the_formula(part):
    cfg = part.model_config(load_run("littlelm-3.8b"))
    for context, giga in ((1024, 18.90), (2048, 19.95), (None, 19.95)):
        got = part.flops_per_token(cfg, context) / 1e9
        assert abs(got - giga) < 0.005, f"{got:.2f} GF at {context}, not {giga}"
    small = part.ModelConfig(**SMALL)
    block = 48 * 48 * 2 + 48 * 24 * 2 + 3 * 48 * 64
    wanted = 6 * (3 * block + 256 * 48) + 12 * 48 * 24 * 3
    assert part.flops_per_token(small) == wanted, "6 per matrix parameter and the head"
    tied = dataclasses.replace(small, tied=True)
    assert part.flops_per_token(tied) == wanted, "a tied head multiplies all the same"
    windowed = dataclasses.replace(small, window=8)
    saved = 12 * 48 * (24 - 8) * 3
    assert part.flops_per_token(windowed) == wanted - saved, "a window of 8 reads 8"
    values = dataclasses.replace(small, value_embeddings=True)
    assert part.flops_per_token(values) == wanted, "looking a value up costs no product"


def test_bits_per_byte_by_hand(part):
    counts = torch.tensor([0, 1, 3, 2])  # id 0 is special
    targets = torch.tensor([[1, 2, 0], [3, -100, 1]])
    losses = torch.tensor([[1.0, 2.0, 50.0], [3.0, 70.0, 1.0]])
    got = part.bits_per_byte(losses, targets, counts)
    wanted = 7.0 / math.log(2) / 7  # 1 + 2 + 3 + 1 nats over 1 + 3 + 2 + 1 bytes
    assert got == pytest.approx(wanted), (
        f"{got} bits a byte, not {wanted}: special and ignored targets count neither"
    )
    assert part.bits_per_byte(losses, targets, counts.tolist()) == pytest.approx(wanted)
    uniform = torch.full((1000,), math.log(256.0))
    ones = torch.ones(256, dtype=torch.long)
    ids = torch.arange(1000) % 256
    assert part.bits_per_byte(uniform, ids, ones) == pytest.approx(8.0), (
        "guessing each byte evenly costs 8 bits"
    )


def test_bits_per_byte_do_not_depend_on_the_cut(part):
    # The same text and probability as 6 single bytes, or as 2 tokens of 3.
    bytes_each = part.bits_per_byte(
        torch.full((6,), 1.5), torch.zeros(6, dtype=torch.long), [1]
    )
    tokens = part.bits_per_byte(
        torch.full((2,), 4.5), torch.zeros(2, dtype=torch.long), [3]
    )
    assert bytes_each == pytest.approx(tokens), "longer tokens must not look worse"


def test_bits_per_byte_refuse_what_they_cannot_measure(part):
    with pytest.raises(ValueError, match="losses"):
        part.bits_per_byte(torch.ones(3), torch.zeros(4, dtype=torch.long), [1])
    with pytest.raises(ValueError, match="byte"):
        part.bits_per_byte(torch.ones(2), torch.tensor([0, 5]), [1, 1])
    with pytest.raises(ValueError, match="byte"):
        part.bits_per_byte(torch.ones(2), torch.tensor([0, -100]), [0])
