"""mini CORE: true answers, the real files' formats, and not one of their sentences."""

import json
import re
from collections import Counter
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from mini_core_puzzles import PUZZLES

from littlelm_core.ingest.core_table import core_yaml

FOLDER = Path(__file__).parents[2] / "data" / "mini_core"
REAL = Path(__file__).parents[3] / "shared" / "core"
needs_real = pytest.mark.skipif(
    not (REAL / "core.yaml").is_file(), reason="the real files are not here"
)

TABLE = yaml.safe_load((FOLDER / "core.yaml").read_text("utf-8"))
TASKS = {row["dataset_uri"].removesuffix(".jsonl"): row for row in TABLE["icl_tasks"]}
FIELDS = {
    "multiple_choice": {"query", "choices", "gold"},
    "schema": {"context_options", "continuation", "gold"},
    "language_modeling": {"context", "continuation"},
}
PLAIN = ("arc_easy", "arc_challenge", "openbook_qa", "copa", "piqa", "hellaswag")

# What surrounds an item's own words. (?s:.) is any character, line ends included.
COQA = (
    "Below is a story followed by a series of related questions. Please answer the "
    "final question by referring to the story and the previous questions.\n"
)
DYCK = (
    "Complete the rest of the sequence, making sure that the parentheses are closed "
    "properly. \n\n"
)
MATCHED = "Determine whether the given sequence of parentheses is properly matched.\n\n"
LCS = "Given two strings, determine the length of the longest common subsequence.\n\n"
OPERATOR = "Given the definition of the op operator, compute the result.\n"
LANGUAGE = "Given a sentence, select the correct language among the choices\n"
LENGTH = "Length of longest common subsequence:"
SAYINGS = (COQA, DYCK, MATCHED, LCS, LENGTH, OPERATOR, LANGUAGE)
LETTERS = r"A\. .+\nB\. .+\nC\. .+\nD\. .+\nAnswer:"
FORMATS = {
    "arc_easy": r"Question: (?s:.)+\S",
    "arc_challenge": r"Question: (?s:.)+\S",
    "commonsense_qa": r"Question: .+\nChoices:\n" + LETTERS,
    "openbook_qa": r".+\S",
    "copa": r".+, (because|therefore)",
    "piqa": r"Question: .+\n",
    "hellaswag": r"[^:]+: .+\S",
    "agi_eval_lsat_ar": r"Passage: .+\nQ: .+\nChoices:\n"
    + LETTERS.replace(r"\.", r"\.\)"),
    "boolq": r"Passage: .+\nQuestion: [^A-Z]+\?",
    "bigbench_language_identification": LANGUAGE + r"Sentence: .+\n" + LETTERS + " ",
    "jeopardy": "(LITERATURE|SCIENCE|AMERICAN HISTORY|WORLD HISTORY|WORD ORIGINS): .+",
    "bigbench_qa_wikidata": r".+ .*\w",
    "bigbench_dyck_languages": DYCK + r"Input: [][(){}<> ]+\nOutput:",
    "bigbench_cs_algorithms": MATCHED
    + r"Sequence: [][(){} ]+\nValid/Invalid\?|"
    + LCS
    + r"Strings: [A-Z]+ [A-Z]+\n"
    + LENGTH,
    "bigbench_operators": OPERATOR + r".+\..*\n.*op.* =",
    "bigbench_repeat_copy_logic": r"repeat with logic:\n\nQ: .+\nA:",
    "squad": r"Context: (?s:.)+\nQuestion: .+\nAnswer: ",
    "coqa": re.escape(COQA)
    + r"Story: (?s:.)+?\n"
    + r"(Preceding questions:\n(Question: .+\nAnswer: .+\n)+)?"
    + r"\nFinal question:\nQuestion: .+\nAnswer: ",
}
CLOSE = {"(": ")", "[": "]", "{": "}", "<": ">"}


def read(folder, name):
    with (folder / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


MINI = {name: read(FOLDER, name) for name in TASKS}


def question(record):
    return record.get("query", record.get("context"))


def options(record):
    """Return the texts to choose from; where the choices are letters, their texts."""
    if "context_options" in record or "choices" not in record:
        return record.get("context_options", [])
    if record["choices"] == ["A", "B", "C", "D"]:
        return re.findall(r"^[A-D]\.\)? (.+)$", record["query"], re.M)
    return record["choices"]


def answer(record):
    if "gold" in record:
        return options(record)[record["gold"]]
    return record["continuation"]


# The table and the files.


def test_the_table_calls_itself_mini_core_and_names_every_file_here():
    assert TABLE["name"] == "mini CORE"
    assert len(TABLE["icl_tasks"]) == 22
    assert len(TASKS) == 21  # both hellaswag tasks read one file
    files = {path.name for path in FOLDER.iterdir()} - {"core.yaml", "README.md"}
    assert files == {f"{name}.jsonl" for name in TASKS}
    for row in TABLE["icl_tasks"]:
        assert "git_blob_sha1" not in row  # these are not the published files
        assert row["num_examples"] == 12 == len(MINI[row["dataset_uri"][:-6]])
        assert row["num_fewshot"][0] < row["num_examples"] - 1


def test_the_settings_are_those_of_the_real_table():
    real = yaml.safe_load(core_yaml())["icl_tasks"]  # itself tested against the file
    left_out = {"git_blob_sha1", "num_examples"}
    assert [
        {key: value for key, value in row.items() if key != "num_examples"}
        for row in TABLE["icl_tasks"]
    ] == [
        {key: value for key, value in row.items() if key not in left_out}
        for row in real
    ]


def test_the_readme_says_that_it_is_not_core():
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert "is not CORE" in readme
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 150_000


@pytest.mark.parametrize("name", TASKS)
def test_records_are_whole(name):
    fields = FIELDS[TASKS[name]["icl_task_type"]]
    for record in MINI[name]:
        assert set(record) - {"category"} == fields
        assert ("category" in record) == (name == "jeopardy")
        texts = [*options(record), answer(record), *filter(None, [question(record)])]
        assert all(isinstance(text, str) and text.strip() for text in texts)
        assert "continuation" not in record or (
            record["continuation"] == record["continuation"].strip()
        )
    assert len({json.dumps(record) for record in MINI[name]}) == 12


@pytest.mark.parametrize(
    "name", [n for n in TASKS if TASKS[n]["icl_task_type"] != "language_modeling"]
)
def test_the_right_answer_stands_everywhere_equally_often(name):
    seen = Counter(record["gold"] for record in MINI[name])
    if name == "boolq":  # as in the real file most answers are yes: the baseline of 62
        assert seen == {0: 5, 1: 7}
    else:
        places = len(options(MINI[name][0]))
        assert seen == dict.fromkeys(range(places), 12 // places)


@pytest.mark.parametrize("name", FORMATS)
def test_the_words_around_an_item_are_those_of_the_task(name):
    for record in MINI[name]:
        assert re.fullmatch(FORMATS[name], question(record)), question(record)


@needs_real
@pytest.mark.parametrize("name", TASKS)
def test_the_formats_are_those_of_the_real_files(name):
    real, mini = read(REAL, name), MINI[name]
    assert {frozenset(r) for r in real} == {frozenset(r) for r in mini}
    assert {len(options(r)) for r in real} == {len(options(r)) for r in mini}
    letters = [{tuple(r.get("choices", "")) for r in rs} for rs in (real, mini)]
    if name not in PLAIN:
        assert letters[0] == letters[1]
    if name in FORMATS:
        fits = [re.fullmatch(FORMATS[name], question(r)) for r in real[::7]]
        assert sum(map(bool, fits)) >= 0.97 * len(fits)


def test_schema_options_differ_in_who_is_meant_and_not_before():
    for record in MINI["winograd"] + MINI["winogrande"]:
        pair = [option.split() for option in record["context_options"]]
        same = takewhile(lambda words: words[0] == words[1], zip(*pair, strict=False))
        start = len(list(same))
        for words in pair:
            meant = " ".join(words[start:]).lower()
            assert 1 <= len(words) - start <= 2
            assert meant in " ".join(words[:start]).lower(), record


# Places where real files are odd; each is here once so that it is met offline.


def test_one_piqa_choice_begins_with_the_other():
    begins = [
        (longer.startswith(shorter), record["choices"].index(shorter), record["gold"])
        for record in MINI["piqa"]
        for shorter, longer in [sorted(record["choices"], key=len)]
    ]
    # It stands first and is wrong: a score of NaN that wins shows in the accuracy.
    assert [row for row in begins if row[0]] == [(True, 0, 1)]


def test_one_arc_item_has_a_wrong_choice_twice_and_no_other_item_any():
    twice = [
        (name, record["gold"], Counter(record["choices"]).most_common(1)[0])
        for name, records in MINI.items()
        for record in records
        if "choices" in record and len(set(record["choices"])) < len(record["choices"])
    ]
    assert [(name, count) for name, _, (_, count) in twice] == [("arc_challenge", 2)]
    record = next(r for r in MINI["arc_challenge"] if len(set(r["choices"])) == 3)
    assert record["choices"].count(answer(record)) == 1


def test_odd_blanks():
    assert [r["context"][-2:] for r in MINI["lambada_openai"]].count("  ") == 1
    choices = [c for record in MINI["hellaswag"] for c in record["choices"]]
    spaced = sum(choice.startswith(" ") for choice in choices)
    assert 0 < spaced < len(choices)
    assert any(
        len({choice[0] == " " for choice in record["choices"]}) == 2
        for record in MINI["hellaswag"]
    )
    assert [record["continuation"] for record in MINI["winograd"]].count(".") == 1


# Answers that can be worked out.


def rest_of(sequence):
    """Return what closes a sequence of brackets; None where one is closed wrongly."""
    waiting = []
    for mark in sequence.split():
        if mark in CLOSE:
            waiting.append(CLOSE[mark])
        elif not waiting or waiting.pop() != mark:
            return None
    return " ".join(reversed(waiting))


def common(one, other):
    """Return the length of the longest common subsequence, from its definition."""
    if not one or not other:
        return 0
    if one[0] == other[0]:
        return 1 + common(one[1:], other[1:])
    return max(common(one[1:], other), common(one, other[1:]))


def test_brackets_are_closed():
    for record in MINI["bigbench_dyck_languages"]:
        sequence = re.search("Input: (.+)\n", record["context"])[1]
        assert rest_of(sequence) == record["continuation"]


def test_algorithms():
    seen = Counter()
    for record in MINI["bigbench_cs_algorithms"]:
        if found := re.search("Strings: (.+) (.+)\n", record["context"]):
            assert str(common(*found.groups())) == record["continuation"]
            seen["strings"] += 1
        else:
            sequence = re.search("Sequence: (.+)\n", record["context"])[1]
            valid = "Valid" if rest_of(sequence) == "" else "Invalid"
            assert valid == record["continuation"]
            seen[valid] += 1
    assert seen == {"strings": 6, "Valid": 3, "Invalid": 3}


OPERATORS = {
    "i op j is twice i plus j.": lambda i, j: 2 * i + j,
    "op i is 1 less than the square of i.": lambda i: i * i - 1,
    "i op j is the number of whole numbers strictly between i and j.": lambda i, j: len(
        range(i + 1, j)
    ),
    "op i j k is the middle one when i, j and k are sorted.": lambda *n: sorted(n)[1],
    "op i is the number of digits of i.": lambda i: len(str(i)),
    "op i adds up the digits of i.": lambda i: sum(map(int, str(i))),
    "i op j is three times i minus j.": lambda i, j: 3 * i - j,
    "op n1 n2 ... nn counts the even numbers in the list.": lambda *n: sum(
        number % 2 == 0 for number in n
    ),
    "op n1 n2 ... nn is the gap between the largest and the smallest number in the "
    "list.": lambda *n: max(n) - min(n),
    "op i swaps the first and the last digit of i.": lambda i: (
        f"{i}"[-1] + f"{i}"[1:-1] + f"{i}"[0]
    ),
    "op i is i plus its own last digit.": lambda i: i + i % 10,
    "i op j tells how often the digit j occurs in i.": lambda i, j: str(i).count(
        str(j)
    ),
}


def test_operators():
    def value(text):
        while "(" in text:
            text = re.sub(r"\(([^()]*)\)", lambda found: value(found[1]), text)
        return str(function(*map(int, re.findall(r"\d+", text))))

    records = MINI["bigbench_operators"]
    lines = [record["context"].split("\n") for record in records]
    assert [definition for _, definition, _ in lines] == list(OPERATORS)
    for record, (_, definition, expression) in zip(records, lines, strict=True):
        function = OPERATORS[definition]
        assert value(expression) == record["continuation"], expression


APPLES = ["green apple"] * 3
NUMBERS = ["one", "two", "three", "four", "five"]
COPIES = {
    "say moon four times": ["moon"] * 4,
    "Repeat green apple three times, with pear between the first and the second": [
        *APPLES[:1],
        "pear",
        *APPLES[1:],
    ],
    "Say tick and then tock, and do this three times": ["tick", "tock"] * 3,
    "Count the letters in cat and say meow that often": ["meow"] * len("cat"),
    "say the numbers one two three four five but leave out three": [
        number for number in NUMBERS if number != "three"
    ],
    "repeat hello five times, but replace the last one with goodbye": [
        *["hello"] * 4,
        "goodbye",
    ],
    "Say the letters a b c d from last to first, twice": list("abcd")[::-1] * 2,
    "say left, then right, then left again, and do it all once more": [
        "left" if place % 3 != 1 else "right" for place in range(6)
    ],
    "Say snow five times, with flake in front of the last one": [
        *["snow"] * 4,
        "flake",
        "snow",
    ],
    "Repeat the first word of paper boats float three times": ["paper"] * 3,
    "Say south twice, and say north before each south": ["north", "south"] * 2,
    "Ten socks lie in pairs. Say fold for each pair": ["fold"] * (10 // 2),
}


def test_repeat_and_copy():
    records = MINI["bigbench_repeat_copy_logic"]
    assert {
        re.search("Q: (.+)\n", record["context"])[1]: record["continuation"]
        for record in records
    } == {text: " ".join(words) for text, words in COPIES.items()}


@pytest.mark.parametrize("place", range(12))
def test_each_puzzle_has_one_right_answer_over_all_arrangements(place):
    puzzle, record = PUZZLES[place], MINI["agi_eval_lsat_ar"][place]
    assert record["query"] == puzzle.query()
    assert puzzle.left()
    assert puzzle.right() == [record["gold"]]
    for rule in puzzle.rules.values():  # each of them says something
        assert not all(rule(arrangement) for arrangement in puzzle.arrangements)


# Small words that a sentence in one of the languages has and the others lack.
WORDS = {
    "French": "le sous de la",
    "German": "wir mit dem die",
    "Spanish": "mi y en el su",
    "Italian": "al per il le",
    "Portuguese": "a minha não mas muito",
    "Dutch": "het langs de naar",
    "Swedish": "sin bakom det",
    "Polish": "wieczorem w",
    "Finnish": "koko vaikka",
    "Turkish": "her bir",
    "Russian": "и на",
    "Greek": "το στη",
}


def test_sentences_are_in_the_language_that_is_said():
    answers = []
    for record in MINI["bigbench_language_identification"]:
        sentence = re.search("Sentence: (.+)\n", record["query"])[1]
        has = set(re.findall(r"\w+", sentence.lower()))
        hits = {name: len(has & set(words.split())) for name, words in WORDS.items()}
        answers.append(max(hits, key=hits.get))
        assert answers[-1] == answer(record)
        assert sorted(hits.values())[-2] < max(hits.values())
    assert set(answers) == set(WORDS)


def test_what_is_asked_for_stands_in_the_text():
    for record in MINI["squad"]:
        passage = record["context"].split("\nQuestion: ")[0]
        assert record["continuation"] in passage, record["continuation"]
    for record in MINI["lambada_openai"]:
        words = re.findall(r"\w+", record["context"])
        assert record["continuation"] in words, record["continuation"]


def test_questions_about_a_story_grow():
    asked, story = "", None
    stories = []
    for record in MINI["coqa"]:
        head, final = record["context"].split("\nFinal question:\n")
        text, _, before = head.partition("\nPreceding questions:\n")
        if text.rstrip("\n") != story:
            asked, story = "", text.rstrip("\n")
            stories.append(story)
        assert before == asked
        asked += f"{final}{record['continuation']}\n"
    assert len(stories) == len(set(stories)) == 3


# Nothing of the real files.


def runs(records, length=8):
    """Return every run of so many words in a line, and every whole line of 4 to 7."""
    lines = set()
    for record in records:
        texts = [question(record) or "", *options(record)]
        if "context_options" in record:
            texts.append(record["continuation"])
        for text in texts:
            for saying in SAYINGS:
                text = text.replace(saying, "")
            lines.update(text.lower().split("\n"))
    found = set()
    for line in lines:
        words = re.findall(r"\w+", re.sub(r"^([a-d]\.\)?|\w+:) ", "", line))
        if 4 <= len(words) < length:
            found.add(tuple(words))
        starts = range(len(words) - length + 1)
        found.update(tuple(words[start : start + length]) for start in starts)
    return found


@needs_real
@pytest.mark.parametrize("name", TASKS)
def test_nothing_is_taken_from_the_real_files(name):
    real = read(REAL, name)
    ours = set().union(*map(runs, MINI.values()))
    assert not ours & runs(real)
    texts = {question(record) for record in real} - {None}
    assert not texts & {question(record) for record in MINI[name]}
    if name != "boolq":
        choices = {frozenset(options(record)) for record in real} - {frozenset()}
        assert not choices & {frozenset(options(record)) for record in MINI[name]}
