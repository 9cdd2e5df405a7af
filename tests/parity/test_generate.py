"""The same weights give the same tokens in transformers."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from littlelm_core.bench.peers import llama_with_our_weights  # noqa: E402
from littlelm_core.generate import generate, sample  # noqa: E402
from littlelm_core.model import LanguageModel, ModelConfig  # noqa: E402


def _model(**changes):
    shape = {
        "dim": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 96,
        "vocab_size": 320, "context": 128, "qk_norm": False,
    }  # fmt: skip
    model = LanguageModel(ModelConfig(**{**shape, **changes}))
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=draw)
    return model.eval()


def _theirs(peer, prompts, count):
    ids = peer.generate(
        torch.tensor(prompts),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return ids[:, len(prompts[0]) :].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 4},
        {"tied": True},
        {"rope_theta": 5e5, "norm_eps": 1e-5},
        {"head_dim": 24},
    ],
)
def test_greedy_tokens_equal(changes):
    model = _model(**changes)
    peer = llama_with_our_weights(model)
    prompt = [7, 300, 12, 12, 55, 1]
    wanted = _theirs(peer, [prompt], 80)[0]
    assert len(set(wanted)) > 5, "a text this poor would hide mistakes"
    assert generate(model, prompt, 80, temperature=0) == wanted
    assert generate(model, prompt, 80, temperature=0, cache=False) == wanted


def test_a_batch_equals():
    model = _model()
    peer = llama_with_our_weights(model)
    prompts = [[7, 300, 12], [1, 2, 3], [99, 98, 97]]
    assert generate(model, prompts, 40, temperature=0) == _theirs(peer, prompts, 40)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, 0, 1.0), (1.0, 12, 1.0), (1.0, 0, 0.8), (1.3, 40, 0.6)],
)
def test_the_same_ids_may_be_drawn(temperature, top_k, top_p):
    """Their warpers and ours leave the same ids, with the same probabilities."""
    process = transformers.generation.logits_process
    logits = torch.randn(4, 80, generator=torch.Generator().manual_seed(3)) * 2
    theirs = process.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        theirs = process.TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = process.TopPLogitsWarper(top_p)(None, theirs)
    wanted = theirs.softmax(-1)
    count = 4000
    drawn = sample(
        logits.repeat_interleave(count, 0),
        temperature,
        top_k,
        top_p,
        torch.Generator().manual_seed(1),
    ).view(4, count)
    for row in range(4):
        share = torch.bincount(drawn[row], minlength=80) / count
        assert share[wanted[row] == 0].sum() == 0, "an id that they cut was drawn"
        assert (share - wanted[row]).abs().max() < 0.04
