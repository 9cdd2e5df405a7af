"""Token files, packing and splits that are wrong in ways people have shipped."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from littlelm_core import shards
from littlelm_core.shards import (
    PackReport,
    RowPlan,
    Shard,
    ValidationRows,
    pack_best_fit,
    plan_rows,
    write_shard,
)


def _with(**changes):
    return SimpleNamespace(**{**vars(shards), **changes})


def _always_16_bits(path, documents, vocab_size):
    """Casts to uint16 whatever the vocabulary: id 65,536 becomes 0."""
    wrapped = ([int(np.uint16(i % 2**16)) for i in d] for d in documents)
    return write_shard(path, wrapped, vocab_size)


def _clips(path, documents, vocab_size):
    """Makes every id valid, so that nothing ever complains."""
    fitted = (np.clip(np.array(d, float), 0, vocab_size - 1) for d in documents)
    return write_shard(path, (f.astype(int) for f in fitted), vocab_size)


def _in_place(path, documents, vocab_size):
    """Writes under the final name, and is killed in the middle."""
    Path(path).unlink(missing_ok=True)
    return write_shard(path, documents, vocab_size)


class Unchecked(Shard):
    """Maps the file and believes it."""

    def _check(self, block):
        pass


class ChecksumOnly(Shard):
    """Finds damage but not the ids of a writer that was wrong."""

    def _check(self, block):
        vocab_size, self.vocab_size = self.vocab_size, 2**32
        super()._check(block)
        self.vocab_size = vocab_size


class NumpySpans(Shard):
    """Hands out 32-bit offsets."""

    def span(self, i):
        return tuple(self.offsets_D[i : i + 2].astype(np.int32))


def _concatenates(docs, row_len, rest="drop"):
    """Joins everything and cuts every row_len + 1 ids."""
    ids = np.concatenate([np.zeros(0, np.int64), *(np.array(d) for d in docs)])
    rows = len(ids) // (row_len + 1)
    kept = rows * (row_len + 1)
    report = PackReport(len(docs), len(ids), rows, len(ids) - kept, 0)
    return ids[:kept].reshape(rows, row_len + 1).astype(np.int64), report


def _overlaps(docs, row_len, rest="drop"):
    """Repeats the last id of a row as the first of the next piece."""
    rows, report = pack_best_fit(docs, row_len, rest)
    if len(rows) > 1:
        rows[1, 1:2] = rows[0, -1:]
    return rows, report


def _says_nothing_lost(docs, row_len, rest="drop"):
    rows, report = pack_best_fit(docs, row_len, rest)
    counts = report.documents, report.tokens, report.rows, 0, report.added
    return rows, PackReport(*counts)


def _first_fit(docs, row_len, rest="drop"):
    """Takes documents as they come and cuts each where its row ends."""
    width, kept, room = row_len + 1, [], row_len + 1
    for document in docs:
        piece = list(document)[:room]
        kept += piece
        room = room - len(piece) or width
    rows = len(kept) // width
    tokens = sum(map(len, docs))
    report = PackReport(len(docs), tokens, rows, tokens - rows * width, 0)
    return np.array(kept[: rows * width], np.int64).reshape(rows, width), report


def _trusts_the_plan(shard, row_len, rest="drop"):
    """Keeps the first plan that it made for a path."""
    key = (str(shard.path), row_len, rest)
    if key not in _PLANS:
        _PLANS[key] = plan_rows(shard.offsets_D, row_len, rest)
        (shard.path.parent / "plan").write_bytes(b"1234567890" * 3)
    return RowPlan(*_PLANS[key])


_PLANS = {}


def _own_shuffle(index_N, size, seed, epoch):
    """Sorts random keys: the order hangs on the generator's version."""
    return np.argsort(np.random.default_rng((seed, epoch)).random(size))[index_N]


def _with_gaps(index_N, size, seed, epoch):
    """Random rows, some twice: no permutation."""
    return np.random.default_rng((seed, epoch)).integers(0, size, len(index_N))


class NoPadding(ValidationRows):
    """Each rank gets its own number of batches, and the last ones wait for ever."""

    def __len__(self):
        own = len(self._rows) - self.rank * self.batch_rows
        return max(0, -(-own // (self.batch_rows * self.world)))


class DropsTheTail(ValidationRows):
    """Leaves out the rows that do not fill a batch."""

    def __len__(self):
        return len(self._rows) // (self.batch_rows * self.world)


class ScoresPadding(ValidationRows):
    """Counts the padding of the last row as text."""

    def __iter__(self):
        for inputs, targets in super().__iter__():
            yield inputs, targets.masked_fill(targets == -100, 1)


class OnlyTheBeginning(ValidationRows):
    """A part of the validation split is its first rows."""

    def __init__(self, shards, batch_rows, row_len, *args, max_tokens=-1, **keys):
        super().__init__(shards, batch_rows, row_len, *args, **keys)
        if max_tokens != -1:
            self._rows = self._rows[: -(-max_tokens // row_len)]


def _last_is_validation(paths):
    """The last shard by name: another one whenever one more is downloaded."""
    paths = sorted(map(Path, paths))
    named = [p for p in paths if "validation" in p.name]
    validation = named or paths[-1:]
    if len(paths) < 2 or len(named) == len(paths):
        raise shards.DataError("not enough shards")
    return [p for p in paths if p not in validation], validation


def _a_share(paths):
    """One in a hundred: none, of a few."""
    paths = sorted(map(Path, paths))
    return paths[len(paths) // 100 :], paths[: len(paths) // 100]


ZOO = {
    "always 16 bits": (
        _with(write_shard=_always_16_bits),
        "test_what_is_written_is_read",
    ),
    "ids are clipped": (
        _with(write_shard=_clips),
        "test_an_id_that_does_not_fit_is_refused_and_nothing_is_left",
    ),
    "written in place": (
        _with(write_shard=_in_place),
        "test_a_crash_leaves_the_old_file",
    ),
    "nothing is checked": (_with(Shard=Unchecked), "test_damage_is_found_and_named"),
    "the vocabulary is not checked": (
        _with(Shard=ChecksumOnly),
        "test_an_id_beyond_the_vocabulary_raises_on_read",
    ),
    "offsets of 32 bits": (
        _with(write_shard=lambda *a: NumpySpans(write_shard(*a).path)),
        "test_offsets_do_not_wrap",
    ),
    "rows cut from one stream": (
        _with(pack_best_fit=_concatenates),
        "test_rows_are_full_and_start_with_bos",
    ),
    "an id is repeated": (
        _with(pack_best_fit=_overlaps),
        "test_rows_are_full_and_start_with_bos",
    ),
    "the loss is not reported": (
        _with(pack_best_fit=_says_nothing_lost),
        "test_rows_are_full_and_start_with_bos",
    ),
    "cut as they come": (
        _with(pack_best_fit=_first_fit),
        "test_best_fit_drops_less_than_cutting_as_it_comes",
    ),
    "rests where starts were asked for": (
        _with(pack_best_fit=lambda d, n, rest="keep": pack_best_fit(d, n, "keep")),
        "test_each_piece_of_a_row_is_the_start_of_a_document",
    ),
    "rests are dropped": (
        _with(pack_best_fit=lambda d, n, rest="drop": pack_best_fit(d, n, "drop")),
        "test_kept_rests_lose_next_to_nothing",
    ),
    "plans are trusted": (
        _with(load_plan=_trusts_the_plan),
        "test_the_plan_beside_a_shard_is_never_trusted_blindly",
    ),
    "no permutation": (
        _with(permute=_with_gaps),
        "test_the_order_of_an_epoch_is_a_permutation",
    ),
    "an order of this numpy": (
        _with(permute=_own_shuffle),
        "test_the_order_is_the_same_on_every_machine",
    ),
    "ranks get unequal batches": (
        _with(ValidationRows=NoPadding),
        "test_validation_scores_every_id_once_on_any_number_of_ranks",
    ),
    "validation drops its tail": (
        _with(ValidationRows=DropsTheTail),
        "test_validation_scores_every_id_once_on_any_number_of_ranks",
    ),
    "padding is scored": (
        _with(ValidationRows=ScoresPadding),
        "test_validation_scores_every_id_once_on_any_number_of_ranks",
    ),
    "only the beginning is validated": (
        _with(ValidationRows=OnlyTheBeginning),
        "test_a_part_of_validation_is_spread_over_it",
    ),
    "the last shard validates": (
        _with(split_shards=_last_is_validation),
        "test_the_validation_split_is_fixed_by_name",
    ),
    "a share of the shards validates": (
        _with(split_shards=_a_share),
        "test_a_split_is_never_empty",
    ),
}
