"""Which known fault a wrong module looks like.

The questions at which the port went wrong are put to the reference with a known fault in it. The fault whose answers
are the port's own names the mistake; where no single one fits, pairs are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parity.cases import CASES
from parity.checks import CHECKS, Plan
from parity.compare_traces import PARTS, legal_routing
from parity.fault_catalogue import FAULTS
from parity.faults import Fault, FaultyPort
from parity.findings import OF_THE_REFERENCE, Diagnosis, Finding, Guess, Report
from parity.likeness import WHOLE, differences, within
from parity.protocol import Taps
from parity.recording import TRACE, Asked, Recording, asked_again
from parity.sides import reference_port
from reference.config import K3Config

FITS = 0.1
"""A fault fits that leaves at most this share of the port's error unexplained."""
QUESTIONS, AGREED = 24, 8
"""How many of a module's questions are put again: those that went wrong, and those that did not."""
PAIRED = 3
"""Pairs are made of one of the faults that fit best alone and any other."""
MODULES, GROUPS = 3, 3
"""How many culprits are explained, and by how many runs of checks each."""
WRONG = 3e-6
"""An answer that is further from the right reference's, in relative RMS, is a wrong one."""
WHOLE_OF = {"kda.output": "kda", "mla.output": "mla"}
"""A golden trace shows attention's output only: any part of it may be wrong."""


class Evidence(NamedTuple):
    """The questions that show one module, and how far the port's answers are from the right reference's."""

    module: str
    questions: tuple[Asked, ...]
    error: float


def diagnose(plan: Plan, report: Report, progress: Callable[[str], None] = lambda text: None) -> tuple[Diagnosis, ...]:
    """A diagnosis of each culprit of ``report``, the worst first, at most three."""
    return tuple(
        explain(evidence)
        for module in culprits(report)
        if (evidence := gathered(plan, report, module, progress)) is not None
    )


def diagnose_trace(report: Report, found: Taps, checkpoint: Path, inputs: Taps, dtype: str) -> tuple[Diagnosis, ...]:
    """The same from a trace alone: the reference's own whole passes over the same inputs, with each known fault in it.

    The trace's routing is imposed, unless the router is the culprit: a tie broken the other way explains nothing.
    """
    results = []
    for module in first_culprits(report):
        routing = {} if module == "router" else legal_routing(found, K3Config.from_file(checkpoint).text_config)
        question = Asked((checkpoint, dtype), TRACE, (checkpoint, inputs, dtype, routing), found)
        if evidence := evidence_of(module, [question]):
            results.append(explain(evidence))
    return tuple(results)


def first_culprits(report: Report) -> list[str]:
    """Where each part of the model first goes wrong: the text runs, the tower, and pictures within text if these two
    are right."""
    first: dict[str, str] = {}
    for part, runs in PARTS.items():
        named = [f.module for run in runs for f in report.sources if f.regime == run]
        if named and not (part == "multimodal" and first):
            first[part] = WHOLE_OF.get(named[0], named[0])
    return list(dict.fromkeys(first.values()))


def culprits(report: Report) -> list[str]:
    """The modules to be explained, in order of how many sources name them; the reference itself is not diagnosed.

    Where a part of a module is named, the module as a whole need not be.
    """
    named = [finding.module for finding in report.sources if finding.check not in OF_THE_REFERENCE]
    wholes = {whole for whole in WHOLE if any(within(whole, module) and module != whole for module in named)}
    return sorted(set(named) - wholes, key=lambda module: -named.count(module))[:MODULES]


def gathered(plan: Plan, report: Report, module: str, progress: Callable[[str], None]) -> Evidence | None:
    """Run the checks that blamed ``module`` once more, and keep what the port was asked about it."""
    asked: list[Asked] = []
    for check, case, dtype in groups(report.sources, module):
        progress(f"diagnosis of {module}: {check}")
        recording = Recording(plan.port)
        cases = tuple(item for item in plan.cases if item.name == case) or plan.cases[:1]
        dtypes = plan.dtypes if dtype == "any" else (dtype,)
        for _ in CHECKS[check](replace(plan, port=recording, cases=cases, dtypes=dtypes, opened={})):
            pass
        asked += recording.asked
    return evidence_of(module, asked)


def groups(sources: Iterable[Finding], module: str) -> list[tuple[str, str, str]]:
    """(check, case, dtype) of the failures to look into: float32 where there is one, different checks first.

    The module's functions are asked even if they are right: that tells a wrong function from right ones misused.
    """
    found = {(f.check, f.case, f.dtype): f for f in sources if f.module == module and f.check not in OF_THE_REFERENCE}
    ranked = sorted(found, key=lambda key: (key[2] == "bfloat16", list(CHECKS).index(key[0])))
    if any(key[2] != "bfloat16" for key in ranked):
        ranked = [key for key in ranked if key[2] != "bfloat16"]
    chosen: list[tuple[str, str, str]] = []
    for key in ranked:
        kept = key[0] if key[0] != "modules" else key[:2]
        if kept not in [other[0] if other[0] != "modules" else other[:2] for other in chosen]:
            chosen.append(key)
    if chosen and all(key[0] != "modules" for key in chosen) and any(within(module, case.module) for case in CASES):
        chosen.insert(0, ("modules", chosen[0][1], chosen[0][2]))
    return chosen[:GROUPS]


def evidence_of(module: str, asked: Sequence[Asked]) -> Evidence | None:
    """The questions that show the module, the wrongly answered ones first, small ones first; None if none is wrong."""
    kept, wrong, right = [], [], []
    for question, answer in zip(asked, asked_again(reference_port(), asked), strict=True):
        apart = [value for _, value in differences(question, question.answer, answer, module)]
        if apart:
            (wrong if max(apart) > WRONG else right).append((question, apart))
    for group, most in ((wrong, QUESTIONS), (right, AGREED)):
        kept += sorted(group, key=lambda item: size(item[0].arguments))[:most]
    if not wrong:
        return None
    return Evidence(module, tuple(question for question, _ in kept), spread(value for _, v in kept for value in v))


def explain(evidence: Evidence, among: Sequence[Fault] = FAULTS) -> Diagnosis:
    """Rank the module's known faults by what of the port's answers they leave unexplained."""
    candidates = [fault for fault in among if may_show(fault, evidence.module)]
    guesses = sorted((guess(evidence, (fault,)) for fault in candidates), key=lambda item: item.residual)
    if candidates and guesses[0].residual > FITS * evidence.error:
        guesses = sorted([*guesses, *pairs(evidence, candidates, guesses)], key=lambda item: item.residual)
    fits = bool(guesses) and guesses[0].residual <= FITS * evidence.error
    return Diagnosis(module=evidence.module, error=evidence.error, fits=fits, guesses=tuple(guesses[:5]))


def pairs(evidence: Evidence, candidates: Sequence[Fault], alone: Sequence[Guess]) -> Iterator[Guess]:
    """Each of the best faults with every other one."""
    best = [guess.faults[0] for guess in alone[:PAIRED]]
    for first, second in combinations(candidates, 2):
        if first.id in best or second.id in best:
            yield guess(evidence, (first, second))


def may_show(fault: Fault, module: str) -> bool:
    return any(within(module, part) or part == module for part in (fault.module, *fault.also))


def guess(evidence: Evidence, faults: tuple[Fault, ...]) -> Guess:
    faulty = FaultyPort(reference_port(), "reference", faults)
    residual = spread(
        value
        for question, answer in zip(evidence.questions, asked_again(faulty, evidence.questions), strict=True)
        for _, value in differences(question, question.answer, answer, evidence.module)
    )
    return Guess(
        faults=tuple(fault.id for fault in faults), claims=tuple(fault.claim for fault in faults), residual=residual
    )


def spread(values: Iterable[float]) -> float:
    """The root of the mean square."""
    collected = np.fromiter(values, np.float64)
    return float(np.sqrt(np.mean(np.square(collected)))) if collected.size else 0.0


def size(value: Any) -> int:
    """How many numbers a question holds."""
    if isinstance(value, np.ndarray):
        return value.size
    if hasattr(value, "__dict__"):
        return size(tuple(vars(value).values()))
    if isinstance(value, dict):
        return size(tuple(value.values()))
    return sum(map(size, value)) if isinstance(value, tuple | list) else 1
