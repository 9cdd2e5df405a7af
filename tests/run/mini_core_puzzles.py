"""mini CORE's logic puzzles, each sentence beside its meaning, for test_mini_core.py.

The order is that of the file; the texts here and there must agree word for word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, permutations, product

Rule = Callable[[dict], bool]


@dataclass(frozen=True)
class Puzzle:
    """What is arranged, the rules of the passage, and what each choice claims.

    `condition` is the "if" of a question. `mode` says how the right choice differs:
    it holds in every arrangement left ("must"), in some ("could"), in none ("cannot").
    """

    intro: str
    arrangements: list[dict]
    rules: dict[str, Rule]
    question: str
    mode: str
    choices: dict[str, Rule]
    condition: Rule = lambda s: True

    def query(self) -> str:
        letters = zip("ABCD", self.choices, strict=True)
        choices = "".join(f"{letter}.) {text}\n" for letter, text in letters)
        passage = " ".join([self.intro, *self.rules])
        return f"Passage: {passage}\nQ: {self.question}\nChoices:\n{choices}Answer:"

    def left(self) -> list[dict]:
        """Return the arrangements that all rules and the condition allow."""
        rules = [*self.rules.values(), self.condition]
        return [s for s in self.arrangements if all(rule(s) for rule in rules)]

    def right(self) -> list[int]:
        """Return the places of the choices that answer the question."""
        judge = {"must": all, "could": any, "cannot": lambda holds: not any(holds)}
        left = self.left()
        return [
            place
            for place, claim in enumerate(self.choices.values())
            if judge[self.mode]([claim(s) for s in left])
        ]


def orders(*names: str, places: int | None = None) -> list[dict]:
    """Return every way to give each name a place of its own, counted from 1."""
    every = range(1, (places or len(names)) + 1)
    return [
        dict(zip(names, chosen, strict=True))
        for chosen in permutations(every, len(names))
    ]


def groups(*names: str, size: int) -> list[dict]:
    """Return every choice of `size` names: True for a chosen name."""
    return [{n: n in chosen for n in names} for chosen in combinations(names, size)]


def exactly(*names: str) -> Rule:
    """Return the claim that these names and no others are chosen."""
    return lambda s: {n for n, chosen in s.items() if chosen} == set(names)


def neighbors(one: int, other: int) -> bool:
    return abs(one - other) == 1


PUZZLES = [
    Puzzle(
        "Four friends, Ada, Ben, Cleo, and Dan, stand in a line one behind another.",
        orders("Ada", "Ben", "Cleo", "Dan"),
        {
            "Ada is directly in front of Ben.": lambda s: s["Ada"] + 1 == s["Ben"],
            "Cleo is not first in the line.": lambda s: s["Cleo"] != 1,
            "Dan is somewhere behind Ben.": lambda s: s["Dan"] > s["Ben"],
        },
        "Which statement must be true?",
        "must",
        {
            "Dan is last in the line.": lambda s: s["Dan"] == 4,
            "Cleo is directly behind Ben.": lambda s: s["Cleo"] == s["Ben"] + 1,
            "Ada is first in the line.": lambda s: s["Ada"] == 1,
            "Cleo is last in the line.": lambda s: s["Cleo"] == 4,
        },
    ),
    Puzzle(
        "Five school clubs, art, biology, chess, drama, and music, meet once a week, "
        "one club a day, from Monday to Friday.",
        orders("art", "biology", "chess", "drama", "music"),
        {
            "Chess meets on Wednesday.": lambda s: s["chess"] == 3,
            "Art meets on the day before drama.": lambda s: s["art"] + 1 == s["drama"],
            "Music does not meet on Monday.": lambda s: s["music"] != 1,
            "Biology meets later in the week than music.": lambda s: (
                s["biology"] > s["music"]
            ),
        },
        "On which day does the biology club meet?",
        "must",
        {
            "Friday": lambda s: s["biology"] == 5,
            "Thursday": lambda s: s["biology"] == 4,
            "Tuesday": lambda s: s["biology"] == 2,
            "Monday": lambda s: s["biology"] == 1,
        },
    ),
    Puzzle(
        "Exactly three of five players, Kim, Lou, Max, Nia, and Oz, travel to a match.",
        groups("Kim", "Lou", "Max", "Nia", "Oz", size=3),
        {
            "If Kim travels, Lou travels too.": lambda s: s["Lou"] or not s["Kim"],
            "Max and Nia do not both travel.": lambda s: not (s["Max"] and s["Nia"]),
            "Kim and Oz do not both travel.": lambda s: not (s["Kim"] and s["Oz"]),
        },
        "Which three players could travel together?",
        "could",
        {
            "Kim, Max, and Oz": exactly("Kim", "Max", "Oz"),
            "Lou, Max, and Nia": exactly("Lou", "Max", "Nia"),
            "Kim, Lou, and Oz": exactly("Kim", "Lou", "Oz"),
            "Kim, Lou, and Nia": exactly("Kim", "Lou", "Nia"),
        },
    ),
    Puzzle(
        "Four books, one red, one blue, one green, and one white, fill two shelves, "
        "two books on each.",
        groups("red", "blue", "green", "white", size=2),  # the upper shelf
        {
            "The red book is on the upper shelf.": lambda s: s["red"],
            "The green book and the white book are on different shelves.": lambda s: (
                s["green"] != s["white"]
            ),
        },
        "Which statement cannot be true?",
        "cannot",
        {
            "The white book is on the upper shelf.": lambda s: s["white"],
            "The blue book is on the same shelf as the red book.": lambda s: (
                s["blue"] == s["red"]
            ),
            "The green book is on the upper shelf.": lambda s: s["green"],
            "The blue book is on the same shelf as the green book.": lambda s: (
                s["blue"] == s["green"]
            ),
        },
    ),
    Puzzle(
        "Five runners, Finn, Gus, Hal, Ivy, and Jo, finish a race one after another.",
        orders("Finn", "Gus", "Hal", "Ivy", "Jo"),
        {
            "Finn finishes before Gus.": lambda s: s["Finn"] < s["Gus"],
            "Hal finishes directly after Ivy.": lambda s: s["Hal"] == s["Ivy"] + 1,
            "Gus does not finish last.": lambda s: s["Gus"] != 5,
        },
        "If Jo finishes first, what must be true?",
        "must",
        {
            "Ivy finishes second.": lambda s: s["Ivy"] == 2,
            "Gus finishes third.": lambda s: s["Gus"] == 3,
            "Finn finishes third.": lambda s: s["Finn"] == 3,
            "Hal finishes fourth.": lambda s: s["Hal"] == 4,
        },
        lambda s: s["Jo"] == 1,
    ),
    Puzzle(
        "Three houses in a row are numbered 1, 2, and 3 from left to right. One is "
        "red, one is blue, and one is yellow. A cat, a dog, and a fish live in them, "
        "one in each house.",
        [
            colors | pets
            for colors, pets in product(
                orders("red", "blue", "yellow"), orders("cat", "dog", "fish")
            )
        ],
        {
            "The red house is directly to the left of the blue house.": lambda s: (
                s["red"] + 1 == s["blue"]
            ),
            "The dog lives in house 2.": lambda s: s["dog"] == 2,
            "The cat lives in the yellow house.": lambda s: s["cat"] == s["yellow"],
            "The fish does not live in the blue house.": lambda s: (
                s["fish"] != s["blue"]
            ),
        },
        "Where does the fish live?",
        "must",
        {
            "in house 3, which is blue": lambda s: s["fish"] == s["blue"] == 3,
            "in house 1, which is yellow": lambda s: s["fish"] == s["yellow"] == 1,
            "in house 3, which is yellow": lambda s: s["fish"] == s["yellow"] == 3,
            "in house 1, which is red": lambda s: s["fish"] == s["red"] == 1,
        },
    ),
    Puzzle(
        "Six children, Ann, Bo, Cy, Di, Ed, and Flo, form two teams of three, East and "
        "West.",
        groups("Ann", "Bo", "Cy", "Di", "Ed", "Flo", size=3),  # the East team
        {
            "Ann and Bo are on different teams.": lambda s: s["Ann"] != s["Bo"],
            "Cy and Di are on the same team.": lambda s: s["Cy"] == s["Di"],
            "Ed is on the East team.": lambda s: s["Ed"],
        },
        "Which statement must be true?",
        "must",
        {
            "Flo is on the East team.": lambda s: s["Flo"],
            "Ann is on the East team.": lambda s: s["Ann"],
            "Cy is on the East team.": lambda s: s["Cy"],
            "Bo is on the West team.": lambda s: not s["Bo"],
        },
    ),
    Puzzle(
        "Four trains, P, Q, R, and S, leave a station at 1, 2, 3, and 4 o'clock, one "
        "at each hour.",
        orders("P", "Q", "R", "S"),
        {
            "P and Q leave exactly one hour apart.": lambda s: neighbors(
                s["P"], s["Q"]
            ),
            "R leaves before P.": lambda s: s["R"] < s["P"],
            "S leaves at 2 or at 3 o'clock.": lambda s: s["S"] in (2, 3),
        },
        "Which statement cannot be true?",
        "cannot",
        {
            "P leaves at 3 o'clock.": lambda s: s["P"] == 3,
            "Q leaves at 3 o'clock.": lambda s: s["Q"] == 3,
            "S leaves at 3 o'clock.": lambda s: s["S"] == 3,
            "P leaves at 4 o'clock.": lambda s: s["P"] == 4,
        },
    ),
    Puzzle(
        "Four guests, Uma, Vik, Wes, and Xena, sit at a round table with four chairs, "
        "facing its center.",
        orders("Uma", "Vik", "Wes", "Xena"),  # chairs, counted toward the left
        {
            "Uma does not sit next to Wes.": lambda s: (s["Uma"] - s["Wes"]) % 2 == 0,
            "Vik sits directly to the left of Uma.": lambda s: (
                (s["Vik"] - s["Uma"]) % 4 == 1
            ),
        },
        "Who sits directly to the left of Wes?",
        "must",
        {
            "Xena": lambda s: (s["Xena"] - s["Wes"]) % 4 == 1,
            "Uma": lambda s: (s["Uma"] - s["Wes"]) % 4 == 1,
            "Vik": lambda s: (s["Vik"] - s["Wes"]) % 4 == 1,
            "either Uma or Vik": lambda s: (
                (s["Uma"] - s["Wes"]) % 4 == 1 or (s["Vik"] - s["Wes"]) % 4 == 1
            ),
        },
    ),
    Puzzle(
        "From Monday to Friday a baker makes one cake a day: two lemon cakes and three "
        "nut cakes.",
        groups("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", size=2),  # lemon
        {
            "Lemon cakes are never made on two days in a row.": lambda s: (
                not any(
                    one and other
                    for one, other in zip(
                        list(s.values())[:-1], list(s.values())[1:], strict=True
                    )
                )
            ),
            "The cakes of Tuesday and Friday are of the same kind.": lambda s: (
                s["Tuesday"] == s["Friday"]
            ),
        },
        "Which could be the two days of the lemon cakes?",
        "could",
        {
            "Monday and Friday": exactly("Monday", "Friday"),
            "Tuesday and Thursday": exactly("Tuesday", "Thursday"),
            "Monday and Thursday": exactly("Monday", "Thursday"),
            "Wednesday and Friday": exactly("Wednesday", "Friday"),
        },
    ),
    Puzzle(
        "Five towers, V, W, X, Y, and Z, all differ in height.",
        orders("V", "W", "X", "Y", "Z"),  # 1 is the tallest
        {
            "V is taller than W.": lambda s: s["V"] < s["W"],
            "Z is taller than V.": lambda s: s["Z"] < s["V"],
            "Exactly two towers are taller than X.": lambda s: s["X"] == 3,
            "Y is either the tallest or the shortest.": lambda s: s["Y"] in (1, 5),
        },
        "Which statement must be true?",
        "must",
        {
            "V is taller than X.": lambda s: s["V"] < s["X"],
            "X is taller than W.": lambda s: s["X"] < s["W"],
            "Z is the tallest.": lambda s: s["Z"] == 1,
            "Y is taller than Z.": lambda s: s["Y"] < s["Z"],
        },
    ),
    Puzzle(
        "Rooms 1, 2, 3, and 4 lie side by side in this order. Three meetings, budget, "
        "hiring, and safety, take place in three of them, and one room stays empty.",
        orders("budget", "hiring", "safety", places=4),
        {
            "The budget meeting has a higher room number than the hiring meeting.": (
                lambda s: s["budget"] > s["hiring"]
            ),
            "The safety meeting is next door to the empty room.": lambda s: neighbors(
                s["safety"], 10 - sum(s.values())
            ),
        },
        "If room 3 is empty, what must be true?",
        "must",
        {
            "Safety is in room 2.": lambda s: s["safety"] == 2,
            "Budget is in room 4.": lambda s: s["budget"] == 4,
            "Budget is in room 2.": lambda s: s["budget"] == 2,
            "Hiring is in room 1.": lambda s: s["hiring"] == 1,
        },
        lambda s: 3 not in s.values(),
    ),
]
