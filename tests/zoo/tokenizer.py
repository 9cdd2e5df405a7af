"""Wrong tokenizers, each with the test of the contract that must reject it."""

import functools
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import regex

from littlelm_core.tokenizer import (
    SPLIT_PATTERN,
    Tokenizer,
    bpe_tokenizer,
    clean_text,
    train_bpe,
)


def wrong(tokenizer_class):
    """A part that trains well and then is of the wrong class."""

    @functools.wraps(bpe_tokenizer)
    def part(texts, vocab_size, **keys):
        good = bpe_tokenizer(texts, vocab_size, **keys)
        return tokenizer_class(good.ranks, good.pattern, good.special_tokens)

    return part


class TextIsControl(Tokenizer):
    """Every spelling of a special token in a document becomes the token."""

    def encode(self, text, allowed_special=()):
        return super().encode(text, allowed_special or "all")


class LongestMatch(Tokenizer):
    """Takes the longest token that fits, from the left, and forgets the ranks."""

    def encode(self, text, allowed_special=()):
        if allowed_special:
            return super().encode(text, allowed_special)
        ids = []
        for match in regex.finditer(self.pattern, clean_text(text)):
            piece = match[0].encode()
            while piece:
                size = next(
                    n for n in range(len(piece), 0, -1) if piece[:n] in self.ranks
                )
                ids.append(self.ranks[piece[:size]])
                piece = piece[size:]
        return ids


class Quadratic(Tokenizer):
    """Looks at every pair before every merge, as tiktoken did for years."""

    def encode(self, text, allowed_special=()):
        ids = []
        for match in regex.finditer(self.pattern, clean_text(text)):
            parts = [bytes([b]) for b in match[0].encode()]
            while True:
                ranks = [
                    self.ranks.get(a + b, 1 << 30) for a, b in itertools.pairwise(parts)
                ]
                if not ranks or min(ranks) == 1 << 30:
                    break
                i = ranks.index(min(ranks))
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            ids.extend(self.ranks[p] for p in parts)
        return ids


class Surrogates(Tokenizer):
    """A batch drops what UTF-8 cannot hold, a single text does not."""

    def encode_batch(self, texts, allowed_special=()):
        clean = [t.encode("utf-8", "ignore").decode() for t in texts]
        return super().encode_batch(clean, allowed_special)


class LoneHalves(Tokenizer):
    """Replaces both halves of a surrogate pair in place of joining them."""

    def encode(self, text, allowed_special=()):
        return super().encode(
            re.sub("[\ud800-\udfff]", "\ufffd", text), allowed_special
        )


class Eager(Tokenizer):
    """Streams each token's bytes as text at once."""

    def stream(self):
        tokenizer = self

        class Stream:
            def push(self, token_id):
                return tokenizer.decode([token_id])

            def flush(self):
                return ""

        return Stream()


class Lossy(Tokenizer):
    """Reads bytes as text that has every bad byte replaced."""

    def encode_bytes(self, data):
        return self.encode(data.decode("utf-8", "replace"))


class Trims(Tokenizer):
    """Normalizes line ends, as if nobody would miss them."""

    def encode(self, text, allowed_special=()):
        return super().encode(text.replace("\r\n", "\n"), allowed_special)


class CountsSpecials(Tokenizer):
    """Counts the spelling of special tokens as bytes of text."""

    def token_byte_counts(self):
        counts = super().token_byte_counts()
        for name, token_id in self.special_ids.items():
            counts[token_id] = len(name.encode())
        return counts


class Strict(Tokenizer):
    """Fails on an id of the padded rows."""

    def decode_bytes(self, ids):
        ids = list(ids)
        if ids and min(ids) < 0:
            raise ValueError("negative")
        return b"".join(self._tokens[i] for i in ids)


class AnyVersion(Tokenizer):
    """Reads whatever has the right keys."""

    @classmethod
    def load(cls, path):
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        path = Path(path).with_name("copy.json")
        path.write_text(json.dumps({**table, "version": 1}), encoding="utf-8")
        return super().load(path)


class InPlace(Tokenizer):
    """Writes over the old file, so that a full disk costs it."""

    def save(self, path):
        with Path(path).open("w", encoding="utf-8") as file:
            file.write(self._to_json()[:100])
            raise OSError(28, "No space left on device")


def naive(choose, count_words=True, merge_from_right=False):
    """A part whose trainer recounts before each merge and chooses by `choose`."""

    def part(texts, vocab_size, **keys):
        bpe_tokenizer(texts := list(texts), vocab_size)  # the same errors on bad input
        words = Counter(
            m[0] for text in texts for m in regex.finditer(SPLIT_PATTERN, text)
        )
        ids = {word: list(word.encode()) for word in words}
        tokens = [bytes([b]) for b in range(256)]
        while len(tokens) < vocab_size - 4:
            count = Counter()
            for word, times in words.items():
                for pair in itertools.pairwise(ids[word]):
                    count[pair] += times if count_words else 1
            token = None
            while count:
                pair = choose(count)
                token = tokens[pair[0]] + tokens[pair[1]]
                if token not in tokens:
                    break
                del count[pair]  # such a token is there already; take the next
            if not count:
                break
            for word, old in ids.items():
                ids[word] = replace(old, pair, len(tokens), merge_from_right)
            tokens.append(token)
        return Tokenizer({token: rank for rank, token in enumerate(tokens)})

    return part


def replace(ids, pair, new, from_right):
    ids, pair = (ids[::-1], pair[::-1]) if from_right else (ids, pair)
    out = []
    while ids:
        if tuple(ids[:2]) == tuple(pair):
            out.append(new)
            ids = ids[2:]
        else:
            out.append(ids[0])
            ids = ids[1:]
    return out[::-1] if from_right else out


def first_seen(count):
    return max(count, key=count.__getitem__)


def largest_pair(count):
    return max(count, key=lambda pair: (count[pair], pair))


def smallest_pair(count):
    return min(count, key=lambda pair: (-count[pair], pair))


def joins(texts, vocab_size, **keys):
    """Joins all texts first: words grow together at the borders."""
    bpe_tokenizer(texts := list(texts), vocab_size)
    return bpe_tokenizer(["".join(texts)], vocab_size, **keys)


def says_nothing(texts, vocab_size, **keys):
    """Gives the bytes alone when there is no text."""
    texts = list(texts) if not isinstance(texts, str) else texts
    if not any(texts):
        return Tokenizer({bytes([b]): b for b in range(256)})
    return bpe_tokenizer(texts, vocab_size, **keys)


def pads(texts, vocab_size, **keys):
    """Fills a vocabulary that has no more pairs with tokens that no text has."""
    ranks = train_bpe(texts, vocab_size - 4)
    while len(ranks) < vocab_size - 4:
        ranks[b"\xff\xff" + len(ranks).to_bytes(4)] = len(ranks)
    return Tokenizer(ranks)


RANK = "test_encoding_merges_by_rank"
TRAIN = "test_training_equals_recounting_before_each_merge"
ZOO = {
    "text is a control token": (
        wrong(TextIsControl),
        "test_text_is_never_a_control_token",
    ),
    "longest match in place of ranks": (wrong(LongestMatch), RANK),
    "quadratic encoder": (
        wrong(Quadratic),
        "test_time_grows_with_length_not_its_square",
    ),
    "batch treats surrogates otherwise": (
        wrong(Surrogates),
        "test_batch_equals_single",
    ),
    "surrogate pairs are not joined": (
        wrong(LoneHalves),
        "test_surrogates_never_raise",
    ),
    "streams half characters": (
        wrong(Eager),
        "test_streaming_holds_back_an_incomplete_character",
    ),
    "stream and decode differ": (
        wrong(Eager),
        "test_streaming_equals_decoding_at_once",
    ),
    "bytes are replaced": (
        wrong(Lossy),
        "test_bytes_that_are_not_utf8_stay_what_they_are",
    ),
    "line ends are normalized": (
        wrong(Trims),
        "test_round_trip_is_exact_for_any_text",
    ),
    "special tokens have bytes": (
        wrong(CountsSpecials),
        "test_byte_counts_are_those_of_the_text",
    ),
    "padding ids crash": (
        wrong(Strict),
        "test_padding_ids_never_crash_the_decoder",
    ),
    "any version is read": (
        wrong(AnyVersion),
        "test_an_unknown_version_is_refused_by_name",
    ),
    "saves in place": (wrong(InPlace), "test_a_failed_save_leaves_the_old_file"),
    "ties by the pair seen first": (naive(first_seen), TRAIN),
    "order of texts decides ties": (
        naive(first_seen),
        "test_training_does_not_depend_on_order",
    ),
    "ties by the largest pair": (naive(largest_pair), TRAIN),
    "each word counts once": (naive(smallest_pair, count_words=False), TRAIN),
    "merges runs from the right": (naive(smallest_pair, merge_from_right=True), TRAIN),
    "joins the texts": (joins, TRAIN),
    "holds all texts": (joins, "test_training_reads_texts_once_and_lets_them_go"),
    "no text, no error": (says_nothing, "test_training_on_nothing_is_a_clear_error"),
    "claims the size it was asked for": (
        pads,
        "test_training_stops_when_no_pair_is_left",
    ),
}
