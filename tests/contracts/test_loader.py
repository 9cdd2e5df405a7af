"""What any loader owes a run.

A loader is built as `part(shards, batch_rows, row_len, seed, rank=0, world=1)` and
yields (inputs_BT, targets_BT) for ever. Its state is the same on every rank and goes on
exactly: the same rows in the same optimizer step, on any number of ranks.
"""

import itertools
import json
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from littlelm_core.config import DataError
from littlelm_core.shards import write_shard

PART = "littlelm_core.shards:Loader"
BOS = 0
ROW_LEN = 8
VOCABULARY = 5000


def _refused(call, accepted):
    """Return the one line of the DataError that a call must raise."""
    message = None
    try:
        call()
    except DataError as error:
        message = str(error)
    assert message is not None, accepted
    assert "\n" not in message, f"the error has more than one line: {message}"
    return message


def _documents(count, start=1, seed=0):
    """Documents in which every id but the BOS stands once: what is lost is seen."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in rng.integers(1, 12, count):
        documents.append([BOS, *range(start, start + int(length))])
        start += int(length)
    return documents


def _shards(folder, counts=(40, 25, 60), first=1):
    paths, start = [], first
    for number, count in enumerate(counts):
        documents = _documents(count, start, seed=number)
        start = documents[-1][-1] + 1
        path = Path(folder) / f"train-text-{number:05d}.shard"
        write_shard(path, documents, VOCABULARY)
        paths.append(path)
    return paths


def _rows(batch):
    inputs, targets = batch
    whole = torch.cat((inputs, targets[:, -1:]), 1)
    return [tuple(row) for row in whole.tolist()]


def _take(loader, batches):
    rows = [_rows(batch) for batch in itertools.islice(loader, batches)]
    assert len(rows) == batches, (
        f"the loader ended after {len(rows)} of {batches} batches: it must go on with "
        "the next epoch"
    )
    return rows


def _steps(part, paths, world, grad_accum, steps, state=None, rows=2):
    """Return the rows of each optimizer step over all ranks, and a rank's state."""
    loaders = [part(paths, rows, ROW_LEN, 7, rank, world) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    taken = []
    for _ in range(steps):
        parts = [row for x in loaders for b in _take(x, grad_accum) for row in b]
        taken.append(sorted(parts))
    states = [loader.state_dict() for loader in loaders]
    assert all(s == states[0] for s in states), f"the ranks' states differ: {states}"
    return taken, states[-1]


def test_batches_are_integer_tensors_of_the_asked_shape(part):
    with tempfile.TemporaryDirectory() as folder:
        inputs, targets = next(iter(part(_shards(folder), 3, ROW_LEN, 1)))
    for name, x in (("inputs", inputs), ("targets", targets)):
        assert tuple(x.shape) == (3, ROW_LEN), f"{name} have shape {tuple(x.shape)}"
        assert x.dtype == torch.int64, f"{name} are {x.dtype}, not int64"
        assert x.is_contiguous(), f"{name} are not contiguous: .view(-1) would fail"


def test_targets_are_the_next_ids(part):
    with tempfile.TemporaryDirectory() as folder:
        inputs, targets = next(iter(part(_shards(folder), 5, ROW_LEN, 1)))
    assert torch.equal(inputs[:, 1:], targets[:, :-1]), (
        "target t must be input t + 1 of the same row"
    )
    # In these documents an id that is not BOS follows the one before it.
    follows = targets == inputs + 1
    starts = (targets == BOS) | (inputs == BOS)
    assert bool((follows | starts).all()), "a target is not the id that comes next"


def test_every_row_starts_with_bos(part):
    with tempfile.TemporaryDirectory() as folder:
        loader = part(_shards(folder), 4, ROW_LEN, 1)
        for batch in _take(loader, 20):
            firsts = {row[0] for row in batch}
            assert firsts == {BOS}, f"rows start with the ids {sorted(firsts)}"


def test_an_epoch_gives_every_row_once_and_no_id_twice(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        loader = part(paths, 1, ROW_LEN, 1)
        rows = [row for batch in _take(loader, loader.rows) for row in batch]
        again = [row for batch in _take(loader, loader.rows) for row in batch]
    assert len(set(rows)) == len(rows), "a row came twice within one epoch"
    ids = Counter(i for row in rows for i in row if i != BOS)
    assert max(ids.values()) == 1, f"ids {ids.most_common(2)} came more than once"
    assert sorted(rows) == sorted(again), "the second epoch has other rows"


def test_rows_left_over_at_the_end_of_an_epoch_are_not_lost(part):
    """Three epochs hold each row three times, whatever the size of a batch."""
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        rows = part(paths, 1, ROW_LEN, 1).rows
        size = next(n for n in (5, 7, 3) if rows % n)
        loader = part(paths, size, ROW_LEN, 1)
        stream = itertools.chain.from_iterable(_take(loader, -(-3 * rows // size)))
        counts = Counter(itertools.islice(stream, 3 * rows))
    assert len(counts) == rows, f"{len(counts)} different rows of {rows} were given"
    assert set(counts.values()) == {3}, (
        f"in three epochs rows came {sorted(set(counts.values()))} times, not 3"
    )


def test_all_ranks_together_give_every_row_once(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        rows = part(paths, 1, ROW_LEN, 1).rows
        loaders = [part(paths, 1, ROW_LEN, 1, rank, 3) for rank in range(3)]
        batches = [_take(loader, rows) for loader in loaders]  # three epochs
    counts = Counter(row for rank in batches for b in rank for row in b)
    assert len(counts) == rows, f"{len(counts)} different rows of {rows} were given"
    assert set(counts.values()) == {3}, "over three ranks some row came more often"


def test_each_epoch_has_an_order_of_its_own(part):
    with tempfile.TemporaryDirectory() as folder:
        loader = part(_shards(folder), 1, ROW_LEN, 1)
        first, second = _take(loader, loader.rows), _take(loader, loader.rows)
        in_order = [row for row, (a,) in enumerate(first) if [a] == second[row]]
        other = _take(part(_shards(folder), 1, ROW_LEN, 2), loader.rows)
    assert len(in_order) < len(first) / 4, "two epochs come in the same order"
    assert other != first, "two seeds give the same order"
    ids = [max(row) for (row,) in first]
    rising = sum(a < b for a, b in itertools.pairwise(ids)) / len(ids)
    assert 0.3 < rising < 0.7, "the rows are hardly shuffled"


def test_the_same_seed_gives_the_same_rows_whatever_the_order_of_the_files(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        first = _take(part(paths, 4, ROW_LEN, 9), 15)
        assert _take(part(paths, 4, ROW_LEN, 9), 15) == first, "one seed, two orders"
        assert _take(part(paths[::-1], 4, ROW_LEN, 9), 15) == first, (
            "the order in which the files are listed changes the rows"
        )


def test_a_run_goes_on_exactly_where_it_stopped(part):
    """In the middle of an epoch, and in the middle of the second."""
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        rows = part(paths, 1, ROW_LEN, 3).rows
        for before in (5, rows // 4 + 3):
            whole = part(paths, 4, ROW_LEN, 3)
            _take(whole, before)
            state = whole.state_dict()
            resumed = part(paths, 4, ROW_LEN, 3)
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state, "a loaded state is saved otherwise"
            assert _take(resumed, rows) == _take(whole, rows), (
                f"stopped after {before} batches, the next batches differ"
            )


def test_the_state_is_small_and_plain(part):
    with tempfile.TemporaryDirectory() as folder:
        state = part(_shards(folder), 4, ROW_LEN, 3).state_dict()
    assert {"fingerprint", "seed", "epoch", "position"} <= set(state), sorted(state)
    for key, value in state.items():
        assert isinstance(value, int | str), f"{key} is a {type(value).__name__}"


def test_any_number_of_ranks_reads_the_same_rows_in_a_step(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        one, state_one = _steps(part, paths, 1, 4, 20)
        two, state_two = _steps(part, paths, 2, 2, 20)
        four, _ = _steps(part, paths, 4, 1, 20)
    assert one == two == four, "a step's rows depend on the number of ranks"
    assert state_one == state_two, "the state depends on the number of ranks"


def test_a_run_goes_on_with_another_number_of_ranks(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        whole, _ = _steps(part, paths, 2, 2, 24)
        half, state = _steps(part, paths, 2, 2, 11)
        for world, grad_accum in ((1, 4), (4, 1)):
            rest, _ = _steps(part, paths, world, grad_accum, 13, state)
            assert half + rest == whole, f"resumed on {world} ranks, other rows come"


def test_a_state_of_other_data_is_refused(part):
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as other,
    ):
        state = part(_shards(folder), 2, ROW_LEN, 1).state_dict()
        loaders = {
            "other documents": part(_shards(other, first=5), 2, ROW_LEN, 1),
            "fewer shards": part(_shards(other, (40, 25)), 2, ROW_LEN, 1),
            "another row length": part(_shards(folder), 2, ROW_LEN + 1, 1),
        }
        for what, loader in loaders.items():
            accepted = f"a checkpoint made on {what} was accepted"
            _refused(partial(loader.load_state_dict, state), accepted)


class _Turns:
    """A mixture in its plainest form: the domains take turns, `most` rows in all."""

    def __init__(self, sources, most=10**9):
        self.sources, self.most, self.given = sources, most, 0

    def pick(self):
        if self.given >= self.most:
            return None
        names = sorted(self.sources)
        round_, number = divmod(self.given, len(names))
        self.given += 1
        epoch, index = divmod(round_, len(self.sources[names[number]]))
        return SimpleNamespace(domain=names[number], epoch=epoch, index=index)

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def _domain_shards(folder):
    """One domain with a hyphen in its name, one of two shards; ids tell them apart."""
    paths = []
    for number, name in enumerate(("a-b-00000", "c-00000", "c-00001")):
        documents = _documents(30, 1 + 1000 * number, seed=number)
        paths.append(Path(folder) / f"train-{name}.shard")
        write_shard(paths[-1], documents, VOCABULARY)
    return paths


def _mixed(part, paths, rank=0, world=1, rows=3, **keys):
    loader = part(paths, rows, ROW_LEN, 7, rank, world)
    loader.mix(lambda sources: _Turns(sources, **keys))
    return loader


def test_a_mixture_of_domains_chooses_the_rows(part):
    with tempfile.TemporaryDirectory() as folder:
        loader = part(_domain_shards(folder), 3, ROW_LEN, 7)
        rows = loader.rows
        mixture = loader.mix(_Turns)
        sources = mixture.sources
        assert sorted(sources) == ["a-b", "c"], f"the domains are {sorted(sources)}"
        sizes = {name: len(source) for name, source in sources.items()}
        assert sum(sizes.values()) == rows, f"{sizes} rows of {rows}"
        for source in sources.values():
            assert set(source.lengths_N.tolist()) == {ROW_LEN}, "rows train on T tokens"
            assert len(source.lengths_N) == len(source)
        got = [row for batch in _take(loader, 40) for row in batch]
        for place, row in enumerate(got):
            name = ("a-b", "c")[place % 2]
            wanted = tuple(sources[name][place // 2 % len(sources[name])].tolist())
            assert row == wanted, f"row {place} is not the one that was chosen"


def test_mixed_rows_are_the_same_on_any_number_of_ranks_and_go_on(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _domain_shards(folder)

        def steps(world, count, state=None):
            loaders = [_mixed(part, paths, r, world, 4 // world) for r in range(world)]
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            rows = [[r for x in loaders for r in _rows(next(x))] for _ in range(count)]
            return rows, loaders[-1].state_dict()

        whole, _ = steps(1, 30)
        for world in (2, 4):
            assert steps(world, 30)[0] == whole, f"{world} ranks read other rows"
        half, state = steps(2, 13)
        state = json.loads(json.dumps(state))
        assert half + steps(4, 17, state)[0] == whole, "resumed, other rows come"


def test_the_end_of_a_mixture_ends_all_ranks_together(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _domain_shards(folder)
        loaders = [_mixed(part, paths, rank, 2, most=8) for rank in range(2)]
        batches = [list(itertools.islice(loader, 9)) for loader in loaders]
    assert [len(b) for b in batches] == [2, 2], (
        "8 rows are 2 batches of 2 ranks, 3 each"
    )
    valid = [int((t != -100).any(1).sum()) for b in batches for _, t in b]
    assert valid == [3, 2, 3, 0], f"rows that count, rank by rank: {valid}"


def test_a_state_with_a_mixture_and_one_without_are_told_apart(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _domain_shards(folder)
        plain, mixed = part(paths, 3, ROW_LEN, 7), _mixed(part, paths)
        states = plain.state_dict(), mixed.state_dict()
        for loader, state in zip((mixed, plain), states, strict=True):
            _refused(lambda x=loader, s=state: x.load_state_dict(s), "the other state")


def test_less_data_than_one_batch_is_refused(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder, (3,))
        with pytest.raises(DataError, match=r"fewer|short|less|rows"):
            part(paths, 64, ROW_LEN, 1)
        with pytest.raises(DataError, match=r"fewer|short|less|rows"):
            part(paths, 1, 10_000, 1)
        with pytest.raises(DataError):
            part([], 1, ROW_LEN, 1)


def test_the_dropped_share_is_what_is_missing(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        loader = part(paths, 1, ROW_LEN, 1)
        given = {
            i for batch in _take(loader, loader.rows) for row in batch for i in row
        }
        counts = (40, 25, 60)
        documents = _all_documents(counts)
    tokens = sum(map(len, documents))
    missing = len({i for d in documents for i in d} - given)
    bos_in_rows = tokens - loader.report.tokens
    assert bos_in_rows == 0, f"the report says {loader.report.tokens} tokens"
    dropped = loader.report.dropped_share * tokens
    assert missing > 0, "these documents cannot be packed without a loss"
    # What is missing are ids; dropped documents lose their BOS as well.
    assert missing <= round(dropped) <= missing + len(documents), (
        f"{missing} ids are in no row, the report says {dropped:.0f} tokens"
    )


def _all_documents(counts):
    documents, start = [], 1
    for number, count in enumerate(counts):
        documents += _documents(count, start, seed=number)
        start = documents[-1][-1] + 1
    return documents


def test_a_damaged_shard_stops_the_run(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        loader_rows = part(paths, 1, ROW_LEN, 1).rows
        raw = bytearray(paths[1].read_bytes())
        raw[64 + 20] ^= 1  # one bit of one id
        paths[1].write_bytes(raw)
        message = _refused(
            lambda: _take(part(paths, 1, ROW_LEN, 1), loader_rows),
            "an epoch over a damaged shard was given without a word",
        )
    assert paths[1].name in message, f"the file is not named: {message}"


def test_shards_of_two_vocabularies_are_refused(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        write_shard(paths[2], _documents(30), VOCABULARY + 1)
        with pytest.raises(DataError, match="vocabulary"):
            part(paths, 2, ROW_LEN, 1)
