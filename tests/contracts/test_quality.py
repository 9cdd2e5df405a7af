"""Contract of the quality classifier: a class made with (bits=18, ngrams=2), with
`fit(good, bad)`, `scores(texts)` (probabilities, shape (N,)), `save(path)` and
`load(path)`.
"""

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

PART = "littlelm_core.curation:QualityClassifier"

CALM = [
    "the", "river", "bends", "slowly", "past", "old", "stone", "houses", "where",
    "people", "keep", "bees",
]  # fmt: skip
LOUD = [
    "buy", "now", "click", "here", "free", "winner", "limited", "offer", "best",
    "price", "deal", "cheap",
]  # fmt: skip
BOTH = [
    "and", "of", "a", "in", "on", "it", "is", "was", "with", "as", "for", "at",
    "by", "from", "or", "an", "be", "this",
]  # fmt: skip


def texts(words, count, seed, least=20):
    draw = random.Random(seed)
    return [
        " ".join(draw.choices(words + BOTH, k=draw.randint(least, 60)))
        for _ in range(count)
    ]


def trained(part, good=60, bad=60, **keys):
    model = part(**{"bits": 14, **keys})
    model.fit(texts(CALM, good, 1), texts(LOUD, bad, 2))
    return model


def test_it_learns_and_is_right_on_new_texts(part):
    model = part(bits=14)
    before = model.scores(["any text", ""])
    assert np.allclose(before, 0.5), "untrained, everything is even"
    losses = model.fit(texts(CALM, 60, 1), texts(LOUD, 60, 2))
    assert losses[0] == pytest.approx(np.log(2)), "the first loss is ln 2"
    assert losses[-1] < 0.3 * losses[0], f"the loss only fell to {losses[-1]:.3f}"
    good, bad = model.scores(texts(CALM, 50, 3)), model.scores(texts(LOUD, 50, 4))
    assert good.shape == (50,)
    assert (good > 0.5).mean() > 0.95, "new good texts score low"
    assert (bad < 0.5).mean() > 0.95, "new bad texts score high"


def test_training_twice_gives_the_same_bits(part):
    one, two = trained(part), trained(part)
    assert np.array_equal(one.weights, two.weights)
    assert one.bias == two.bias


def test_classes_weigh_the_same(part):
    model = trained(part, good=20, bad=400)
    middle = model.scores(["", *texts(BOTH, 40, 5)])
    assert 0.2 < middle[1:].mean() < 0.8, (
        f"twenty to one bad: neutral text scores {middle[1:].mean():.2f}"
    )


def test_pairs_of_words_are_features(part):
    # The same words in both classes: only their order tells them apart.
    draw = random.Random(6)
    filler = [draw.choice(BOTH) for _ in range(2000)]
    good = ["not bad " + " ".join(filler[k : k + 3]) for k in range(0, 600, 3)]
    bad = ["bad not " + " ".join(filler[k : k + 3]) for k in range(0, 600, 3)]
    model = part(bits=14, ngrams=2)
    model.fit(good[:150], bad[:150])
    right = (
        np.append(model.scores(good[150:]), 1 - model.scores(bad[150:])) > 0.5
    ).mean()
    assert right > 0.9, f"{right:.2f} right: the order of words is not seen"


def test_a_score_is_of_one_text(part):
    model = trained(part)
    mixed = [*texts(CALM, 5, 7), "", "?", *texts(LOUD, 5, 8), "the", "x" * 70_000]
    together = model.scores(mixed)
    alone = np.array([model.scores([t])[0] for t in mixed])
    assert np.array_equal(together, alone), "a neighbor changes a score"
    assert model.scores(["THE river, bends"]) == model.scores(["the River\nbends"])
    assert np.isfinite(together).all()
    assert model.scores([]).shape == (0,)
    model.bias = 2.0
    assert model.scores([""])[0] == pytest.approx(1 / (1 + np.exp(-2))), (
        "a text without words scores the bias"
    )


def test_length_does_not_decide(part):
    model = trained(part)
    mixed = CALM[:6] + BOTH + LOUD[:4] + BOTH
    one, two = model.scores([" ".join(mixed), " ".join(mixed * 50)])
    assert 0.05 < one < 0.95, f"a mixed text scores {one:.2f}"
    assert abs(one - two) < 0.1, f"fifty times the same text: {one:.2f}, {two:.2f}"


def test_save_and_load(part):
    model, sample = trained(part, bits=12), texts(CALM + LOUD, 10, 9)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quality.npz"
        model.save(path)
        again = part.load(path)
        assert np.array_equal(again.scores(sample), model.scores(sample))
        assert (again.bits, again.ngrams) == (12, 2)
        model.save(Path(folder) / "second.npz")
        assert path.read_bytes() == (Path(folder) / "second.npz").read_bytes()


def test_files_that_are_none_are_refused(part):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quality.npz"
        with pytest.raises(ValueError, match=r"quality\.npz"):
            part.load(path)
        path.write_bytes(b"no classifier")
        with pytest.raises(ValueError, match=r"quality\.npz"):
            part.load(path)
        np.savez(path, version=2, bits=4, ngrams=1, bias=0.0, weights=np.zeros(16))
        with pytest.raises(ValueError, match="version 2"):
            part.load(path)
        np.savez(path, version=1, bits=4, ngrams=1, bias=0.0, weights=np.zeros(15))
        with pytest.raises(ValueError, match=r"quality\.npz"):
            part.load(path)
        trained(part).save(path)
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises(ValueError, match=r"quality\.npz"):
            part.load(path)


def test_wrong_input_is_refused(part):
    with pytest.raises(ValueError, match="empty"):
        part(bits=8).fit([], ["a"])
    with pytest.raises(ValueError, match="empty"):
        part(bits=8).fit(["a"], [])
    for wrong in ({"bits": 0}, {"bits": 40}, {"ngrams": 0}):
        with pytest.raises(ValueError, match=r"bits|ngrams"):
            part(**wrong)
