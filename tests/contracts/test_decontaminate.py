"""Contract of decontamination: a function `decontaminate(docs, items, ngram=13,
threshold=0.5, shortest=8)` that returns hits, sorted by document and item.

A hit has `document` and `item`, both indices, and `share`, the share of the item's
different runs of `ngram` normalised words that the document contains; it is a hit from
`threshold` on. An item of shortest ... ngram - 1 words is one run; a shorter one is
never found.
"""

import random

import pytest

PART = "littlelm_core.curation:decontaminate"


def text(draw, count):
    return " ".join("".join(draw.choices("abcdefghij", k=6)) for _ in range(count))


def found(part, docs, items, **keys):
    return [(hit.document, hit.item) for hit in part(docs, items, **keys)]


def page(draw, inside, before=300, after=300):
    return f"{text(draw, before)} {inside} {text(draw, after)}"


def test_an_item_is_found_in_whatever_shape(part):
    draw = random.Random(1)
    item = text(draw, 30)
    shapes = {
        "verbatim": item,
        "re-wrapped": item.replace(" ", "\n", 7).replace(" ", "  "),
        "re-cased": item.upper(),
        "titled": item.title(),
        "with marks": "“" + item.replace(" ", ", ") + "”!",
        "in a long page": page(draw, item, 5000, 5000),
        "at the start": item + " " + text(draw, 50),
        "at the end": text(draw, 50) + " " + item,
        "numbered": page(draw, "1. " + item + " (a)"),
    }
    for shape, doc in shapes.items():
        hits = part([text(draw, 100), doc], [item])
        assert [(h.document, h.item) for h in hits] == [(1, 0)], f"{shape}: {hits}"
        assert hits[0].share == 1.0, shape


def test_hits_carry_the_index(part):
    draw = random.Random(2)
    items = [text(draw, 20) for _ in range(5)]
    docs = [text(draw, 60) for _ in range(2500)]
    want = [(3, 4), (999, 0), (1000, 1), (1000, 2), (2047, 0), (2499, 3)]
    for document, item in want:
        docs[document] = page(draw, items[item], 5, 5) + " " + docs[document]
    assert found(part, docs, items) == want


def test_a_stock_phrase_is_no_hit(part):
    draw = random.Random(3)
    phrase = text(draw, 14)
    item = f"{text(draw, 20)} {phrase} {text(draw, 20)}"
    assert found(part, [page(draw, phrase)], [item]) == [], "2 of 42 runs"
    twelve = " ".join(item.split()[:12])
    assert found(part, [page(draw, twelve)], [item]) == [], "12 words are no run of 13"
    short = "which of these is right"
    assert found(part, [page(draw, short)], [short]) == [], "five words prove nothing"


def test_the_threshold_is_used(part):
    draw = random.Random(4)
    words = text(draw, 52).split()  # 40 runs of 13
    for count, runs in ((32, 20), (33, 21), (20, 8), (48, 36)):
        doc = page(draw, " ".join(words[:count]))
        (hit,) = part([doc], [" ".join(words)], threshold=0.01)
        assert hit.share == pytest.approx(runs / 40), f"{count} of 52 words"
        at, above = runs / 40, runs / 40 + 0.01
        assert found(part, [doc], [" ".join(words)], threshold=at) == [(0, 0)]
        assert found(part, [doc], [" ".join(words)], threshold=above) == []
    half = page(draw, " ".join(words[:32]))
    assert found(part, [half], [" ".join(words)]) == [(0, 0)], "half by default"
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="threshold"):
            part(["a"], ["b"], threshold=wrong)


def test_a_repeated_run_counts_once(part):
    draw = random.Random(5)
    words = text(draw, 40).split()
    start = " ".join(words[:13])
    doc = " and ".join(page(draw, start, 20, 20) for _ in range(30))
    assert found(part, [doc], [" ".join(words)]) == [], "1 of 28 runs, thirty times"


def test_short_items_are_found_whole(part):
    draw = random.Random(6)
    for count in (8, 10, 12, 13):
        item = text(draw, count)
        assert found(part, [page(draw, item.upper())], [item]) == [(0, 0)], count
        most = " ".join(item.split()[:-1])
        assert found(part, [page(draw, most)], [item]) == [], f"{count - 1} of {count}"
    seven = text(draw, 7)
    assert found(part, [page(draw, seven)], [seven]) == [], "shorter than shortest"
    assert found(part, [page(draw, seven)], [seven], shortest=7) == [(0, 0)]
    for wrong in (0, 14):
        with pytest.raises(ValueError, match="shortest"):
            part(["a"], ["b"], shortest=wrong)


def test_the_length_of_a_run_is_used(part):
    draw = random.Random(7)
    words = text(draw, 40).split()
    doc = page(draw, " ".join(words[:10]) + " x " + " ".join(words[11:21]))
    assert found(part, [doc], [" ".join(words)], threshold=0.01) == []
    item = [" ".join(words)]
    (hit,) = part([doc], item, ngram=8, shortest=8, threshold=0.01)
    assert hit.share == pytest.approx(6 / 33), "two times three runs of 8, of 33"


def test_order_and_borders_count(part):
    draw = random.Random(8)
    item = text(draw, 26)
    words = item.split()
    shuffled = " ".join(draw.sample(words, 26))
    assert found(part, [shuffled], [item]) == [], "the words in another order"
    docs = [text(draw, 30) + " " + " ".join(words[:13]), " ".join(words[13:])]
    hits = part(docs, [item], threshold=0.01)
    assert [(h.document, h.share) for h in hits] == [(0, 1 / 14), (1, 1 / 14)], (
        "runs must not cross from one document into the next"
    )
    inner = item.replace(words[9], words[9] + "x").replace(words[18], "x" + words[18])
    assert found(part, [inner], [item]) == [], "a word is a whole word"


def test_several_items_and_documents(part):
    draw = random.Random(9)
    a, b = text(draw, 15), text(draw, 11)
    docs = [page(draw, a) + " " + b, b, a, "nothing"]
    assert found(part, docs, [a, b, a]) == [
        (0, 0), (0, 1), (0, 2), (1, 1), (2, 0), (2, 2),
    ]  # fmt: skip


def test_nothing_is_found_in_nothing(part):
    draw = random.Random(10)
    item = text(draw, 20)
    assert found(part, [], [item]) == []
    assert found(part, [item], []) == []
    assert found(part, ["", "?!", item], ["", " ", "...", item]) == [(2, 3)]
    assert found(part, ["", " \n"], [item]) == []
