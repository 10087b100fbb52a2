"""Single layers over several processes or machines: a unit of work is a layer, and the findings are the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from parity.findings import Finding
from port.executors import executor, run_all

if TYPE_CHECKING:
    from parity.true_width.text import Options

PASSED_ON = ("OMP_NUM_THREADS", "MLX_ENABLE_TF32", "K3_PARITY_LEND_BLAS")
"""Read once, when the libraries are loaded: a worker elsewhere must have them as this process does."""


class Share(NamedTuple):
    """What one layer gave: findings, lines to show, bytes needed, bytes read, and the most that its worker held."""

    number: int
    findings: tuple[Finding, ...]
    lines: tuple[str, ...]
    needed: int
    read: int
    peak: int


class Task(NamedTuple):
    """``options`` are the fields of an Options, which must not be imported before the environment is set."""

    number: int
    options: dict[str, Any]
    environment: dict[str, str]


def shares(
    options: Options, layers: Sequence[int], workers: int, scheduler: str | None, note: Callable[[str], None]
) -> list[Share]:
    """Every layer's share in the order of ``layers``; ``note`` hears of each as it ends."""
    return sorted(_ended(options, layers, workers, scheduler, note), key=lambda share: share.number)


def _ended(options, layers, workers, scheduler, note) -> Iterator[Share]:
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    tasks = (Task(n, vars(options) | {"layers": str(layer)}, environment) for n, layer in enumerate(layers))
    with executor(workers, scheduler) as (pool, ahead):
        for share in run_all(pool, ahead, work, tasks):
            for line in share.lines:
                note(line)
            yield share


def work(task: Task) -> Share:
    """One layer in this process."""
    os.environ |= task.environment
    from parity.true_width.cost import peak_rss
    from parity.true_width.text import Options, isolated, opened

    lines: list[str] = []
    run = opened(Options(**task.options))
    run.note = lines.append
    findings = tuple(isolated(run, [int(task.options["layers"])]))
    run.reader.close()
    needed, read = sum(run.reader.needed.values()), run.reader.source.read_bytes
    return Share(task.number, findings, tuple(lines), needed, read, peak_rss())
