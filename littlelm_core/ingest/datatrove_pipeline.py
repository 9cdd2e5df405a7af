"""`data curate` on many machines: the same steps as pipelines of datatrove.

datatrove (pip install 'littlelm[curate]') brings executors for one machine, Slurm and
Ray, which start tasks, repeat the failed ones and keep their logs. The blocks here are
ours, so the output is that of `littlelm data curate`, byte for byte. The machines share
a file system, on which the sources and OUT have the same absolute paths.

    from functools import partial
    from datatrove.executor import SlurmPipelineExecutor
    from littlelm_core.ingest.datatrove_pipeline import executors

    cluster = partial(
        SlurmPipelineExecutor, partition="cpu", time="8:00:00", cpus_per_task=2,
        mem_per_cpu_gb=4, venv_path="/shared/venv",
    )
    executors(cluster, ["/shared/crawl"], "/shared/curated", tasks=500).run()

On Ray, give partial(RayPipelineExecutor, cpus_per_task=1, mem_per_cpu_gb=4), on one
machine partial(LocalPipelineExecutor, workers=8): run() then runs the four stages one
after the other. A task that failed is run again by running it all again.

`Clean` alone is a filter for a pipeline of datatrove's own readers and writers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from littlelm_core.config import LittleLMError
from littlelm_core.ingest import curate_steps, curate_write
from littlelm_core.ingest.curate import Plan, make_plan
from littlelm_core.ingest.curate_options import Options
from littlelm_core.ingest.pool import Pool
from littlelm_core.ingest.write import PART_BYTES, hold

try:
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep
    from datatrove.pipeline.filters.base_filter import BaseFilter
except ImportError as error:
    raise LittleLMError(
        f"datatrove is missing ({error}): pip install 'littlelm[curate]'"
    ) from error


class _Stage(PipelineStep):
    """A pass of a plan: task `rank` does each `world_size`-th part."""

    type = "littlelm"

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = plan

    def jobs(self) -> list[tuple[Any, ...]]:
        """Return the jobs of all tasks, done or not."""
        raise NotImplementedError

    def work(self, job: tuple[Any, ...]) -> dict[str, Any]:
        """Do one job, or return what it has left."""
        raise NotImplementedError

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Do this task's share of the parts; nothing once all stages are done."""
        if self.plan.finished() is not None:
            return
        for job in self.jobs()[rank::world_size]:
            with self.track_time():
                report = self.work(job)
            self.stat_update("documents", value=report["documents"])
            for reason, counts in report["removed"].items():
                self.stat_update(f"dropped {reason}", value=counts["documents"])


class Sift(_Stage):
    """Normalise, filter, decontaminate and hash each part."""

    name = "sift"

    def jobs(self) -> list[tuple[Any, ...]]:
        """Return a job for each part."""
        return list(self.plan.jobs)

    def work(self, job: tuple[Any, ...]) -> dict[str, Any]:
        """Sift one part."""
        self.plan.work.mkdir(parents=True, exist_ok=True)
        done = curate_steps.sifted(self.plan.work, *job[1:3])
        return curate_steps.sift(*job) if done is None else done


class Cluster(_Stage):
    """Find the duplicates over all parts: one task, with `workers` processes."""

    name = "cluster"

    def __init__(self, plan: Plan, workers: int = 1):
        super().__init__(plan)
        self.workers = workers

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Do all of it in the first task."""
        if rank == 0 and self.plan.finished() is None:
            with self.track_time(), Pool(self.workers) as pool:
                self.plan.cluster(pool)


class Write(_Stage):
    """Write what stays of each part."""

    name = "write"

    def jobs(self) -> list[tuple[Any, ...]]:
        """Return a job for each part."""
        return self.plan.writes()

    def work(self, job: tuple[Any, ...]) -> dict[str, Any]:
        """Write one part."""
        done = curate_write.written(*job)
        return curate_write.write(*job) if done is None else done


class Finish(_Stage):
    """Add up, write the report and the manifest: one task."""

    name = "finish"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Do all of it in the first task."""
        if rank == 0 and self.plan.finished() is None:
            with self.track_time(), hold(self.plan.out):
                self.plan.finish()


def stages(plan: Plan, tasks: int, workers: int = 1) -> list[tuple[str, list, int]]:
    """Return (name, pipeline, tasks) of the four stages, in the order to run them."""
    tasks = min(tasks, len(plan.jobs))
    return [
        ("sift", [Sift(plan)], tasks),
        ("cluster", [Cluster(plan, workers)], 1),
        ("write", [Write(plan)], tasks),
        ("finish", [Finish(plan)], 1),
    ]


def executors(
    make: Callable[..., Any],
    sources: Iterable[str | Path],
    out: str | Path,
    options: Options | None = None,
    *,
    tasks: int,
    workers: int = 1,
    part_bytes: int = PART_BYTES,
) -> Any:
    """Return the last of four executors that depend on each other: run() runs all.

    make: makes one from pipeline=, tasks=, depends=, logging_dir=: a class of
    datatrove.executor with its other arguments bound. workers: processes of the stage
    that finds duplicates. Raises DataError as `curate`.
    """
    out = Path(out).absolute()  # a task may start in another folder
    plan, last = make_plan(sources, out, options or Options(), part_bytes), None
    for name, pipeline, count in stages(plan, tasks, workers):
        # The key is in the name: tasks of other sources or options do not count.
        logs = out.parent / f"{out.name}-logs" / plan.key / name
        last = make(pipeline=pipeline, tasks=count, depends=last, logging_dir=str(logs))
    return last


class Clean(BaseFilter):
    """Normalise and filter documents of any datatrove reader; no duplicates.

    The text is replaced by the normalised one; dropped documents go to the
    exclusion_writer, if there is one, with their reason.
    """

    name = "littlelm clean"

    def __init__(self, options: Options | None = None, exclusion_writer: Any = None):
        super().__init__(exclusion_writer, batch_size=100)
        self.options = options or Options()

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return True, or False with the reason."""
        return self.filter_batch([doc])[0]

    def filter_batch(self, batch: list[Document]) -> list[bool | tuple[bool, str]]:
        """Return a verdict for each document."""
        steps = curate_steps.sifter(self.options)
        verdicts: list[bool | tuple[bool, str]] = [True] * len(batch)
        for i, doc in enumerate(batch):
            doc.text = steps.normalize(doc.text)
            if reason := steps.judge(doc.text):
                verdicts[i] = (False, reason)
        passed = [i for i, verdict in enumerate(verdicts) if verdict is True]
        found = steps.judge_all([batch[i].text for i in passed])
        for i, verdict in zip(passed, found, strict=True):
            if verdict is not None:
                verdicts[i] = (False, verdict[0])
        return verdicts
