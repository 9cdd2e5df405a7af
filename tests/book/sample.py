"""A small valid book of two chapters, which the tests of the gates then damage."""

from __future__ import annotations

from pathlib import Path

FRONT = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
    format_version: 0.13
kernelspec:
  name: python3
  display_name: Python 3 (ipykernel)
  language: python
---
"""

CHECK = '''"""A stand-in for the contracts: it grades the exercises and no part."""

import importlib.util
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests" / "exercises"


def check(what, part=None):
    if part is not None:
        assert callable(part)
        print(f"{what}: all tests pass")
        return
    chapter, number = what.split(".")
    path = TESTS / f"chapter_{int(chapter):02d}.py"
    spec = importlib.util.spec_from_file_location("grader", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer = getattr(__import__("__main__"), f"ex_{chapter}_{number}")
    try:
        getattr(module, f"exercise_{chapter}_{number}")(answer)
    except NotImplementedError:
        print(f"{what}: not done yet")
    else:
        print(f"{what}: right")
'''


def cell(source: str, *tags: str, figure: str = "", alt: str = "A rising line.") -> str:
    """One MyST code cell."""
    head = f":tags: [{', '.join(tags)}]\n\n" if tags else ""
    if figure:
        head = (
            f"---\nmystnb:\n  figure:\n    name: {figure}\n    caption: |\n"
            f"      The value doubles with each step.\n  image:\n    alt: {alt}\n"
            f"tags: [{', '.join(tags)}]\n---\n"
        )
    return f"```{{code-cell}} ipython3\n{head}{source.strip()}\n```\n\n"


def exercise(order: int, number: int) -> str:
    """One exercise: heading, stub, check, folded solution."""
    key, name = f"{order}.{number}", f"ex_{order}_{number}"
    stub = f"def {name}(x):\n    raise NotImplementedError"
    solution = f'def {name}(x):\n    return {number} * x\n\n\ncheck("{key}")'
    return (
        f"### {key} Times {number}\n\nReturn {number} times the argument.\n\n"
        + cell(stub)
        + cell(f'check("{key}")')
        + cell(solution, "hide-cell")
    )


def chapter(order: int, module: str, function: str, export: str) -> str:
    """A chapter that every gate passes; `export` is the body of its one function."""
    plot = 'plt.plot([1, 2, 4])\nplt.xlabel("step")\nplt.ylabel("value")\nplt.show()'
    return (
        FRONT
        + f"# The {module}\n\nPrerequisites: none · about 5 minutes · runs in about "
        "3 s\n\n"
        + cell(f"#| default_exp {module}", "hide-cell")
        + cell(
            "import matplotlib.pyplot as plt\nfrom IPython.display import Markdown\n\n"
            "from littlelm_core.check import check\n\n"
            'plt.style.use("course.mplstyle")\n'
            '%config InlineBackend.figure_formats = ["svg"]',
            "hide-cell",
        )
        + "## What you will build\n\nA function of one number, as "
        f"{{numref}}`fig-{module}-a`, {{numref}}`fig-{module}-b` and "
        f"{{numref}}`fig-{module}-c` show.\n\n"
        "## What you need\n\nArithmetic.\n\n## The idea\n\nDouble it: $y = 2 x$.\n\n"
        + cell(plot, "hide-input", figure=f"fig-{module}-a")
        + "## Build it\n\n"
        + cell(f'#| export\n"""The module {module} of a small book."""')
        + "### The function\n\nLook at its result.\n\n"
        + cell(f"#| export\n{export}")
        + cell(f"value = {function}(2)\nassert value == 4\nvalue")
        + cell(plot, "hide-input", figure=f"fig-{module}-b")
        + f"```{{figure}} figures/{module}.svg\n:name: fig-{module}-c\n"
        ":alt: A square.\n\nOne square.\n```\n\n## Check it\n\n"
        + cell(f'check("{module}", {function})')
        + "## What it costs\n\n"
        + cell(
            f'Markdown(f"The result of doubling 21 is {{{function}(21)}}.")',
            "hide-input",
        )
        + "## Exercises\n\n"
        + "".join(exercise(order, number) for number in range(1, 5))
        + f"## What moved into the core\n\n- `{function}`: twice its argument, by "
        "`SIDES`.\n\n"
        "## Next\n\nMore.\n"
    )


FIRST = chapter(
    0,
    "doubling",
    "double",
    "import math\n\nSIDES = 2\n\n\n"
    "def double(x: float) -> float:\n"
    '    """Return twice x."""\n    return math.prod((SIDES, x))',
)
SECOND = chapter(
    1,
    "twice",
    "twice",
    "from littlelm_core.doubling import SIDES, double\n\n\n"
    "def twice(x: float) -> float:\n"
    '    """Return what double gives."""\n    return double(x) * SIDES / 2',
)
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40">'
    '<rect width="40" height="40" fill="#0072b2"/></svg>\n'
)


def write_book(root: Path, style: Path) -> Path:
    """Write the book's sources under `root`; no notebook and no module yet."""
    for folder in ("chapters/figures", "littlelm_core", "tests/exercises"):
        (root / folder).mkdir(parents=True)
    chapters, package = root / "chapters", root / "littlelm_core"
    (chapters / "00_doubling.md").write_text(FIRST, encoding="utf-8")
    (chapters / "01_twice.md").write_text(SECOND, encoding="utf-8")
    (chapters / "course.mplstyle").write_text(style.read_text(encoding="utf-8"))
    for module in ("doubling", "twice"):
        (chapters / "figures" / f"{module}.svg").write_text(SVG)
    (package / "__init__.py").write_text("")
    (package / "check.py").write_text(CHECK)
    for order in (0, 1):
        graders = "".join(
            f"def exercise_{order}_{n}(answer):\n    assert answer(3) == {3 * n}\n\n\n"
            for n in range(1, 5)
        )
        (root / "tests" / "exercises" / f"chapter_{order:02d}.py").write_text(graders)
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: chapters/00_doubling\n"
        "chapters:\n- file: chapters/01_twice\n"
    )
    return root
