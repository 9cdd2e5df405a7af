"""Contract of deduplication: a function `deduplicate(docs, threshold=0.8)` that returns
(indices of the documents kept, ascending; a report).

The report has `documents`, `kept`, `removed`, `clusters` ({kept index: indices of the
cluster}, of two or more) and `sizes` ({size of cluster: how many}).
"""

import random

import pytest

PART = "littlelm_core.curation:deduplicate"


def draw_words(draw, count):
    return ["".join(draw.choices("abcdefghijklmnop", k=7)) for _ in range(count)]


def text(draw, count=120):
    return " ".join(draw_words(draw, count))


def changed(draw, original, words):
    """The text with the last words new: of n shingles, n - words stay."""
    found = original.split()
    return " ".join(found[: len(found) - words] + draw_words(draw, words))


def jaccard(a, b, n=5):
    sets = []
    for found in (a.split(), b.split()):
        sets.append({tuple(found[i : i + n]) for i in range(len(found) - n + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def consistent(docs, kept, report):
    """Kept and removed are the input, once each."""
    assert list(kept) == sorted(set(kept)), "kept indices: ascending, each once"
    assert set(kept) <= set(range(len(docs))), "an index that is no document's"
    assert report.documents == len(docs)
    assert report.kept == len(kept)
    assert report.kept + report.removed == len(docs), "kept + removed is the input"
    removed = set(range(len(docs))) - set(kept)
    grouped = [i for group in report.clusters.values() for i in group]
    assert len(grouped) == len(set(grouped)), "a document in two clusters"
    for low, group in report.clusters.items():
        assert low == min(group), f"the cluster {group} keeps {low}, not its lowest"
        assert len(group) > 1, "a cluster of one"
    assert removed == set(grouped) - set(report.clusters), "removed, but in no cluster"
    assert sum(s * n for s, n in report.sizes.items()) == len(docs), "cluster sizes"
    assert sum(report.sizes.values()) == len(kept), "one document of each cluster"


def run(part, docs, **keys):
    kept, report = part(docs, **keys)
    consistent(docs, kept, report)
    return list(kept), report


def test_nothing_and_one(part):
    assert run(part, [])[0] == []
    assert run(part, ["one document"])[0] == [0]
    assert run(part, [""])[0] == [0]


def test_equal_texts_keep_the_first(part):
    draw = random.Random(1)
    a, b, c = (text(draw) for _ in range(3))
    kept, report = run(part, [a, b, a, c, b, a])
    assert kept == [0, 1, 3]
    assert report.clusters == {0: [0, 2, 5], 1: [1, 4]}
    assert report.sizes == {1: 1, 2: 1, 3: 1}


def test_near_duplicates_go(part):
    draw = random.Random(2)
    docs = [text(draw) for _ in range(60)]
    again = [changed(draw, d, 4) for d in docs]  # similarity about 0.93
    noise = [text(draw) for _ in range(60)]
    kept, report = run(part, noise + docs + again)
    missed = len(set(kept) & set(range(120, 180)))
    assert missed <= 1, f"{missed} of 60 near duplicates stayed"
    assert set(range(120)) <= set(kept), "a document went that has no earlier twin"
    assert report.sizes[2] >= 59


def test_rewrapped_and_recased_is_a_duplicate(part):
    draw = random.Random(3)
    a = text(draw)
    kept, _ = run(part, [a, a.replace(" ", "\n"), a.upper(), a.replace(" ", ", ")])
    assert kept == [0]


def test_candidates_are_verified(part):
    draw, docs = random.Random(4), []
    for _ in range(60):  # at 0.72 about 64 % of the pairs meet in a band
        a = text(draw, 104)
        docs += [a, changed(draw, a, 16)]
    for a, b in zip(docs[::2], docs[1::2], strict=True):
        assert 0.70 < jaccard(a, b) < 0.75
    kept, _ = run(part, docs, threshold=0.8)
    assert len(kept) == 120, f"{120 - len(kept)} documents went, similar to 0.72 only"
    kept, _ = run(part, docs, threshold=0.7)
    assert 70 <= len(kept) <= 95, f"{len(kept)} kept at threshold 0.7: about 82 are due"


def test_the_threshold_is_used(part):
    draw = random.Random(5)
    a = text(draw, 200)
    docs = [a, changed(draw, a, 10)]
    near = jaccard(*docs)
    assert 0.89 < near < 0.92
    assert run(part, docs, threshold=0.88)[0] == [0]
    assert run(part, docs, threshold=0.93)[0] == [0, 1], f"similar to {near:.3f} only"
    assert run(part, docs, threshold=near)[0] == [0], "at the threshold: a duplicate"
    for wrong in (0, -0.5, 1.01, 80):
        with pytest.raises(ValueError, match="threshold"):
            part(docs, threshold=wrong)


def test_a_cluster_is_what_pairs_connect(part):
    draw = random.Random(6)
    middle = text(draw, 120)
    left = changed(draw, middle, 7)
    found = middle.split()
    right = " ".join(draw_words(draw, 7) + found[7:])
    assert (
        jaccard(left, right) < 0.8 < min(jaccard(left, middle), jaccard(right, middle))
    )
    for docs in ([left, middle, right], [left, right, middle], [middle, right, left]):
        kept, report = run(part, docs)
        assert kept == [0], f"{report.clusters}: the middle connects both"
        assert report.clusters == {0: [0, 1, 2]}


def test_the_middle_connects_two_that_stood_before_it(part):
    draw, docs = random.Random(11), []
    for _ in range(12):  # so alike that all three meet in nearly every band
        middle = text(draw, 1000)
        right = " ".join(draw_words(draw, 4) + middle.split()[4:])
        docs += [changed(draw, middle, 4), right, middle]
    assert jaccard(docs[0], docs[1]) < 0.988 < jaccard(docs[0], docs[2])
    kept, _ = run(part, docs, threshold=0.988)
    assert kept == list(range(0, 36, 3)), "left and right stayed apart"


def test_the_order_changes_only_who_is_first(part):
    draw = random.Random(7)
    docs = []
    for _ in range(25):  # chains: the middle is like both ends, these not each other
        middle = text(draw)
        right = " ".join(draw_words(draw, 7) + middle.split()[7:])
        docs += [changed(draw, middle, 7), middle, right]
    docs += [text(draw) for _ in range(15)]

    def clusters(order):
        kept, report = run(part, [docs[i] for i in order])
        found = {frozenset(order[i] for i in g) for g in report.clusters.values()}
        return found | {frozenset([order[i]]) for i in kept if i not in report.clusters}

    usual = clusters(list(range(90)))
    for _ in range(3):
        assert clusters(draw.sample(range(90), 90)) == usual, "other clusters"


def test_different_short_documents_stay(part):
    docs = ["", "yes", "no", "Yes!", "yes no", "no yes", "a b c d", "a b c e", "?", "1",
            "yes", "no", "", "a b c d"]  # fmt: skip
    kept, report = run(part, docs)
    assert kept == list(range(10)), f"{report.clusters}"
    assert report.clusters == {0: [0, 12], 1: [1, 10], 2: [2, 11], 6: [6, 13]}


def test_a_shared_footer_is_no_duplicate(part):
    draw = random.Random(8)
    footer = text(draw, 60)
    docs = [text(draw, 60) + " " + footer for _ in range(200)]
    kept, _ = run(part, docs)
    assert len(kept) == 200, "half of the words in common is similarity 1/3"


def test_many_copies(part):
    draw = random.Random(9)
    a = text(draw)
    docs = [changed(draw, a, k % 3) for k in range(300)] + [a] * 300
    kept, report = run(part, docs)
    assert kept == [0]
    assert report.sizes == {600: 1}
    assert report.removed == 599


def test_the_list_is_left_alone(part):
    docs = ["b a", "a b", "b a"]
    part(docs)
    assert docs == ["b a", "a b", "b a"]
    assert part(tuple(docs))[0] == part(docs)[0]
