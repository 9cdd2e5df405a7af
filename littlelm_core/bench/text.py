"""Rows of the data path: BPE training, encoding, packing and loading."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np

from littlelm_core import corpus
from littlelm_core.bench.measure import Row, against, alone, rounds
from littlelm_core.bench.peers import peer, version
from littlelm_core.shards import Loader, pack_best_fit, write_shard
from littlelm_core.tokenizer import SPLIT_PATTERN, Tokenizer, train_bpe


def _texts(size: int) -> list[str]:
    """About `size` characters of the default corpus, code first."""
    texts: list[str] = []
    room = size
    for domain in corpus.domains():
        for text in corpus.documents(domain, "train"):
            texts.append(text[:room])
            room -= len(texts[-1])
            if room <= 0:
                return texts
    return texts


def bpe(quick: bool = False) -> list[Row]:
    """Training a vocabulary of 4096 on 10 MB, in Python and with the engine."""
    size, vocab_size = (100_000, 512) if quick else (10_000_000, 4096)
    texts, rustbpe = _texts(size), peer("rustbpe")
    found: dict[str, dict[bytes, int]] = {}

    def theirs() -> None:
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(texts), vocab_size, pattern=SPLIT_PATTERN)
        ranks = trainer.get_mergeable_ranks()
        found["theirs"] = {bytes(token): rank for token, rank in ranks}

    def python() -> None:
        found["python"] = train_bpe(texts, vocab_size)

    def engine() -> None:
        found["engine"] = train_bpe(texts, vocab_size, engine="rustbpe")

    contestants = {"python": python, "engine": engine, "theirs": theirs}
    seconds = rounds(contestants, 3 if quick else 5, warm_up=0 if quick else 1)
    if not found["python"] == found["engine"] == found["theirs"]:
        raise AssertionError("ranks differ: not the same work")
    work = sum(len(text.encode()) for text in texts) / 1e6
    name, note = version("rustbpe"), f"{work:.1f} MB, {vocab_size} equal ranks"
    return [
        against(
            "BPE, Python + numpy", name, seconds, work, "MB/s", 1 / 2.5,
            ours="python", note=note,
        ),
        against(
            "BPE, engine rustbpe", name, seconds, work, "MB/s", 1 / 1.1,
            ours="engine", note=note,
        ),
    ]  # fmt: skip


def encoding(quick: bool = False) -> list[Row]:
    """Encoding ordinary text, document by document, on the same ranks."""
    tiktoken = peer("tiktoken")
    size, vocab_size = (100_000, 512) if quick else (5_000_000, 4096)
    texts = _texts(size)
    ranks = train_bpe(texts, vocab_size)
    ours = Tokenizer(ranks)
    theirs = tiktoken.Encoding(
        "peer", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    found: dict[str, list[list[int]]] = {}

    def our_ids() -> None:
        found["ours"] = [ours.encode(text) for text in texts]

    def their_ids() -> None:
        found["theirs"] = [theirs.encode_ordinary(text) for text in texts]

    contestants = {"ours": our_ids, "theirs": their_ids}
    seconds = rounds(contestants, 3 if quick else 11)
    if found["ours"] != found["theirs"]:
        raise AssertionError("ids differ: not the same work")
    work = sum(len(text.encode()) for text in texts) / 1e6
    return [
        against(
            "encoding", version("tiktoken"), seconds, work, "MB/s", 1 / 1.1,
            note=f"{work:.1f} MB in {len(texts)} documents, equal ids",
        )
    ]  # fmt: skip


def loader(quick: bool = False) -> list[Row]:
    """Packing documents into rows, and reading packed rows with their checksums."""
    count, row_len, batch = (400, 1024, 8) if quick else (20_000, 1024, 32)
    draw = np.random.default_rng(1)
    # Lengths as web text has them: many short documents, few long ones.
    lengths = np.minimum(draw.lognormal(5.7, 1.0, count).astype(int) + 2, 50_000)
    documents = [draw.integers(4, 4096, n).astype(np.uint16) for n in lengths]
    for document in documents:
        document[0] = 0
    tokens = int(lengths.sum())
    packing = rounds({"ours": lambda: pack_best_fit(documents, row_len)}, 5)["ours"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train-bench-00000.shard"
        write_shard(path, documents, 4096)
        rows = Loader([path], batch, row_len, seed=1).rows
        batches = rows // batch

        def read() -> None:
            # A new loader checks every block of the file again.
            source = Loader([path], batch, row_len, seed=1)
            for _ in range(batches):
                next(source)

        reading = rounds({"ours": read}, 3 if quick else 9)["ours"]
    share = statistics.median(lengths)
    note = f"{count:,} documents, median {share:.0f} tokens, rows of {row_len}"
    return [
        alone("packing", packing, tokens, "tok/s", 5e6, note),
        alone(
            "loader with checksum", reading, batches * batch * row_len,
            "tok/s", 100e6, note,
        ),
    ]  # fmt: skip
