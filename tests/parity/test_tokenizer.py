"""The tokenizer beside its peers: rustbpe, tiktoken, Hugging Face's tokenizers.

Also what no contract can ask of every tokenizer: our pattern, workers and the hash
seed, the engines by name, GPT-2's vocabulary, and the errors in one line.
"""

import hashlib
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from littlelm_core import tokenizer as module
from littlelm_core.config import ConfigError, DataError
from littlelm_core.corpus import documents, domains
from littlelm_core.tokenizer import (
    GPT2_PATTERN,
    SPLIT_PATTERN,
    Tokenizer,
    bpe_tokenizer,
    clean_text,
    count_words,
    gpt2_tokenizer,
    merge_by_rank,
    split_text,
    train_bpe,
)

USUAL = (  # the pattern as nanochat writes it
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
MIXED = st.text(
    st.one_of(
        # Not what this Python's Unicode lacks: the engines class it differently.
        st.characters(exclude_categories=["Cs", "Cn"]),
        st.sampled_from("aB1 \n\t'sLl!.é漢\u0558\u0300\u200d\u2028\x1c\x85\u017f🙂"),
    ),
    max_size=60,
)
pytestmark = pytest.mark.filterwarnings("ignore:the text has no more pairs")


@pytest.fixture(scope="module")
def corpus():
    """About 2 MB of each domain."""
    texts = []
    for domain in domains():
        size = 0
        for text in documents(domain, "train"):
            texts.append(text)
            size += len(text)
            if size > 2_000_000:
                break
    return texts


@pytest.fixture(scope="module")
def ranks(corpus):
    return train_bpe(corpus, 4096)


# ---- Training


def test_ranks_are_those_of_rustbpe(corpus, ranks):
    rustbpe = pytest.importorskip("rustbpe")
    peer = rustbpe.Tokenizer()
    peer.train_from_iterator(iter(corpus), 4096, pattern=SPLIT_PATTERN)
    theirs = {bytes(token): rank for token, rank in peer.get_mergeable_ranks()}
    assert ranks == theirs
    assert list(ranks) == list(theirs)
    assert train_bpe(iter(corpus), 4096, engine="rustbpe") == ranks


def test_ranks_are_those_of_rustbpe_on_runs_and_ties():
    pytest.importorskip("rustbpe")
    for seed in range(40):
        rng = random.Random(seed)
        texts = ["".join(rng.choices("aab \n", k=rng.randint(1, 200)))] * 2
        size = rng.choice([256, 260, 300, 500])
        ours, theirs = (train_bpe(texts, size, engine=e) for e in ("python", "rustbpe"))
        assert ours == theirs, f"seed {seed}, vocab_size {size}"


def test_a_smaller_vocabulary_is_a_prefix(corpus, ranks):
    assert list(train_bpe(corpus, 1000)) == list(ranks)[:1000]
    assert list(ranks.values()) == list(range(4096))


def test_workers_give_the_same_counts(corpus):
    some = corpus[::3]
    assert count_words(iter(some), workers=2) == count_words(some)


class Text(str):
    alive = 0

    def __new__(cls, text):
        cls.alive += 1
        return super().__new__(cls, text)

    def __del__(self):
        type(self).alive -= 1


def test_workers_hold_few_texts_at_once():
    most = 0

    def texts():
        nonlocal most
        for i in range(2000):
            most = max(most, Text.alive)
            yield Text(f"words and more {i}")

    assert count_words(texts(), workers=2)["words"] == 2000
    assert most < 1000, f"{most} of 2,000 texts were held at once"


def test_the_hash_seed_changes_nothing():
    code = (
        "from littlelm_core.tokenizer import *\n"
        "texts = ['the cat, the hat; a bat 12 ' * 3, 'tie eit ite tei'] * 2\n"
        "print(Tokenizer(train_bpe(texts, 300)).fingerprint)\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 16


def test_running_out_of_pairs_is_said():
    with pytest.warns(UserWarning, match="258 ranks, not 300"):
        train_bpe(["ab ab"], 300)


# ---- Cutting text


@settings(max_examples=400, deadline=None)
@given(MIXED)
def test_both_engines_cut_alike(text):
    """tiktoken shows its cuts when every piece is one token."""
    pieces = list(split_text(text))
    assert "".join(pieces) == text
    table = {bytes([b]): b for b in range(256)}
    for piece in pieces:
        table.setdefault(piece.encode(), len(table))
    engine = tiktoken.Encoding(
        "cuts", pat_str=SPLIT_PATTERN, mergeable_ranks=table, special_tokens={}
    )
    ids = engine.encode_ordinary(text)
    assert engine.decode_tokens_bytes(ids) == [piece.encode() for piece in pieces]


def test_the_pattern_cuts_as_the_usual_one(corpus):
    for text in corpus[::40]:
        assert list(split_text(text)) == regex.findall(USUAL, text)


def test_the_plain_engine_cuts_as_regex():
    rng = random.Random(3)
    ascii_characters = [chr(c) for c in range(128)] + list(" \n\r'sdLlVerRE019a") * 8
    compiled = regex.compile(SPLIT_PATTERN)
    for _ in range(3000):
        text = "".join(rng.choices(ascii_characters, k=30))
        assert list(split_text(text)) == compiled.findall(text), repr(text)


def test_numbers_are_cut_in_twos():
    assert list(split_text("x123456 7")) == ["x", "12", "34", "56", " ", "7"]


def test_a_pattern_with_groups_gives_whole_pieces():
    assert list(split_text("ab1 cd", r"([a-z])+|(\d)|\s")) == ["ab", "1", " ", "cd"]


# ---- Encoding


def test_ids_are_those_of_our_own_encoder(corpus, ranks):
    tokenizer = Tokenizer(ranks)
    rng = random.Random(4)
    texts = [text[:20_000] for text in rng.sample(corpus, 40)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.encode_by_rank(text) == ids


@settings(max_examples=300, deadline=None)
@given(MIXED)
def test_ids_are_those_of_our_own_encoder_on_any_text(text):
    assert WORLD.encode_by_rank(text) == WORLD.encode(text)


WORLD = Tokenizer(
    train_bpe(
        ["naïve 漢字 \u0558\u0558 ''s 'll !! \n\n  x 🙂🙂 \u0300e 12 34 "] * 9, 280
    )
)


def test_any_ranks_encode_as_in_tiktoken():
    """Also tables that no trainer made, and pieces long enough for its heap."""
    for seed in range(60):
        rng = random.Random(seed)
        tokens = {"".join(rng.choices("abc", k=rng.randint(2, 5))) for _ in range(40)}
        table = {bytes([b]): b for b in range(256)}
        for token in rng.sample(sorted(tokens), len(tokens)):
            table[token.encode()] = len(table)
        tokenizer = Tokenizer(table)
        for size in (3, 10, 50, 150, 600):
            text = "".join(rng.choices("abc", k=size))
            assert tokenizer.encode(text) == merge_by_rank(text.encode(), table)


def test_our_own_encoder_is_near_linear(ranks):
    def seconds(text):
        start = time.process_time()
        ids = merge_by_rank(text, ranks)
        assert b"".join(map(tokens.__getitem__, ids)) == text
        return time.process_time() - start

    tokens = list(ranks)
    rng = random.Random(5)
    for text in (
        b"a" * 100_000,
        b"ab" * 50_000,
        bytes(rng.choices(b"etaoins", k=10**5)),
    ):
        short = min(seconds(text[:2000]) for _ in range(3))
        assert seconds(text) < 0.2 + 4 * 50 * short


def test_an_engine_that_gives_up_is_replaced(capfd):
    text = "x" + " " * 1_100_000 + "y"
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)})
    start = tokenizer.encode(text)
    assert tokenizer.decode(start) == text
    assert tokenizer.encode_batch([text, "x"]) == [start, tokenizer.encode("x")]
    capfd.readouterr()  # the engine's own complaint


def test_the_longest_special_token_wins():
    tokenizer = Tokenizer(WORLD.ranks, special_tokens=("<|a", "<|a|>", "<|🙂|>"))
    ids = tokenizer.special_ids
    assert tokenizer.encode("<|a|><|a", "all") == [ids["<|a|>"], ids["<|a"]]
    assert tokenizer.encode("<|\ud83d\ude42|>", ["<|🙂|>"]) == [ids["<|🙂|>"]]


def test_decoding_takes_arrays(ranks):
    tokenizer = Tokenizer(ranks)
    ids = tokenizer.encode("naïve text 🙂")
    assert tokenizer.decode(np.array(ids, np.uint16)) == "naïve text 🙂"
    assert clean_text("a\ud800") == "a\ufffd"


# ---- Peers and GPT-2


def test_hugging_face_tokenizers_agree(ranks):
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import Regex, decoders, models, pre_tokenizers

    letters = {
        bytes([b]): c for b, c in zip(_gpt2_bytes(), _gpt2_characters(), strict=True)
    }
    spelled = {
        "".join(letters[bytes([b])] for b in token): rank
        for token, rank in ranks.items()
    }
    merges, tokens = [], list(ranks)
    for rank in range(256, len(tokens)):
        earlier = {token: r for token, r in ranks.items() if r < rank}
        if rank > 700:
            break
        halves = [tokens[i] for i in merge_by_rank(tokens[rank], earlier)]
        assert len(halves) == 2, "each token is made of two earlier ones"
        merges.append(tuple("".join(letters[bytes([b])] for b in h) for h in halves))
    small = dict(list(ranks.items())[:701])
    vocab = {word: rank for word, rank in spelled.items() if rank <= 700}
    peer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    peer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    peer.decoder = decoders.ByteLevel()
    ours = Tokenizer(small)
    for text in (
        "def f(x):\n    return x + 12345\n",
        "It's naïve, 漢字 and 🙂.  Ok\n\n",
    ):
        assert peer.encode(text).ids == ours.encode(text)


def _gpt2_bytes():
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    return printable + [b for b in range(256) if b not in printable]


def _gpt2_characters():
    shown = [chr(b) for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    return shown + [chr(256 + i) for i in range(256 - len(shown))]


def test_gpt2_from_its_file(tmp_path, monkeypatch):
    """With a file of the same form in miniature, since nothing is downloaded here."""
    letters = dict(zip(_gpt2_bytes(), _gpt2_characters(), strict=True))
    space = letters[ord(" ")]
    path = tmp_path / "vocab.bpe"
    path.write_text(f"#version: 0.2\nt h\nth e\n{space} the\n", encoding="utf-8")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=r"vocab\.bpe") as raised:
        Tokenizer.gpt2(path)
    assert digest[:16] in str(raised.value), "the error names the hash"
    monkeypatch.setattr(module, "_GPT2_SHA256", digest)
    tokenizer = Tokenizer.gpt2(path)
    assert tokenizer.vocab_size == 260
    assert tokenizer.bos_id == tokenizer.special_ids["<|endoftext|>"] == 259
    assert tokenizer.pattern == GPT2_PATTERN
    assert tokenizer.encode("the the") == [257, 258]
    assert list(tokenizer.ranks)[:256] == [bytes([b]) for b in _gpt2_bytes()]


def test_gpt2_without_a_network_is_one_line(monkeypatch):
    def offline(name):
        raise OSError("Name or service not known\nand a long story")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(DataError, match="go online once") as raised:
        Tokenizer.gpt2()
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="50257"):
        gpt2_tokenizer([], 4096)
    with pytest.raises(DataError, match=r"nowhere\.bpe"):
        Tokenizer.gpt2("nowhere.bpe")


def test_gpt2_itself():
    """The real ranks, where tiktoken has them in its cache or LITTLELM_GPT2 says so."""
    path = os.environ.get("LITTLELM_GPT2")
    if not path:
        pytest.skip("LITTLELM_GPT2 does not name GPT-2's vocab.bpe")
    tokenizer = Tokenizer.gpt2(path)
    assert tokenizer.vocab_size == 50257
    assert tokenizer.bos_id == 50256
    assert tokenizer.encode("Hello world") == [15496, 995]


# ---- Errors in one line


def test_bad_arguments_are_named(monkeypatch):
    single = {bytes([b]): b for b in range(256)}
    cases = {
        "byte 65": lambda: Tokenizer({k: v for k, v in single.items() if k != b"A"}),
        "256 is missing": lambda: Tokenizer({**single, b"ab": 300}),
        "<|a|>": lambda: Tokenizer(single, special_tokens=("<|a|>", "<|a|>")),
        "pattern": lambda: Tokenizer(single, pattern="("),
        "no special token": lambda: Tokenizer(single, special_tokens=()).bos_id,
        "vocab_size = 259": lambda: bpe_tokenizer(["a"], 259),
        "did you mean 'rustbpe'": lambda: train_bpe(["a"], 300, engine="rustbp"),
        "did you mean": lambda: WORLD.encode("a", allowed_special=["<|bso|>"]),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match="(?s)" + regex.escape(message)) as raised:
            call()
        assert "\n" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "rustbpe", None)
    with pytest.raises(ConfigError, match="pip install rustbpe"):
        train_bpe(["a b"], 300, engine="rustbpe")
    with pytest.raises(TypeError, match="encode_bytes"):
        WORLD.encode(b"bytes")
