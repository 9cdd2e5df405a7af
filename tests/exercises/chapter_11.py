"""Graders of chapter 11's exercises."""

import math
import random

from littlelm_core.curation import Clusters, Decontaminator, MinHash, judge


def exercise_11_1(answer):
    """Jaccard similarity of runs of words."""
    got = answer("the cat sat on the mat", "the cat sat on the hat", 3)
    assert math.isclose(got, 0.6), f"three of five runs are common: 0.6, not {got}"
    assert answer("a b a b a b", "a b a b", 2) == 1.0, "sets: a run counts once"
    assert answer("a b c d", "d c b a", 2) == 0.0, "the order of the words counts"
    assert answer("a b c", "a  b\nc", 2) == 1.0, "white space only parts words"
    assert answer("yes", "no", 3) == 0.0, "short texts are whole, or different"
    assert answer("a b", "a b", 3) == 1.0
    assert answer("a b", "a b c d", 3) == 0.0
    assert answer("", "", 2) == 1.0
    got = answer("a b c d e", "b c d e f", 4)
    assert math.isclose(got, 1 / 3), f"one run of three, not {got}"


def exercise_11_2(answer):
    """A filter against shouting."""
    drop = answer(0.3)
    assert drop.name == "shouting"
    assert drop("ABC defg hij") is None, "3 of 10 letters are not more than 0.3"
    assert drop("ABCD efg hij") == "capitals", "4 of 10 letters are more than 0.3"
    assert drop("ABC 12345 !!! defghij") is None, "only letters count"
    assert drop("ABCD 12345 !!! efghij") == "capitals", "only letters count"
    assert drop("ÄÖÜ ßa") == "capitals", "letters beyond ASCII count"
    for text in ("", "123 !?", " \n"):
        assert drop(text) is None, f"{text!r} has no letters: it stays"
    assert answer(0.9)("ABCD efg hij") is None, "the limit is not used"
    assert judge("HELLO there", [answer(0.4)]) == "shouting: capitals"


def exercise_11_3(answer):
    """The number of bands."""
    assert answer(112, 0.8, 0.9) == 14, "14 bands of 8 meet with 0.924 at 0.8"
    assert answer(112, 0.8, 0.93) == 16
    assert answer(6, 0.5, 1 / 64) == 1, "one band of 6 rows: exactly (1/2)^6"
    assert answer(112, 0.1, 1.0) is None
    for permutations, similarity, least in (
        (128, 0.5, 0.5), (60, 0.9, 0.99), (64, 0.3, 0.8), (7, 0.6, 0.7),
    ):  # fmt: skip
        enough = [
            bands
            for bands in range(1, permutations + 1)
            if permutations % bands == 0
            and MinHash(permutations, bands).meeting(similarity) >= least
        ]
        want = min(enough, default=None)
        got = answer(permutations, similarity, least)
        assert got == want, (
            f"{permutations} permutations, {similarity}, {least}: {got}, not {want}"
        )


def exercise_11_4(answer):
    """One document of each cluster."""
    assert answer(5, [(3, 1), (4, 3)]) == [0, 1, 2], "4 is a duplicate of 1 through 3"
    assert answer(3, []) == [0, 1, 2]
    assert answer(0, []) == []
    assert answer(4, [(0, 1), (2, 3), (1, 2)]) == [0], "two clusters grow together"
    assert answer(3, [(2, 1), (1, 2), (2, 2)]) == [0, 1]
    draw = random.Random(1)
    for _ in range(20):
        pairs = [(draw.randrange(30), draw.randrange(30)) for _ in range(20)]
        given, clusters = list(pairs), Clusters()
        for i, j in pairs:
            clusters.unite(i, j)
        want = [i for i in range(30) if clusters.find(i) == i]
        assert answer(30, pairs) == want, f"{pairs}"
        assert pairs == given, "the given pairs must stay as they are"


def exercise_11_5(answer):
    """The share of an item in a document."""
    assert answer("x a b c d y", "a b c d", 2) == 1.0
    assert answer("A B\nC", "a b c", 3) == 1.0, "case and white space do not count"
    assert math.isclose(answer("a b c x", "a b c d e", 2), 0.5), "2 of 4 runs"
    assert math.isclose(answer("a b a b a b", "a b c", 2), 0.5), "a run counts once"
    assert answer("a b c d", "d c b a", 2) == 0.0, "the order counts"
    assert answer("a b c d", "a b", 3) == 0.0, "shorter than n: 0.0"
    assert answer("", "a b c", 2) == 0.0
    draw = random.Random(2)
    for _ in range(10):
        item = " ".join(draw.choices("abcdefgh", k=20))
        doc = " ".join([*"xyz", *item.split()[: draw.randint(8, 20)], *"xyz"])
        (hit,) = Decontaminator([item], ngram=4, threshold=1e-9, shortest=4).find([doc])
        got = answer(doc, item, 4)
        assert math.isclose(got, hit.share), f"{item!r} in {doc!r}: {got}"
