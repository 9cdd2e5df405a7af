"""eval: CORE's tasks for a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from littlelm_core.cli.frame import app, console


@app.command("eval")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|hf:FOLDER",
            help="A run, its folder, a checkpoint, or a local Hugging Face model.",
        ),
    ],
    tasks: Annotated[
        str, typer.Option(help="Only some, by label: piqa,arc_easy; no CORE then.")
    ] = "",
    max_per_task: Annotated[
        int, typer.Option(help="Only the first N items of each task; -1: all.")
    ] = -1,
    context: Annotated[
        int, typer.Option(help="Tokens of a prompt at most; -1: the model's.")
    ] = -1,
    data: Annotated[
        str, typer.Option(help="Folder of tasks; else CORE if prepared, or mini CORE.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; the run has its own.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with items of a killed evaluation.")
    ] = False,
    baselines: Annotated[
        str, typer.Option(help="Table of the score: v1 or v2.")
    ] = "v1",
    crop: Annotated[
        str, typer.Option(help="What does not fit: bos, plain, shots or none.")
    ] = "bos",
    legacy_pool: Annotated[
        bool, typer.Option("--legacy-pool", help="Shots from the first N items alone.")
    ] = False,
    legacy_nan: Annotated[
        bool, typer.Option("--legacy-nan", help="A first choice without a token wins.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="fp32, bf16, or auto: bf16 on a GPU that has it.")
    ] = "auto",
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens in memory at a time; -1: by device.")
    ] = -1,
    against: Annotated[
        Path | None, typer.Option(help="Another report.json, to draw beside.")
    ] = None,
) -> None:
    """Score a model on CORE: 22 tasks, one number, and how sure it is.

    Without the real files (littlelm data prepare core) it runs on mini CORE, which
    comes with the course and is not CORE. Under torchrun each process takes a share.
    The report of a part (--tasks, --max-per-task) or by other rules (--context, --crop,
    --baselines, --precision, --legacy-pool, --legacy-nan) has a folder of its own, in
    part. Where the report of another exam lies, it stays, and the new one beside it.

    \b
    Examples:
      littlelm eval tiny
      littlelm eval runs/tiny/checkpoints/step_00000760 --tasks piqa,boolq
      littlelm eval hf:models/SmolLM2-135M --max-per-task 100
      littlelm eval littlelm-3.8b --context 1024 --out runs/core-1024
      torchrun --nproc-per-node 8 -m littlelm_core eval littlelm-3.8b
    """
    from littlelm_core.core_eval import CROPS, TABLES
    from littlelm_core.core_eval import evaluate as score
    from littlelm_core.report import evaluation
    from littlelm_core.report.core import show_core
    from littlelm_core.report.eval_progress import EvalProgress
    from littlelm_core.report.journal import recorded, remove

    _check_word("--crop", crop, CROPS)
    _check_word("--baselines", baselines, TABLES)
    _check_word("--precision", precision, evaluation.PRECISIONS)
    longest = _limit("--context", context)
    at_once = _limit("--batch-tokens", batch_tokens)
    chosen = evaluation.choose_tasks(data, tasks)
    most = evaluation.cap(chosen, _limit("--max-per-task", max_per_task) or -1)
    evaluation.enough(chosen, most, legacy_pool)
    other = evaluation.read_report(against, chosen) if against else None
    with evaluation.processes() as world:
        first = world.rank == 0
        subject = evaluation.load_subject(model, chosen[0].suite, world)
        # A quick look leaves the whole's report and journal, and other looks, alone.
        part = evaluation.part_name(
            [task.label for task in chosen] if tasks else [],
            max_per_task=most,
            context=longest,
            crop=crop if crop != "bos" else None,
            baselines=baselines if baselines != "v1" else None,
            precision=precision if precision != "auto" else None,
            legacy_pool=legacy_pool,
            legacy_nan=legacy_nan,
        )
        folder = out or subject.folder / part
        journal = folder / "journal"
        if not resume:
            remove(journal)  # each of its own disk, if they share none
        world.sum(0)  # the others wait until it is gone
        if first:
            _announce(subject.name, chosen, most, subject.device)
        known = recorded(journal)
        progress = EvalProgress(chosen, most, world.size, known, quiet=not first)
        numbers = evaluation.precision_context(precision, subject.device)
        with _resumable(first), progress, numbers:
            report = score(
                subject.model,
                subject.tokenizer,
                chosen,
                max_per_task=most,
                context=longest or subject.context,
                baselines=baselines,
                crop=crop,
                legacy_pool=legacy_pool,
                legacy_nan=legacy_nan,
                batch_tokens=at_once,
                rank=world.rank,
                world=world.size,
                token_cache=evaluation.token_folder(),
                journal=journal,
                progress=progress,
            )
        if first:  # a minute, for a large model on a CPU
            progress.say("bits per byte of validation text")
        with numbers:
            bits = subject.bits()
        if first:
            facts = evaluation.named(report, subject.name, bits)
            folder = evaluation.save(report, facts, folder, other)
        world.sum(0)  # no journal goes before the report is there
        remove(journal)
    if first:
        show_core(facts, console)
        lines = f"\npage:   {folder / 'report.html'}\nreport: {folder / 'report.json'}"
        console.print(lines, soft_wrap=True, markup=False)


def _announce(name: str, tasks: Sequence[Any], most: int | None, device: Any) -> None:
    """Say what is about to be scored."""
    items = sum(min(most or len(t.items), len(t.items)) for t in tasks)
    console.print(
        f"{name} on {device}: {items:,} items of {len(tasks)} tasks of "
        f"{tasks[0].suite}",
        soft_wrap=True,
        markup=False,
    )


def _check_word(option: str, value: str, valid: Sequence[str]) -> None:
    from littlelm_core.config import ConfigError, nearest

    if value not in valid:
        raise ConfigError(f"{option} {value!r}{nearest(value, valid)}")


def _limit(option: str, value: int) -> int | None:
    """Return a number, None for -1."""
    from littlelm_core.config import ConfigError

    if value < 1 and value != -1:
        raise ConfigError(f"{option} {value} must be at least 1, or -1 for none")
    return None if value == -1 else value


@contextmanager
def _resumable(first: bool) -> Iterator[None]:
    """Say how to go on when Ctrl-C ends it."""
    try:
        yield
    except KeyboardInterrupt:
        if first:
            console.print("stopped; the same command with --resume goes on")
        raise
