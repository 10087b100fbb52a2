"""The checks over several processes or machines: the same findings in the same order, whoever does the work.

A unit of work is one check, or one check on one case; a worker takes a case's units together, so that each checkpoint
is opened in one process only. Units travel as names: every machine builds the fixtures that it needs, the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from parity.checks.plan import Plan, case_named
from parity.findings import Finding
from parity.ports import load_port
from port.executors import executor, run_all

BY_CASE = ("layers", "end_to_end", "decode", "padding", "converter")
"""Checks that treat their cases one by one; the others are asked once, about all of them."""
OWN_PORTS = ("mlx", "reference")
"""Ports that are known to be small and to mind no second copy of themselves."""
MOST = 4


class Job(NamedTuple):
    """Some checks of one plan, in a form that travels: the port by its name, the cases by theirs."""

    port: str
    checks: tuple[str, ...]
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    seed: int
    golden: Path | None


def workers_for(port: str) -> int:
    """How many processes a run takes unless told otherwise: the cores for the twins, one for a port of the user's."""
    return min(MOST, os.cpu_count() or 1) if port in OWN_PORTS else 1


def jobs_of(port: str, plan: Plan, checks: Sequence[str]) -> list[Job]:
    """Each case's checks together, then the rest one by one: the short ones last, so that the workers end together."""
    names = tuple(case.name for case in plan.cases)
    whole = Job(port, (), names, plan.dtypes, plan.seed, plan.golden)
    by_case = tuple(name for name in checks if name in BY_CASE)
    alone = [whole._replace(checks=(name,)) for name in checks if name not in by_case]
    return [whole._replace(checks=by_case, cases=(name,)) for name in names if by_case] + alone


def work(numbered: tuple[int, Job]) -> tuple[int, dict[str, list[Finding]]]:
    """The job's number, and the findings of each of its checks. One thread: the workers are the threads."""
    import torch

    from parity.runner import own_data_is_good

    torch.set_num_threads(1)
    number, job = numbered
    cases = tuple(case_named(name, job.seed) for name in job.cases)
    plan = Plan(load_port(job.port), cases, job.dtypes, job.seed, job.golden)
    return number, {name: list(own_data_is_good(plan, name)) for name in job.checks}


def in_workers(
    port: str,
    plan: Plan,
    checks: Sequence[str],
    workers: int,
    progress: Callable[[str], None],
    scheduler: str | None = None,
) -> Iterator[list[Finding]]:
    """The findings of each check, in the order of ``checks``; within a check in the order of the plan's cases.

    ``scheduler`` is the address of a dask scheduler, in place of ``workers`` processes of this machine.
    """
    jobs, done = jobs_of(port, plan, checks), {}
    for case in plan.cases:
        _ = case.checkpoint  # built here, so that no two workers of this machine build it
    with executor(workers, scheduler) as (pool, ahead):
        for number, found in run_all(pool, ahead, work, enumerate(jobs)):
            done[number] = found
            progress(name_of(jobs[number]))
    for check in checks:
        yield joined([done[number][check] for number in sorted(done) if check in done[number]])


def name_of(job: Job) -> str:
    checks = " ".join(job.checks)
    return f"{job.cases[0]}: {checks}" if job.checks[0] in BY_CASE else checks


def joined(parts: Sequence[list[Finding]]) -> list[Finding]:
    """One check's findings over its units. What it says of no case in particular comes with every unit; the first
    stays."""
    kept: list[Finding] = []
    for part in parts:
        known = {about(finding) for finding in kept}
        kept += [finding for finding in part if about(finding) not in known]
    return kept


def about(finding: Finding) -> tuple:
    return finding.case, finding.dtype, finding.regime, finding.module, finding.tap, finding.seed
