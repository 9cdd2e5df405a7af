"""Loaders that are wrong in ways people have shipped."""

import numpy as np
import torch

from littlelm_core.shards import Loader, PackedRows, PackReport, Shard


class DropsTheTail(Loader):
    """Starts the next epoch when what is left does not fill a batch of all ranks."""

    def __next__(self):
        step = self.world * self.batch_rows
        if self.position + step > self.rows:
            self._consumed = (self.epoch + 1) * self.rows
        return super().__next__()


class OneOrder(Loader):
    """Shuffles once, and gives every epoch in that order."""

    def _rows_at(self, place):
        return super()._rows_at(place % self.rows)


class StartsAgain(Loader):
    """Remembers the epoch but not the place in it."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "position": 0})


class CountsItsOwn(Loader):
    """Counts the rows of this rank alone: right until the number of ranks changes."""

    def state_dict(self):
        return {**super().state_dict(), "position": self.position // self.world}

    def load_state_dict(self, state):
        super().load_state_dict({**state, "position": state["position"] * self.world})


class OwnSlice(Loader):
    """Each rank walks through a contiguous part of the rows."""

    def _rows_at(self, place):
        place = place // self.world + self.rank * (self.rows // self.world)
        return super()._rows_at(place)


class RankSeed(Loader):
    """Each rank shuffles with a seed of its own."""

    def __init__(self, shards, batch_rows, row_len, seed, rank=0, world=1):
        super().__init__(shards, batch_rows, row_len, seed + rank, rank, world)


class NotShifted(Loader):
    """Targets equal the inputs: the loss goes to zero in no time."""

    def __next__(self):
        inputs, _ = super().__next__()
        return inputs, inputs.clone()


class ShiftedTwice(Loader):
    """The loader shifts and the model shifts again."""

    def __next__(self):
        inputs, targets = super().__next__()
        return inputs, torch.roll(targets, -1, 1)


class Views(Loader):
    """Hands out two views of one array."""

    def __next__(self):
        inputs, targets = super().__next__()
        whole = torch.cat((inputs, targets[:, -1:]), 1)
        return whole[:, :-1], whole[:, 1:]


class AnyData(Loader):
    """Takes a checkpoint of other data and goes on in the middle of it."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "fingerprint": self.fingerprint})


class ListingOrder(Loader):
    """Takes the files as the file system lists them."""

    def __init__(self, shards, batch_rows, row_len, seed, rank=0, world=1):
        shards = list(shards)
        turned = list(shards) != sorted(shards, key=str)
        super().__init__(shards, batch_rows, row_len, seed + turned, rank, world)


class Ends(Loader):
    """Stops after the first epoch, so that a run of two epochs hangs or dies."""

    def __next__(self):
        if self._consumed + self.world * self.batch_rows > self.rows:
            raise StopIteration
        return super().__next__()


class WithReplacement(Loader):
    """Draws rows at random: some come twice in an epoch, a third never."""

    def _rows_at(self, place):
        draw = np.random.default_rng((self.seed, place))
        return draw.integers(0, self.rows, self.batch_rows)


class Trusting(Loader):
    """Reads what is on the disk without looking at its checksum."""

    def __init__(self, shards, *args, **keys):
        opened = [Shard(s) for s in shards]
        for shard in opened:
            shard._unchecked.clear()
        super().__init__(opened, *args, **keys)


class HidesTheLoss(Loader):
    """Reports that nothing was dropped."""

    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        r = self.report
        self.report = PackReport(r.documents, r.tokens, r.rows, 0, r.added)


class MixesAlone(Loader):
    """Each rank asks the mixture for its own rows only: all read the same ones."""

    def _picked_rows(self):
        picks = [self.mixture.pick() for _ in range(self.batch_rows)]
        if picks[0] is None:
            raise StopIteration
        return [self.domains[p.domain][p.index] for p in picks if p is not None]


class ForgetsTheMixture(Loader):
    """Saves its own place and not that of the mixture."""

    def load_state_dict(self, state):
        if self.mixture is not None:
            state = {**state, "mixture": self.mixture.state_dict()}
        super().load_state_dict(state)


class EndsAlone(Loader):
    """Stops on the rank that has no row left: the others wait for it for ever."""

    def _picked_rows(self):
        rows = super()._picked_rows()
        if not rows:
            raise StopIteration
        return rows


class TakesEither(Loader):
    """Takes a state without a mixture, and mixes from the start."""

    def load_state_dict(self, state):
        if self.mixture is not None and "mixture" not in state:
            state = {**state, "mixture": self.mixture.state_dict()}
        super().load_state_dict(state)


class ShardsAsDomains(Loader):
    """Takes each shard for a domain of its own."""

    def mix(self, make):
        mixture = super().mix(lambda sources: None)
        rules = self.row_len, self.rest
        self.domains = {
            shard.path.stem: PackedRows([(shard, plan)], *rules)
            for shard, plan in self._packed.parts
        }
        mixture = self.mixture = make(self.domains)
        return mixture


ZOO = {
    "each rank mixes alone": (
        MixesAlone,
        "test_mixed_rows_are_the_same_on_any_number_of_ranks_and_go_on",
    ),
    "the mixture's place is not saved": (
        ForgetsTheMixture,
        "test_mixed_rows_are_the_same_on_any_number_of_ranks_and_go_on",
    ),
    "a rank ends before the others": (
        EndsAlone,
        "test_the_end_of_a_mixture_ends_all_ranks_together",
    ),
    "a state without a mixture is taken": (
        TakesEither,
        "test_a_state_with_a_mixture_and_one_without_are_told_apart",
    ),
    "every shard is a domain": (
        ShardsAsDomains,
        "test_a_mixture_of_domains_chooses_the_rows",
    ),
    "drops the last rows of an epoch": (
        DropsTheTail,
        "test_rows_left_over_at_the_end_of_an_epoch_are_not_lost",
    ),
    "one order for all epochs": (OneOrder, "test_each_epoch_has_an_order_of_its_own"),
    "resumes at the start of the epoch": (
        StartsAgain,
        "test_a_run_goes_on_exactly_where_it_stopped",
    ),
    "state counts one rank's rows": (
        CountsItsOwn,
        "test_a_run_goes_on_with_another_number_of_ranks",
    ),
    "ranks walk through slices": (
        OwnSlice,
        "test_any_number_of_ranks_reads_the_same_rows_in_a_step",
    ),
    "a seed for each rank": (RankSeed, "test_all_ranks_together_give_every_row_once"),
    "targets not shifted": (NotShifted, "test_targets_are_the_next_ids"),
    "targets shifted twice": (ShiftedTwice, "test_targets_are_the_next_ids"),
    "views that are not contiguous": (
        Views,
        "test_batches_are_integer_tensors_of_the_asked_shape",
    ),
    "a state of other data is taken": (
        AnyData,
        "test_a_state_of_other_data_is_refused",
    ),
    "the listing decides the order": (
        ListingOrder,
        "test_the_same_seed_gives_the_same_rows_whatever_the_order_of_the_files",
    ),
    "ends with the epoch": (Ends, "test_an_epoch_gives_every_row_once_and_no_id_twice"),
    "draws with replacement": (
        WithReplacement,
        "test_an_epoch_gives_every_row_once_and_no_id_twice",
    ),
    "checksums are not read": (Trusting, "test_a_damaged_shard_stops_the_run"),
    "the loss is not reported": (
        HidesTheLoss,
        "test_the_dropped_share_is_what_is_missing",
    ),
}
