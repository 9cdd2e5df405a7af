"""practice, check and book: working through the course, and making it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from littlelm_core.cli.frame import app, book_app, console

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
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    console.print(f"wrote {path}; open it:", soft_wrap=True)
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
def book_check(
    chapters: _Chapters = None,
    fast: Annotated[bool, typer.Option("--fast", help="Leave out the runs.")] = False,
) -> None:
    """Certify that chapters, notebooks and modules fit together.

    \b
    Examples:
      littlelm book check
      littlelm book check 02 --fast
    """
    _book("check", *(chapters or []), *(["--fast"] if fast else []))


@book_app.command("build")
def book_build() -> None:
    """Build the static site from the executed notebooks.

    \b
    Examples:
      littlelm book build
    """
    _book("build")
