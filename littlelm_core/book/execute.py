"""Run a chapter once in a fresh kernel and keep what it printed and drew.

The .ipynb written here is the one that nbval certifies and the site shows, so it holds
nothing that changes by itself: cell ids come from the cells' text, there are no
timestamps or machine paths, and the chapter ran on one thread with fixed seeds.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from littlelm_core.book.chapter import (
    FORMAT,
    Chapter,
    chapter_paths,
    find_root,
    from_notebook,
    read_chapter,
    select,
)

CELL_SECONDS = 600  # a cell that needs longer has hung
CHAPTER_SECONDS = 60  # the bar for a whole chapter

# Set before the interpreter starts: threads and hashing can't be changed later, and a
# dated SVG would differ on each run.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "SOURCE_DATE_EPOCH": "0",
    "TZ": "UTC",
    "COLUMNS": "88",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SEEDS = "import random, numpy; random.seed(0); numpy.random.seed(0); del random, numpy"

LANGUAGE = {  # without the version, so that any Python writes the same notebook
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SVG_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_SVG_PLACES = re.compile(r'\b(?:d|x|y)="[^"]*"|translate\([^)]*\)')


def execute(
    chapters: Iterable[str] = (),
    root: Path | None = None,
    echo: Callable[[str], Any] = print,
) -> dict[str, float]:
    """Run the named chapters (all by default); return the seconds that each took.

    Each .md is run in a kernel of its own, with this interpreter, and written as the
    .ipynb beside it. A cell that fails raises BookError with chapter and cell after its
    traceback was shown, and the old .ipynb stays as it was.
    """
    root = find_root(root)
    seconds = {}
    for path in select(chapter_paths(root), chapters):
        chapter = read_chapter(path)
        start = time.perf_counter()
        notebook = run_notebook(chapter, root, echo)
        elapsed = time.perf_counter() - start
        write_notebook(notebook, chapter.notebook)
        seconds[chapter.path.stem] = elapsed
        slow = f" (more than {CHAPTER_SECONDS} s)" if elapsed > CHAPTER_SECONDS else ""
        size = chapter.notebook.stat().st_size / 1000
        echo(f"{chapter.path.stem}: {elapsed:.1f} s, {size:.0f} kB{slow}")
        for cell in from_notebook(path, notebook).code_cells:
            for text in stderr_of(notebook.cells[cell.index]):
                echo(f"  {chapter.where(cell)} writes to stderr: {text[:200]}")
    if len(seconds) > 1:
        echo(f"{len(seconds)} chapters: {sum(seconds.values()):.1f} s")
    return seconds


def source_notebook(chapter: Chapter) -> Any:
    """The unexecuted notebook of a chapter: fixed ids and metadata, no outputs."""
    import jupytext

    text = chapter.path.read_text(encoding="utf-8")
    notebook = jupytext.reads(text, fmt=FORMAT)
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python"}
    text_format = dict(notebook.metadata["jupytext"]["text_representation"])
    text_format.pop("jupytext_version", None)
    notebook.metadata.clear()
    notebook.metadata.update(
        jupytext={"text_representation": text_format},
        kernelspec={**kernel, "name": "python3"},
        language_info=copy.deepcopy(LANGUAGE),
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        cell["id"] = cell_id(chapter.path.stem, cell.cell_type, cell.source, seen)
    return notebook


def cell_id(stem: str, kind: str, source: str, seen: dict[str, int]) -> str:
    """An id made of the cell's text, so that a new cell leaves its neighbors' alone."""
    digest = hashlib.sha256(f"{stem}\0{kind}\0{source}".encode()).hexdigest()[:12]
    seen[digest] = seen.get(digest, 0) + 1
    return digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def run_notebook(chapter: Chapter, root: Path, echo: Callable[[str], Any]) -> Any:
    """Execute a chapter from a clean start; return the notebook with its outputs."""
    from nbclient import NotebookClient
    from nbclient.exceptions import (
        CellExecutionError,
        CellTimeoutError,
        DeadKernelError,
    )

    notebook = source_notebook(chapter)
    cells = {cell.index: cell for cell in chapter.cells}
    running = [0]

    def started(cell: Any, cell_index: int) -> None:
        running[0] = cell_index

    with tempfile.TemporaryDirectory(prefix="littlelm-book-") as scratch:
        client = NotebookClient(
            notebook,
            km=_kernel_manager(),
            timeout=CELL_SECONDS,
            coalesce_streams=True,
            record_timing=False,
            on_cell_start=started,
            resources={"metadata": {"path": str(chapter.path.parent)}},
        )
        try:
            # A kernel manager of our own is not shut down unless we ask.
            client.execute(cleanup_kc=True, env=_environment(root, Path(scratch)))
        except CellExecutionError as error:
            echo(_ANSI.sub("", error.traceback).rstrip())
            why = f"{error.ename}: {_ANSI.sub('', error.evalue)}".splitlines()[0]
            raise chapter.error(cells[running[0]], why) from error
        except CellTimeoutError as error:
            why = f"still running after {CELL_SECONDS} s"
            raise chapter.error(cells[running[0]], why) from error
        except DeadKernelError as error:
            why = "the kernel died here (out of memory, or a crash in native code)"
            raise chapter.error(cells[running[0]], why) from error
    notebook.metadata["language_info"] = copy.deepcopy(LANGUAGE)
    paths = machine_paths(root)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code" and is_docstring(cell.source):
            cell["outputs"] = []  # a module's docstring, echoed: no output of worth
        for output in cell.get("outputs", []):
            _clean(output, paths)
    return notebook


def is_docstring(source: str) -> bool:
    """Whether an exported cell is nothing but a string."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return False
    text = len(body) == 1 and isinstance(body[0], ast.Expr) and body[0].value
    return isinstance(text, ast.Constant) and isinstance(text.value, str)


def _kernel_manager() -> Any:
    """A kernel manager whose kernel is this very interpreter.

    An installed `python3` kernelspec may belong to another environment, and then the
    chapters would run against another package.
    """
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class OwnInterpreter(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            launch = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]
            lines = f"--IPKernelApp.exec_lines={SEEDS}"
            quiet = ("--HistoryManager.enabled=False", "--IPKernelApp.log_level=40")
            return KernelSpec(
                argv=[sys.executable, *launch, lines, *quiet],
                display_name="Python 3 (ipykernel)",
                language="python",
            )

    return AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=OwnInterpreter()
    )


def _environment(root: Path, scratch: Path) -> dict[str, str]:
    """The kernel's environment: ours, one thread, no profile of the person's own."""
    search = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(search),
        "IPYTHONDIR": str(scratch / "ipython"),
        "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", str(_matplotlib_cache())),
    }


def _matplotlib_cache() -> Path:
    """matplotlib's own folder: its font cache is worth keeping between kernels."""
    import matplotlib

    return Path(matplotlib.get_configdir())


def machine_paths(root: Path) -> list[tuple[str, str]]:
    """(folder of this machine, what to write instead), the longest first."""
    folders = {
        str(root): ".",
        sys.prefix: "venv",
        sys.base_prefix: "python",
        str(Path.home()): "~",
    }
    usable = [(k, v) for k, v in folders.items() if len(Path(k).parts) > 1]
    return sorted(usable, key=lambda pair: -len(pair[0]))


def _clean(output: Any, paths: list[tuple[str, str]]) -> None:
    """Take this machine's folders and the SVGs' metadata out of one output."""

    def clean(text: str) -> str:
        for folder, short in paths:
            text = re.sub(re.escape(folder) + r"(?=[/\\\s'\":,;)]|$)", short, text)
        return text

    if output.output_type == "stream":
        output["text"] = clean(output["text"])
    for kind, content in output.get("data", {}).items():
        if kind == "image/svg+xml":
            output["data"][kind] = _compact(content)
        elif isinstance(content, str) and kind.startswith("text/"):
            output["data"][kind] = clean(content)


def _compact(svg: str) -> str:
    """An SVG without date and versions, places to 1/1000 point: half the bytes."""

    def shorten(match: re.Match[str]) -> str:
        return re.sub(r"(\.\d{3})\d+", r"\1", " ".join(match[0].split()))

    return _SVG_PLACES.sub(shorten, _SVG_METADATA.sub("", svg))


def stderr_of(cell: Any) -> list[str]:
    """What a cell wrote to stderr: warnings and progress bars that lost their way."""
    return [
        output["text"].strip()
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output["name"] == "stderr"
    ]


def write_notebook(notebook: Any, path: Path) -> None:
    """Write a notebook in one go, so that a kill never leaves half of one."""
    import nbformat

    text = nbformat.writes(notebook, version=4).rstrip("\n") + "\n"
    partial = path.with_suffix(".ipynb.part")
    partial.write_text(text, encoding="utf-8", newline="\n")
    partial.replace(path)
