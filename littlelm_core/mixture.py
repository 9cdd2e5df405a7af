# From chapters/12_mixture.md by `littlelm book export`: edit the chapter.
"""The mixture: whose text is next, and how to find the weights.

A corpus has domains of very different sizes, and what a model should see of each is a
decision, not what happened to be collected. Drawn at random, the shares wander; counted
in documents, a domain of long ones gets more than was said. Here weights are shares of
tokens, and every share stays within one sample of its weight, at every moment, on any
number of GPUs.

Shapes: R runs, D domains, N samples of one domain.
"""

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from littlelm_core.config import ConfigError, DataError, nearest, register
from littlelm_core.shards import permute

__all__ = [
    "Domain",
    "FLOOR",
    "MODELS",
    "Mixture",
    "MixtureFit",
    "PENALTIES",
    "PLACES",
    "POLICIES",
    "Pick",
    "UNIT",
    "fit_mixture",
    "fit_ridge",
    "fit_trees",
    "proportional",
    "rank_correlation",
    "ridge_features",
    "sample_weights",
    "source_fingerprint",
    "token_lengths",
    "token_shares",
]


# ---- From weights to shares


def token_shares(
    weights: Mapping[str, float] | None,
    tokens: Mapping[str, int],
    temperature: float = 1.0,
) -> dict[str, float]:
    """Return each domain's share of the tokens, by name; the shares sum to 1.

    weights: in any unit, since they are divided by their sum; 0 leaves a domain out;
    None: the tokens that there are. temperature: shares become share ** (1 /
    temperature), divided by their sum again (XLM-R: Conneau et al., 2020); 1 changes
    nothing, above 1 small domains gain.
    Raises ConfigError: a domain that is unknown or not named, a weight that is negative
    or not finite, all of them 0, temperature <= 0; DataError: a weight for no tokens.
    """
    if not (isinstance(temperature, Real) and 0 < temperature < math.inf):
        raise ConfigError(f"mixture.temperature = {temperature!r} must be above 0")
    weights = tokens if weights is None else weights
    for name in sorted({*weights} - {*tokens}):
        raise ConfigError(
            f"mixture: no domain {name!r}{nearest(name, tokens)}: weights are by the "
            "data's domains, write yours or take mixture.use=proportional"
        )
    for name in sorted({*tokens} - {*weights}):
        raise ConfigError(f"mixture: domain {name!r} has no weight: 0 leaves it out")
    for name, weight in weights.items():
        if not (isinstance(weight, Real) and 0 <= weight < math.inf):
            raise ConfigError(f"mixture: {name} = {weight!r} is no weight >= 0")
        if weight > 0 and tokens[name] == 0:
            raise DataError(
                f"mixture: domain {name!r} has the weight {weight:g} and no tokens: "
                "prepare text for it, or give it the weight 0"
            )
    most = max(weights.values(), default=0)  # becomes 1, at any temperature
    if most == 0:
        raise ConfigError("mixture: every weight is 0: give one domain more")
    flat = {n: (w / most) ** (1 / temperature) for n, w in sorted(weights.items())}
    total = math.fsum(flat.values())
    return {name: share / total for name, share in flat.items()}


# ---- A domain: samples in an endless order


def token_lengths(source: Sequence[Sequence[int]]) -> np.ndarray:
    """Return lengths_N, the tokens of each sample: known, or by looking at each."""
    if hasattr(source, "lengths_N"):  # packed rows
        return source.lengths_N
    if hasattr(source, "offsets_D"):  # a shard
        return np.diff(source.offsets_D)
    return np.array([len(sample) for sample in source], np.int64)


def source_fingerprint(source: Sequence[Sequence[int]]) -> str:
    """Return a source's own fingerprint, or a digest of every id in it."""
    if hasattr(source, "fingerprint"):
        return source.fingerprint
    digest = hashlib.blake2b(digest_size=16)
    for sample in source:
        ids = np.asarray(sample, np.int64)
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()


PLACES = 4096  # of an order are computed at once, since 20 take nearly as long


class Domain:
    """One source and its samples in an endless order: each once in every epoch.

    given and tokens count what has been taken, over all epochs. The order depends on
    the seed and the domain's own name, not on the other domains.
    """

    def __init__(self, name: str, source: Sequence[Sequence[int]], seed: int):
        self.name, self.source, self.seed = name, source, seed
        self.lengths_N = token_lengths(source)
        self.size, self.all_tokens = len(self.lengths_N), int(self.lengths_N.sum())
        self.given = self.tokens = 0
        self._order: tuple[Any, list[int], list[int]] = None, [], []

    def next(self) -> tuple[int, int, int]:
        """Return (epoch, index, tokens) of the next sample, without taking it."""
        epoch, place = divmod(self.given, self.size)
        ahead = place % PLACES
        known = self.seed, epoch, place - ahead
        if self._order[0] != known:
            places = np.arange(known[2], min(known[2] + PLACES, self.size))
            key = hashlib.blake2b(f"{self.seed}:{self.name}".encode(), digest_size=8)
            order = permute(places, self.size, int.from_bytes(key.digest()), epoch)
            self._order = known, order.tolist(), self.lengths_N[order].tolist()
        return epoch, self._order[1][ahead], self._order[2][ahead]

    def take(self) -> tuple[int, int, int]:
        """Take the next sample; return what `next` does."""
        sample = self.next()
        self.given, self.tokens = self.given + 1, self.tokens + sample[2]
        return sample


# ---- The mixture


class Pick(NamedTuple):
    """One choice of a mixture: which sample of which domain comes next."""

    domain: str
    epoch: int  # of that domain
    index: int  # in its source


UNIT = 10**12  # shares are kept as integers of it: decimal ones are exact
POLICIES = ("redistribute", "stop", "raise")


@register("mixture", "weighted")
class Mixture:
    """Samples of several domains in an order that keeps every share of the tokens.

    Only a domain that has not had more than its share may go, and of those the one
    whose next sample is due first. So no domain is ever more than one sample (the
    longest there is) ahead of its share or behind it (the bound of WF2Q: Bennett and
    Zhang, 1996). Shares are counted anew whenever they change.

    sources: {domain: list of documents, `Shard` or `PackedRows`}, any sequence of
    samples. weights, temperature: as in `token_shares`; None: in proportion to tokens.
    max_epochs: how often a domain may be read, one number or one of each; -1: no limit.
    when_exhausted: what happens when a domain has been read so often. "redistribute":
    the others share its weight in proportion; "stop": the mixture ends, as it does
    when no domain is left; "raise": DataError.
    decay_weights: hold from the share decay_start of `total` tokens on, as they are.
    total: tokens of the whole run; only decay_weights need it.

    Iterating gives samples; `pick()` says which, and every rank that calls it gets the
    same. Attributes: epochs, tokens and shares by domain, fingerprint (of the data).
    Raises ConfigError: as `token_shares`, and for values that mean nothing; DataError:
    a domain with weight and without tokens, and a state of other data.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[Sequence[int]]],
        weights: Mapping[str, float] | None = None,
        seed: int = 1,
        *,
        temperature: float = 1.0,
        max_epochs: int | Mapping[str, int] = -1,
        when_exhausted: str = "redistribute",
        decay_weights: Mapping[str, float] | None = None,
        decay_start: float = 0.8,
        total: int | None = None,
    ):
        if when_exhausted not in POLICIES:
            valid = nearest(when_exhausted, POLICIES)
            raise ConfigError(f"mixture.when_exhausted = {when_exhausted!r}{valid}")
        self.seed, self.when_exhausted = seed, when_exhausted
        self.domains = {n: Domain(n, sources[n], seed) for n in sorted(sources)}
        there = {name: d.all_tokens for name, d in self.domains.items()}
        self._plan = [(0.0, token_shares(weights, there, temperature))]
        if decay_weights is not None:
            if not (total and 0 <= decay_start <= 1):
                raise ConfigError(
                    f"mixture.decay_weights needs decay_start = {decay_start!r} from 0 "
                    f"to 1, as a share of total = {total!r} tokens"
                )
            decay = token_shares(decay_weights, there)
            self._plan.append((decay_start * total, decay))
        self._most = self._limits(max_epochs)
        names = [(n, source_fingerprint(d.source)) for n, d in self.domains.items()]
        digest = hashlib.blake2b(repr(names).encode(), digest_size=16)
        self.fingerprint = digest.hexdigest()
        self._spent = 0  # tokens of all domains, from the start
        self._shares: dict[str, int] = {}  # in force, of those that may still go
        self._since: dict[str, int] = {}  # tokens since these shares are in force

    def _limits(self, max_epochs: int | Mapping[str, int]) -> dict[str, float]:
        """Return the most samples that each domain may give."""
        by_name = max_epochs if isinstance(max_epochs, Mapping) else {}
        for name in by_name:
            if name not in self.domains:
                valid = nearest(name, self.domains)
                raise ConfigError(f"mixture.max_epochs: no domain {name!r}{valid}")
        most = {}
        for name, domain in self.domains.items():
            limit = by_name.get(name, -1 if by_name else max_epochs)
            if not isinstance(limit, int) or (limit < 1 and limit != -1):
                raise ConfigError(f"mixture.max_epochs = {limit!r}: 1 or more, or -1")
            most[name] = math.inf if limit == -1 else limit * domain.size
        return most

    def _shares_now(self) -> dict[str, int]:
        """Return the shares of those domains that have one and are not exhausted."""
        wanted = [shares for start, shares in self._plan if start <= self._spent][-1]
        now = {}
        for name, share in wanted.items():
            if share > 0 and self.domains[name].given < self._most[name]:
                now[name] = max(1, round(share * UNIT))
            elif share > 0 and self.when_exhausted == "stop":
                return {}
            elif share > 0 and self.when_exhausted == "raise":
                raise DataError(
                    f"mixture: {name} has been read {self.epochs[name]:g} times, its "
                    "max_epochs: lower its weight, or set when_exhausted"
                )
        return now

    def pick(self) -> Pick | None:
        """Choose and take the next sample; None when the mixture has ended."""
        shares = self._shares_now()
        if shares != self._shares:
            self._shares, self._since = shares, dict.fromkeys(shares, 0)
        if not shares:
            return None
        unit, tokens = sum(shares.values()), sum(self._since.values())
        first, due = "", (1, 0)  # a date is tokens / share; this one never comes
        for name, share in shares.items():
            had = self._since[name]
            if had * unit <= share * tokens:  # in Python's integers: exact
                at = had + self.domains[name].next()[2]
                if at * due[1] < due[0] * share:
                    first, due = name, (at, share)
        epoch, index, length = self.domains[first].take()
        self._since[first] += length
        self._spent += length
        return Pick(first, epoch, index)

    def __iter__(self) -> "Mixture":
        return self

    def __next__(self) -> Sequence[int]:
        pick = self.pick()
        if pick is None:
            raise StopIteration
        return self.domains[pick.domain].source[pick.index]

    @property
    def epochs(self) -> dict[str, float]:
        """How often each domain has been read."""
        return {n: d.given / max(d.size, 1) for n, d in self.domains.items()}

    @property
    def tokens(self) -> dict[str, int]:
        """The tokens that each domain has given."""
        return {name: domain.tokens for name, domain in self.domains.items()}

    @property
    def shares(self) -> dict[str, float]:
        """The shares in force for the next sample; they sum to 1 until the end."""
        now = self._shares_now()
        return {name: share / sum(now.values()) for name, share in now.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on, in numbers and strings."""
        given = {name: domain.given for name, domain in self.domains.items()}
        state = {"fingerprint": self.fingerprint, "seed": self.seed, "given": given}
        return state | {
            "tokens": self.tokens,
            "shares": dict(self._shares),
            "since": dict(self._since),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where a mixture of the same sources stopped, with its seed.

        Where the weights are others now, they are counted from here on; what each
        domain has been read already stays known.
        Raises DataError: the state belongs to other data.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the mixture's state was made on other data ({state['fingerprint']}, "
                f"now {self.fingerprint}): give it the same sources"
            )
        self.seed = int(state["seed"])
        for name, domain in self.domains.items():
            domain.seed = self.seed
            domain.given, domain.tokens = state["given"][name], state["tokens"][name]
        self._spent = sum(self.tokens.values())
        self._shares, self._since = dict(state["shares"]), dict(state["since"])


# ---- The parts of a run


@register("mixture", "proportional")
def proportional(
    sources: Mapping[str, Sequence[Sequence[int]]],
    *,
    seed: int = 1,
    total: int | None = None,
) -> Mixture:
    """Return the mixture that draws from each domain in proportion to its tokens.

    It is the default of a run, and a run with it does without a mixture: the loader's
    own order, every row once an epoch, has the same shares.
    """
    return Mixture(sources, None, seed, total=total)


# ---- Which weights?


def sample_weights(
    runs: int,
    domains: int,
    seed: int,
    center_D: Sequence[float] | None = None,
    concentration: float = 1.0,
) -> np.ndarray:
    """Draw weights_RD for proxy runs from a Dirichlet distribution; rows sum to 1.

    center_D: the mean of the draws (None: equal weights). concentration: 1 around equal
    weights is uniform over all mixtures; larger ones stay closer to the center.
    """
    center = np.full(domains, 1 / domains) if center_D is None else np.array(center_D)
    alpha_D = concentration * domains * center / center.sum()
    return np.random.default_rng(seed).dirichlet(alpha_D, runs)


def rank_correlation(a_R: Sequence[float], b_R: Sequence[float]) -> float:
    """Return Spearman's correlation, from -1 to 1; equal values share their rank."""
    ranks = []
    for values in (a_R, b_R):
        _, place, count = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - (count - 1) / 2)[place])
    if any(np.ptp(r) == 0 for r in ranks):
        return 0.0  # one of them says nothing
    return float(np.corrcoef(*ranks)[0, 1])


FLOOR = 0.02  # is added before the logarithm: a domain that is left out stays finite
PENALTIES = tuple(10.0**n for n in range(-8, 2))


def ridge_features(weights_RD: np.ndarray) -> np.ndarray:
    """Return weights, their products and their logarithms, as columns."""
    first, second = np.triu_indices(weights_RD.shape[1])
    products = weights_RD[:, first] * weights_RD[:, second]
    return np.hstack([weights_RD, products, np.log(weights_RD + FLOOR)])


def fit_ridge(weights_RD: np.ndarray, losses_R: np.ndarray) -> Callable:
    """Fit a ridge regression on `ridge_features`; return weights_ND -> predicted_N.

    The penalty is the one whose predictions are best for runs left out one at a time,
    which a linear fit knows without fitting again.
    """
    features = ridge_features(weights_RD)
    middle, spread = features.mean(0), features.std(0) + 1e-12
    u_RK, s_K, v_KF = np.linalg.svd((features - middle) / spread, full_matrices=False)
    mean, rest_R = losses_R.mean(), losses_R - losses_R.mean()

    def left_out_error(penalty: float) -> float:
        kept_K = s_K**2 / (s_K**2 + penalty * len(losses_R))
        influence_R = 1 / len(losses_R) + (u_RK**2) @ kept_K
        error_R = (rest_R - u_RK @ (kept_K * (u_RK.T @ rest_R))) / (1 - influence_R)
        return float(np.mean(error_R**2))

    penalty = min(PENALTIES, key=left_out_error)
    slope_F = v_KF.T @ (s_K / (s_K**2 + penalty * len(losses_R)) * (u_RK.T @ rest_R))
    return lambda w_ND: mean + (ridge_features(w_ND) - middle) / spread @ slope_F


def fit_trees(weights_RD: np.ndarray, losses_R: np.ndarray) -> Callable:
    """Fit LightGBM's boosted trees, sized for some dozens of runs.

    Raises ConfigError where lightgbm is not installed.
    """
    try:
        lightgbm = importlib.import_module("lightgbm")
    except ImportError as error:
        raise ConfigError(
            "model = 'lightgbm' needs lightgbm: pip install -e '.[mixture]', or take "
            "'ridge'"
        ) from error
    keys = {"objective": "l2", "learning_rate": 0.05, "num_leaves": 8, "verbose": -1}
    keys |= {"min_data_in_leaf": 3, "min_data_in_bin": 1, "num_threads": 1, "seed": 1}
    data = lightgbm.Dataset(weights_RD, losses_R - losses_R.mean())
    trees, mean = lightgbm.train(keys, data, 200), losses_R.mean()
    return lambda w_ND: mean + trees.predict(w_ND)


MODELS = {"ridge": fit_ridge, "lightgbm": fit_trees}


class MixtureFit(NamedTuple):
    """What a regression makes of proxy runs."""

    weights_D: np.ndarray  # with the lowest predicted loss; they sum to 1
    loss: float  # predicted there
    predict: Callable[[np.ndarray], np.ndarray]  # weights_ND -> losses_N
    held_out_R: np.ndarray  # predicted for each run by a fit that has not seen it
    rank_correlation: float  # of held_out_R and the measured losses
    error: float  # root of the mean square of held_out_R - measured


def fit_mixture(
    weights: Sequence[Sequence[float]] | np.ndarray,
    losses: Sequence[float] | np.ndarray,
    model: str = "ridge",
    *,
    folds: int = 8,
    candidates: int = 20_000,
    seed: int = 1,
) -> MixtureFit:
    """Learn a loss as a function of the mixture's weights, and find its lowest point.

    weights: (R, D), the mixture of each proxy run, rows that sum to 1. losses: (R,), or
    (R, K) of K scores that count equally: each is fitted alone and their mean is
    predicted. model: "ridge" or "lightgbm". Weights are searched among `candidates`
    mixtures of the runs' own mixtures, since beyond them no proxy has been:
    the mean of the best hundred, as RegMix does (Liu et al., 2024).
    Raises DataError: shapes that do not fit, fewer than 8 runs or than folds, losses
    that are not finite, rows that are no mixture; ConfigError: an unknown model.
    """
    weights_RD, losses_RK = np.array(weights, float), np.array(losses, float)
    losses_RK = losses_RK[:, None] if losses_RK.ndim == 1 else losses_RK
    if weights_RD.ndim != 2 or losses_RK.shape[:1] != weights_RD.shape[:1]:
        shapes = f"{weights_RD.shape} and {losses_RK.shape}"
        raise DataError(f"weights and losses have the shapes {shapes}: one row a run")
    runs = len(weights_RD)
    if runs < 8 or not 2 <= folds <= runs:
        raise DataError(f"{runs} runs and {folds} folds: take 8 runs, 2 folds or more")
    sums_R = weights_RD.sum(1)
    if not np.isfinite(losses_RK).all() or not np.allclose(sums_R, 1, atol=1e-6):
        raise DataError("a loss is not finite, or the weights of a run do not sum to 1")
    if (weights_RD < 0).any():
        raise DataError("a weight is negative: weights are shares of tokens")
    if model not in MODELS:
        raise ConfigError(f"no model {model!r}{nearest(model, MODELS)}")

    def fit(rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        parts = [MODELS[model](weights_RD[rows], y) for y in losses_RK[rows].T]
        return lambda w_ND: np.mean([part(w_ND) for part in parts], 0)

    measured_R, held_out_R = losses_RK.mean(1), np.empty(runs)
    for fold in range(folds):
        out = np.arange(runs) % folds == fold
        held_out_R[out] = fit(~out)(weights_RD[out])
    predict = fit(np.ones(runs, bool))
    some_ND = np.vstack([weights_RD, _inside(weights_RD, candidates, seed)])
    best = np.argsort(predict(some_ND), kind="stable")[:100]
    weights_D = some_ND[best].mean(0)
    return MixtureFit(
        weights_D,
        float(predict(weights_D[None])[0]),
        predict,
        held_out_R,
        rank_correlation(held_out_R, measured_R),
        float(np.sqrt(np.mean((held_out_R - measured_R) ** 2))),
    )


def _inside(weights_RD: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return mixtures of the runs' mixtures: inside what has been tried."""
    rng = np.random.default_rng(seed)
    few = min(len(weights_RD), weights_RD.shape[1] + 1)
    corners = rng.random((count, len(weights_RD))).argsort(1)[:, :few]
    shares = rng.dirichlet(np.ones(few), count)
    return np.einsum("nf,nfd->nd", shares, weights_RD[corners])
