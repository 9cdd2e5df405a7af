"""eval: CORE's tasks for a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import shutil
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
        str, typer.Option(help="auto, fp32 or bf16, as precision.dtype of a run.")
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

    \b
    Examples:
      littlelm eval tiny
      littlelm eval runs/tiny/checkpoints/step_00000760 --tasks piqa,boolq
      littlelm eval hf:models/SmolLM2-135M --max-per-task 100
      littlelm eval littlelm-3.8b --context 1024 --out runs/core-1024
      torchrun --nproc-per-node 8 -m littlelm_core eval littlelm-3.8b
    """
    from littlelm_core.core_eval import evaluate as score
    from littlelm_core.report import evaluation
    from littlelm_core.report.core import show_core
    from littlelm_core.report.eval_progress import EvalProgress

    other = evaluation.read_report(against) if against else None
    with evaluation.processes() as world:
        first = world.rank == 0
        subject = evaluation.load_subject(model, world)
        chosen = evaluation.choose_tasks(data, tasks)
        folder = out or subject.folder
        journal = folder / "journal"
        if first and not resume:
            shutil.rmtree(journal, ignore_errors=True)
        world.sum(0)  # the others wait until it is gone
        most = None if max_per_task == -1 else max_per_task
        if first:
            _announce(subject.name, chosen, most, subject.device)
        progress = EvalProgress(chosen, most, world.size, quiet=not first)
        with progress, evaluation.precision_context(precision, subject.device):
            report = score(
                subject.model,
                subject.tokenizer,
                chosen,
                max_per_task=most,
                context=None if context == -1 else context,
                baselines=baselines,
                crop=crop,
                legacy_pool=legacy_pool,
                legacy_nan=legacy_nan,
                batch_tokens=None if batch_tokens == -1 else batch_tokens,
                rank=world.rank,
                world=world.size,
                token_cache=evaluation.token_folder(),
                journal=journal,
                progress=progress,
            )
            bits = subject.bits()
        if not first:
            return
        facts = evaluation.named(report, subject.name, bits)
        evaluation.save(report, facts, folder, other)
        shutil.rmtree(journal, ignore_errors=True)
    show_core(facts, console)
    console.print(f"\npage:   {folder / 'report.html'}", soft_wrap=True)
    console.print(f"report: {folder / 'report.json'}", soft_wrap=True)


def _announce(name: str, tasks: list[Any], most: int | None, device: Any) -> None:
    """Say what is about to be scored."""
    items = sum(min(most or len(t.items), len(t.items)) for t in tasks)
    console.print(
        f"{name} on {device}: {items:,} items of {len(tasks)} tasks of "
        f"{tasks[0].suite}",
        soft_wrap=True,
        markup=False,
    )
