"""Rows of the curation chapter: near duplicates beside datasketch."""

from __future__ import annotations

import re

import numpy as np

from littlelm_core import corpus
from littlelm_core.bench.measure import Row, against, rounds
from littlelm_core.bench.peers import peer, version
from littlelm_core.curation import MinHash, deduplicate

# ---- Near duplicates


def planted(count: int, seed: int = 1) -> tuple[list[str], list[tuple[int, int]]]:
    """Return documents, a tenth of them changed copies, and the pairs (first, copy).

    Words are drawn with the frequencies of the default corpus, lengths as web pages
    have them; a copy has up to 2 % other words, so that most pairs are similar to 0.8
    or more.
    """
    draw = np.random.default_rng(seed)
    texts = [t for d in corpus.domains() for t in corpus.documents(d, "validation")]
    words = np.array(" ".join(texts).split(), object)
    first = count - count // 10
    lengths = np.minimum(draw.lognormal(5.0, 0.9, first).astype(int) + 20, 5_000)
    found = [draw.choice(words, length) for length in lengths]
    docs, pairs = [" ".join(text) for text in found], []
    for copy, i in enumerate(draw.choice(first, count - first, replace=False).tolist()):
        text = found[i].copy()
        changes = draw.binomial(len(text), draw.uniform(0, 0.02))
        text[draw.choice(len(text), changes, replace=False)] = "changed"
        docs.append(" ".join(text))
        pairs.append((i, first + copy))
    return docs, pairs


def _shingles(text: str) -> list[bytes]:
    words = re.findall(r"\w+", text.lower())
    return [" ".join(words[i : i + 5]).encode() for i in range(max(len(words) - 4, 1))]


def minhash(quick: bool = False) -> list[Row]:
    """Finding near duplicates: all of it, from texts to pairs."""
    datasketch = peer("datasketch")
    docs, pairs = planted(300 if quick else 20_000)
    sample = docs[-(100 if quick else 1_000) :]
    minhash, found = MinHash(), {}

    def theirs(texts: list[str], batch: bool) -> set[tuple[int, int]]:
        index = datasketch.MinHashLSH(num_perm=112, params=(14, 8))
        met = set()
        for i, text in enumerate(texts):
            sketch = datasketch.MinHash(num_perm=112, seed=1)
            if batch:
                sketch.update_batch(_shingles(text))
            else:
                for shingle in _shingles(text):
                    sketch.update(shingle)
            met.update((j, i) for j in index.query(sketch))
            index.insert(i, sketch)
        return met

    def ours(texts: list[str]) -> set[tuple[int, int]]:
        _, report = deduplicate(texts, 0.8, minhash)
        return {
            (i, j)
            for group in report.clusters.values()
            for i in group
            for j in group
            if i < j
        }

    all_ = {
        "ours": lambda: found.update(ours=ours(docs)),
        "batch": lambda: found.update(batch=theirs(docs, True)),
    }
    some = {
        "ours": lambda: ours(sample),
        "update": lambda: theirs(sample, False),
    }
    count = 3 if quick else 5
    seconds, slow = rounds(all_, count), rounds(some, count, warm_up=0)
    near = [p for p in pairs if _similarity(docs, p) >= 0.8]
    recall = {
        who: sum(p in met for p in near) / len(near) for who, met in found.items()
    }
    if abs(recall["ours"] - recall["batch"]) > 0.02:
        raise AssertionError(f"not the same work: recall {recall}")
    said = ", ".join(f"{100 * recall[who]:.1f} %" for who in ("ours", "batch"))
    note = f"{len(docs):,} documents; recall {said} of {len(near):,} pairs >= 0.8"
    name = version("datasketch")
    return [
        against(
            "near duplicates", f"{name} update_batch", seconds, len(docs), "doc/s", 4,
            theirs="batch", note=note,
        ),
        against(
            "near duplicates, one by one", f"{name} update", slow, len(sample),
            "doc/s", 15, theirs="update", note=f"{len(sample):,} documents",
        ),
    ]  # fmt: skip


def _similarity(docs: list[str], pair: tuple[int, int]) -> float:
    a, b = (set(_shingles(docs[i])) for i in pair)
    return len(a & b) / len(a | b)
