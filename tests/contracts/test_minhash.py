"""Contract of MinHash: a class made with permutations=112, bands=14, shingle=5, seed=1,
with `signatures(texts)`, uint32 of shape (N, P), and `band_keys(signatures)`, uint64 of
shape (N, bands); two documents meet where a key is equal in the same column.
"""

import random
import re

import numpy as np
import pytest

PART = "littlelm_core.curation:MinHash"


def draw_words(draw, count):
    return ["".join(draw.choices("abcdefghijklmnop", k=7)) for _ in range(count)]


def jaccard(a, b, n=5):
    """Straight from the definition, for lower-case words."""
    sets = []
    for text in (a, b):
        found = text.split()
        sets.append({tuple(found[i : i + n]) for i in range(len(found) - n + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def pairs(similarity, count, seed, words=160):
    """Pairs of texts whose Jaccard similarity is near the one asked for."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        common = draw_words(draw, words)
        new = round((words - 4) * (1 - similarity) / (2 * similarity))
        found.append(
            (
                " ".join(common + draw_words(draw, new)),
                " ".join(common + draw_words(draw, new)),
            )
        )
    return found


def test_settings_by_default_and_refused(part):
    made = part()
    assert (made.permutations, made.bands, made.shingle) == (112, 14, 5)
    assert made.rows == 8, "112 permutations in 14 bands are 8 rows"
    for wrong in ({"bands": 13}, {"bands": 0}, {"permutations": 0}, {"shingle": 0}):
        with pytest.raises(ValueError):
            part(**wrong)


def test_shapes_and_types(part):
    made = part(permutations=24, bands=6)
    texts = ["one two three four five six", "", "word"]
    signatures = made.signatures(texts)
    assert (signatures.shape, signatures.dtype) == ((3, 24), np.uint32)
    keys = made.band_keys(signatures)
    assert (keys.shape, keys.dtype) == ((3, 6), np.uint64)
    assert made.signatures([]).shape == (0, 24)


def test_neighbors_do_not_matter(part):
    draw, made = random.Random(3), part()
    texts = [
        " ".join(draw_words(draw, draw.choice((0, 1, 4, 5, 6, 90)))) for _ in "x" * 40
    ]
    texts += ["", "ä ö", "ÄÖ ü, und so weiter und so fort", "日本語", "x" * 200_000]
    whole = made.signatures(texts)
    for size in (1, 7):
        parts = [
            made.signatures(texts[k : k + size]) for k in range(0, len(texts), size)
        ]
        assert (np.concatenate(parts) == whole).all(), f"batches of {size} differ"
    assert (made.signatures(texts[::-1]) == whole[::-1]).all(), "the order matters"


def test_a_long_text_is_one_text(part):
    draw, made = random.Random(4), part()
    found = draw_words(draw, 60_000)
    # The signature of the whole is the minimum over pieces that overlap by 4 words.
    pieces = [" ".join(found[max(k - 4, 0) : k + 700]) for k in range(0, 60_000, 700)]
    whole = made.signatures([" ".join(found)])[0]
    assert (made.signatures(pieces).min(0) == whole).all(), (
        "a text of 480,000 characters is not the sum of its pieces"
    )


def test_case_marks_and_wrapping_do_not_matter(part):
    made = part()
    same = (
        "The quick brown fox jumps over the lazy dog",
        "the quick brown fox\njumps over  the lazy dog.",
        "“THE QUICK” — brown fox: jumps, over the (lazy) dog…",
    )
    signatures = made.signatures(same)
    for text, signature in zip(same[1:], signatures[1:], strict=True):
        assert (signature == signatures[0]).all(), f"{text!r} is another text"
    umlaut = made.signatures(
        ["ÜBER DEN Fluß ging ein BÄR", "über den fluß ging ein bär"]
    )
    assert (umlaut[0] == umlaut[1]).all(), "capitals beyond ASCII differ"
    other = made.signatures(["dog lazy the over jumps fox brown quick the"])
    assert (other != signatures[0]).mean() > 0.9, "the order of the words is lost"


def test_agreement_estimates_the_similarity(part):
    made = part(permutations=200, bands=10)
    for similarity in (0.2, 0.5, 0.8):
        texts = pairs(similarity, 40, seed=5)
        one, two = (made.signatures([p[k] for p in texts]) for k in (0, 1))
        agree = (one == two).mean(1)
        true = np.array([jaccard(*p) for p in texts])
        error = agree - true
        spread = np.sqrt(
            (true * (1 - true)).mean() / 200
        )  # of one pair, if independent
        assert abs(error.mean()) < 4 * spread / np.sqrt(40), (
            f"at {similarity} the mean estimate is off by {error.mean():.3f}"
        )
        assert error.std() < 1.5 * spread, (
            f"at {similarity} single estimates spread by {error.std():.3f}, not "
            f"{spread:.3f}: the permutations are not independent"
        )


def test_bands_meet_with_the_promised_probability(part):
    made = part()
    for similarity in (0.55, 0.7, 0.8, 0.9):
        texts = pairs(similarity, 250, seed=6)
        one, two = (
            made.band_keys(made.signatures([p[k] for p in texts])) for k in (0, 1)
        )
        met = (one == two).any(1).mean()
        want = np.mean([1 - (1 - jaccard(*p) ** 8) ** 14 for p in texts])
        tolerance = 4 * np.sqrt(want * (1 - want) / 250) + 0.01
        assert abs(met - want) < tolerance, (
            f"at similarity {similarity} {met:.3f} of the pairs meet, not {want:.3f}"
        )
        assert made.meeting(similarity) == pytest.approx(1 - (1 - similarity**8) ** 14)


def test_a_key_is_its_band_and_no_more(part):
    made = part(permutations=12, bands=3)
    base = np.arange(12, dtype=np.uint32)[None] + np.uint32(7)
    keys = made.band_keys(base)
    for k in range(12):
        changed = base.copy()
        changed[0, k] ^= np.uint32(1 << 31)
        differs = made.band_keys(changed)[0] != keys[0]
        want = [band == k // 4 for band in range(3)]
        assert differs.tolist() == want, f"entry {k} belongs to band {k // 4} alone"
    swapped = base[:, [1, 0, *range(2, 12)]]
    assert made.band_keys(swapped)[0, 0] != keys[0, 0], "rows of a band are in order"


def test_short_texts_are_whole_or_different(part):
    made = part()
    short = ["", "yes", "no", "yes no", "no yes", "Yes", "yes!", "one two three four",
             "one two three for", "1", "!", "?"]  # fmt: skip
    signatures = made.signatures([*short, *short])
    assert (signatures[: len(short)] == signatures[len(short) :]).all()
    for i, one in enumerate(short):
        for j, two in enumerate(short[:i]):
            shared = (signatures[i] == signatures[j]).mean()
            assert shared < 0.05, f"{one!r} and {two!r} look alike"


def test_seeds_are_different_permutations(part):
    texts = [" ".join(draw_words(random.Random(7), 200))]
    one, again, two = (part(seed=s).signatures(texts) for s in (1, 1, 2))
    assert (one == again).all(), "the same seed gives another signature"
    assert (one == two).mean() < 0.1, "another seed gives the same permutations"


def test_shingle_sets_are_the_sets(part):
    draw, made = random.Random(8), part(shingle=3)
    for _ in range(20):
        text = " ".join(draw.choices(["a", "b", "c", "dé", "É"], k=draw.randint(3, 60)))
        found = re.findall(r"\w+", text.lower())
        want = {tuple(found[i : i + 3]) for i in range(len(found) - 2)}
        (got,) = made.shingle_sets([text])
        assert len(got) == len(want), f"{len(want)} different shingles in {text!r}"
        assert (np.diff(got.astype(object)) > 0).all(), "sorted, each once"


def test_small_differences_of_words_count(part):
    # 2,000 texts of five words, each another one: nothing may look equal.
    made = part(permutations=8, bands=1)
    texts = [f"alpha beta gamma delta {k}" for k in range(1000)]
    texts += [f"{k} alpha beta gamma delta" for k in range(1000)]
    keys = made.band_keys(made.signatures(texts))
    assert len(np.unique(keys)) == 2000, "different shingles have the same hash"
