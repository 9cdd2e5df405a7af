"""`python -m littlelm_core.book`: what `littlelm book` does, without typer."""

from __future__ import annotations

import argparse
import sys

from littlelm_core import book


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="littlelm book", description=book.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("export", help="write the package from the chapters")
    command.add_argument("chapters", nargs="*", metavar="NN")
    command.add_argument("--check", action="store_true", help="only show differences")
    command = commands.add_parser("execute", help="run chapters into their notebooks")
    command.add_argument("chapters", nargs="*", metavar="NN")
    command = commands.add_parser("check", help="run every gate over the book")
    command.add_argument("chapters", nargs="*", metavar="NN")
    command.add_argument("--fast", action="store_true", help="leave out the runs")
    commands.add_parser("build", help="make the site from the executed notebooks")
    options = parser.parse_args(arguments)
    try:
        if options.command == "export":
            book.export(options.chapters, check=options.check)
        elif options.command == "execute":
            book.execute(options.chapters)
        elif options.command == "check":
            book.check(options.chapters, fast=options.fast)
        else:
            book.build()
    except book.BookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
