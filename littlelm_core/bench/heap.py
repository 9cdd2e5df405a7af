"""A heap of text for the ablation of curation: good pages, mirrors of some, and junk.

The default corpus has nothing to curate, so the heap is made: to the training documents
of each domain come half as much text again in mirrors (a few documents, many times, a
word here and there replaced) and half as much in junk of the kinds a crawl brings. What
chapter 11's steps leave of it is the curated text: a classifier that has seen a sample
of both sorts, then the search for duplicates. Both are made from a seed.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from littlelm_core import corpus
from littlelm_core.config import RunConfig
from littlelm_core.ingest import Prepared, prepare_run
from littlelm_core.ingest.runs import whole_folder
from littlelm_core.ingest.write import write_json
from littlelm_core.shards import Shard, write_shard

__all__ = ["KINDS", "curate", "heap", "junk", "mirrors", "prepare"]

RECIPE = 1  # raise it when other text would be made
KINDS = ("heap", "curated")
MIRRORED = 12  # documents of a domain that are mirrored
SAMPLE = 60  # documents of each domain, and as many of junk, that the classifier sees
FACTS = "heap.json"


def junk(draw: random.Random, size: int) -> Iterator[str]:
    """Yield about `size` characters of junk in documents of a few thousand."""
    words = ["".join(draw.choices(string.ascii_lowercase, k=5)) for _ in range(300)]
    menu = ["Home", "About", "Products", "Contact", "Login", "Help", "Terms", "Privacy"]

    def line(kind: int) -> str:
        if kind == 0:
            return " | ".join(draw.sample(menu, 5))
        if kind == 1:
            return " ".join(["buy", "cheap", *draw.choices(words, k=8), "online"])
        if kind == 2:
            return "".join(draw.choices(string.ascii_letters + string.digits, k=70))
        return ", ".join(f"{draw.random() * 1000:.2f}" for _ in range(10))

    while size > 0:
        kind, count = draw.randrange(4), draw.randrange(20, 60)
        text = "\n".join(line(kind) for _ in range(count)) + "\n"
        size -= len(text)
        yield text


def mirrors(draw: random.Random, texts: Sequence[str], size: int) -> Iterator[str]:
    """Yield about `size` characters of copies, one word in a hundred replaced."""
    chosen = draw.sample([t for t in texts if 500 < len(t) < 20_000], MIRRORED)
    while size > 0:
        words = draw.choice(chosen).split(" ")
        places = [i for i, word in enumerate(words) if word]  # code is full of blanks
        for place in draw.sample(places, len(places) // 100):
            words[place] = draw.choice(("here", "more", "new"))
        text = " ".join(words)
        size -= len(text)
        yield text


def heap(domain: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (sort, text) in a seeded order: "good", "mirror" and "junk"."""
    draw = random.Random(f"{RECIPE} {domain}")
    half = sum(map(len, texts)) // 2
    pages = [("good", text) for text in texts]
    pages += [("mirror", text) for text in mirrors(draw, texts, half)]
    pages += [("junk", text) for text in junk(draw, half)]
    draw.shuffle(pages)
    return pages


def curate(pages: Sequence[tuple[str, str]]) -> list[int]:
    """Return what is kept, ascending: what the classifier takes, without duplicates."""
    from littlelm_core.curation import QualityClassifier, deduplicate

    good = [text for sort, text in pages if sort == "good"][:SAMPLE]
    bad = list(junk(random.Random(RECIPE), 2000 * SAMPLE))[:SAMPLE]  # other junk
    judge = QualityClassifier()
    judge.fit(good, bad)
    texts = [text for _, text in pages]
    passed = [i for i, score in enumerate(judge.scores(texts)) if score > 0.5]
    kept, _ = deduplicate([texts[i] for i in passed])
    return [passed[i] for i in kept]


def prepare(kind: str, run: RunConfig) -> Prepared:
    """Return the run's data with the heap, or what curation leaves of it, to train on.

    Tokenizer and validation text stay those of the default corpus. Made once; the
    manifest's "heap" counts documents and characters by sort, before and after.
    """
    base = prepare_run(run)
    name = f"heap-{RECIPE}-{base.tokenizer.fingerprint[:8]}-{corpus.fingerprint()}"
    folder = corpus.data_folder() / name
    if not (folder / FACTS).is_file():
        with whole_folder(folder) as temporary:
            facts = {d: _write(temporary, d, base.tokenizer) for d in corpus.domains()}
            write_json(temporary / FACTS, facts)
    facts = json.loads((folder / FACTS).read_text("utf-8"))
    shards = [Shard(folder / f"{kind}-{d}-00000.shard") for d in corpus.domains()]
    manifest = {**base.manifest, "heap": facts}
    return Prepared(folder, base.tokenizer, shards, base.validation, manifest)


def _write(folder: Path, domain: str, tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Write both kinds of one domain; return counts of each."""
    pages = heap(domain, list(corpus.documents(domain, "train")))
    kept = [pages[i] for i in curate(pages)]
    facts = {}
    for kind, chosen in zip(KINDS, (pages, kept), strict=True):
        ids = tokenizer.encode_batch([text for _, text in chosen])
        documents = ([tokenizer.bos_id, *document] for document in ids)
        path = folder / f"{kind}-{domain}-00000.shard"
        write_shard(path, documents, tokenizer.vocab_size)
        facts[kind] = {
            sort: {
                "documents": sum(s == sort for s, _ in chosen),
                "characters": sum(len(t) for s, t in chosen if s == sort),
            }
            for sort in ("good", "mirror", "junk")
        }
    return facts
