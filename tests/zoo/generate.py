"""Generators that are wrong in ways people have shipped."""

import torch

from littlelm_core.generate import generate, sample
from littlelm_core.model import LanguageModel


def _checked(model, ids, count, how):
    """Let our own generator refuse what it refuses; draw nothing."""
    generate(model, ids, count, **{**how, "stop": range(model.cfg.vocab_size)})


def _rows(ids):
    ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    return (ids, False) if isinstance(ids[0], list) else ([ids], True)


@torch.no_grad()
def _loop(model, ids, count, how, *, cached_logits, rule=lambda row, cfg: row):
    """A plain loop over rows; `cached_logits` gives the scores of the next id."""
    rows, single = _rows(ids)
    keys = ("temperature", "top_k", "top_p")
    settings = {k: how[k] for k in keys if k in how}
    generator = how.get("generator")
    if how.get("seed") is not None:
        generator = torch.Generator().manual_seed(how["seed"])
    found = []
    for row in rows:
        text, memory = list(row), {}
        for _ in range(count):
            logits = cached_logits(model, rule(text, model.cfg), memory)
            id_ = int(sample(logits, generator=generator, **settings))
            if id_ in set(how.get("stop", ())):
                break
            text.append(id_)
        found.append(text[len(row) :])
    return found[0] if single else found


def _uncached(model, text, memory):
    return model.next_token_logits(torch.tensor([text]))


def _position_restarts(model, ids, count, temperature=1.0, **how):
    """Each new token is fed at position 0, with all keys behind it in the cache."""
    how["temperature"] = temperature
    _checked(model, ids, count, how)
    if not how.get("cache", True):
        return generate(model, ids, count, **how)

    def logits(model, text, memory):
        if "cache" not in memory:
            memory["cache"] = model.make_cache(1, model.cfg.context)
            return model.next_token_logits(torch.tensor([text]), memory["cache"])
        kept = model._rope
        model._rope = lambda start, end, device: kept(0, end - start, device)
        try:
            return model.next_token_logits(torch.tensor([text[-1:]]), memory["cache"])
        finally:
            del model._rope

    return _loop(model, ids, count, how, cached_logits=logits)


def _last_token_twice(model, ids, count, temperature=1.0, **how):
    """The prompt is prefilled, then its last token is fed again."""
    how["temperature"] = temperature
    _checked(model, ids, count, how)
    if not how.get("cache", True) or how.get("slide"):
        return generate(model, ids, count, **how)

    def logits(model, text, memory):
        if "cache" not in memory:
            memory["cache"] = model.make_cache(1, model.cfg.context)
            model.next_token_logits(torch.tensor([text]), memory["cache"])
        return model.next_token_logits(torch.tensor([text[-1:]]), memory["cache"])

    return _loop(model, ids, count, how, cached_logits=logits)


def _draws_padding(model, ids, count, temperature=1.0, **how):
    """Scores of the padded table go to the sampler as they are."""
    how["temperature"] = temperature
    _checked(model, ids, count, how)

    def logits(model, text, memory):
        return model(torch.tensor([text]))[:, -1]

    return _loop(model, ids, count, how, cached_logits=logits)


def _pads_left(model, ids, count, temperature=1.0, **how):
    """Short rows are filled with 0 in front, and nothing hides the filling."""
    how["temperature"] = temperature
    rows, single = _rows(ids)
    if single or how.get("slide"):
        return generate(model, ids, count, **how)
    longest = max(map(len, rows))
    padded = [[0] * (longest - len(row)) + row for row in rows]
    return generate(model, padded, count, **how)


def _returns_the_prompt(model, ids, count, temperature=1.0, **how):
    rows, single = _rows(ids)
    new = generate(model, ids, count, temperature=temperature, **how)
    return rows[0] + new if single else [r + n for r, n in zip(rows, new, strict=True)]


def _keeps_the_stop(model, ids, count, temperature=1.0, stop=(), **how):
    new = generate(model, ids, count, temperature=temperature, stop=stop, **how)
    whole = generate(model, ids, count, temperature=temperature, **how)
    return whole[: len(new) + 1]


def _all_rows_stop_together(model, ids, count, temperature=1.0, stop=(), **how):
    new = generate(model, ids, count, temperature=temperature, stop=stop, **how)
    if not isinstance(new[0], list):
        return new
    return [row[: min(map(len, new))] for row in new]


def _cuts_silently(model, ids, count, temperature=1.0, **how):
    """Past the context the oldest tokens go, and nobody is told."""
    how["temperature"] = temperature
    how["slide"] = True
    return generate(model, ids, count, **how)


def _slides_by_one_with_a_stale_cache(model, ids, count, temperature=1.0, **how):
    """Without a cache the newest tokens are read at positions from 0; the cache still
    holds keys that were turned for their old positions."""
    how["temperature"] = temperature
    if not how.pop("slide", False) or how.get("cache", True):
        return generate(model, ids, count, slide=True, **how)

    def newest(text, cfg):
        return text[-cfg.context :]

    return _loop(model, ids, count, how, cached_logits=_uncached, rule=newest)


def _forgets_bos(model, ids, count, temperature=1.0, **how):
    how["temperature"] = temperature
    if not how.pop("slide", False):
        return generate(model, ids, count, **how)

    def newest(text, cfg):
        half, excess = cfg.context // 2, len(text) - cfg.context
        if excess <= 0:
            return text
        return text[-(half + (excess - 1) % (half + 1)) :]

    return _loop(model, ids, count, how, cached_logits=_uncached, rule=newest)


def _seeds_the_global_generator(model, ids, count, temperature=1.0, **how):
    how["temperature"] = temperature
    if how.get("seed") is not None and how.get("generator") is None:
        torch.manual_seed(how.pop("seed") * 0)
    return generate(model, ids, count, **how)


def _leaves_eval_mode(model, ids, count, temperature=1.0, **how):
    model.eval()
    return generate(model, ids, count, temperature=temperature, **how)


def _rewrites_the_weights(model, ids, count, temperature=1.0, **how):
    """The layout that decodes faster is given to the model itself."""
    new = generate(model, ids, count, temperature=temperature, **how)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data = weight.data.t().contiguous().t()
    return new


_COPIES: dict[int, LanguageModel] = {}


def _keeps_an_old_copy(model, ids, count, temperature=1.0, **how):
    """A copy of the weights is kept for the next call, whatever becomes of them."""
    import copy

    if id(model) not in _COPIES:
        _COPIES[id(model)] = copy.deepcopy(model)
    return generate(_COPIES[id(model)], ids, count, temperature=temperature, **how)


ZOO = {
    "positions restart behind the cache": (
        _position_restarts,
        "test_greedy_equals_the_definition",
    ),
    "the last token of the prompt is fed twice": (
        _last_token_twice,
        "test_greedy_equals_the_definition",
    ),
    "padding rows of the table are drawn": (
        _draws_padding,
        "test_padding_ids_are_never_drawn",
    ),
    "left padding is attended to": (_pads_left, "test_rows_of_a_batch_are_as_alone"),
    "the prompt comes back too": (_returns_the_prompt, "test_new_ids_of_one_prompt"),
    "the stop id is returned": (_keeps_the_stop, "test_stop_ids_end_the_text"),
    "the first stop ends all rows": (
        _all_rows_stop_together,
        "test_each_row_stops_by_itself",
    ),
    "the oldest tokens go silently": (_cuts_silently, "test_the_end_of_the_context"),
    "slides by one, cache stale": (
        _slides_by_one_with_a_stale_cache,
        "test_sliding_is_the_same_with_and_without_the_cache",
    ),
    "BOS slides out": (
        _forgets_bos,
        "test_sliding_is_the_same_with_and_without_the_cache",
    ),
    "every seed is 0": (_seeds_the_global_generator, "test_seeds"),
    "the model stays in eval mode": (
        _leaves_eval_mode,
        "test_the_model_is_left_as_it_was",
    ),
    "the model's memory is laid out anew": (
        _rewrites_the_weights,
        "test_the_model_is_left_as_it_was",
    ),
    "an old copy of the weights": (
        _keeps_an_old_copy,
        "test_other_weights_give_another_text",
    ),
}
