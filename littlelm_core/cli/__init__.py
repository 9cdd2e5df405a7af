"""The `littlelm` command.

Commands import what they need when they run, so `littlelm --help` starts no torch.
An error is one line that names the cause and the mend; `--debug` (anywhere on the line,
or LITTLELM_DEBUG=1) shows the traceback instead.
"""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
import traceback
import warnings
from typing import NoReturn

from littlelm_core.cli import (
    course,
    data,
    evaluate,
    run,
)  # their commands register themselves
from littlelm_core.cli.frame import app, book_app, data_app

__all__ = ["course", "data", "evaluate", "main", "run"]

# ---- Errors in one line


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _fail(message: str, status: int = 1) -> NoReturn:
    print(f"error: {_one_line(message)}", file=sys.stderr)
    sys.exit(status)


def _warning_line(message: object, *where: object, **line: object) -> str:
    return f"warning: {_one_line(message)}\n"


def _usage_line(error: Exception, arguments: list[str]) -> str:
    """Say what is wrong with a command line, with the nearest command."""
    message = _one_line(error.format_message())
    if "No such command" in message:
        group = {"data": data_app, "book": book_app}.get(arguments[0], app)
        wrong = arguments[0] if group is app else arguments[1]
        names = [c.name or c.callback.__name__ for c in group.registered_commands]
        names += [g.name for g in group.registered_groups]
        close = difflib.get_close_matches(wrong, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else ", ".join(sorted(names))
        return f"no command {wrong!r} ({hint})"
    command = getattr(getattr(error, "ctx", None), "command_path", "littlelm")
    return f"{message} ({command} --help shows examples)"


def _lacks_memory(error: Exception) -> bool:
    # torch's OutOfMemoryError is the GPU's; its CPU allocator raises a RuntimeError.
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)


def _explain(error: Exception) -> str:
    """Put any exception into one line; what nobody foresaw keeps its traceback."""
    from littlelm_core.config import LittleLMError

    if isinstance(error, LittleLMError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    if isinstance(error, OSError | AssertionError) and str(error):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return (
            f"{error.name} is not installed: pip install -e '.[book,test,bench]' "
            "brings what the optional commands use"
        )
    if _lacks_memory(error):
        return (
            f"not enough memory ({_one_line(error)[:200]}): lower rows, model.context "
            "or the size of the model"
        )
    with tempfile.NamedTemporaryFile(
        "w", prefix="littlelm-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
    return f"{type(error).__name__}: {error} (traceback in {file.name})"


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 an error, 2 a wrong command line."""
    # Two OpenMP threads that spin on busy cores made a step five times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in options or os.environ.get("LITTLELM_DEBUG", "0") != "0"
    if "--debug" in options:
        arguments.remove("--debug")
    before = warnings.formatwarning
    if not debug:
        warnings.formatwarning = _warning_line
    try:
        status = app(arguments, prog_name="littlelm", standalone_mode=False)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:  # `littlelm generate ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if type(error).__name__ == "Abort":  # how typer hands on Ctrl-C
            _fail("interrupted", 130)
        if debug:
            raise
        if hasattr(error, "format_message"):  # typer's own: a wrong command line
            _fail(_usage_line(error, arguments), 2)
        _fail(_explain(error))
    finally:
        warnings.formatwarning = before
    if status == 130:  # how newer versions of typer hand on Ctrl-C
        _fail("interrupted", 130)
    sys.exit(status if isinstance(status, int) else 0)
