"""Many parts, many processes: what `data prepare` and `data curate` run on."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from littlelm_core.config import DataError

IN_PROCESS_BYTES = 8_000_000  # less than this is not worth a second process

_told: Any = None  # in a worker: the bytes it has told the progress bar


def _start_worker(counter: Any) -> None:
    global _told
    _told = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool


def _tell(size: int) -> None:
    with _told.get_lock():
        _told.value += size


def _work(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    return function(*arguments, advance=_tell)


class Pool:
    """Processes that are started when there is work for more than one.

    with Pool(4) as pool: pool.run(function, jobs, size, advance)
    """

    def __init__(self, workers: int):
        self.workers = workers
        self.pool: ProcessPoolExecutor | None = None
        self.counter: Any = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self.pool is not None:
            # A job may take an hour more, and what is written is whole.
            if kind is KeyboardInterrupt:
                for process in multiprocessing.active_children():
                    process.terminate()
            self.pool.shutdown(wait=True, cancel_futures=True)

    def run(
        self,
        function: Callable[..., Any],
        jobs: Sequence[Sequence[Any]],
        size: int,
        advance: Callable[[int], None] = lambda size: None,
    ) -> list[Any]:
        """Call function(*job, advance=...) for each job; return the results in order.

        function: of a module (another process imports it); it tells `advance` the
        bytes it has done. size: bytes of all jobs; few are done in this process.
        Raises the first failure, and DataError when a process was killed.
        """
        # A process takes seconds to start: little text is done sooner without.
        if size < IN_PROCESS_BYTES or min(self.workers, len(jobs)) <= 1:
            return [function(*job, advance=advance) for job in jobs]
        if self.pool is None:
            context = multiprocessing.get_context("spawn")  # threads and forks clash
            self.counter = context.Value("q", 0)
            self.pool = ProcessPoolExecutor(
                self.workers, context, _start_worker, (self.counter,)
            )
        try:
            futures: list[Future] = [
                self.pool.submit(_work, function, job) for job in jobs
            ]
            waiting, seen = set(futures), self.counter.value
            while waiting:
                done, waiting = wait(waiting, 0.2, FIRST_COMPLETED)
                advance(self.counter.value - seen)
                seen = self.counter.value
                for future in done:
                    future.result()  # the first failure stops the rest
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise DataError(
                "a process was killed (out of memory?): what is done is kept, go on "
                "with --workers 1"
            ) from error


def run_jobs(
    function: Callable[..., Any],
    jobs: Sequence[Sequence[Any]],
    workers: int,
    size: int,
    advance: Callable[[int], None],
) -> list[Any]:
    """Run all there is to do on a Pool of its own."""
    with Pool(min(workers, len(jobs))) as pool:
        return pool.run(function, jobs, size, advance)


def progress_bar(console: Console) -> Progress:
    """Return a bar in bytes with rate and time left; none where nobody looks."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
        TransferSpeedColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
