"""Graders of chapter 05's exercises (written together with chapters/05_shards.md)."""

import itertools
import tempfile
from pathlib import Path

import numpy as np

from littlelm_core.shards import Loader, load_plan, write_shard


def exercise_5_1(answer):
    """Bytes of a shard: the formula against files."""
    rng = np.random.default_rng(0)
    for lengths, vocab_size in (
        ([3, 4, 2], 4096),
        ([1], 65_536),
        ([5, 1], 65_537),
        (rng.integers(1, 500, 300), 50_257),
        ([65_536], 1000),
    ):
        documents = [np.zeros(n, np.int64) for n in lengths]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.shard"
            shard = write_shard(path, documents, vocab_size)
            size = path.stat().st_size
        got = answer(len(documents), shard.tokens, vocab_size)
        assert got == size, (
            f"{len(documents)} documents, {shard.tokens} tokens, vocabulary "
            f"{vocab_size}: the file has {size} bytes, not {got}"
        )


def exercise_5_2(answer):
    """Ids lost when documents are cut as they come."""
    assert answer([5, 7, 3, 2, 6, 4], 8) == 11, "5+3, 3+2+3 are the only full rows"
    assert answer([8, 8], 8) == 0, "two full rows lose nothing"
    assert answer([3], 8) == 3, "a row that is not full is dropped"
    assert answer([20], 8) == 12, "a document longer than a row loses its rest"
    rng = np.random.default_rng(1)
    for _ in range(20):
        lengths = rng.integers(1, 20, 30).tolist()
        width = int(rng.integers(2, 25))
        rows, row = 0, []
        for length in lengths:
            row += [0] * min(length, width - len(row))
            if len(row) == width:
                rows, row = rows + 1, []
        lost = sum(lengths) - rows * width
        got = answer(lengths, width)
        assert got == lost, f"{lengths} in rows of {width}: {lost} are lost, not {got}"


def exercise_5_3(answer):
    """Which places of which epoch a rank reads in its batch number n."""
    got = [tuple(p) for p in answer(0, 0, 1, 3, 100)]
    assert got == [(0, 0), (0, 1), (0, 2)], f"the first batch of one rank: {got}"
    got = [tuple(p) for p in answer(1, 2, 4, 2, 100)]
    assert got == [(0, 12), (0, 13)], f"batch 1 of rank 2 of 4, 2 rows each: {got}"
    got = [tuple(p) for p in answer(2, 1, 2, 2, 11)]
    assert got == [(0, 10), (1, 0)], f"the epoch ends inside a batch: {got}"
    for world in (1, 2, 4):
        places = [
            tuple(p)
            for batch in range(8 // world)
            for rank in range(world)
            for p in answer(batch, rank, world, 3, 7)
        ]
        wanted = [divmod(n, 7) for n in range(24)]
        assert places == wanted, f"{world} ranks together must read every place once"


def exercise_5_4(answer):
    """Undo a Feistel network of any number of rounds."""

    def forward(high, low, functions, high_size, low_size):
        for number, function in enumerate(functions):
            if number % 2:
                high = (high + function(low)) % high_size
            else:
                low = (low + function(high)) % low_size
        return high, low

    rng = np.random.default_rng(2)
    for rounds in (0, 1, 2, 3, 8):
        tables = rng.integers(0, 1000, (rounds, 10)).tolist()
        functions = [table.__getitem__ for table in tables]
        for high, low in itertools.product(range(5), range(7)):
            sent = forward(high, low, functions, 5, 7)
            back = answer(*sent, functions, 5, 7)
            assert tuple(back) == (high, low), (
                f"{rounds} rounds send {(high, low)} to {sent}, and {tuple(back)} back"
            )


def exercise_5_5(answer):
    """A loader that gives the rows of every epoch in their order."""
    start, documents = 1, []
    for length in np.random.default_rng(3).integers(1, 12, 60).tolist():
        documents.append([0, *range(start, start + length)])
        start += length
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train-a-00000.shard"
        shard = write_shard(path, documents, 1000)
        plan = load_plan(shard, 8)
        ids = [i for d in documents for i in d]
        wanted = [
            [
                i
                for s in range(plan.first_R[r], plan.first_R[r + 1])
                for i in ids[plan.start_S[s] : plan.start_S[s] + plan.length_S[s]]
            ]
            for r in range(plan.report.rows)
        ]
        loader = answer([path], 2, 8, 1)
        assert isinstance(loader, Loader) or hasattr(loader, "state_dict"), (
            "ex_5_5 must be a class that builds a loader"
        )
        count = len(wanted)  # two epochs
        rows = [row for _ in range(count) for row in next(loader)[0].tolist()]
        for number, row in enumerate(rows):
            assert row == wanted[number % count][:-1], (
                f"row {number} is not row {number % count} of the plan"
            )
        state = loader.state_dict()
        ranks = [answer([path], 1, 8, 1, rank, 2) for rank in range(2)]
        for rank in ranks:
            rank.load_state_dict(state)
        more = [rank_rows for rank in ranks for rank_rows in next(rank)[0].tolist()]
        assert more == next(loader)[0].tolist(), "resumed on two ranks, other rows come"
