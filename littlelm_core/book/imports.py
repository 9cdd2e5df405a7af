"""A chapter builds on earlier chapters only: look at what its cells import."""

from __future__ import annotations

import ast
from pathlib import Path

from littlelm_core.book.chapter import HAND_WRITTEN, PACKAGE, Cell, Chapter

COMMANDS = ("cli", "book", "doctor", "bench")  # they stand on top of the chapters


def check_imports(
    chapter: Chapter, cell: Cell, orders: dict[str, int], root: Path
) -> None:
    """A chapter builds on earlier ones only: refuse imports of later modules."""
    try:
        tree = ast.parse(cell.plain_code)
    except SyntaxError:
        return  # not Python without IPython; such a cell can't be exported
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise chapter.error(
                cell, f"write `from {PACKAGE}.name import ...`, not a relative import"
            )
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module.removeprefix(PACKAGE + ".")]
            modules = modules if node.module.startswith(PACKAGE + ".") else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            modules = [n[len(PACKAGE) + 1 :] for n in names if n.startswith(PACKAGE)]
        for module in filter(None, modules):
            _check_order(chapter, cell, module.split(".")[0], orders, root)


def _check_order(
    chapter: Chapter, cell: Cell, module: str, orders: dict[str, int], root: Path
) -> None:
    if module.startswith("__") or module in HAND_WRITTEN:
        return
    if module == chapter.module:
        raise chapter.error(
            cell, f"imports its own module {module}: the chapter defines that itself"
        )
    if module in COMMANDS:
        raise chapter.error(
            cell, f"imports {PACKAGE}.{module}, a command; chapters do without"
        )
    if module not in orders:
        if (root / PACKAGE / f"{module}.py").exists():
            return
        raise chapter.error(
            cell, f"imports {PACKAGE}.{module}, but no chapter writes that module"
        )
    if orders[module] > chapter.order:
        raise chapter.error(
            cell,
            f"imports {PACKAGE}.{module} of chapter {orders[module]:02d}; a chapter "
            "imports only modules of earlier ones",
        )
