"""Run a chapter where nothing but the earlier chapters' modules exists.

Reading imports is not proof: a chapter may reach a later module through a string, a
contract or another module. So its code runs in a fresh process, in a copy of the
package that holds the earlier chapters' modules and the hand-written ones alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from littlelm_core.book.chapter import (
    HAND_WRITTEN,
    PACKAGE,
    Chapter,
    chapter_paths,
    read_chapter,
)
from littlelm_core.book.execute import CELL_SECONDS, ENVIRONMENT, SEEDS

# Stands for a notebook's kernel. A contract may import names of the part's own module;
# here these are the chapter's own definitions, since that module does not exist yet.
# Who asks whether it exists (the registry) hears no until its last exported cell ran.
RUNNER = """
import importlib.machinery, importlib.util, json, linecache, sys, types
{seeds}
_cells = json.loads(open(sys.argv[1], encoding="utf-8").read())
_module, _last = sys.argv[2], int(sys.argv[3])
_number = 0
if _module:
    import littlelm_core
    _twin = types.ModuleType(_module)
    _twin.__spec__ = importlib.machinery.ModuleSpec(_module, None)
    _twin.__getattr__ = lambda name: getattr(sys.modules["__main__"], name)
    sys.modules[_module] = _twin
    _find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: (
        None if name == _module and _number <= _last else _find(name, package)
    )
for _number, _source in _cells:
    _name = f"<code cell {{_number}}>"
    _lines = [line + "\\n" for line in _source.splitlines()]
    linecache.cache[_name] = (len(_source), None, _lines, _name)
    try:
        exec(compile(_source, _name, "exec"), globals())
    except BaseException as error:
        print(f"cell {{_number}}", file=sys.stderr)
        raise
"""


def run_alone(chapter: Chapter, root: Path) -> tuple[int | None, str] | None:
    """Run a chapter with only the earlier modules present.

    Returns None when it ran, else (number of the code cell or None, what was wrong).
    """
    with tempfile.TemporaryDirectory(prefix="littlelm-alone-") as scratch:
        home = Path(scratch)
        copy_earlier(chapter, root, home)
        cells = [(c.number, c.plain_code) for c in chapter.code_cells]
        script, source = home / "run_alone.py", home / "cells.json"
        script.write_text(RUNNER.format(seeds=SEEDS), encoding="utf-8")
        source.write_text(json.dumps(cells), encoding="utf-8")
        last = max((c.number or 0 for c in chapter.code_cells if c.exported), default=0)
        command = [sys.executable, str(script), str(source)]
        command += [f"{PACKAGE}.{chapter.module}", str(last)]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": str(home),
            "MPLBACKEND": "agg",
        }
        try:
            done = subprocess.run(
                command,
                cwd=home / "chapters",
                env=environment,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=CELL_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return None, f"still running after {CELL_SECONDS} s"
    if done.returncode == 0:
        return None
    return _reason(done.stderr, done.returncode)


def copy_earlier(chapter: Chapter, root: Path, home: Path) -> list[str]:
    """Copy what exists of the clone before this chapter; return its modules."""
    package, source = home / PACKAGE, root / PACKAGE
    package.mkdir()
    earlier = []
    for path in chapter_paths(root):
        if path.stem[:2] < chapter.path.stem[:2]:
            earlier.append(read_chapter(path).module)
    names = ["__init__", *HAND_WRITTEN, *earlier]
    copied = []
    for name in [*names, "runs"]:
        file, folder = source / f"{name}.py", source / name
        if file.exists():
            shutil.copy(file, package)
        elif folder.is_dir():
            shutil.copytree(folder, package / name)
        else:
            continue
        copied.append(name)
    for name in ("chapters", "tests", "data", "pyproject.toml"):
        if (root / name).exists():
            (home / name).symlink_to(root / name)
    return copied


def _reason(stderr: str, code: int) -> tuple[int | None, str]:
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    numbers = [line.split()[1] for line in lines if line.startswith("cell ")]
    last = lines[-1] if lines else f"the process ended with {code}"
    number = int(numbers[-1]) if numbers and numbers[-1].isdigit() else None
    return number, f"fails with only the earlier modules present: {last}"
