"""Contract of generation: a function `generate(model, ids, max_new_tokens, temperature,
top_k, top_p, stop, seed, generator, cache, slide)` that returns the new ids."""

import copy

import pytest
import torch

from littlelm_core.model import LanguageModel, ModelConfig

PART = "littlelm_core.generate:generate"

SHAPE = {
    "dim": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 48,
    "vocab_size": 70,  # padded to 128
    "context": 48,
}


def _model(seed=1, **changes):
    """A fresh model whose weights are large enough to have opinions."""
    model = LanguageModel(ModelConfig(**{**SHAPE, **changes}))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=draw)
    return model.eval()


def _greedy(model, ids, count):
    """The definition: the whole text again for each token, the best real id."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids]))[0, -1, : model.cfg.vocab_size]
            ids.append(int(logits.argmax()))
    return ids[-count:]


PROMPT = [3, 60, 17, 17, 5]


def test_new_ids_of_one_prompt(part):
    new = part(_model(), PROMPT, 6, temperature=0)
    assert isinstance(new, list), f"a {type(new).__name__}, not a list"
    assert len(new) == 6, f"{len(new)} ids, not 6: the new ones only"
    assert all(type(i) is int for i in new), "ids are not plain ints"


def test_greedy_equals_the_definition(part):
    for changes in (
        {},
        {"qk_norm": False, "tied": True},
        {"ffn": "relu2", "residual_scales": True, "value_embeddings": True},
        {"window": 7, "softcap": 15.0},
        {"kv_heads": 4, "head_dim": 16, "block": "llama"},
    ):
        model = _model(**changes)
        wanted = _greedy(model, PROMPT, 40)
        for cache in (True, False):
            new = part(model, PROMPT, 40, temperature=0, cache=cache)
            assert new == wanted, (
                f"cache={cache}, {changes}: token {_first(new, wanted)} differs from "
                "reading the whole text again"
            )


def _first(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), "?")


def test_drawn_text_is_the_same_with_and_without_the_cache(part):
    model = _model()
    how = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3}
    for count in (8, 40):  # short and long: the long one may take another path
        cached = part(model, PROMPT, count, cache=True, **how)
        assert cached == part(model, PROMPT, count, cache=False, **how), (
            f"{count} tokens differ between cache and no cache"
        )


def test_seeds(part):
    model = _model()
    texts = [tuple(part(model, PROMPT, 12, seed=seed)) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1], "the same seed gave another text"
    assert len(set(texts)) == 3, "another seed gave the same text"
    generator = torch.Generator().manual_seed(1)
    first = part(model, PROMPT, 12, generator=generator)
    assert tuple(first) == texts[0], "a generator of seed 1 is not seed=1"
    assert part(model, PROMPT, 12, generator=generator) != first, (
        "a generator goes on: the second text must be another"
    )
    with pytest.raises(ValueError):
        part(model, PROMPT, 4, seed=1, generator=generator)


def test_padding_ids_are_never_drawn(part):
    model = _model()
    with torch.no_grad():  # as if training had left the padding rows large
        model.head.weight[SHAPE["vocab_size"] :] = 0
        model.head.weight[: SHAPE["vocab_size"]] -= 1.0
        model.head.weight[SHAPE["vocab_size"] :] += 9.0
    for how in ({"temperature": 0}, {"temperature": 5.0, "seed": 1}):
        for cache in (True, False):
            new = part(model, PROMPT, 40, cache=cache, **how)
            assert max(new) < SHAPE["vocab_size"], (
                f"id {max(new)} was drawn, the vocabulary has {SHAPE['vocab_size']}"
            )


def test_stop_ids_end_the_text(part):
    model = _model()
    whole = part(model, PROMPT, 30, temperature=0)
    stop = whole[10]
    at = whole.index(stop)
    for cache in (True, False):
        new = part(model, PROMPT, 30, temperature=0, stop=[stop], cache=cache)
        assert new == whole[:at], f"{len(new)} ids before the stop, not {at}"
    absent = next(i for i in range(SHAPE["vocab_size"]) if i not in whole)
    assert part(model, PROMPT, 30, temperature=0, stop=[absent]) == whole


def test_rows_of_a_batch_are_as_alone(part):
    model = _model()
    equal = [[3, 60, 17], [9, 9, 1], [69, 2, 40]]
    ragged = [[3, 60, 17, 4, 8, 20], [9], [69, 2, 40]]
    for prompts in (equal, ragged):
        for count in (5, 33):
            for cache in (True, False):
                new = part(model, prompts, count, temperature=0, cache=cache)
                for row, prompt in enumerate(prompts):
                    assert new[row] == _greedy(model, prompt, count), (
                        f"row {row} of {prompts}, cache={cache}: its neighbors or "
                        "their padding changed its text"
                    )


def test_each_row_stops_by_itself(part):
    model = _model()
    prompts = [[3, 60], [9, 1], [40, 2]]
    whole = [_greedy(model, p, 20) for p in prompts]
    stop = {whole[0][4], whole[1][9]}
    new = part(model, prompts, 20, temperature=0, stop=stop)
    for row, text in enumerate(whole):
        at = next((i for i, id_ in enumerate(text) if id_ in stop), len(text))
        assert new[row] == text[:at], f"row {row} has {len(new[row])} ids, not {at}"


def test_equal_prompts_in_a_batch_differ(part):
    new = part(_model(), [PROMPT] * 6, 12, seed=1, temperature=1.5)
    assert len({tuple(row) for row in new}) > 3, "rows of a batch share their numbers"


def test_a_tensor_is_a_prompt_too(part):
    model = _model()
    wanted = _greedy(model, PROMPT, 5)
    assert part(model, torch.tensor(PROMPT), 5, temperature=0) == wanted
    assert part(model, torch.tensor([PROMPT]), 5, temperature=0) == [wanted]


def test_the_end_of_the_context(part):
    model = _model()
    context = SHAPE["context"]
    prompt = [i % 70 for i in range(context - 5)]
    # Five more fill the context, and the sixth is drawn but never read.
    for cache in (True, False):
        new = part(model, prompt, 6, temperature=0, cache=cache)
        assert new[:5] == _greedy(model, prompt, 5), "wrong before the context's end"
        assert len(new) == 6, f"{len(new)} ids, not 6"
        for count in (7, 60):
            with pytest.raises(ValueError, match=str(context)):
                part(model, prompt, count, temperature=0, cache=cache)
    with pytest.raises(ValueError, match=str(context)):
        part(model, [1] * (context + 1), 1, temperature=0)


def test_sliding_is_the_same_with_and_without_the_cache(part):
    context = SHAPE["context"]
    inside = context - len(PROMPT) + 1
    for seed in (1, 2, 3):
        model = _model(seed)
        cached = part(model, PROMPT, 120, temperature=0, slide=True)
        assert len(cached) == 120, f"{len(cached)} ids, not 120"
        plain = part(model, PROMPT, 120, temperature=0, slide=True, cache=False)
        assert cached == plain, f"token {_first(cached, plain)} differs"
        assert cached[:inside] == _greedy(model, PROMPT, inside), (
            "sliding changed what fits the context"
        )
        # The text after the slide is read from BOS and the newest ids.
        text = PROMPT + cached[:inside]
        shown = [text[0], *text[-(context // 2 - 1) :]]
        assert cached[inside : inside + 20] == _greedy(model, shown, 20), (
            "after a slide the model must see the first id and the newest half"
        )


def test_wrong_prompts_raise(part):
    model = _model()
    for prompt in ([], [70], [-1], [[1, 2], []], [[1], [127]]):
        with pytest.raises(ValueError):
            part(model, prompt, 3, temperature=0)
    for how in ({"temperature": -1}, {"top_p": 2}, {"top_k": -1}):
        with pytest.raises(ValueError):
            part(model, PROMPT, 3, **how)
    with pytest.raises(ValueError):
        part(model, PROMPT, -1)


def test_no_new_tokens(part):
    model = _model()
    assert part(model, PROMPT, 0) == [], "0 new tokens are no tokens"
    assert part(model, [PROMPT, [1]], 0) == [[], []]


def test_the_model_is_left_as_it_was(part):
    for by_columns in (False, True):
        model = _model(residual_scales=True).train()
        for weight in model.parameters():
            if by_columns and weight.ndim == 2:
                weight.data = weight.data.t().contiguous().t()
        before = copy.deepcopy(model.state_dict())
        strides = {n: p.stride() for n, p in model.named_parameters()}
        for count in (4, 40):
            part(model, PROMPT, count, temperature=0)
        assert model.training, "the model was left in eval mode"
        for name, weight in model.named_parameters():
            assert torch.equal(weight, before[name]), f"{name} was changed"
            assert weight.stride() == strides[name], f"{name} lies otherwise in memory"
            assert weight.requires_grad, f"{name} no longer learns"
        ids = torch.tensor([PROMPT])
        model.loss(ids[:, :-1], ids[:, 1:]).backward()  # and it can go on learning
        assert model.head.weight.grad is not None, "no gradient after generating"


def test_other_weights_give_another_text(part):
    model = _model()
    first = part(model, PROMPT, 40, temperature=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.neg_()
    again = part(model, PROMPT, 40, temperature=0)
    assert again == _greedy(model, PROMPT, 40), "a copy of the old weights was used"
    assert again != first
