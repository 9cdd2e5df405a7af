"""Contract of the filters of pages: a module (or namespace) with `normalize`, the
filters `GopherQuality`, `GopherRepetition`, `C4Quality`, `FineWebQuality`, `Language`,
and `judge`, which applies them.

A filter made without arguments has the published thresholds; called with a text it
returns a reason (a non-empty str) to drop it, or None.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PART = "littlelm_core.curation"
NAMES = (
    "GopherQuality", "GopherRepetition", "C4Quality", "FineWebQuality", "Language",
)  # fmt: skip
STOPS = ("the", "of", "and", "to", "in", "is", "that", "it")


def word(draw, least=3, most=7):
    return "".join(draw.choices("abcdefghilmnoprstuvw", k=draw.randint(least, most)))


def sentence(draw, words=12):
    middle = [word(draw) if i % 3 else draw.choice(STOPS) for i in range(words)]
    return " ".join(middle).capitalize() + "."


def prose(seed=1, paragraphs=6):
    """English enough for every filter: nothing in it repeats."""
    draw = random.Random(seed)
    return "\n\n".join(
        " ".join(sentence(draw) for _ in range(4)) for _ in range(paragraphs)
    )


def words(count, width=5, seed=2):
    """Different words of one width, the first two "the" and "of"."""
    draw = random.Random(seed)
    found = dict.fromkeys(("the", "of"))
    while len(found) < count:
        found[word(draw, width, width)] = None
    return list(found)[:count]


def keeps(drop, text, what):
    reason = drop(text)
    assert reason is None, f"{what}: dropped ({reason})"


def drops(drop, text, what):
    reason = drop(text)
    assert isinstance(reason, str) and reason, f"{what}: kept (returned {reason!r})"  # noqa: PT018


def test_prose_passes_and_every_filter_has_a_name(part):
    for name in NAMES:
        made = getattr(part, name)()
        assert isinstance(made.name, str) and made.name  # noqa: PT018
        for seed in range(5):
            keeps(made, prose(seed), f"{name}, ordinary prose")


def test_nothing_and_one_word_are_no_trouble(part):
    for name in NAMES:
        for text in ("", " ", "\n", "\n\n \t\n", "word", "?!", "…", "\u3000", "12"):
            answer = getattr(part, name)()(text)
            assert answer is None or isinstance(answer, str), f"{name}({text!r})"
        drops(getattr(part, name)(), "\n \n", f"{name}, a blank text")


def test_normalize_gives_one_spelling(part):
    for before, after in (
        ("a\r\nb\rc", "a\nb\nc"),
        ("a\u2028b\x0bc\x0cd\x85e", "a\nb\nc\nd\ne"),
        ("cafe\u0301", "caf\u00e9"),
        ("a\u00a0b\u2003c\u3000d", "a b c d"),
        ("a\u200bb\ufeffc\u00add\x00e\x7ff", "abcdef"),
        ("a  \t\nb", "a\nb"),
        ("a\n\n\n \n\nb", "a\n\nb"),
        ("a\n\n\nb\n\nc", "a\n\nb\n\nc"),
        ("\n\na\n", "a"),
        ("    if x:\n\ty()", "    if x:\n\ty()"),  # indentation means something
        ("\ud800x", "\ufffdx"),
        ("x² ﬁ", "x² ﬁ"),  # NFC, not NFKC: meaning stays
        ("", ""),
        (" \r\n ", ""),
    ):
        got = part.normalize(before)
        assert got == after, f"{before!r} became {got!r}, not {after!r}"


def test_normalize_twice_is_once(part):
    odd = "\r\n\t \x0c\x1c\x85\xa0\u0301\u0345\u0344\u200b\u2000\u2028\ufeff\ud800"
    odd += "ae\u212b"

    @settings(max_examples=200, deadline=None)
    @given(st.one_of(st.text(), st.text(alphabet=odd)))
    def prove(text):
        once = part.normalize(text)
        assert part.normalize(once) == once, f"{text!r}: {once!r} changes again"
        once.encode("utf-8")

    for text in ("e\u200b\u0301", "a \u00ad\nb", "a\n\u200b\n\n\nb", "\ufeff\n a"):
        once = part.normalize(text)
        assert part.normalize(once) == once, f"{text!r}: {once!r} changes again"
    prove()


def test_gopher_counts_words(part):
    drop = part.GopherQuality()
    keeps(drop, " ".join(words(50)), "50 words")
    drops(drop, " ".join(words(49)), "49 words")
    drops(drop, " ".join(words(49)) + " --- !!! ...", "49 words and symbols")
    few = part.GopherQuality(max_words=100)
    keeps(few, " ".join(words(100)), "at most 100 words")
    drops(few, " ".join(words(101)), "101 words of at most 100")
    keeps(drop, " ".join(words(200)), "more than 100 words by default")


def test_gopher_measures_words(part):
    drop = part.GopherQuality()
    text = ["the", "and", *(w[:3] for w in words(100)[2:])]
    keeps(drop, " ".join(text), "a mean width of exactly 3")
    drops(drop, " ".join([*text[:-1], "ab"]), "a mean width below 3")
    text = ["the", "and", *("abcdefghij" for _ in range(97))]
    keeps(drop, " ".join([*text, "x" * 24]), "a mean width of exactly 10")
    drops(drop, " ".join([*text, "x" * 25]), "a mean width above 10")


def test_gopher_counts_symbols(part):
    drop = part.GopherQuality()
    text = words(100)

    def with_mark(count, before="", after=""):
        return " ".join([before + w + after for w in text[:count]] + text[count:])

    for before, after in (("#", ""), ("", "..."), ("", "…")):
        where = (text[2:] + text[:2]).index  # the stop words stay as they are
        assert where("the") > 50
        marked = [*text[2:], *text[:2]]
        ten, eleven = (
            " ".join([before + w + after for w in marked[:n]] + marked[n:])
            for n in (10, 11)
        )
        keeps(drop, ten, f"10 of {before + after} in 100 words")
        drops(drop, eleven, f"11 of {before + after} in 100 words")


def test_gopher_looks_at_lines(part):
    drop = part.GopherQuality()
    found = words(100)
    lines = [" ".join(found[k : k + 10]) for k in range(0, 100, 10)]
    for bullet in ("- ", "• ", "  - "):
        keeps(drop, "\n".join([bullet + s for s in lines[:9]] + lines[9:]), "9 of 10")
        drops(drop, "\n".join(bullet + s for s in lines), f"10 of 10 with {bullet!r}")
    for end in ("...", "…"):
        keeps(drop, "\n".join([s + end for s in lines[:3]] + lines[3:]), "3 of 10 cut")
        drops(drop, "\n".join([s + end for s in lines[:4]] + lines[4:]), "4 of 10 cut")


def test_gopher_wants_letters_and_english(part):
    drop = part.GopherQuality()
    found = words(100)
    number = [str(12345 + k) for k in range(30)]
    keeps(drop, " ".join(found[:80] + number[:20]), "80 of 100 words have a letter")
    drops(drop, " ".join(found[:79] + number[:21]), "79 of 100 words have a letter")
    plain = [w for w in words(110) if w not in ("the", "of")]
    keeps(drop, " ".join(["the", "have", *plain]), "two stop words")
    drops(drop, " ".join(["the", "the", "the", *plain]), "one stop word, three times")


def _top(found, n):
    grams = [" ".join(found[i : i + n]) for i in range(len(found) - n + 1)]
    counts = {}
    for gram in grams:
        counts[gram] = counts.get(gram, 0) + 1
    best = max(counts, key=counts.__getitem__)  # the first of the commonest
    return len(best) * counts[best]


def _repeated(found, n):
    seen, characters, i = set(), 0, 0
    while i + n <= len(found):
        gram = tuple(found[i : i + n])
        if gram in seen:
            characters += sum(map(len, gram))
            i += n
        else:
            seen.add(gram)
            i += 1
    return characters


def test_gopher_measures_repeated_n_grams(part):
    draw = random.Random(5)
    for case in range(40):
        vocabulary = [word(draw, 1, 9) for _ in range(draw.choice((2, 5, 30)))]
        found = draw.choices(vocabulary, k=draw.choice((12, 40, 150)))
        for _ in range(draw.randint(0, 3)):  # longer repeats than chance makes
            at = draw.randrange(len(found))
            found += found[at : at + 14]
        text = " ".join(found)
        for kind, n in [("top", n) for n in (2, 3, 4)] + [
            ("repeated", n) for n in range(5, 11)
        ]:
            want = (_top if kind == "top" else _repeated)(found, n) / len(text)
            for factor, keep in ((0.999, False), (1.001, True)):
                if want == 0 and not keep:
                    continue
                rules = {"top": (), "repeated": (), "parts": (1.0, 1.0)}
                rules[kind] = ((n, want * factor + (1e-9 if keep else 0)),)
                reason = part.GopherRepetition(**rules)(text)
                assert (reason is None) == keep, (
                    f"case {case}: {kind} {n}-grams have {want:.4f} of the characters, "
                    f"limit {want * factor:.4f}: {reason or 'kept'}"
                )


def test_gopher_thresholds_are_those_of_the_paper(part):
    made = part.GopherRepetition()
    assert dict(made.top) == {2: 0.20, 3: 0.18, 4: 0.16}
    assert dict(made.repeated) == {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}
    assert tuple(made.parts) == (0.30, 0.20), "shares of parts, of their characters"


def test_gopher_finds_repeated_lines_and_paragraphs(part):
    drop, draw = part.GopherRepetition(top=(), repeated=()), random.Random(6)
    page = ["\n".join(sentence(draw) for _ in range(5)) for _ in range(7)]
    short = "One more short line."
    keeps(drop, "\n\n".join([*page[:6], *[short] * 4]), "3 of 10 paragraphs again")
    drops(drop, "\n\n".join([*page[:6], *[short] * 5]), "4 of 11 paragraphs again")
    lines = [sentence(draw) for _ in range(20)]
    keeps(drop, "\n".join([*lines[:6], *[short] * 4]), "3 of 10 lines again")
    drops(drop, "\n".join([*lines[:6], *[short] * 5]), "4 of 11 lines again")
    lengthy = " ".join(sentence(draw) for _ in range(3))
    drops(
        drop, "\n".join([*lines[:10], *[lengthy] * 3]), "40 % of the characters again"
    )


def test_c4_keeps_lines_that_are_sentences(part):
    made = part.C4Quality()
    lines = [f"This is line {name} of five." for name in "abcde"]
    junk = (
        "No end here",
        "Two words.",
        "Cut in the middle of...",
        "Please turn on JavaScript to see this page.",
        "By reading on you accept our Privacy Policy.",
        "This site uses cookies to know you.",
        "x" * 1001 + " is an endless word.",
    )
    keeps(made, "\n".join(lines), "five sentences")
    for line in junk:
        text = "\n".join([*lines[:2], line, *lines[2:]])
        keeps(made, text, f"five sentences and {line[:40]!r}")
        assert made.clean(text) == "\n".join(lines), f"{line[:40]!r} stayed"
        drops(made, "\n".join([*lines[:4], line]), f"four sentences and {line[:40]!r}")
    assert made.clean("So it was found.[12][edit]") == "So it was found."
    keeps(made, " ".join(lines), "five sentences in one line")
    drops(made, "\n".join(lines[:4]), "four sentences")


def test_c4_drops_code_and_filler(part):
    lines = [f"This is line {name} of six." for name in "abcdef"]
    for line in ("Lorem ipsum dolor sit amet.", "A { opens here and ends there."):
        drops(part.C4Quality(), "\n".join([*lines, line]), line)


def test_fineweb_looks_at_lines(part):
    drop, draw = part.FineWebQuality(), random.Random(8)
    ends = [sentence(draw, 30) for _ in range(100)]
    open_ = [line[:-1] for line in ends]
    keeps(drop, "\n".join(ends[:12] + open_[12:]), "12 of 100 lines end")
    drops(drop, "\n".join(ends[:11] + open_[11:]), "11 of 100 lines end")
    japanese = ["これは" + word(draw, 30, 30) + " a b c d e。" for _ in range(5)]
    keeps(drop, "\n".join(japanese), "lines that end in 。")

    def short(count, width):
        lines = [f"{k:02} " + "a b " * 7 + "." for k in range(count)]
        lines = [line[: width - 1].ljust(width - 1, "x") + "." for line in lines]
        return "\n".join([*lines, *ends[: 100 - count]])

    keeps(drop, short(67, 30), "67 of 100 lines have 30 characters")
    drops(drop, short(68, 30), "68 of 100 lines have 30 characters")
    keeps(drop, short(68, 31), "68 of 100 lines have 31 characters")


def test_fineweb_finds_repeats_and_lists(part):
    drop, draw = part.FineWebQuality(), random.Random(9)
    lines = [sentence(draw, 30) for _ in range(60)]
    keeps(drop, "\n".join([*lines, "A small line.", "A small line."]), "0.1 % again")
    drops(drop, "\n".join([*lines, lines[0]]), "1.6 % of the characters again")
    three = [word(draw, 9, 9) + " ab is-this-not-a-long-line." for _ in range(40)]
    drops(drop, "\n".join(three), "a line end for every third word")
    four = [word(draw, 9, 9) + " ab is not-quite-so-long-here." for _ in range(40)]
    keeps(drop, "\n".join(four), "a line end for every fourth word")


TEXTS = {
    "en": "It is a truth that a man in want of a house must be in want of the money "
    "for it, and that the rest of us are of no use to him at all.",
    "de": "Es ist eine Wahrheit, die man überall kennt, dass ein Mann mit Geld auch "
    "eine Frau sucht, und dass ihm das nicht von selbst gelingt.",
    "fr": "C'est une vérité que tout le monde connaît : un homme qui a de la fortune "
    "est dans la nécessité de chercher une femme pour sa maison.",
    "es": "Es una verdad que todo el mundo conoce que un hombre con una buena fortuna "
    "necesita una mujer para la casa, y los vecinos lo saben.",
    "it": "È una verità nota a tutti che un uomo con una bella fortuna cerca una "
    "moglie per la casa, e non sono pochi i vicini che lo sanno.",
    "nl": "Het is een waarheid die iedereen kent dat een man met geld op zoek is naar "
    "een vrouw voor het huis, en dat de buren er van weten.",
    "pt": "É uma verdade que todo o mundo conhece que um homem com uma boa fortuna "
    "procura uma mulher para a casa, e os vizinhos não o esquecem.",
}


def test_language_keeps_the_one_asked_for(part):
    for code, text in TEXTS.items():
        assert part.language(text)[0] == code, f"{part.language(text)}: {text}"
        for keep in TEXTS:
            made = part.Language(keep=keep)
            says = keeps if keep == code else drops
            says(made, text, f"{keep} asked, {code} given")
    drops(part.Language(), "Это правда, которую знает весь мир.", "Russian")
    drops(part.Language(), "total 3 of 57 99 12 14 km 3 78 m 4 x", "hardly any words")
    assert part.language("") == ("unknown", 0.0)


def test_judge_names_the_first_filter_that_drops(part):
    class Says:
        def __init__(self, name, reason):
            self.name, self.reason, self.calls = name, reason, 0

        def __call__(self, text):
            self.calls += 1
            return self.reason

    one, two, three = Says("one", None), Says("two", "bad"), Says("three", "worse")
    assert part.judge("x", [one, two, three]) == "two: bad"
    assert (one.calls, two.calls, three.calls) == (1, 1, 0), "it goes on after a drop"
    assert part.judge("x", [one]) is None
    assert part.judge("x", []) is None


def test_filters_share_words_and_agree_with_plain_text(part):
    texts = [prose(3), "\n".join(["- a b"] * 60), "word " * 300, TEXTS["de"] * 3]
    for text in texts:
        filters = [getattr(part, name)() for name in NAMES]
        for drop in filters:
            alone = drop(text)
            assert drop(text) == alone, "the second call says something else"
        first = next((f"{f.name}: {f(text)}" for f in filters if f(text)), None)
        assert part.judge(text, filters) == first


def test_no_filter_is_quadratic(part):
    # Long runs that make a careless regular expression look back again and again.
    for text in (" " * 200_000 + "x", "\n" * 200_000, "a " * 50_000, "." * 200_000):
        part.normalize(text)
        for name in NAMES:
            getattr(part, name)()(text)


def test_thresholds_that_are_given_are_used(part):
    text = " ".join(words(30))
    keeps(part.GopherQuality(min_words=30), text, "30 words of at least 30")
    drops(part.GopherQuality(min_words=31), text, "30 words of at least 31")
    with pytest.raises((AttributeError, TypeError)):
        part.GopherQuality().min_words = 3
