"""The default corpus: real text that is there before anything is downloaded.

Three domains, about 20 MB, each clearly unlike the others:

code        the source of Python's standard library (PSF license), without tests,
            without tables of character codes, and without its docstrings
docs        reference prose: the docstrings of the standard library and its help topics
            (PSF license), of numpy and networkx (BSD 3-Clause) and of the documented
            parts of torch (BSD 3-Clause); one document a source file
literature  the works of Shakespeare (public domain; source in data/corpus/README.md),
            one document a scene or poem

About 5 % of the source files are held out for validation, chosen by a hash of the
file's name alone, so that neither the order of a listing nor the number of files moves
a file from one side to the other. A held-out file is held out of every domain.
Docstrings are cut from the code: they belong to docs, and the domains stay apart. Text
that stands on both sides (boilerplate that many files share) is taken out of
validation.

The text differs between versions of Python and of the libraries: `fingerprint()` names
it, and exact-number tests use text generated from a seed instead.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import json
import lzma
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from littlelm_core.config import DataError, nearest

DOMAINS = ("code", "docs", "literature")
SPLITS = ("train", "validation")
RECIPE = 2  # raise it when a rule below changes: caches are keyed by it

# Which files are held out. The number was chosen once, so that each domain has whole
# works or files of all sizes on the validation side, and is never changed.
HELD_OUT_SALT = 16
HELD_OUT_PER_MILLE = 50

# Libraries whose docstrings are read, with the parts that are prose-rich.
LIBRARIES = {
    "networkx": ("",),
    "numpy": ("",),
    "torch": (
        "_tensor_docs.py", "_torch_docs.py", "autograd", "distributions",
        "functional.py", "nn", "optim", "utils/data",
    ),
}  # fmt: skip
# Files that keep their prose in plain strings instead of docstrings.
PROSE_FILES = re.compile(r"(_docs|_add_newdocs|_add_newdocs_scalars|topics)\.py$")

_SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages",
    "ensurepip", "encodings", "pydoc_data", "lib-dynload",
}  # fmt: skip
_SHORTEST = 40  # characters of a docstring or file worth keeping
_CLONE = Path(__file__).resolve().parents[1]


class Entry(NamedTuple):
    """One text of the corpus: its domain, the file it comes from, its place there."""

    domain: str
    source: str  # relative name, "/" between folders; the split hangs on it alone
    title: str
    text: str


# ---- The split


def held_out(source: str) -> bool:
    """Return whether a source file belongs to validation, from its name alone."""
    digest = hashlib.blake2b(f"{HELD_OUT_SALT}:{source}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") % 1000 < HELD_OUT_PER_MILLE


# ---- Code and docstrings


def _python_files(root: Path, parts: Iterable[str] = ("",)) -> Iterator[Path]:
    for part in parts:
        top = root / part
        found = [top] if top.is_file() else top.rglob("*.py")
        for path in found:
            folders = path.relative_to(root).parts[:-1]
            generated = path.name.startswith("_sysconfigdata")
            if not generated and not any(
                f in _SKIPPED_FOLDERS or f.startswith("config-") for f in folders
            ):
                yield path


def _read(path: Path) -> str | None:
    """Return a file's text with LF line ends, or None when it is not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _docstrings(
    node: ast.AST, name: str = ""
) -> Iterator[tuple[str, ast.Expr, bool, str]]:
    """Yield (qualified name, statement, whether it stands alone, text), in order."""
    if isinstance(node, _DOCUMENTED) and node.body:
        first = node.body[0]
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            alone = len(node.body) == 1 and not isinstance(node, ast.Module)
            yield name, first, alone, inspect.cleandoc(first.value.value)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DOCUMENTED):
            yield from _docstrings(child, f"{name}.{child.name}".lstrip("."))
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _docstrings(child, name)


def _long_strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = inspect.cleandoc(node.value)
            if len(text) >= 5 * _SHORTEST:
                yield text


def split_source(source: str) -> tuple[str, list[tuple[str, str]]]:
    """Part a Python source into (code without docstrings, [(name, docstring)]).

    A body that held nothing but its docstring keeps "..." in its place, so that the
    code still parses. Raises SyntaxError and ValueError as `ast.parse` does.
    """
    lines = source.split("\n")
    prose = []
    for name, statement, alone, text in _docstrings(ast.parse(source)):
        first, last = statement.lineno - 1, statement.end_lineno - 1
        # Columns are counted in bytes of UTF-8.
        head = lines[first].encode()[: statement.col_offset].decode()
        tail = lines[last].encode()[statement.end_col_offset :].decode()
        lines[first : last + 1] = [None] * (last - first + 1)
        if tail.lstrip().startswith(";"):  # "docstring"; return 1
            tail = tail.lstrip("; ")
        rest = head + ("..." if alone else "") + tail
        lines[first] = rest if rest.strip() else None
        prose.append((name, text))
    code = "\n".join(line.rstrip() for line in lines if line is not None)
    return re.sub(r"\n{4,}", "\n\n\n", code).strip() + "\n", prose


def _python_entries() -> Iterator[Entry]:
    """Yield the code of the standard library and the prose of it and the libraries."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    roots = [("stdlib", stdlib, ("", "pydoc_data/topics.py"))]
    for name, parts in LIBRARIES.items():
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            roots.append((name, Path(spec.origin).parent, parts))
    for library, root, parts in roots:
        files = {p.relative_to(root).as_posix(): p for p in _python_files(root, parts)}
        if library == "stdlib" and (root / "pydoc_data/topics.py").is_file():
            files["pydoc_data/topics.py"] = root / "pydoc_data/topics.py"
        for relative in sorted(files):
            text = _read(files[relative])
            source = f"{library}/{relative}"
            try:
                if text is None or len(text) < _SHORTEST:
                    continue
                if PROSE_FILES.search(relative):
                    for prose in _long_strings(ast.parse(text)):
                        yield Entry("docs", source, "", prose)
                    continue
                code, docstrings = split_source(text)
            except (SyntaxError, ValueError, RecursionError):
                continue
            if library == "stdlib" and len(code) >= _SHORTEST:
                yield Entry("code", source, "", code)
            for name, prose in docstrings:
                if len(prose) >= _SHORTEST:
                    yield Entry("docs", source, name, prose)


# ---- Literature


def _scenes(text: str) -> Iterator[str]:
    """Cut a play before each scene; an act's heading goes with its first scene."""
    scene: list[str] = []
    for line in text.split("\n"):
        heading = re.match(r"\s*(act|scene)\b\.?\s*[ivxlc\d]+\b", line, re.IGNORECASE)
        if heading and len("\n".join(scene).strip()) > 200:
            yield "\n".join(scene).strip() + "\n"
            scene = []
        scene.append(line)
    yield "\n".join(scene).strip() + "\n"


def _literature_entries() -> Iterator[Entry]:
    path = _CLONE / "data/corpus/literature.jsonl.xz"
    if not path.is_file():
        raise DataError(
            f"{path} is missing: the default corpus needs the course's clone "
            "(git clone, then pip install -e .)"
        )
    for line in lzma.decompress(path.read_bytes()).decode("utf-8").splitlines():
        work = json.loads(line)
        for scene in _scenes(work["text"]):
            yield Entry(
                "literature", f"literature/{work['name']}", work["title"], scene
            )


# ---- Documents


def arrange(entries: Iterable[Entry]) -> dict[str, dict[str, list[str]]]:
    """Sort entries into {domain: {split: documents}}.

    Equal texts are kept once; a held-out text whose every paragraph stands somewhere in
    training is left out. The prose of one file becomes one document, each piece under
    its name. The order of the files does not matter, that within a file does.
    """
    entries = sorted(entries, key=lambda e: (e.domain, e.source))
    trained: set[str] = set()
    for entry in entries:
        if not held_out(entry.source):
            trained |= _paragraphs(entry.text)
    seen: set[str] = set()
    pieces: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        text = entry.text.strip()
        if text in seen or (held_out(entry.source) and _paragraphs(text) <= trained):
            continue
        seen.add(text)
        key = (entry.domain, entry.source)
        if entry.domain == "docs":
            name = entry.title or (
                "" if PROSE_FILES.search(entry.source) else _module(entry.source)
            )
            text = f"{name}\n\n{text}" if name else text
            pieces[key] = ["\n\n\n".join([*pieces.get(key, []), text])]
        else:
            pieces.setdefault(key, []).append(text)
    result = {d: {s: [] for s in SPLITS} for d in DOMAINS}
    for domain, source in sorted(pieces):
        split = "validation" if held_out(source) else "train"
        result[domain][split] += [t + "\n" for t in pieces[domain, source]]
    return result


def _paragraphs(text: str) -> set[str]:
    return {p.strip() for p in text.split("\n\n")}


def _module(source: str) -> str:
    """Return the dotted name: "stdlib/json/decoder.py" is "json.decoder"."""
    name = source.removeprefix("stdlib/").removesuffix(".py").removesuffix("/__init__")
    return name.replace("/", ".")


def _cache_key() -> str:
    versions = [sys.version, sysconfig.get_path("stdlib"), str(RECIPE)]
    for name in LIBRARIES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} absent")
    return hashlib.blake2b("\n".join(versions).encode(), digest_size=8).hexdigest()


def data_folder() -> Path:
    """Return the folder of prepared data: $LITTLELM_DATA, or the clone's own."""
    named = os.environ.get("LITTLELM_DATA")
    return Path(named).expanduser() if named else _CLONE / "data" / "prepared"


@functools.lru_cache(maxsize=1)
def _load(key: str) -> tuple[dict[str, dict[str, list[str]]], str]:
    """Return (documents, fingerprint), from the cache beside the prepared data."""
    path = data_folder() / f"corpus-{key}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        documents, name = stored["documents"], stored["fingerprint"]
        if name == _fingerprint(documents):
            return documents, name
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # absent or damaged: read the sources again
    documents = arrange([*_python_entries(), *_literature_entries()])
    name = _fingerprint(documents)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            json.dump(
                {"fingerprint": name, "documents": documents}, file, ensure_ascii=False
            )
        Path(file.name).replace(path)
    except OSError:
        pass  # a folder that cannot be written only costs time
    return documents, name


def _fingerprint(documents: dict[str, dict[str, list[str]]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for domain in DOMAINS:
        for split in SPLITS:
            for text in documents[domain][split]:
                data = text.encode("utf-8")
                digest.update(f"{domain} {split} {len(data)}\n".encode())
                digest.update(data)
    return digest.hexdigest()


def domains() -> list[str]:
    """Return the names of the domains, sorted."""
    return list(DOMAINS)


def documents(domain: str, split: str) -> Iterator[str]:
    """Yield the documents of one domain and split ("train", "validation"), in order.

    Raises DataError: an unknown domain or split, or the clone's data is missing.
    """
    for value, valid, what in ((domain, DOMAINS, "domain"), (split, SPLITS, "split")):
        if value not in valid:
            raise DataError(f"no {what} {value!r} in the corpus{nearest(value, valid)}")
    return iter(_load(_cache_key())[0][domain][split])


def fingerprint() -> str:
    """Return a short hash of every document of the corpus, in order."""
    return _load(_cache_key())[1]
