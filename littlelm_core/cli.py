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
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

app = typer.Typer(
    name="littlelm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help keeps its line breaks: examples are to be copied
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
book_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data", help="Prepare text for training.")
app.add_typer(book_app, name="book", help="Export, execute, check and build the book.")

console = Console(highlight=False)


@app.callback()
def _littlelm() -> None:
    """Train a small language model, talk to it, and work through the course.

    Any command takes --debug: a traceback instead of one line of error.
    """


# ---- Errors in one line


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _fail(message: str, status: int = 1) -> NoReturn:
    print(f"error: {_one_line(message)}", file=sys.stderr)
    sys.exit(status)


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
    sys.exit(status if isinstance(status, int) else 0)


# ---- Look at the machine


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option(help="Skip the timing of matmuls.")] = False,
) -> None:
    """Say what this machine can do and which runs fit it.

    \b
    Examples:
      littlelm doctor
      littlelm doctor --quick
    """
    from littlelm_core import doctor as module

    module.show(console, quick=quick)


# ---- Train and talk


@app.command()
def train(
    run: Annotated[str, typer.Argument(help="A run by name, or a .toml file.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides.")
    ] = None,
) -> None:
    """Train a run; a run that was stopped goes on where it was.

    \b
    Examples:
      littlelm train tiny
      littlelm train tiny steps=50 run_dir=runs/short
      littlelm train tiny attention.use=my.py:MyAttention
      littlelm train my_run.toml optimizer.lr=0.001
    """
    from littlelm_core import session

    session.train(run, changes or [], console)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A run, its folder, or a checkpoint.")],
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="At most this many.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the K likeliest; 0: off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from a share P; 1: off.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    cache: Annotated[bool, typer.Option(help="Keep keys and values.")] = True,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text.")
    ] = None,
) -> None:
    """Continue a prompt with a trained model, token by token.

    \b
    Examples:
      littlelm generate tiny "def read_file("
      littlelm generate tiny "To be, or" --temperature 0 --max-new-tokens 80
      littlelm generate runs/tiny/checkpoints/step_00000400 "import " --seed 7
    """
    from littlelm_core import session

    session.talk(
        model,
        prompt,
        console,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        cache=cache,
        stop=tuple(stop or ()),
    )


# ---- Work through the course


@app.command()
def practice(
    chapter: Annotated[str, typer.Argument(metavar="NN", help="A chapter: 02.")],
) -> None:
    """Write a working copy of a chapter: no outputs, no solutions.

    \b
    Examples:
      littlelm practice 02
    """
    from littlelm_core import check as module

    path = module.practice(chapter)
    console.print(f"wrote {path}: open it with", soft_wrap=True)
    console.print(f"  jupyter lab {path}", soft_wrap=True)


@app.command()
def check(
    part: Annotated[str, typer.Argument(help="A contract: attention, loader, ...")],
    own: Annotated[
        str | None, typer.Option("--with", help="Your part: file.py:Name.")
    ] = None,
) -> None:
    """Grade a part by its contract: ours, or your own.

    \b
    Examples:
      littlelm check attention
      littlelm check attention --with my.py:MyAttention
    """
    from littlelm_core import check as module

    raise typer.Exit(module.check_part_cli(part, own))


@app.command()
def bench(
    what: Annotated[list[str] | None, typer.Argument(help="Some of the rows.")] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes: does it run?")] = False,
    threads: Annotated[int, typer.Option(help="Of torch and its peers.")] = 1,
    folder: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path(
        "data/benchmarks"
    ),
) -> None:
    """Measure our parts against named peers, side by side, with the bars.

    \b
    Examples:
      littlelm bench
      littlelm bench bpe generate
      littlelm bench train --threads 2
    """
    from littlelm_core import bench as module

    module.main(what or [], console, quick=quick, threads=threads, folder=folder)


# ---- Data


# (data prepare is added when ingest lands)


# ---- The book


def _book(*arguments: str) -> NoReturn:
    from littlelm_core.book.__main__ import main as book_main

    raise typer.Exit(book_main(list(arguments)))


_Chapters = Annotated[
    list[str] | None, typer.Argument(metavar="[NN]...", help="Chapters; all if none.")
]


@book_app.command("export")
def book_export(
    chapters: _Chapters = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only show what differs.")
    ] = False,
) -> None:
    """Write the package's modules from the chapters.

    \b
    Examples:
      littlelm book export
      littlelm book export 02 --check
    """
    _book("export", *(chapters or []), *(["--check"] if check else []))


@book_app.command("execute")
def book_execute(chapters: _Chapters = None) -> None:
    """Run chapters in a fresh kernel and write their notebooks.

    \b
    Examples:
      littlelm book execute
      littlelm book execute 02 07
    """
    _book("execute", *(chapters or []))


@book_app.command("check")
def book_check(chapters: _Chapters = None) -> None:
    """Certify that chapters, notebooks and modules fit together.

    \b
    Examples:
      littlelm book check
    """
    _book("check", *(chapters or []))


@book_app.command("build")
def book_build() -> None:
    """Build the static site from the executed notebooks.

    \b
    Examples:
      littlelm book build
    """
    _book("build")


if __name__ == "__main__":
    main()
