"""Who does the work: this process, processes of this machine, or a dask cluster, all as ``concurrent.futures``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from reference.errors import InputError

AHEAD = 2
"""Tasks handed out per worker: one in work, one waiting, so that descriptions of the rest need not exist."""
CONNECT_SECONDS = 10


class HereExecutor(Executor):
    """Runs each call at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def executor(workers: int, scheduler: str | None) -> Iterator[tuple[Executor, int]]:
    """(an executor, how many tasks to keep in flight).

    ``scheduler`` is a dask scheduler's address, whose workers must see the same folders; else ``workers`` processes.
    Raises InputError where there is no such scheduler, or no dask.
    """
    if scheduler is not None:
        with dask_executor(scheduler) as client:
            yield client
    elif workers == 1:
        yield HereExecutor(), 1
    else:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, initializer=end_with_parent)
        try:
            yield pool, AHEAD * workers
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def dask_executor(address: str) -> Iterator[tuple[Executor, int]]:
    try:
        from distributed import Client
    except ImportError:
        mend = 'pip install "k3-parity[cluster]"'
        raise InputError("--scheduler", "dask", "the package distributed", "nothing", mend) from None
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        mend = "start one with: dask scheduler"
        raise InputError("--scheduler", address, "a dask scheduler", f"{type(error).__name__}", mend) from None
    with client:
        threads = sum(client.nthreads().values())
        if not threads:
            mend = f"start some with: dask worker {address}"
            raise InputError("--scheduler", address, "workers", "none", mend)
        yield client.get_executor(pure=False), AHEAD * threads


def end_with_parent() -> None:
    """Let this worker process end when its parent does, even when the parent is killed."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_all(pool: Executor, ahead: int, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
    """``function`` of every task, as they end, at most ``ahead`` in flight; InputError if a worker process dies."""
    running: set[Future] = set()
    try:
        for task in tasks:
            running.add(pool.submit(function, task))
            if len(running) >= ahead:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool:
        expected, mend = "processes that live", "see why it was killed (memory?), then resume"
        raise InputError("--workers", "worker", expected, "one that died", mend) from None
    finally:
        for future in running:
            future.cancel()
