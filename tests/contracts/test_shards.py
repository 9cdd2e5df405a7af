"""What a token file, packing and validation owe: nothing wrong, nothing lost unseen.

The part is a module: write_shard, Shard, pack_best_fit, ValidationRows, split_shards.
"""

import tempfile
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from littlelm_core.config import DataError

PART = "littlelm_core.shards"
BOS = 0


def _documents(count, mean, seed=0):
    """Documents in which every id but the BOS stands once: what is lost is seen."""
    rng = np.random.default_rng(seed)
    documents, start = [], 1
    for length in 1 + rng.geometric(1 / mean, count):
        documents.append([BOS, *range(start, start + int(length))])
        start += int(length)
    return documents


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


# ---- The file


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 999), max_size=8), max_size=8),
    vocab_size=st.sampled_from((1000, 65_536, 65_537, 200_000)),
)
def test_what_is_written_is_read(part, documents, vocab_size):
    # The largest id that the vocabulary has is where a wrong dtype shows.
    documents = [*documents, [0, vocab_size - 1]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.shard"
        part.write_shard(path, iter(documents), vocab_size)
        shard = part.Shard(path)
        read = [shard[i].tolist() for i in range(len(shard))]
    assert read == documents, f"written {documents[-3:]}, read {read[-3:]}"


def test_ids_lie_in_the_file_as_they_are(part):
    """Anything can read them: little-endian, uint16 while the vocabulary allows it."""
    for vocab_size, dtype in ((65_536, "<u2"), (65_537, "<u4")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.shard"
            part.write_shard(path, [[0, 258, 7], [0, 65_535]], vocab_size)
            raw = path.read_bytes()
            stored = part.Shard(path)[0].dtype
        ids = np.array([0, 258, 7, 0, 65_535], dtype).tobytes()
        assert ids in raw, f"vocabulary {vocab_size}: no {dtype} ids in the file"
        assert stored == np.dtype(dtype), f"vocabulary {vocab_size} reads as {stored}"


def test_an_id_that_does_not_fit_is_refused_and_nothing_is_left(part):
    wrong = {
        "an id of the vocabulary's size": [0, 100],
        "an id that wraps to a valid one in 16 bits": [0, 65_536 + 5],
        "a negative id": [0, -1],
        "a float": [0, 1.0],
        "text": [0, "1"],
        "a nested list": [[0, 1]],
    }
    for what, document in wrong.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.shard"
            write = partial(part.write_shard, path, [[0, 1], document], 100)
            message = _refused(write, f"{what} was written")
            assert "document 1" in message, f"no place: {message}"
            left = [p.name for p in Path(folder).iterdir()]
            assert left == [], f"{what}: {left} was left"


def test_a_vocabulary_that_is_no_size_is_refused(part):
    for vocab_size in (0, -5, 2**32 + 1, 10.0, True):
        with tempfile.TemporaryDirectory() as folder:
            write = partial(
                part.write_shard, Path(folder) / "a.shard", [[0]], vocab_size
            )
            _refused(write, f"vocab_size = {vocab_size!r} was taken")


def test_offsets_do_not_wrap(part):
    """Spans are Python ints: 3 billion ids into a file, sums must not turn over."""
    with tempfile.TemporaryDirectory() as folder:
        shard = part.write_shard(Path(folder) / "a.shard", [[0, 1], [0, 2, 3]], 10)
        start, stop = shard.span(1)
        assert (start, stop) == (2, 5), f"document 1 spans {start} to {stop}"
        assert type(start) is int, f"offsets are {type(start).__name__}"
        assert type(stop) is int, f"offsets are {type(stop).__name__}"
    assert shard.offsets_D.dtype.itemsize == 8, "offsets of 32 bits wrap at 4 billion"


def _damaged(raw, change):
    raw = bytearray(raw)
    change(raw)
    return bytes(raw)


def test_damage_is_found_and_named(part):
    documents = _documents(50, 20)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train-a-00000.shard"
        part.write_shard(path, documents, 5000)
        raw = path.read_bytes()
        changes = {
            "one bit of an id": lambda r: r.__setitem__(100, r[100] ^ 4),
            "one bit of an offset": lambda r: r.__setitem__(-30, r[-30] ^ 1),
            "the vocabulary": lambda r: r.__setitem__(24, r[24] ^ 1),
            "the magic": lambda r: r.__setitem__(0, 0),
            "the last byte cut off": lambda r: r.pop(),
            "half of it": lambda r: r.__delitem__(slice(len(r) // 2, None)),
            "all of it": lambda r: r.clear(),
            "a byte too many": lambda r: r.append(0),
        }
        for what, change in changes.items():
            path.write_bytes(_damaged(raw, change))
            accepted = f"{what} was changed and nobody noticed"
            message = _refused(lambda: list(part.Shard(path)), accepted)
            assert path.name in message, f"{what}: the file is not named: {message}"
        with pytest.raises(DataError, match=r"none\.shard"):
            part.Shard(Path(folder) / "none.shard")


def test_a_file_of_many_blocks(part):
    """Checksums are kept in blocks: each is read, and each is looked at."""
    documents = _documents(60, 4000, seed=3)
    size = sum(map(len, documents))
    assert size > 3 * 65_536
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train-a-00000.shard"
        shard = part.write_shard(path, documents, size + 1)
        for i in (0, 31, 59, 30, 1):  # in any order, over the borders of blocks
            assert shard[i].tolist() == documents[i], f"document {i} is another"
        raw = path.read_bytes()
        start = raw.index(np.array(documents[40], "<u4").tobytes())
        assert start > 2 * 65_536 * 4
        one = start + 8  # a byte of its third id
        path.write_bytes(_damaged(raw, lambda r: r.__setitem__(one, r[one] ^ 4)))
        whole = part.Shard(path)
        assert whole[0].tolist() == documents[0], "far from the damage all is well"
        _refused(lambda: whole[40], "a wrong id of the third block was handed out")


def test_another_format_version_is_refused_by_name(part):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.shard"
        part.write_shard(path, [[0, 1]], 10)
        raw = bytearray(path.read_bytes())
        assert raw[8] == 1, "byte 8 is the format version"
        raw[8] = 77
        path.write_bytes(raw)
        with pytest.raises(DataError, match="77"):
            part.Shard(path)


def test_an_id_beyond_the_vocabulary_raises_on_read(part):
    """Checksums all right, ids wrong: as from a writer that did not look."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.shard"
        unchecked = {"check_ids": lambda d, *_: np.asarray(d)}
        with mock.patch.dict(part.write_shard.__globals__, unchecked):
            part.write_shard(path, [[0, 1], [0, 900]], 100)
        with pytest.raises(DataError, match="900"):
            part.Shard(path)[1]


def test_a_crash_leaves_the_old_file(part):
    def breaks_off():
        yield [0, 1]
        raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.shard"
        part.write_shard(path, [[0, 7]], 10)
        with pytest.raises(KeyboardInterrupt):
            part.write_shard(path, breaks_off(), 10)
        assert part.Shard(path)[0].tolist() == [0, 7], "the old shard is gone"
        left = [p.name for p in Path(folder).iterdir()]
        assert left == ["a.shard"], f"left: {left}"


# ---- Packing


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=30),
    row_len=st.integers(1, 20),
    rest=st.sampled_from(("drop", "keep")),
)
def test_rows_are_full_and_start_with_bos(part, lengths, row_len, rest):
    start, documents = 1, []
    for length in lengths:
        documents.append([BOS, *range(start, start + length)])
        start += length
    rows, report = part.pack_best_fit(documents, row_len, rest)
    rows = np.asarray(rows).reshape(-1, row_len + 1)
    assert set(rows[:, :1].ravel().tolist()) <= {BOS}, "a row does not start with BOS"
    ids = Counter(rows[rows != BOS].tolist())
    assert set(ids.values()) <= {1}, f"ids came twice: {ids.most_common(2)}"
    assert set(ids) <= set(range(1, start)), "a row has an id that no document has"
    tokens = sum(map(len, documents))
    assert rows.size == tokens - report.dropped + report.added, (
        f"{rows.size} ids in rows, but the report says {tokens} - {report.dropped} "
        f"+ {report.added}"
    )
    assert report.rows == len(rows)


def test_each_piece_of_a_row_is_the_start_of_a_document(part):
    """Every document that is in a row has exactly one BOS, in front."""
    documents = _documents(300, 12)
    rows, report = part.pack_best_fit(documents, 31)
    starts = {d[1]: d for d in documents}
    pieces = 0
    for row in rows:
        cuts = [*np.flatnonzero(np.asarray(row) == BOS).tolist(), len(row)]
        for first, last in pairwise(cuts):
            piece = [int(i) for i in row[first:last]]
            pieces += 1
            if len(piece) > 1:
                whole = starts.get(piece[1])
                assert whole is not None, f"{piece[:4]} is the middle of a document"
                assert whole[: len(piece)] == piece, "a piece mixes documents"
    assert report.added == 0, "a BOS was added"
    assert pieces <= len(documents), "a document is in two pieces"


def test_kept_rests_lose_next_to_nothing(part):
    documents = _documents(200, 60)
    rows, report = part.pack_best_fit(documents, 31, "keep")
    missing = sum(map(len, documents)) - len(documents) - np.count_nonzero(rows)
    assert missing <= 31, f"{missing} ids are lost; only a last row may be"
    assert report.dropped_share < 0.01, f"{report.dropped_share:.1%} dropped"


def test_best_fit_drops_less_than_cutting_as_it_comes(part):
    """Documents in the order of the file, cut where the row ends: the baseline."""
    documents = _documents(2000, 40, seed=3)
    row_len, room, lost = 127, 128, 0
    for document in documents:
        taken = min(room, len(document))
        lost += len(document) - taken
        room = room - taken or row_len + 1
    _, report = part.pack_best_fit(documents, row_len)
    assert report.dropped < lost / 4, (
        f"best fit drops {report.dropped} ids, cutting as they come {lost}"
    )


def test_packing_is_the_same_each_time_and_takes_arrays(part):
    documents = _documents(300, 30)
    rows, report = part.pack_best_fit(documents, 50)
    again, same = part.pack_best_fit([np.array(d, np.uint16) for d in documents], 50)
    assert np.array_equal(rows, again), "the same documents gave other rows"
    assert report == same, "the same documents gave another report"


def test_the_plan_beside_a_shard_is_never_trusted_blindly(part):
    """Damaged, or of another content: made again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.shard"
        shard = part.write_shard(path, _documents(100, 20), 5000)
        plan = part.load_plan(shard, 15)
        (beside,) = [p for p in Path(folder).iterdir() if p != path]
        raw = beside.read_bytes()
        for damage in (raw[: len(raw) // 2], b"", raw[:-8] + bytes(8), b"x" * 500):
            beside.write_bytes(damage)
            made = part.load_plan(shard, 15)
            assert all(np.array_equal(a, b) for a, b in zip(plan, made, strict=True)), (
                "a damaged plan was used"
            )
        other = part.write_shard(path, _documents(100, 20, seed=8), 5000)
        assert part.load_plan(other, 15).report != plan.report, "an old plan was used"


def test_the_order_of_an_epoch_is_a_permutation(part):
    for size in (1, 2, 3, 5, 16, 100, 4096, 10_007):
        order = part.permute(np.arange(size), size, 3, 1)
        assert sorted(order.tolist()) == list(range(size)), (
            f"{size} rows: not each once"
        )
    # Where the first row of seven comes to stand, over many epochs: anywhere.
    places = Counter(int(part.permute([0], 7, 5, e)[0]) for e in range(1400))
    assert min(places.values()) > 130, f"not all places are alike: {places}"
    assert max(places.values()) < 280, f"not all places are alike: {places}"


def test_the_order_is_the_same_on_every_machine(part):
    """A resumed run may meet another version of numpy: the order may not change."""
    got = part.permute(np.arange(10), 1_000_000, 1, 0).tolist()
    golden = [
        390523,
        102960,
        925432,
        691494,
        820849,
        890503,
        494207,
        858555,
        477106,
        630112,
    ]
    assert got == golden, f"the order of epoch 0 of seed 1 has changed: {got}"


# ---- Validation


def test_validation_scores_every_id_once_on_any_number_of_ranks(part):
    documents = _documents(60, 15)
    wanted = sorted(i for d in documents for i in d[1:])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "validation-a-00000.shard"
        part.write_shard(path, documents, 5000)
        for world, rows in ((1, 1), (1, 7), (2, 3), (5, 4)):
            counts, scored = [], []
            for rank in range(world):
                batches = list(part.ValidationRows([path], rows, 10, rank, world))
                counts.append(len(batches))
                for inputs, targets in batches:
                    assert inputs.shape == targets.shape == (rows, 10)
                    assert int(inputs.min()) >= 0, "an input is no id"
                    scored += targets[(targets != -100) & (targets != BOS)].tolist()
            assert len(set(counts)) == 1, f"ranks get {counts} batches: some would wait"
            assert sorted(scored) == wanted, (
                f"{world} ranks, {rows} rows: {len(scored)} of {len(wanted)} ids scored"
            )


def test_validation_rows_start_with_bos_and_read_on(part):
    documents = _documents(20, 30)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.shard"
        part.write_shard(path, documents, 5000)
        for inputs, targets in part.ValidationRows([path], 4, 16):
            used = targets[:, 0] != -100
            assert set(inputs[used, 0].tolist()) <= {BOS}, "a row has no BOS"
            inside = (targets > 0) & (inputs > 0)
            assert bool((targets[inside] == inputs[inside] + 1).all()), (
                "a target is not the id that comes next"
            )


def test_a_part_of_validation_is_spread_over_it(part):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.shard"
        shard = part.write_shard(path, _documents(200, 20), 6000)
        batches = list(part.ValidationRows([shard], 4, 16, max_tokens=160))
    targets = np.concatenate([t.numpy().ravel() for _, t in batches])
    targets = targets[targets > 0]
    assert 100 <= len(targets) <= 160, f"{len(targets)} ids scored, 160 asked for"
    assert targets.max() > 0.8 * shard.tokens, "only the beginning is scored"


def test_the_validation_split_is_fixed_by_name(part):
    names = [f"train-a-{i:05d}.shard" for i in range(5)] + ["validation-a-00000.shard"]
    train, validation = part.split_shards([f"/data/{n}" for n in names])
    assert [p.name for p in validation] == names[-1:], f"validation is {validation}"
    assert [p.name for p in train] == names[:-1], f"train is {train}"
    plain = [f"shard_{i:05d}.shard" for i in range(6)]
    for count in (2, 3, 6):
        shuffled = plain[:count][::-1]
        train, validation = part.split_shards(shuffled)
        assert [str(p) for p in validation] == plain[:1], (
            f"with {count} shards, {validation} is validation"
        )
        assert not set(train) & set(validation), "a shard is on both sides"
        assert len(train) + len(validation) == count, "a shard is on neither side"
    inside = [f"/validation/{n}" for n in plain]
    _, validation = part.split_shards(inside)
    assert len(validation) == 1, "the name of a folder decided"


def test_a_split_is_never_empty(part):
    for names in ([], ["a.shard"], ["validation-a.shard", "validation-b.shard"]):
        _refused(partial(part.split_shards, names), f"{names} was split")
