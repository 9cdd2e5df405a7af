"""The contract of a tokenizer: `part(texts, vocab_size)` trains one and returns it.

vocab_size counts every id, the special tokens too. The naive trainer and encoder here
share nothing with the part but its split pattern.
"""

import functools
import itertools
import json
import math
import pickle
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import regex
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

PART = "littlelm_core.tokenizer:bpe_tokenizer"
pytestmark = pytest.mark.filterwarnings("ignore:the text has no more pairs")

PROSE = (
    "The cat sat on the mat, and the other cat did not. It's 12 o'clock; they'll "
    "see 1999 and 20260 more.\n\n    return self.value + 1\n\tif x == y:\n"
)
WORLD = "naïve café, größer, 漢字かな交じり文, Ελληνικά, русский, 🙂🙃🙂 👩‍👩‍👧 é́\r\n"
TEXTS = [PROSE * 20, WORLD * 20, "aaaa bbbb abab aaab " * 10, "  \n \t\n" * 5]
SIZE = 620


@functools.cache
def trained(part):
    return part(TEXTS, SIZE)


def ranks_of(tokenizer):
    """{token: rank}, read through the decoder."""
    count = tokenizer.vocab_size - len(tokenizer.special_ids)
    return {tokenizer.decode_bytes([i]): i for i in range(count)}


def naive_encode(text, ranks, pattern):
    """Merge the pair of lowest rank, the leftmost of equals, until none is left."""
    ids = []
    for match in regex.finditer(pattern, text):
        parts = [bytes([b]) for b in match[0].encode()]
        while True:
            pairs = [
                (ranks[a + b], i)
                for i, (a, b) in enumerate(itertools.pairwise(parts))
                if a + b in ranks
            ]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids.extend(ranks[p] for p in parts)
    return ids


def naive_train(texts, size, pattern):
    """Recount every pair before every merge."""
    words = Counter(m[0] for text in texts for m in regex.finditer(pattern, text))
    ids = {word: list(word.encode()) for word in words}
    tokens = [bytes([b]) for b in range(256)]
    while len(tokens) < size:
        count = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(ids[word]):
                count[pair] += times
        if not count:
            break
        best = min(count, key=lambda pair: (-count[pair], pair))
        for word in words:
            old, new = ids[word], []
            while old:
                if tuple(old[:2]) == best:
                    new.append(len(tokens))
                    old = old[2:]
                else:
                    new.append(old[0])
                    old = old[1:]
            ids[word] = new
        tokens.append(tokens[best[0]] + tokens[best[1]])
    return tokens


SIGNS = st.sampled_from("ab  \n\r\t'sé漢字🙂!19<|endbos>\u00a0\u200d\u0301")
ANY_TEXT = st.text(
    st.one_of(SIGNS, st.characters(exclude_categories=["Cs"])), max_size=40
)
MANY = settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck)
)


# ---- Encode and decode


def test_round_trip_is_exact_for_any_text(part):
    tokenizer = trained(part)

    @MANY
    @given(ANY_TEXT)
    @example("")
    @example("\r\n \r\n")
    @example("\ufeffa\x00b")
    def holds(text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, f"{text!r} comes back otherwise"
        assert tokenizer.decode_bytes(ids) == text.encode(), "decode_bytes differs"

    holds()


def test_encoding_merges_by_rank(part):
    tokenizer = trained(part)
    ranks = ranks_of(tokenizer)
    texts = [PROSE, WORLD, "aaa", "aaaaaaa b", "abababa", "aaabaaab", "x" * 50]
    rng = random.Random(1)
    texts += ["".join(rng.choices("ab the", k=30)) for _ in range(100)]
    for text in texts:
        want = naive_encode(text, ranks, tokenizer.pattern)
        got = tokenizer.encode(text)
        assert got == want, f"{text!r}: ids {got}, by rank {want}"


def test_batch_equals_single(part):
    tokenizer = trained(part)
    texts = [PROSE, "", WORLD, "<|end|>", "a\ud83d\ude42b", "\udc00"]
    want = [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts) == want, "a batch gives other ids"
    assert tokenizer.encode_batch(iter(texts)) == want, "a batch may be an iterator"
    want = [tokenizer.encode(text, "all") for text in texts]
    assert tokenizer.encode_batch(texts, allowed_special="all") == want


def test_surrogates_never_raise(part):
    tokenizer = trained(part)
    cases = {
        "\ud83d\ude42": "🙂",
        "a\ud83d\ude42b": "a🙂b",
        "\ud800": "\ufffd",
        "x\udc00y\ud800": "x\ufffdy\ufffd",
        "\ud800\ud83d\ude42": "\ufffd🙂",
        "\ufeff\udfff": "\ufeff\ufffd",
        "漢\ude42\ud83d": "漢\ufffd\ufffd",
    }
    for text, clean in cases.items():
        want = tokenizer.encode(clean)
        ways = {
            "encode": tokenizer.encode(text),
            "encode_batch": tokenizer.encode_batch([text])[0],
            "encode with special tokens": tokenizer.encode(text, "all"),
        }
        for way, ids in ways.items():
            assert ids == want, f"{way} of {text!r} is not that of {clean!r}"


def test_time_grows_with_length_not_its_square(part):
    tokenizer = part([*TEXTS, "a" * 4000, "ab" * 2000], SIZE)
    rng = random.Random(2)
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=200_000))
    kinds = {"equal": "a" * 200_000, "alternating": "ab" * 100_000, "random": letters}

    def seconds(text):
        start = time.process_time()
        ids = tokenizer.encode(text)
        took = time.process_time() - start
        assert tokenizer.decode_bytes(ids) == text.encode()
        return took

    for kind, text in kinds.items():
        short = min(seconds(text[:1000]) for _ in range(3))
        for size in (4_000, 200_000):  # a quadratic encoder stops at the first
            took = seconds(text[:size])
            steps = size * math.log(size) / (1000 * math.log(1000))
            limit = 0.05 + 2.5 * short * steps
            assert took < limit, (
                f"{size:,} {kind} letters took {took:.2f} s, 1,000 took {short:.4f} s: "
                "that is not near-linear"
            )


def test_bytes_that_are_not_utf8_stay_what_they_are(part):
    tokenizer = trained(part)

    @MANY
    @given(st.binary(max_size=40))
    @example(b"caf\xc3")
    @example(b"\xed\xa0\x80")
    def holds(data):
        ids = tokenizer.encode_bytes(data)
        assert tokenizer.decode_bytes(ids) == data, f"{data!r} comes back otherwise"

    holds()
    good = PROSE.encode()
    assert tokenizer.encode_bytes(good) == tokenizer.encode(PROSE)
    bad = tokenizer.encode_bytes(good + b"\xff" + good)
    ids = tokenizer.encode(PROSE)
    assert bad[: len(ids) - 3] == ids[:-3], "a bad byte changed ids far before it"
    assert bad[-len(ids) + 3 :] == ids[3:], "a bad byte changed ids far after it"


# ---- Special tokens


def test_text_is_never_a_control_token(part):
    tokenizer = trained(part)
    special = set(tokenizer.special_ids.values())
    for name, its_id in tokenizer.special_ids.items():
        text = f"one {name} two{name}"
        for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0]):
            assert not special & set(ids), f"the text {text!r} became a control token"
            assert tokenizer.decode(ids) == text
        allowed = tokenizer.encode(text, allowed_special=[name])
        assert allowed.count(its_id) == 2, f"{name} was allowed by name, twice"
        assert tokenizer.decode(allowed) == text
        for other in set(tokenizer.special_ids) - {name}:
            assert its_id not in tokenizer.encode(text, allowed_special=[other]), (
                f"{other} was allowed, {name} was not"
            )
    between = tokenizer.encode(f" a{name}b ", allowed_special=[name])
    assert between == [*tokenizer.encode(" a"), its_id, *tokenizer.encode("b ")]
    with pytest.raises(ValueError):
        tokenizer.encode("text", allowed_special=["<|no such token|>"])


def test_the_first_special_token_starts_documents(part):
    tokenizer = trained(part)
    ids = list(tokenizer.special_ids.values())
    ranks = tokenizer.vocab_size - len(ids)
    assert ids == list(range(ranks, tokenizer.vocab_size)), "they follow the ranks"
    assert tokenizer.bos_id == ids[0]
    assert tokenizer.bos_id not in tokenizer.encode("text"), "encode adds no BOS"


def test_byte_counts_are_those_of_the_text(part):
    tokenizer = trained(part)
    counts = tokenizer.token_byte_counts()
    assert len(counts) == tokenizer.vocab_size, "one count for each id"
    for name, its_id in tokenizer.special_ids.items():
        assert counts[its_id] == 0, f"{name} stands for no bytes of text"
    for text in (PROSE, WORLD):
        ids = tokenizer.encode(text)
        assert sum(int(counts[i]) for i in ids) == len(text.encode())


def test_padding_ids_never_crash_the_decoder(part):
    tokenizer = trained(part)
    for extra in (0, 1, 63, 10**6):
        ids = [*tokenizer.encode("ab"), tokenizer.vocab_size + extra]
        assert tokenizer.decode(ids).startswith("ab")
        assert tokenizer.stream().push(ids[-1]) is not None
    with pytest.raises(ValueError):
        tokenizer.decode([-1])


# ---- Streaming


def test_streaming_equals_decoding_at_once(part):
    tokenizer = trained(part)
    singles = {tokenizer.decode_bytes([i]): i for i in range(256)}

    @MANY
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    @example([singles[bytes([b])] for b in "x🙂漢".encode()])
    @example([singles[b"\xf0"], singles[b"\x9f"], singles[b"a"]])
    def holds(ids):
        stream = tokenizer.stream()
        shown = "".join([stream.push(i) for i in ids]) + stream.flush()
        assert shown == tokenizer.decode(ids), f"{ids} stream otherwise"

    holds()


def test_streaming_holds_back_an_incomplete_character(part):
    tokenizer = trained(part)
    singles = {tokenizer.decode_bytes([i]): i for i in range(256)}
    ids = [singles[bytes([b])] for b in "é🙂".encode()]
    stream = tokenizer.stream()
    got = [stream.push(i) for i in ids]
    assert got == ["", "é", "", "", "", "🙂"], f"pieces {got}"
    for cut in range(len(ids) + 1):
        stream = tokenizer.stream()
        shown = "".join([stream.push(i) for i in ids[:cut]])
        assert "é🙂".startswith(shown), f"{shown!r} is not how the text begins"
        assert len(stream.flush()) <= 1, "what is held back is one character at most"


# ---- Training


def test_training_equals_recounting_before_each_merge(part):
    for seed in range(25):
        rng = random.Random(seed)
        letters = rng.choice(["ab", "ab ", "abc \n", "aé漢 "])
        texts = [
            "".join(rng.choices(letters, k=rng.randint(5, 120)))
            for _ in range(rng.randint(1, 4))
        ]
        size = 256 + rng.randint(1, 60)
        specials = len(trained(part).special_ids)
        got = part(texts, size + specials)
        want = naive_train(texts, size, got.pattern)
        tokens = list(ranks_of(got))
        for step, (mine, naive) in enumerate(zip(tokens, want, strict=False)):
            assert mine == naive, (
                f"merge {step - 255} of {texts} is {mine!r}, not {naive!r}: the "
                "highest count first, ties by the smallest pair of ids"
            )
        assert len(tokens) == len(want), f"{len(tokens)} tokens, not {len(want)}"


def test_training_does_not_depend_on_order(part):
    want = ranks_of(trained(part))
    for seed in range(3):
        texts = [piece for text in TEXTS for piece in text.splitlines(keepends=True)]
        by_line = ranks_of(part(texts, SIZE))
        random.Random(seed).shuffle(texts)
        assert ranks_of(part(texts, SIZE)) == by_line, "another order, other ranks"
    assert ranks_of(part(TEXTS[::-1], SIZE)) == want, "another order, other ranks"


def test_training_reads_texts_once_and_lets_them_go(part):
    class Text(str):
        alive = 0

        def __new__(cls, text):
            cls.alive += 1
            return super().__new__(cls, text)

        def __del__(self):
            type(self).alive -= 1

    most = 0

    def texts():
        nonlocal most
        for i in range(400):
            most = max(most, Text.alive)
            yield Text(f"{PROSE} {i}")

    got = part(texts(), SIZE)
    assert ranks_of(got) == ranks_of(part([f"{PROSE} {i}" for i in range(400)], SIZE))
    assert most < 100, f"{most} of 400 texts were held in memory at once"


def test_training_stops_when_no_pair_is_left(part):
    tokenizer = part(["ab ab"], 1000)
    tokens = list(ranks_of(tokenizer))[256:]
    assert tokens == [b"ab", b" ab"], f"{tokens} from 'ab ab'"
    assert tokenizer.vocab_size == 258 + len(tokenizer.special_ids), "the real size"


def test_training_on_nothing_is_a_clear_error(part):
    for texts in ([], [""], iter(["", ""])):
        with pytest.raises(ValueError, match="text") as raised:
            part(texts, SIZE)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="100"):
        part(TEXTS, 100)
    with pytest.raises(TypeError):
        part("one text in place of a list", SIZE)


# ---- Save and load


def test_saved_and_loaded_is_the_same(part):
    tokenizer = trained(part)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(path)
        assert [p.name for p in Path(folder).iterdir()] == [path.name], "other files"
        copies = [type(tokenizer).load(path), pickle.loads(pickle.dumps(tokenizer))]
        other = part(["another text entirely"], SIZE)
    for copy in copies:
        assert ranks_of(copy) == ranks_of(tokenizer)
        assert copy.special_ids == tokenizer.special_ids
        assert copy.fingerprint == tokenizer.fingerprint
        for text in (PROSE, WORLD, "<|bos|>"):
            assert copy.encode(text, "all") == tokenizer.encode(text, "all")
    assert other.fingerprint != tokenizer.fingerprint, "other ranks, same fingerprint"


def test_an_unknown_version_is_refused_by_name(part):
    tokenizer = trained(part)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(path)
        table = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**table, "version": 4711}), encoding="utf-8")
        with pytest.raises(ValueError, match="4711"):
            type(tokenizer).load(path)
        for broken in ('{"a": 1}', "[]", path.read_text()[:100], "\x00"):
            path.write_text(broken, encoding="utf-8")
            with pytest.raises(ValueError, match="tokenizer"):
                type(tokenizer).load(path)
        with pytest.raises(ValueError, match="nowhere"):
            type(tokenizer).load(Path(folder) / "nowhere.json")


def test_a_failed_save_leaves_the_old_file(part):
    tokenizer = trained(part)
    other = part(["another text entirely"], SIZE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(path)
        full = OSError(28, "No space left on device")
        with mock.patch("os.fsync", side_effect=full), pytest.raises(OSError):
            other.save(path)
        again = type(tokenizer).load(path)
        assert again.fingerprint == tokenizer.fingerprint, "the old file is lost"
        assert [p.name for p in Path(folder).iterdir()] == [path.name], "partial file"
