"""Rows of the curation chapter: filters beside datatrove, MinHash beside datasketch."""

from __future__ import annotations

import re

import numpy as np

from littlelm_core import corpus, curation
from littlelm_core.bench.measure import Row, against, rounds
from littlelm_core.bench.peers import peer, version
from littlelm_core.curation import MinHash, deduplicate, normalize

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


# ---- Heuristics


class _Words:
    """Our words and sentences for datatrove: its own need spaCy, and far more time."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        ends = [match.end() for match in curation._SENTENCE.finditer(text)]
        ends += [len(text)] if not ends or ends[-1] < len(text) else []
        return list(zip([0, *ends], ends, strict=False))


def heuristics(quick: bool = False) -> list[Row]:
    """Gopher's, C4's and FineWeb's rules on pages of the default corpus."""
    peer("datatrove")
    filters = peer("datatrove.pipeline.filters")
    tokenizers = peer("datatrove.utils.word_tokenizers")
    cut, document = peer("datatrove.utils.text"), peer("datatrove.data").Document
    ours = [
        curation.GopherQuality(), curation.GopherRepetition(),
        curation.C4Quality(), curation.FineWebQuality(),
    ]  # fmt: skip
    theirs = [
        filters.GopherQualityFilter(), filters.GopherRepetitionFilter(),
        filters.C4QualityFilter(), filters.FineWebQualityFilter(),
    ]  # fmt: skip
    size, texts = 3_000, []  # characters of a page; many pages of prose, some of code
    for domain in corpus.domains():
        for whole in corpus.documents(domain, "train"):
            clean = normalize(whole[: 20 * size])
            texts += [clean[at : at + size] for at in range(0, len(clean), size)]
    draw = np.random.default_rng(1)
    texts = [texts[i] for i in draw.permutation(len(texts))[: 60 if quick else 1_500]]
    found: dict[str, list[list[bool]]] = {}

    def judge_ours() -> None:
        found["ours"] = []
        for text in map(curation.Page, texts):
            found["ours"].append([drop(text) is None for drop in ours])

    def judge_theirs() -> None:
        found["theirs"] = []
        for text in texts:
            answers = [f.filter(document(text=text, id="0")) for f in theirs]
            found["theirs"].append([answer is True for answer in answers])

    before = tokenizers.load_word_tokenizer
    tokenizers.load_word_tokenizer = lambda language: _Words()
    try:
        cut.split_into_parts.cache_clear()
        contestants = {"ours": judge_ours, "theirs": judge_theirs}
        seconds = rounds(contestants, 3 if quick else 5)
    finally:
        tokenizers.load_word_tokenizer = before
        cut.split_into_parts.cache_clear()
    if found["ours"] != found["theirs"]:
        raise AssertionError("decisions differ: not the same work")
    kept = np.array(found["ours"]).mean(axis=0)
    said = ", ".join(f"{f.name} {k:.0%}" for f, k in zip(ours, kept, strict=True))
    work = sum(len(text.encode()) for text in texts) / 1e6
    return [
        against(
            "heuristics", version("datatrove"), seconds, work, "MB/s", 2.0,
            note=f"{len(texts):,} pages, equal decisions; kept by {said}; both cut "
            "words at white space",
        )
    ]  # fmt: skip
