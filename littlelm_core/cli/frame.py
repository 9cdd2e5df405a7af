"""The frame of the command: the apps that commands register with."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

ORDER = (
    "doctor", "train", "eval", "generate", "data", "bench", "practice", "check", "book",
)  # fmt: skip


class InOrder(TyperGroup):
    """Lists the commands in the order in which one needs them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    name="littlelm",
    cls=InOrder,
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
