"""Write each chapter's exported cells as one readable module of the package.

The package is what the chapters say: nobody edits `littlelm_core/attention.py`, one
edits `chapters/02_attention.md` and exports. Export cells hold imports, definitions and
constants only, so importing a module never computes anything; ruff decides the layout
and finds names that the module lacks; the same chapter always gives the same bytes.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from littlelm_core.book.chapter import (
    HAND_WRITTEN,
    PACKAGE,
    BookError,
    Cell,
    Chapter,
    chapter_paths,
    find_root,
    module_orders,
    read_chapter,
    select,
)
from littlelm_core.book.imports import COMMANDS, check_imports

HEADER = "# From {chapter} by `littlelm book export`: edit the chapter."
FUTURE = "from __future__ import annotations"
WIDTH = 88

Line = tuple[str, Cell | None]  # a line of the module and the cell that it comes from


@dataclass
class _Parts:
    """What the export cells of a chapter hold, sorted by where it goes."""

    docstring: list[Line] = field(default_factory=list)
    imports: list[Line] = field(default_factory=list)
    typing_imports: list[Line] = field(default_factory=list)  # under `if TYPE_CHECKING`
    body: list[Line] = field(default_factory=list)
    names: dict[str, Cell] = field(default_factory=dict)
    future: bool = False


def export(
    chapters: Iterable[str] = (),
    check: bool = False,
    root: Path | None = None,
    echo=print,
) -> list[Path]:
    """Export the named chapters (all by default); return the modules that changed.

    With `check` nothing is written: the difference is shown through `echo` and
    BookError raised. Errors name chapter, section and code cell.
    """
    root = find_root(root)
    paths = chapter_paths(root)
    changed = []
    for path in select(paths, chapters):
        chapter = read_chapter(path)
        target = root / PACKAGE / f"{chapter.module}.py"
        new = module_text(chapter, root)
        old = target.read_text(encoding="utf-8") if target.exists() else ""
        if new == old:
            continue
        changed.append(target)
        name = target.relative_to(root).as_posix()
        if check:
            lines = old.splitlines(), new.splitlines()
            diff = difflib.unified_diff(*lines, name, chapter.name, lineterm="")
            echo("\n".join(diff))
        else:
            target.write_text(new, encoding="utf-8", newline="\n")
            echo(f"{chapter.name} -> {name}")
    if check and changed:
        names = ", ".join(sorted(p.stem for p in changed))
        raise BookError(
            f"the package differs from its chapters ({names}): run `littlelm book "
            "export` to write the modules from the chapters"
        )
    return changed


def module_text(chapter: Chapter, root: Path) -> str:
    """The whole module that a chapter exports, formatted. Raises BookError."""
    owners = module_orders(chapter_paths(root))
    rivals = [p for p in owners.get(chapter.module, []) if p != chapter.path]
    if rivals:
        raise BookError(
            f"{chapter.name}: module {chapter.module!r} is also written by "
            f"chapters/{rivals[0].name}; one module has one chapter"
        )
    if chapter.module in (*HAND_WRITTEN, *COMMANDS, "__init__", "__main__"):
        raise BookError(
            f"{chapter.name}: {chapter.module}.py is written by hand; "
            "choose another name for `#| default_exp`"
        )
    orders = {module: int(where[0].stem[:2]) for module, where in owners.items()}
    parts = _collect(chapter)
    if not parts.names:
        raise BookError(f"{chapter.name}: no `#| export` cell defines anything")
    for cell in chapter.code_cells:
        check_imports(chapter, cell, orders, root)
    lines = _assemble(chapter, parts)
    target = root / PACKAGE / f"{chapter.module}.py"
    _undefined(chapter, lines, target, root)
    arguments = ["check", "--quiet", "--select", "I", "--fix-only"]
    text = _ruff(arguments, _joined(lines), target, root)
    _unused(chapter, text, target, root)
    return _ruff(["format", "--quiet"], text, target, root)


def _collect(chapter: Chapter) -> _Parts:
    parts, anchor, first = _Parts(), "", True
    for cell in chapter.code_cells:
        if not cell.exported:
            continue
        tree = _parse(chapter, cell)
        lines = cell.code.splitlines()
        if first and len(tree.body) == 1 and _is_text(tree.body[0]):
            parts.docstring = [(line, cell) for line in lines if line.strip()]
            node = tree.body[0]
            chosen = lines[node.lineno - 1 : node.end_lineno]
            parts.docstring = [(line, cell) for line in chosen]
            first = False
            continue
        first = False
        taken = _sort_statements(chapter, cell, tree, lines, parts)
        rest = [line for i, line in enumerate(lines, 1) if i not in taken]
        while rest and not rest[0].strip():
            rest.pop(0)
        if not any(line.strip() for line in rest):
            continue  # a cell of imports alone
        if cell.section != anchor:
            anchor = cell.section
            parts.body += [("", None), (_anchor(anchor), None), ("", None)]
        parts.body += [(line, cell) for line in rest]
        parts.body.append(("", None))
    return parts


def _parse(chapter: Chapter, cell: Cell) -> ast.Module:
    try:
        return ast.parse(cell.code)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise chapter.error(
            cell, f"not plain Python, line {error.lineno}: {error.msg}: {line}"
        ) from error


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _sort_statements(
    chapter: Chapter, cell: Cell, tree: ast.Module, lines: list[str], parts: _Parts
) -> set[int]:
    """File imports and names into `parts`; return the numbers of the lines taken."""
    taken: set[int] = set()
    defined = False
    for position, node in enumerate(tree.body):
        last = node.end_lineno or node.lineno
        span = range(node.lineno, last + 1)
        if position and node.lineno <= (tree.body[position - 1].end_lineno or 0):
            raise chapter.error(cell, f"line {node.lineno}: one statement a line")
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if is_import or _is_type_checking(node):
            if defined:
                text = lines[node.lineno - 1].strip()
                raise chapter.error(
                    cell,
                    f"`{text}` stands below a definition; imports come first in a cell",
                )
            taken.update(span)
            if is_import and getattr(node, "module", "") == "__future__":
                if [alias.name for alias in node.names] != ["annotations"]:
                    raise chapter.error(cell, f"only `{FUTURE}` is supported")
                parts.future = True
            else:
                home = parts.imports if is_import else parts.typing_imports
                start = node.lineno if is_import else node.body[0].lineno
                chosen = [(lines[i - 1], cell) for i in range(start, last + 1)]
                home += [line for line in chosen if line not in home or not is_import]
            continue
        defined = True
        _refuse_running(chapter, cell, node, lines)
        _refuse_nested_imports(chapter, cell, node)
        for name in _names(node):
            if name in parts.names and not _is_overload(node) and name != "_":
                raise chapter.error(
                    cell,
                    f"{name} is already defined in code cell "
                    f"{parts.names[name].number}; a module defines a name once",
                )
            parts.names[name] = cell
    return taken


def _is_type_checking(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:` with nothing but imports in it."""
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        and not node.orelse
        and all(isinstance(x, ast.Import | ast.ImportFrom) for x in node.body)
    )


def _is_overload(node: ast.stmt) -> bool:
    decorators = getattr(node, "decorator_list", [])
    names = [ast.unparse(d).split("(")[0].split(".")[-1] for d in decorators]
    return "overload" in names


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [x.id for t in targets for x in ast.walk(t) if isinstance(x, ast.Name)]


def _refuse_running(
    chapter: Chapter, cell: Cell, node: ast.stmt, lines: list[str]
) -> None:
    """Importing a module computes nothing: definitions and constants only.

    A constant may be made by a call (`re.compile`, `TypeVar`) if its name says that it
    is one: capitals, CamelCase or a leading underscore. `loss = train(...)` is work.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    text = lines[node.lineno - 1].strip()
    why = "exported cells hold imports, definitions and constants only"
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        raise chapter.error(cell, f"`{text}` runs when the module is imported; {why}")
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    inner = [x for t in targets for x in ast.walk(t)]
    if any(isinstance(x, ast.Attribute | ast.Subscript) for x in inner):
        raise chapter.error(cell, f"`{text}` changes an object that exists; {why}")
    works = (ast.Call, ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom)
    calls = node.value is not None and any(
        isinstance(x, works) for x in _outside_lambdas(node.value)
    )
    small = [n for n in _names(node) if n[0].islower()]
    if calls and small:
        raise chapter.error(
            cell,
            f"`{text}` runs when the module is imported; {why} (a constant made by a "
            "call is written in capitals or with a leading underscore)",
        )


def _outside_lambdas(node: ast.AST) -> Iterable[ast.AST]:
    """Every node below that is evaluated at once, so not the body of a lambda."""
    yield node
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _outside_lambdas(child)


def _refuse_nested_imports(chapter: Chapter, cell: Cell, node: ast.stmt) -> None:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            home = getattr(node, "name", "a block")
            raise chapter.error(
                cell,
                f"`{ast.unparse(inner)}` inside {home}; imports stand at the top of an "
                "exported cell (importlib.import_module for an optional package)",
            )


def _anchor(section: str) -> str:
    text = f"# ---- {section or 'Beginning'}"
    return text if len(text) <= WIDTH else text[: WIDTH - 3].rstrip() + "..."


def _assemble(chapter: Chapter, parts: _Parts) -> list[Line]:
    lines: list[Line] = [(HEADER.format(chapter=chapter.name), None)]
    lines += parts.docstring
    lines.append(("", None))
    if parts.future:
        lines += [(FUTURE, None), ("", None)]
    lines += parts.imports
    if parts.typing_imports:
        lines += [("", None), ("if TYPE_CHECKING:", None), *parts.typing_imports]
    public = sorted(n for n in parts.names if not n.startswith("_"))
    listed = ", ".join(f'"{name}"' for name in public)
    lines += [("", None), (f"__all__ = [{listed}]", None), ("", None)]
    return lines + parts.body


def _undefined(chapter: Chapter, lines: list[Line], target: Path, root: Path) -> None:
    """Let ruff's scope analysis look for names that the module does not have."""
    for found in _findings("F821", _joined(lines), target, root):
        cell = lines[found["location"]["row"] - 1][1]
        raise chapter.error(cell, _missing(chapter, found["message"].split("`")[1]))


def _unused(chapter: Chapter, text: str, target: Path, root: Path) -> None:
    """The same for imports that nothing uses; the text has its imports merged."""
    for found in _findings("F401,F811", text, target, root):
        name = found["message"].split("`")[1].split(" as ")[-1].split(".")[-1]
        cells = [c for c in chapter.code_cells if c.exported]
        imports = re.compile(rf"^(?:from|import)\b.*\b{re.escape(name)}\b", re.M)
        cell = next((c for c in cells if imports.search(c.code)), None)
        raise chapter.error(cell, found["message"].replace("`", ""))


def _findings(rules: str, text: str, target: Path, root: Path) -> list[dict]:
    """What ruff finds by these rules alone, `# noqa` or not."""
    options = [
        "--isolated",
        "--target-version",
        "py311",
        "--ignore-noqa",
        "--exit-zero",
    ]
    arguments = ["check", *options, "--output-format", "json", "--select", rules]
    return json.loads(_ruff(arguments, text, target, root))


def _joined(lines: list[Line]) -> str:
    return "\n".join(line for line, _ in lines) + "\n"


def _missing(chapter: Chapter, name: str) -> str:
    """Say that the module lacks a name, and where the notebook alone has it."""
    for cell in chapter.code_cells:
        if cell.exported:
            continue
        try:
            nodes = list(ast.walk(ast.parse(cell.plain_code)))
        except SyntaxError:
            continue
        bound = {x.id for x in nodes if isinstance(x, ast.Name) and _stores(x)}
        bound |= {getattr(x, "name", None) for x in nodes}
        bound |= {x.asname or x.name for x in nodes if isinstance(x, ast.alias)}
        if name in bound:
            return (
                f"{name} is neither defined nor imported by the module: only code cell "
                f"{cell.number} has it, and that cell lacks `#| export`"
            )
    return f"{name} is neither defined nor imported by the module"


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _ruff(arguments: list[str], text: str, target: Path, root: Path) -> str:
    command = [sys.executable, "-m", "ruff", *arguments]
    config = root / "pyproject.toml"
    if config.exists() and "--isolated" not in arguments:
        command += ["--config", str(config)]
    command += ["--no-cache", "--stdin-filename", str(target), "-"]
    if arguments[0] == "format":
        command.remove("-")
    done = subprocess.run(
        command, input=text, capture_output=True, cwd=root, encoding="utf-8"
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        hint = "; pip install ruff" if "No module named ruff" in done.stderr else ""
        raise BookError(f"{target.name}: ruff could not work on it: {why}{hint}")
    return done.stdout
