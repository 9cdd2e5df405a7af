"""Graders of chapter 07's exercises (written together with chapters/07_generate.md)."""

import math

import torch

from littlelm_core.model import LanguageModel, ModelConfig


def exercise_7_1(answer):
    """Min-p: a cut relative to the best."""
    p = torch.tensor([[0.5, 0.3, 0.06, 0.04, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2]])
    logits = p.log() + 3.0  # a constant changes no probability
    kept = answer(logits.clone(), 0.15)
    allowed = kept > -math.inf
    assert allowed[0].tolist() == [True, True, False, False, True], (
        "the best has .5, so at .15 everything from .075 on stays"
    )
    assert allowed[1].all(), "where all are as good as the best, all stay"
    assert torch.equal(kept[allowed], logits[allowed]), "what stays keeps its score"
    given = logits.clone()
    answer(given, 0.5)
    assert torch.equal(given, logits), "the logits you are given must stay as they are"
    first = answer(logits.clone(), 1.0) > -math.inf
    assert first[0].sum() == 1, "min_p = 1 leaves the best alone"


def exercise_7_2(answer):
    """The temperature for an entropy."""
    logits = torch.tensor([3.0, 1.0, 0.2, -1.0, -4.0, 0.0, 2.0, 0.5])
    for bits in (0.5, 1.5, 2.5, 2.9):
        temperature = float(answer(logits, bits))
        p = torch.softmax(logits.double() / temperature, -1)
        entropy = -(p * p.log2()).sum().item()
        assert math.isclose(entropy, bits, abs_tol=0.01), (
            f"at your temperature of {temperature:.3f} the entropy is {entropy:.3f} "
            f"bits, not {bits}"
        )
    # Two scores one apart: the odds are e^(1/T), by hand at 3 : 1.
    temperature = float(answer(torch.tensor([1.0, 0.0]), 0.8112781))
    assert math.isclose(temperature, 1 / math.log(3), rel_tol=0.01), (
        "3 : 1 odds have .811 bits: the temperature is 1 / ln 3"
    )


def exercise_7_3(answer):
    """CTRL's penalty on repetition."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 4.0], [1.0, 1.0, -2.0, 0.0]])
    kept = logits.clone()
    got = answer(logits, [[0, 1, 0], [2]], 2.0)
    wanted = torch.tensor([[1.0, -2.0, 0.5, 4.0], [1.0, 1.0, -4.0, 0.0]])
    assert torch.equal(logits, kept), "the logits you are given must stay as they are"
    assert got[0, 0] == 1.0, (
        f"2.0 used twice pays once and becomes 1.0, not {got[0, 0]}"
    )
    assert got[0, 1] == -2.0, f"-1.0 must fall to -2.0, not {got[0, 1]}"
    assert torch.allclose(got, wanted), f"{got.tolist()} is not {wanted.tolist()}"
    assert torch.equal(answer(logits, [[], []], 2.0), logits), "nothing was used yet"


def exercise_7_4(answer):
    """Tokens through the model, without and with a cache."""
    without, cached = answer(6, 8)
    assert cached != 14, "the last token drawn is not fed: 13, not 14"
    assert (without, cached) == (76, 13), (
        f"6 + 7 + ... + 13 = 76 and 6 + 7 = 13, not {without} and {cached}"
    )
    assert tuple(answer(100, 1)) == (100, 100), "one token needs the prompt once"
    assert tuple(answer(5, 0)) == (0, 0), "no new tokens, no work"


def exercise_7_5(answer):
    """The log probability of a text behind a prompt."""
    cfg = ModelConfig(
        dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=24, vocab_size=20, context=16
    )
    model = LanguageModel(cfg).eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.5 * torch.randn(weight.shape, generator=draw)
    prompt, text = [1, 5, 2], [7, 7, 0, 19]
    total, ids = 0.0, list(prompt)
    with torch.no_grad():
        for id_ in text:
            p = model(torch.tensor([ids]))[0, -1, : cfg.vocab_size].softmax(-1)
            total += math.log(p[id_])
            ids.append(id_)
    got = float(answer(model, prompt, text))
    assert got <= 0, "the logarithm of a probability is never above 0"
    assert math.isclose(got, total, abs_tol=1e-3), (
        f"{got:.4f}, but token by token it is {total:.4f}: position t scores t + 1, "
        "and padding ids take no part"
    )
