"""A mixture of domains: shares of tokens, kept at every moment, resumed exactly.

The part is called as mixture(sources, weights, seed, **keys); iterating gives samples,
`pick()` says (domain, epoch, index) of the next one, or None at the end.
"""

import itertools
import json
import math
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from littlelm_core.shards import Loader, Shard, write_shard

PART = "littlelm_core.mixture:Mixture"


def _refused(call, accepted):
    """Return the one line of the error that a call must raise."""
    message = None
    try:
        call()
    except ValueError as error:
        message = str(error)
    assert message is not None, f"{accepted} was accepted"
    assert "\n" not in message, f"the error has more than one line: {message}"
    return message


def _sources(sizes, longest=9, seed=0):
    """Documents whose first id names their domain; every document is another one."""
    rng = np.random.default_rng(seed)
    return {
        name: [
            [number, at, *[7] * int(n)]
            for at, n in enumerate(rng.integers(0, longest, size))
        ]
        for number, (name, size) in enumerate(sizes.items())
    }


def _tokens(picks, sources):
    counts = Counter()
    for pick in picks:
        counts[pick[0]] += len(sources[pick[0]][pick[2]])
    return counts


def _picks(mixture, count):
    return [mixture.pick() for _ in range(count)]


def _deviation(part, sources, weights, count):
    """Return the largest |tokens - share of all tokens| of any domain at any moment."""
    mixture, given, worst = part(sources, weights, 3), Counter(), 0.0
    total = sum(weights.values())
    for pick in _picks(mixture, count):
        given[pick[0]] += len(sources[pick[0]][pick[2]])
        tokens = sum(given.values())
        for name, weight in weights.items():
            worst = max(worst, abs(given[name] - weight / total * tokens))
    return worst


def test_it_yields_the_documents_themselves(part):
    sources = _sources({"a": 5, "b": 5})
    got = list(itertools.islice(part(sources, {"a": 1, "b": 1}, 1), 8))
    assert len(got) == 8, f"it ended after {len(got)} documents"
    for document in got:
        assert list(document) in sources["ab"[document[0]]], f"{document} is none"


def test_shares_are_of_tokens_not_of_documents(part):
    sources = {"long": [[0] * 100] * 4, "short": [[1] * 10] * 40}
    picks = _picks(part(sources, {"long": 0.5, "short": 0.5}, 1), 440)
    tokens = _tokens(picks, sources)
    assert abs(tokens["long"] - tokens["short"]) <= 200, (
        f"half and half of the tokens was asked, {dict(tokens)} were given"
    )


def test_no_share_is_ever_off_by_more_than_one_sample(part):
    for number, count in enumerate((2, 3, 5, 8)):
        names = "abcdefgh"[:count]
        sources = _sources(dict.fromkeys(names, 30), longest=20, seed=number)
        rng = np.random.default_rng(number)
        weights = dict(
            zip(names, rng.dirichlet(np.full(count, 0.5)) + 0.01, strict=True)
        )
        longest = max(len(d) for documents in sources.values() for d in documents)
        worst = _deviation(part, sources, weights, 400)
        assert worst <= longest, f"{worst / longest:.2f} samples off with {weights}"


def test_rows_of_one_length_are_never_off_by_more_than_one(part):
    """Where taking the largest deficit alone falls behind by more than a sample."""
    tried = [(6, 1, 1, 2), (20, 20, 9, 3, 3), (3, 4, 12), (40, 6, 3, 3), (14, 1, 1, 1)]
    rng = np.random.default_rng(5)
    tried += [tuple(rng.dirichlet(np.full(5, 0.5)) + 0.002) for _ in range(6)]
    for weights in tried:
        names = "abcdefgh"[: len(weights)]
        sources = {name: [[0] * 4] * 50 for name in names}
        worst = _deviation(part, sources, dict(zip(names, weights, strict=True)), 600)
        assert worst <= 4 + 1e-6, f"weights {weights}: {worst / 4:.2f} rows off"


def test_weights_of_any_sum_mean_the_same_or_are_refused(part):
    sources = _sources({"a": 20, "b": 20})
    shares = _picks(part(sources, {"a": 0.8, "b": 0.2}, 1), 60)
    try:
        scaled = part(sources, {"a": 4, "b": 1}, 1)
    except ValueError:
        return
    assert _picks(scaled, 60) == shares, "4 to 1 is not 0.8 to 0.2"


def test_what_is_no_weight_is_refused(part):
    sources = _sources({"a": 5, "b": 5})
    for weights in (
        {"a": -1, "b": 2},
        {"a": math.nan, "b": 1},
        {"a": math.inf, "b": 1},
        {"a": 0, "b": 0},
    ):
        _refused(lambda w=weights: part(sources, w, 1), f"weights {weights}")
    unknown = {"a": 1, "b": 1, "kode": 1}
    message = _refused(lambda: part(sources, unknown, 1), "an unknown domain")
    assert "kode" in message, f"the domain is not named: {message}"


def test_a_domain_of_weight_zero_is_never_drawn(part):
    sources = _sources({"a": 5, "b": 5, "never": 5})
    for keys in ({}, {"temperature": 5.0}):
        mixture = part(sources, {"a": 1, "b": 2, "never": 0}, 1, **keys)
        drawn = {pick[0] for pick in _picks(mixture, 300)}
        assert drawn == {"a", "b"}, f"{sorted(drawn)} were drawn ({keys})"


def test_a_weight_for_an_empty_domain_is_refused(part):
    for empty in ([], [[], []]):
        sources = {"a": [[1, 2]], "empty": empty}
        message = _refused(
            lambda s=sources: part(s, {"a": 1, "empty": 0.1}, 1),
            f"a weight for {empty}",
        )
        assert "empty" in message, f"the domain is not named: {message}"
        allowed = part(sources, {"a": 1, "empty": 0}, 1)
        assert {pick[0] for pick in _picks(allowed, 5)} == {"a"}


def test_an_epoch_of_a_domain_has_each_document_once_in_a_new_order(part):
    sources = _sources({"a": 40, "b": 7})
    order = {"a": [], "b": []}
    for pick in _picks(part(sources, {"a": 2, "b": 1}, 1), 400):
        order[pick[0]].append(pick[2])
        epoch = (len(order[pick[0]]) - 1) // len(sources[pick[0]])
        assert pick[1] == epoch, f"{pick} should be of epoch {epoch}"
    first, second = order["a"][:40], order["a"][40:80]
    for epoch in (first, second, order["b"][:7], order["b"][7:14]):
        assert sorted(epoch) == list(range(len(epoch))), f"an epoch was {epoch}"
    assert first != second, "two epochs have one order"
    assert first != sorted(first), "documents come as they lie"


def test_a_seed_gives_one_order_whatever_the_order_of_the_names(part):
    sources = _sources({"a": 9, "b": 9, "c": 9})
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    first = _picks(part(sources, weights, 4), 120)
    turned = dict(reversed(sources.items())), dict(reversed(weights.items()))
    assert _picks(part(*turned, 4), 120) == first, "the order of the names matters"
    assert _picks(part(sources, weights, 5), 120) != first, "two seeds, one order"


def test_it_goes_on_exactly_from_any_position(part):
    sources, weights = _sources({"a": 9, "b": 25}), {"a": 0.6, "b": 0.4}
    keys = {"max_epochs": {"a": 3}, "decay_weights": {"a": 0.1, "b": 0.9}}
    keys |= {"decay_start": 0.5, "total": 240}
    whole = _picks(part(sources, weights, 2, **keys), 90)
    for stop in (0, 1, 5, 14, 33, 60, 85):
        before = part(sources, weights, 2, **keys)
        _picks(before, stop)
        state = json.loads(json.dumps(before.state_dict()))
        after = part(sources, weights, 2, **keys)
        after.load_state_dict(state)
        rest = _picks(after, 90 - stop)
        assert rest == whole[stop:], f"stopped after {stop}, it goes on differently"
        assert before.epochs.keys() == after.epochs.keys()


def test_a_state_of_other_data_is_refused(part):
    sources, weights = _sources({"a": 9, "b": 9}), {"a": 1, "b": 1}
    state = part(sources, weights, 1).state_dict()
    others = {
        "a document less": {**sources, "a": sources["a"][:-1]},
        "another id": {**sources, "a": [[0, 0, 8], *sources["a"][1:]]},
        "swapped domains": {"a": sources["b"], "b": sources["a"]},
    }
    for what, other in others.items():
        mixture = part(other, weights, 1)
        _refused(lambda m=mixture: m.load_state_dict(state), f"a state with {what}")


def test_new_weights_count_from_where_they_begin(part):
    """A branch with other weights does not make up for what the trunk has read."""
    sources = {name: [[0] * 4] * 50 for name in "ab"}
    trunk = part(sources, {"a": 0.9, "b": 0.1}, 1)
    _picks(trunk, 200)
    branch = part(sources, {"a": 0.5, "b": 0.5}, 1)
    branch.load_state_dict(trunk.state_dict())
    counts = Counter(pick[0] for pick in _picks(branch, 20))
    assert counts == {"a": 10, "b": 10}, f"half and half gave {dict(counts)}"


def test_the_decay_phase_has_weights_of_its_own(part):
    sources = {name: [[0] * 4] * 30 for name in "abc"}
    mixture = part(
        sources, {"a": 0.5, "b": 0.5, "c": 0}, 1,
        decay_weights={"a": 0.25, "b": 0, "c": 0.75}, decay_start=0.75, total=800,
    )  # fmt: skip
    picks = _picks(mixture, 200)
    stable, decay = (Counter(p[0] for p in x) for x in (picks[:150], picks[150:]))
    assert stable == {"a": 75, "b": 75}, f"600 tokens before the decay: {stable}"
    assert abs(decay["a"] - 12.5) <= 1, f"200 tokens of the decay: {decay}"
    assert abs(decay["c"] - 37.5) <= 1, f"200 tokens of the decay: {decay}"
    assert decay["b"] == 0, f"200 tokens of the decay: {decay}"


def test_an_exhausted_domain_leaves_its_weight_to_the_others_in_proportion(part):
    sources = {name: [[0] * 4] * n for name, n in (("a", 5), ("b", 90), ("c", 90))}
    mixture = part(sources, {"a": 0.5, "b": 0.3, "c": 0.2}, 1, max_epochs={"a": 2})
    picks = _picks(mixture, 80)
    counts = Counter(pick[0] for pick in picks)
    assert counts["a"] == 10, f"two epochs of 5 are 10, not {counts['a']}"
    after = Counter(pick[0] for pick in picks[30:])
    assert after == {"b": 30, "c": 20}, f"0.3 to 0.2 of 50 gave {dict(after)}"


def test_it_ends_when_all_domains_have_been_read_so_often(part):
    sources = _sources({"a": 4, "b": 6})
    mixture = part(sources, {"a": 0.9, "b": 0.1}, 1, max_epochs=3)
    documents = list(itertools.islice(mixture, 200))
    assert len(documents) == 30, f"3 epochs of 10 documents are 30: {len(documents)}"
    assert mixture.pick() is None, "it goes on after its end"


def test_the_other_policies(part):
    sources, weights = _sources({"a": 4, "b": 90}), {"a": 0.5, "b": 0.5}
    keys = {"max_epochs": {"a": 1}}
    stop = part(sources, weights, 1, when_exhausted="stop", **keys)
    counts = Counter(p[0] for p in _picks(stop, 60) if p is not None)
    assert counts["a"] == 4, f"one epoch of a is 4 documents: {counts}"
    assert counts["b"] < 20, f"it did not stop when a was exhausted: {counts}"
    strict = part(sources, weights, 1, when_exhausted="raise", **keys)
    message = _refused(lambda: _picks(strict, 60), "an exhausted domain")
    assert "a" in message.split(), f"the domain is not named: {message}"
    _refused(lambda: part(sources, weights, 1, when_exhausted="wrap"), "wrap")
    for epochs in (0, -2, 1.5, {"c": 1}):
        _refused(lambda e=epochs: part(sources, weights, 1, max_epochs=e), epochs)


def test_temperature_flattens(part):
    sources = {name: [[0] * 4] * 50 for name in "ab"}
    for temperature, expected in ((1.0, 0.8), (2.0, 2 / 3), (1e9, 0.5), (0.5, 16 / 17)):
        mixture = part(sources, {"a": 0.8, "b": 0.2}, 1, temperature=temperature)
        got = Counter(pick[0] for pick in _picks(mixture, 600))["a"] / 600
        assert abs(got - expected) < 1 / 300, (
            f"0.8 at temperature {temperature} is {expected:.3f}, not {got:.3f}"
        )
    for temperature in (0, -1, math.inf):
        _refused(
            lambda t=temperature: part(sources, {"a": 1, "b": 1}, 1, temperature=t),
            f"temperature {temperature}",
        )


def test_without_weights_it_is_the_tokens_there_are(part):
    sources = {"a": [[0] * 4] * 30, "b": [[1] * 2] * 30}
    tokens = _tokens(_picks(part(sources, None, 1), 150), sources)
    share = tokens["a"] / sum(tokens.values())
    assert abs(share - 2 / 3) < 0.02, f"a has 2/3 of the tokens and got {share:.3f}"


def test_epochs_and_tokens_say_what_was_read(part):
    sources = _sources({"a": 5, "b": 50})
    mixture = part(sources, {"a": 0.7, "b": 0.3}, 1)
    picks = _picks(mixture, 70)
    counts = Counter(pick[0] for pick in picks)
    for name, documents in sources.items():
        assert mixture.epochs[name] == counts[name] / len(documents), mixture.epochs
    assert mixture.tokens == dict(_tokens(picks, sources)), mixture.tokens


def _shards(folder):
    paths = []
    for number, (name, size) in enumerate((("code", 50), ("docs", 90), ("docs", 30))):
        rng = np.random.default_rng(number)
        documents = [[0, *rng.integers(1, 90, 17)] for _ in range(size)]
        paths.append(Path(folder) / f"train-{name}-{number:05d}.shard")
        write_shard(paths[-1], documents, 100)
    return paths


def test_a_shard_is_a_source(part):
    with tempfile.TemporaryDirectory() as folder:
        code, docs, _ = (Shard(path) for path in _shards(folder))
        mixture = part({"code": code, "docs": docs}, {"code": 1, "docs": 2}, 1)
        picks = _picks(mixture, 90)
        assert Counter(p[0] for p in picks) == {"code": 30, "docs": 60}
        fresh = part({"code": code, "docs": docs}, {"code": 1, "docs": 2}, 1)
        for (domain, _, index), document in zip(picks, fresh, strict=False):
            shard = {"code": code, "docs": docs}[domain]
            assert np.array_equal(document, shard[index]), "another document was given"


def _steps(part, paths, world, grad_accum, steps, state=None):
    """Return the rows of each step of 8 rows over all ranks, and a rank's state."""
    rows = 8 // (world * grad_accum)
    loaders = [Loader(paths, rows, 8, 7, rank, world) for rank in range(world)]
    for loader in loaders:
        loader.mix(lambda s: part(s, {"code": 0.7, "docs": 0.3}, 7))
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    taken = []
    for _ in range(steps):
        batches = [next(loader) for loader in loaders for _ in range(grad_accum)]
        taken.append(sorted(tuple(r) for b in batches for r in b[1].tolist()))
    states = [loader.state_dict() for loader in loaders]
    assert all(s == states[0] for s in states), f"the ranks' states differ: {states}"
    return taken, states[0]


def test_any_number_of_ranks_trains_on_the_same_rows(part):
    with tempfile.TemporaryDirectory() as folder:
        paths = _shards(folder)
        one, _ = _steps(part, paths, 1, 2, 24)
        two, _ = _steps(part, paths, 2, 2, 24)
        four, _ = _steps(part, paths, 4, 1, 24)
        assert one == two == four, "a step's rows depend on the number of ranks"
        half, state = _steps(part, paths, 2, 2, 11)
        for world, grad_accum in ((1, 4), (4, 1)):
            rest, _ = _steps(part, paths, world, grad_accum, 13, state)
            assert half + rest == one, f"resumed on {world} ranks, other rows come"
