"""One run of the checks: from a plan to a report."""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from parity.baseline import Baselines
from parity.checks import CHECKS, PARTS, Plan
from parity.compare import Place
from parity.findings import Finding, Report
from parity.protocol import Port
from parity.quantities import Quantity
from reference.errors import InputError

CORE_CASES = (
    "mini", "full-bank", "plain-residual", "more-heads", "conv-5", "unbounded", "low-rank-gate", "wide-values",
    "no-linear-beta", "dense-heavy", "groups", "softmax-router", "dense-experts", "kimi-linear",
    "vision-heads", "vision-positions", "vision-window",
)  # fmt: skip
"""What ``check`` runs unless told otherwise: together they take every setting both ways; ``--case all`` runs all."""
EVERY_CASE = "all"


def header(port: Port, dtypes: tuple[str, ...], seed: int) -> dict[str, str]:
    """What a reader must know to judge a run: versions, device, threads, dtypes, seed."""
    own = {"k3-parity": "0.1.0", "platform": platform.platform(), "cores": str(os.cpu_count())}
    own |= {"numpy": np.__version__, "port": port.name, "dtypes": " ".join(dtypes), "seed": str(seed)}
    return own | port.versions()


def run_checks(
    plan: Plan,
    checks: Iterable[str],
    regime: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
    found: Iterable[Iterable[Finding]] | None = None,
) -> Report:
    """Run the named checks and collect every finding; ``regime`` keeps only one regime's.

    ``found`` are the findings of each check where others run them (``parity.parallel``).
    """
    started, findings, regimes = time.monotonic(), [], set()
    baselines = Baselines(plan.port)
    for of_check in found or in_this_process(plan, checks, progress):
        for finding in of_check:
            regimes.add(finding.regime)
            if regime is None or finding.regime == regime:
                command = repeat_command(plan, finding)
                findings.append(baselines.judged(finding).model_copy(update={"command": command}))
    if regimes and not findings:
        raise InputError(
            "--regime", regime, f"one of {', '.join(sorted(regimes))}", regime, "name a regime of these checks"
        )
    return Report(
        port=plan.port.name,
        header=header(plan.port, plan.dtypes, plan.seed) | {"baselines": baselines.state(plan.seed)},
        findings=tuple(findings),
        seconds=round(time.monotonic() - started, 2),
    )


def in_this_process(plan: Plan, checks: Iterable[str], progress: Callable[[str], None]) -> Iterator[Iterator[Finding]]:
    """Each check's findings, one check after another."""
    for name in checks:
        progress(name)
        yield own_data_is_good(plan, name)


def own_data_is_good(plan: Plan, check: str) -> Iterator[Finding]:
    """The findings of a check; where the reference itself refuses this project's own data, that is a disagreement.

    Only a golden folder that the user gave can be bad input.
    """
    try:
        yield from CHECKS[check](plan)
    except InputError as error:
        if check == "golden" and plan.golden:
            raise
        what = Quantity("reference", "§2", 0)
        note = f"the reference refuses this project's own data: {error}"
        yield Place(check, "own data", "any", seed=plan.seed).finding(what, "load", "fail", note=note)


def repeat_command(plan: Plan, finding: Finding) -> str:
    """The one command that runs exactly this comparison again."""
    words = ["k3-parity check", f"--port {shlex.quote(plan.port.name)}", f"--check {finding.check}"]
    if finding.check == "golden":
        words += [f"--golden {plan.golden}"] if plan.golden else []
    elif finding.case in {case.name for case in plan.cases}:
        words.append(f"--case {finding.case}")
    if finding.dtype != "any":
        words.append(f"--dtype {finding.dtype}")
    if finding.regime != "natural":
        words.append(f"--regime {finding.regime}")
    return " ".join([*words, f"--seed {finding.seed}"])


def checks_of(part: str) -> tuple[str, ...]:
    """The checks of one part of the model, all of them for "all"; raises InputError on an unknown part."""
    if part == "all":
        return tuple(CHECKS)
    if part not in PARTS:
        raise InputError("--part", part, f"one of {', '.join(PARTS)} or all", part, "name a part")
    return PARTS[part]


def known_checks(names: Iterable[str]) -> tuple[str, ...]:
    """The checks to run, in their order; raises InputError on an unknown name."""
    chosen = tuple(names) or tuple(CHECKS)
    for name in chosen:
        if name not in CHECKS:
            raise InputError("--check", name, f"one of {', '.join(CHECKS)}", name, "name a check")
    return tuple(name for name in CHECKS if name in chosen)


def by_module(findings: Iterable[Finding]) -> Iterator[tuple[str, str, list[Finding]]]:
    """(module, dtype, findings) groups, in order of first appearance."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.module, finding.dtype), []).append(finding)
    for (module, dtype), members in groups.items():
        yield module, dtype, members
