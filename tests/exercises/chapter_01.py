"""Graders of chapter 01's exercises, written together with its notebook."""

import math
import random
from collections import Counter
from itertools import pairwise


def _merged(ids, pair, new):
    ids, out = list(ids), []
    while ids:
        if tuple(ids[:2]) == tuple(pair):
            out.append(new)
            ids = ids[2:]
        else:
            out.append(ids.pop(0))
    return out


def exercise_1_1(answer):
    """The changes of the pair counts of one word."""
    got = answer([1, 2, 3], (1, 2), 9)
    want = {(1, 2): -1, (2, 3): -1, (9, 3): 1}
    assert got == want, f"1 2 3 becomes 9 3: the changes are {want}, not {got}"
    got = answer([1, 1, 1, 1], (1, 1), 9)
    assert got == {(1, 1): -3, (9, 9): 1}, f"1 1 1 1 becomes 9 9, not by {got}"
    got = answer([1, 2, 1, 2], (1, 2), 9)
    assert got == {(1, 2): -2, (2, 1): -1, (9, 9): 1}, f"two merges side by side: {got}"
    assert answer([3, 4], (1, 2), 9) == {}, "no such pair, no change"
    rng = random.Random(1)
    for _ in range(200):
        ids = rng.choices([1, 2, 3], k=rng.randint(1, 12))
        before, after = (
            Counter(pairwise(ids)),
            Counter(pairwise(_merged(ids, (1, 2), 9))),
        )
        after.subtract(before)
        want = {pair: n for pair, n in after.items() if n}
        got = answer(list(ids), (1, 2), 9)
        assert got == want, f"{ids}: the changes are {want}, not {got}"


def exercise_1_2(answer):
    """Encode one piece by rank."""
    tokens = [b"bc", b"ab", b"abc", b"aa", b"aaa", b"cab"]
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {token: 256 + i for i, token in enumerate(tokens)}
    for piece, want in (
        (b"abc", [b"abc"]),
        (b"ab", [b"ab"]),
        (b"aaa", [b"aaa"]),
        (b"aaaa", [b"aa", b"aa"]),
        (b"abcab", [b"abc", b"ab"]),
        (b"x", [b"x"]),
        (b"bcbc", [b"bc", b"bc"]),
        (b"cabc", [b"c", b"abc"]),
    ):
        got = answer(piece, ranks)
        expected = [ranks[token] for token in want]
        assert got == expected, f"{piece} is {want} = {expected}, not {got}"


def exercise_1_3(answer):
    """Padded rows and their bytes."""
    assert answer(50_257, 64, 3072) == (50_304, 47 * 3072 * 2 * 2), "GPT-2, two tables"
    assert answer(4096, 64, 192) == (4096, 0), "a multiple needs no padding"
    assert answer(4097, 128, 10, tables=1, bytes_per_number=4) == (4224, 127 * 10 * 4)


def exercise_1_4(answer):
    """Text that can be shown after each chunk."""
    assert answer(["é".encode()[:1], "é".encode()[1:] + b"a"]) == ["", "éa"]
    data = "naïve 漢字 🙂 end".encode()
    rng = random.Random(2)
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randint(1, 8)))
        chunks = [data[a:b] for a, b in pairwise([0, *cuts, len(data)])]
        got = answer(list(chunks))
        assert len(got) == len(chunks), "one text for each chunk, also an empty one"
        for i, shown in enumerate(got):
            whole = b"".join(chunks[: i + 1]).decode("utf-8", "ignore")
            so_far = "".join(got[: i + 1])
            assert so_far == whole, f"after {chunks[: i + 1]}: {shown!r}"


def exercise_1_5(answer):
    """Bits per byte."""
    assert math.isclose(answer(math.log(2), 1.0), 1.0), "ln 2 nats are one bit"
    assert math.isclose(answer(math.log(256), 1.0), 8.0), "a guess among 256 bytes"
    assert math.isclose(answer(2.0, 4.0), 0.5 / math.log(2)), "divide by the bytes"
