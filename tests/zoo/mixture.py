"""Mixtures that are wrong in ways people have shipped."""

import math

import numpy as np

from littlelm_core.mixture import UNIT, Domain, Mixture, Pick


class LargestDeficit(Mixture):
    """Takes the largest deficit and looks at no date: small domains come late."""

    def pick(self):
        shares = self._shares_now()
        if shares != self._shares:
            self._shares, self._since = shares, dict.fromkeys(shares, 0)
        if not shares:
            return None
        unit, tokens = sum(shares.values()), sum(self._since.values())
        deficit = {n: s * tokens - self._since[n] * unit for n, s in shares.items()}
        return self._take(max(deficit, key=deficit.get))

    def _take(self, name):
        epoch, index, length = self.domains[name].take()
        self._since[name] += length
        self._spent += length
        return Pick(name, epoch, index)


class AtRandom(LargestDeficit):
    """Draws the domain at random: right in the mean alone."""

    def pick(self):
        shares = self._shares_now()
        if shares != self._shares:
            self._shares, self._since = shares, dict.fromkeys(shares, 0)
        if not shares:
            return None
        given = sum(d.given for d in self.domains.values())
        draw = np.random.default_rng((self.seed, given)).random() * sum(shares.values())
        reached = np.cumsum(list(shares.values())) > draw
        return self._take(list(shares)[int(reached.argmax())])


class CountsDocuments(Mixture):
    """Weighs documents: a domain of long ones gets more than was said."""

    def pick(self):
        before = dict(self._since)
        pick = super().pick()
        if pick is not None:
            self._since = {n: before.get(n, 0) for n in self._since}
            self._since[pick.domain] += 1
        return pick


class AddsALittle(Mixture):
    """Adds a little to every weight, so that nothing divides by zero."""

    def __init__(self, sources, weights=None, seed=1, **keys):
        if weights:
            weights = {n: w + 0.01 * (w >= 0) for n, w in weights.items()}
        super().__init__(sources, weights, seed, **keys)


class AnyWeight(Mixture):
    """Takes the size of a weight, whatever its sign."""

    def __init__(self, sources, weights=None, seed=1, **keys):
        weights = weights and {n: abs(w) for n, w in weights.items()}
        super().__init__(sources, weights, seed, **keys)


class SkipsTheEmpty(Mixture):
    """Leaves an empty domain out without a word: the others get its share."""

    def __init__(self, sources, weights=None, seed=1, **keys):
        full = {n: s for n, s in sources.items() if sum(map(len, s))}
        weights = weights and {n: w for n, w in weights.items() if n in full}
        super().__init__(full, weights, seed, **keys)


class OneOrder(Domain):
    def next(self):
        given, self.given = self.given, self.given % max(self.size, 1)
        _, index, length = super().next()
        self.given = given
        return given // self.size, index, length


class SameEachEpoch(Mixture):
    """Shuffles once, and gives every epoch of a domain in that order."""

    def __init__(self, sources, *args, **keys):
        super().__init__(sources, *args, **keys)
        for domain in self.domains.values():
            domain.__class__ = OneOrder


class NamesInOrder(Mixture):
    """Seeds each domain by its place among the names as they came."""

    def __init__(self, sources, *args, **keys):
        super().__init__(sources, *args, **keys)
        for place, name in enumerate(sources):
            self.domains[name].seed += place


class StartsTheEpochAgain(Mixture):
    """Remembers how many epochs were read, not the place in the epoch."""

    def load_state_dict(self, state):
        given = {
            n: g // max(self.domains[n].size, 1) * self.domains[n].size
            for n, g in state["given"].items()
        }
        super().load_state_dict({**state, "given": given})


class ForgetsTheShares(Mixture):
    """Resumes the places and starts the counting anew: the order parts from there."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self._since = dict.fromkeys(self._since, 0)


class AnyData(Mixture):
    """Takes a state of other data."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "fingerprint": self.fingerprint})


class NamesAndSizes(Mixture):
    """Knows its data by names and numbers of documents alone."""

    def __init__(self, sources, *args, **keys):
        super().__init__(sources, *args, **keys)
        self.fingerprint = str({n: len(s) for n, s in sorted(sources.items())})


class CatchesUp(Mixture):
    """New weights hold for all that was ever read: they are made up for at once."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self._shares, self._since = self._shares_now(), self.tokens


class NoDecay(Mixture):
    """Takes the weights of the decay and never uses them."""

    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        del self._plan[1:]


class GivesEqually(Mixture):
    """Gives the weight of an exhausted domain to the others in equal parts."""

    def _shares_now(self):
        now = super()._shares_now()
        wanted = {n: s for n, s in self._plan[0][1].items() if s > 0}
        lost = 1 - sum(wanted[n] for n in now if n in wanted)
        if not now or lost < 1e-9:
            return now
        return {n: round((wanted[n] + lost / len(now)) * UNIT) for n in now}


class NoLimit(Mixture):
    """Reads a domain as often as it likes."""

    def _limits(self, max_epochs):
        super()._limits(max_epochs)
        return dict.fromkeys(self.domains, math.inf)


class GoesOn(Mixture):
    """One policy for all: the others go on."""

    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.when_exhausted = "redistribute"


class WrongPower(Mixture):
    """Raises shares to the temperature, not to its inverse: it sharpens."""

    def __init__(self, sources, weights=None, seed=1, *, temperature=1.0, **keys):
        inverse = 1 / temperature if temperature else 0
        super().__init__(sources, weights, seed, temperature=inverse, **keys)


class ByDocuments(Mixture):
    """Without weights: in proportion to the documents."""

    def __init__(self, sources, weights=None, seed=1, **keys):
        counts = {n: len(s) for n, s in sources.items()}
        super().__init__(sources, weights or counts, seed, **keys)


class WholeEpochs(Mixture):
    """Says only how many epochs are finished."""

    @property
    def epochs(self):
        return {n: d.given // max(d.size, 1) for n, d in self.domains.items()}


class NotNormalized(Mixture):
    """Takes weights as shares as they are, whatever their sum."""

    def __init__(self, sources, weights=None, seed=1, **keys):
        super().__init__(sources, weights, seed, **keys)
        self._scale = sum(weights.values()) if weights else 1

    def _shares_now(self):
        now = super()._shares_now()
        return {n: max(1, int(s * self._scale) % UNIT) for n, s in now.items()}


class OwnPicks(Mixture):
    """Draws with a seed that a restart changes: ranks that start apart read apart."""

    started = 0

    def __init__(self, sources, weights=None, seed=1, **keys):
        OwnPicks.started += 1
        super().__init__(sources, weights, seed + OwnPicks.started, **keys)


ZOO = {
    "the largest deficit alone": (
        LargestDeficit,
        "test_rows_of_one_length_are_never_off_by_more_than_one",
    ),
    "the domain is drawn at random": (
        AtRandom,
        "test_no_share_is_ever_off_by_more_than_one_sample",
    ),
    "weights of documents": (
        CountsDocuments,
        "test_shares_are_of_tokens_not_of_documents",
    ),
    "a little for everyone": (
        AddsALittle,
        "test_a_domain_of_weight_zero_is_never_drawn",
    ),
    "a negative weight is taken": (AnyWeight, "test_what_is_no_weight_is_refused"),
    "an empty domain is left out": (
        SkipsTheEmpty,
        "test_a_weight_for_an_empty_domain_is_refused",
    ),
    "one order for all epochs": (
        SameEachEpoch,
        "test_an_epoch_of_a_domain_has_each_document_once_in_a_new_order",
    ),
    "seeds by place": (
        NamesInOrder,
        "test_a_seed_gives_one_order_whatever_the_order_of_the_names",
    ),
    "resumes at the start of the epoch": (
        StartsTheEpochAgain,
        "test_it_goes_on_exactly_from_any_position",
    ),
    "resumes without the counts": (
        ForgetsTheShares,
        "test_it_goes_on_exactly_from_any_position",
    ),
    "a state of other data is taken": (
        AnyData,
        "test_a_state_of_other_data_is_refused",
    ),
    "data known by its size": (NamesAndSizes, "test_a_state_of_other_data_is_refused"),
    "new weights are made up for": (
        CatchesUp,
        "test_new_weights_count_from_where_they_begin",
    ),
    "the decay is not mixed anew": (
        NoDecay,
        "test_the_decay_phase_has_weights_of_its_own",
    ),
    "a lost weight is given in equal parts": (
        GivesEqually,
        "test_an_exhausted_domain_leaves_its_weight_to_the_others_in_proportion",
    ),
    "no limit on epochs": (
        NoLimit,
        "test_it_ends_when_all_domains_have_been_read_so_often",
    ),
    "one policy for all": (GoesOn, "test_the_other_policies"),
    "the power upside down": (WrongPower, "test_temperature_flattens"),
    "documents instead of tokens": (
        ByDocuments,
        "test_without_weights_it_is_the_tokens_there_are",
    ),
    "whole epochs only": (WholeEpochs, "test_epochs_and_tokens_say_what_was_read"),
    "weights are not normalized": (
        NotNormalized,
        "test_weights_of_any_sum_mean_the_same_or_are_refused",
    ),
    "every start has a seed of its own": (
        OwnPicks,
        "test_any_number_of_ranks_trains_on_the_same_rows",
    ),
}
