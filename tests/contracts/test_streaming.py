"""Contract of streaming: a function `stream_text(model, tokenizer, prompt,
max_new_tokens, stop=(), **settings)` that yields pieces of the text."""

import inspect
import itertools
import random

import pytest
import torch

from littlelm_core.generate import generate
from littlelm_core.model import LanguageModel, ModelConfig
from littlelm_core.tokenizer import Tokenizer, train_bpe

PART = "littlelm_core.generate:stream_text"


def _tokenizer():
    draw = random.Random(1)
    words = ["naïve", "日本", "über", "the", "cat", "sat", "😀", "end."]
    text = " ".join(draw.choices(words, k=400))
    return Tokenizer(train_bpe([text], 280))


def _model(tokenizer, like=None, seed=1):
    """A fresh model; `like`: text whose tokens it prefers, in their order."""
    size = tokenizer.vocab_size
    cfg = ModelConfig(max(64, size), 1, 2, 2, 32, size, 64, head_dim=8, qk_norm=False)
    model = LanguageModel(cfg).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=draw)
        if like is not None:  # a table of what follows what, through the stream alone
            for block in model.blocks:
                block.attention.wo.weight.zero_()
                block.ffn.w_down.weight.zero_()
            model.embedding.weight.zero_()
            model.head.weight.zero_()
            for here, after in itertools.pairwise(like):
                model.embedding.weight[here, here] = 1.0
                model.head.weight[after, here] = 9.0
    return model


def _chain(tokenizer, text, after=()):
    """A model that says exactly `text` after BOS, then the ids in `after`."""
    ids = [tokenizer.bos_id, *tokenizer.encode(text), *after]
    assert len(set(ids)) == len(ids), "the case needs ids that do not repeat"
    return _model(tokenizer, like=ids), ids


def test_pieces_are_the_text(part):
    tokenizer = _tokenizer()
    model = _model(tokenizer)
    for seed in range(4):
        how = {"temperature": 1.0, "seed": seed}
        pieces = list(part(model, tokenizer, "the cat", 40, **how))
        ids = [tokenizer.bos_id, *tokenizer.encode("the cat")]
        stop = list(tokenizer.special_ids.values())
        new = generate(model, ids, 40, stop=stop, **how)
        assert "".join(pieces) == tokenizer.decode(new), (
            "the pieces do not add up to the text of the ids"
        )


def test_no_half_characters(part):
    tokenizer = _tokenizer()
    # The bytes of a character that training did not merge, one token each.
    model, _ = _chain(tokenizer, "é😮x")
    pieces = list(part(model, tokenizer, "", 7, temperature=0))
    assert "".join(pieces) == "é😮x", f"{pieces}"
    for piece in pieces:
        assert "\ufffd" not in piece, f"half a character was given out: {pieces}"


def test_what_is_cut_comes_out_at_the_end(part):
    tokenizer = _tokenizer()
    model, ids = _chain(tokenizer, "x😮")
    half = len(ids) - 2  # all but the last byte
    text = "".join(part(model, tokenizer, "", half, temperature=0))
    assert text == "x\ufffd", f"a cut character became {text!r}"


def test_it_streams(part):
    tokenizer = _tokenizer()
    model = _model(tokenizer)
    fed = []
    model.embedding.register_forward_hook(lambda m, args, out: fed.append(args[0]))
    pieces = part(model, tokenizer, "the", 20, temperature=0, cache=False)
    assert inspect.isgenerator(pieces) or hasattr(pieces, "__next__"), (
        "a list is no stream: the reader waits for all of it"
    )
    next(pieces)
    assert len(fed) < 10, f"{len(fed)} tokens were made before the first piece"


def test_a_special_token_ends_the_text(part):
    tokenizer = _tokenizer()
    for name, id_ in tokenizer.special_ids.items():
        if id_ == tokenizer.bos_id:
            continue
        model, _ = _chain(tokenizer, "ab", after=[id_, ord("z")])
        text = "".join(part(model, tokenizer, "", 12, temperature=0))
        assert text == "ab", f"after {name} the text went on: {text!r}"


def test_a_prompt_stands_behind_bos(part):
    tokenizer = _tokenizer()
    model, _ = _chain(tokenizer, "xyz")
    assert "".join(part(model, tokenizer, "", 3, temperature=0)) == "xyz", (
        "an empty prompt is BOS alone"
    )
    assert "".join(part(model, tokenizer, "x", 2, temperature=0)) == "yz"


def test_special_spellings_in_a_prompt_are_text(part):
    tokenizer = _tokenizer()
    model = _model(tokenizer)
    seen = []
    model.embedding.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    list(part(model, tokenizer, "<|end|>", 1, temperature=0, cache=False))
    ids = seen[0].flatten().tolist()
    assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.special_ids["<|end|>"] not in ids, (
        "text that spells a special token became one"
    )


def test_stop_texts(part):
    tokenizer = _tokenizer()
    model, _ = _chain(tokenizer, "abcdefgh")
    for stop, wanted in (
        (["d"], "abc"),
        (["cde"], "ab"),  # over several tokens
        (["gx", "fg"], "abcde"),
        (["h"], "abcdefg"),
        (["hi"], "abcdefgh"),  # begun at the end, never finished
        (["bcx", "zz"], "abcdefgh"),  # begun, and then not
        (["a"], ""),
        ([], "abcdefgh"),
        ([""], "abcdefgh"),
    ):
        text = "".join(part(model, tokenizer, "", 8, stop=stop, temperature=0))
        assert text == wanted, f"stop {stop}: {text!r}, not {wanted!r}"


def test_text_that_may_become_a_stop_is_held_back(part):
    tokenizer = _tokenizer()
    model, _ = _chain(tokenizer, "abcdefgh")
    pieces, shown = part(model, tokenizer, "", 8, stop=["cdef"], temperature=0), ""
    for piece in pieces:
        shown += piece
        assert "c" not in shown, f"{shown!r} was shown, and cdef is a stop"
    assert shown == "ab"


def test_wrong_settings_raise_at_once(part):
    tokenizer = _tokenizer()
    model = _model(tokenizer)
    with pytest.raises(ValueError):
        part(model, tokenizer, "x", 5, temperature=-1)
    with pytest.raises(ValueError):
        part(model, tokenizer, "x", 500)
