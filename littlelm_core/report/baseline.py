"""What a model must beat: n-grams over the same tokens, and a compressor.

A loss of 1.9 bits per byte says little until something simple has been asked for the
same text. An n-gram model predicts a token from the n - 1 before it, by counting; it
gets every training token of the prepared data, not only those that a run has time for.
Smoothing decides how good it is, so the best known one is used: interpolated Kneser-Ney
with three discounts (Chen and Goodman, 1998), whose lower orders count in how many
contexts a token was seen, and not how often. lzma gets the validation text of a domain
and nothing else.

Everything is numpy over sorted arrays: an n-gram is one 64-bit number, the index of its
first n - 1 tokens times the vocabulary plus its last token.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from littlelm_core.config import DataError
from littlelm_core.report.log import write_text
from littlelm_core.report.terminal import table

ORDERS = {"bigram": 2, "5-gram": 5}
VERSION = 1  # of the numbers: raised when a baseline is computed in another way


def baselines(prepared: Any) -> dict[str, dict[str, float]]:
    """Return {"bigram" | "5-gram" | "lzma": {domain or "overall": bits per byte}}.

    prepared: what `ingest.prepare_run` gives; trained on all of `prepared.train`, and
    scored on all of `prepared.validation`, special tokens left out as in a run's own
    validation. Kept in the folder's baselines.json, for these shards alone.
    Raises DataError when there is nothing to train on.
    """
    path = Path(prepared.folder) / "baselines.json"
    key = _fingerprint(prepared)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] == key:
            return kept["scores"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    scores = _compute(prepared)
    write_text(path, json.dumps({"key": key, "scores": scores}, indent=1))
    return scores


def comparison(
    validation: Mapping[str, Mapping[str, float]],
    scores: Mapping[str, Mapping[str, float]],
) -> str:
    """Return a text table of bits per byte: a run's validation beside the baselines.

    validation: `TrainResult.validation`; scores: what `baselines` gives.
    """
    rows = [["bits per byte", "this run", *scores]]
    for domain, score in validation.items():
        values = [score["bits_per_byte"], *(scores[b][domain] for b in scores)]
        rows.append([domain, *(f"{value:.3f}" for value in values)])
    return table(rows)


def _fingerprint(prepared: Any) -> str:
    names = [f"version {VERSION}", prepared.tokenizer.fingerprint]
    names += [shard.fingerprint for shard in prepared.train]
    for domain, shards in prepared.validation.items():
        names += [domain, *(shard.fingerprint for shard in shards)]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _compute(prepared: Any) -> dict[str, dict[str, float]]:
    tokenizer = prepared.tokenizer
    byte_counts = np.asarray(tokenizer.token_byte_counts())
    ids = _all_ids(prepared.train)
    grams = count_grams(
        ids, tokenizer.vocab_size, tokenizer.bos_id, max(ORDERS.values())
    )
    bits: dict[str, dict[str, float]] = {name: {} for name in (*ORDERS, "lzma")}
    sizes = {}
    for domain, shards in prepared.validation.items():
        held_out = _all_ids(shards)
        size_N = byte_counts[held_out]
        sizes[domain] = int(size_N.sum())
        for name, order in ORDERS.items():
            p_N = kneser_ney(grams[:order], held_out, tokenizer.bos_id)
            bits[name][domain] = float(-np.log2(p_N[size_N > 0]).sum())
        documents = (s[i][1:].tolist() for s in shards for i in range(len(s)))
        text = b"".join(tokenizer.decode_bytes(d) for d in documents)
        packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
        bits["lzma"][domain] = 8.0 * len(packed)
    return {
        name: {domain: value / sizes[domain] for domain, value in by_domain.items()}
        | {"overall": sum(by_domain.values()) / sum(sizes.values())}
        for name, by_domain in bits.items()
    }


def _all_ids(shards: Iterable[Any]) -> np.ndarray:
    parts = [np.asarray(s.read(0, s.tokens), dtype=np.int64) for s in shards]
    if not sum(map(len, parts)):
        raise DataError("no tokens for the baselines: prepare the data again")
    return np.concatenate(parts)


# ---- n-grams


@dataclass(frozen=True)
class Grams:
    """All n-grams of one length n in a text, each once, sorted by key.

    keys_G: index of the first n - 1 tokens among the shorter grams, times the
    vocabulary, plus the last token. count_G: how often it occurs. before_G: how many
    different tokens occur before it (for one that only opens documents: count_G).
    """

    vocab_size: int
    keys_G: np.ndarray
    count_G: np.ndarray
    before_G: np.ndarray


def count_grams(ids: np.ndarray, vocab_size: int, bos: int, order: int) -> list[Grams]:
    """Count the n-grams of lengths 1 … order; none reaches over a document's BOS.

    ids: all documents on end, each from its BOS. A BOS may only be the first token.
    """
    index_N = ids.astype(np.int64)  # of the gram that ends here, -1 where there is none
    counts = np.bincount(index_N, minlength=vocab_size)
    levels = [(np.arange(vocab_size), counts, index_N, None)]
    for _ in range(1, order):
        before_N = np.concatenate([[-1], index_N[:-1]])
        there = np.flatnonzero((before_N >= 0) & (ids != bos))
        key = before_N[there] * vocab_size + ids[there]
        # np.unique with an inverse sorts stably, at four times the cost of this.
        sorting = np.argsort(key)
        first = np.flatnonzero(np.diff(key[sorting], prepend=-1))
        counts = np.diff(first, append=len(key))
        inverse = np.empty_like(key)
        inverse[sorting] = np.repeat(np.arange(len(first)), counts)
        keys, example = key[sorting[first]], sorting[first]
        index_N = np.full(len(ids), -1)
        index_N[there] = inverse
        levels.append((keys, counts, index_N, there[example]))
    grams = []
    for n, (keys, counts, index_N, _) in enumerate(levels):
        before = counts
        if n + 1 < order:  # each longer gram is one more token before its own end
            ends = index_N[levels[n + 1][3]]
            before = np.bincount(ends, minlength=len(keys))
            before = np.where(before > 0, before, counts)
        grams.append(Grams(vocab_size, keys, counts, before))
    return grams


def kneser_ney(grams: list[Grams], ids: np.ndarray, bos: int) -> np.ndarray:
    """Return p_N, the probability of each id after those before it in its document.

    grams: of lengths 1 … n from `count_grams`. The longest use their counts, shorter
    ones the number of tokens seen before them; each gives what its discounts take to
    the next shorter one, and the shortest to all ids alike. At a BOS the value means
    nothing.
    """
    vocab = grams[0].vocab_size
    p_N = np.full(len(ids), 1.0 / vocab)
    context_N = np.zeros(len(ids), np.int64)  # the empty context, seen everywhere
    for n, level in enumerate(grams):
        counts = level.count_G if n + 1 == len(grams) else level.before_G
        if n == 0:
            counts = np.where(np.arange(vocab) == bos, 0, counts)  # no target
            context_G, contexts = np.zeros(vocab, np.int64), 1
            found_N = ids.astype(np.int64)
        else:
            context_G, contexts = level.keys_G // vocab, len(grams[n - 1].keys_G)
            key_N = np.where(context_N >= 0, context_N * vocab + ids, -1)
            at_N = np.searchsorted(level.keys_G, key_N).clip(max=len(level.keys_G) - 1)
            found_N = np.where(level.keys_G[at_N] == key_N, at_N, -1)
        discount_G = _discounts(counts)
        weights = {"minlength": contexts}
        total_C = np.bincount(context_G, counts, **weights)
        taken_C = np.bincount(context_G, discount_G, **weights)
        known_N = (context_N >= 0) & (total_C[context_N] > 0)
        total_N = np.where(known_N, total_C[context_N], 1.0)
        kept_G = counts - discount_G
        kept_N = np.where(known_N & (found_N >= 0), kept_G[found_N], 0.0)
        left_N = np.where(known_N, taken_C[context_N], 1.0)
        p_N = (kept_N + left_N * p_N) / total_N
        found_N = np.where(known_N | (n == 0), found_N, -1)
        context_N = np.concatenate([[-1], found_N[:-1]])
    return p_N


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Return what to take from each count: three sizes, for 1, 2, and 3 or more.

    By the counts of counts (Chen and Goodman, 1998); where a text is too small for
    these, 0.75 of every count.
    """
    n = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(float)
    sizes = np.array([0.0, 0.75, 0.75, 0.75])
    if n.min() > 0:
        share = n[0] / (n[0] + 2 * n[1])
        sizes[1:] = [k - (k + 1) * share * n[k] / n[k - 1] for k in (1, 2, 3)]
        sizes = sizes.clip(0.0, [0.0, 0.99, 1.99, 2.99])
    return sizes[np.minimum(counts, 3)]
