"""Both sides of every limit, as measured: how far right ports are from it, and how far known faults are beyond it.

The figures stand in ``limits.json``; ``k3-parity explain --measure`` makes them anew, and a test measures a part again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from parity.checks import CHECKS, Plan
from parity.checks.plan import case_named
from parity.fault_catalogue import FAULTS
from parity.findings import Finding, Record
from parity.kill_matrix import Kill, matrix
from parity.ports import load_port

FILE = Path(__file__).with_name("limits.json")
CHECKED = ("modules", "layers", "vision", "multimodal")
CASES = ("mini", "groups", "wide-values", "kimi-linear", "vision-heads")
DTYPES = ("float32", "bfloat16")
SEEDS = (0, 1, 2, 3, 4)
EXACT = 1e99
"""How many times over its limit a fault counts at which something exact is wrong."""
BEYOND = 3.0
"""A known fault must exceed its limit at least so many times in float32, in the regime made for it."""


class NoiseSide(Record):
    """The worst of a right port in one module and dtype: the reference's own error, the port's, and the share of the
    limit that it used up, over all regimes and seeds."""

    noise: float
    error: float
    share: float
    at: str


class FaultSide(Record):
    """The known faults of one module and dtype: how many, and the one that exceeds the limit least."""

    faults: int
    weakest: str
    times: float
    at: str


class Limits(Record):
    """All that was measured, by module and dtype."""

    seeds: tuple[int, ...]
    noise: dict[str, dict[str, NoiseSide]]
    faults: dict[str, dict[str, FaultSide]]


def stored() -> Limits:
    return Limits.model_validate_json(FILE.read_text(encoding="utf-8"))


def measured(
    seeds: Iterable[int] = SEEDS, workers: int = 2, progress: Callable[[str], None] = lambda text: None
) -> Limits:
    """Both sides anew, of the MLX port; minutes."""
    seeds = tuple(seeds)
    progress("noise")
    findings = [finding for seed in seeds for finding in right_findings(seed, CASES, DTYPES)]
    progress("faults")
    return Limits(
        seeds=seeds, noise=noise_side(findings), faults=fault_side(matrix(FAULTS, ("mlx",), DTYPES, workers=workers))
    )


def save(limits: Limits) -> None:
    """Sorted and rounded, so that a new measurement is a small change."""
    document = json.loads(limits.model_dump_json(), parse_float=lambda text: float(f"{float(text):.2g}"))
    FILE.write_text(json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def right_findings(seed: int, cases: Iterable[str], dtypes: tuple[str, ...]) -> Iterator[Finding]:
    """What the checks find in the MLX port as it is."""
    plan = Plan(load_port("mlx"), tuple(case_named(name, seed) for name in cases), dtypes, seed)
    for check in CHECKED:
        yield from CHECKS[check](plan)


def noise_side(findings: Iterable[Finding]) -> dict[str, dict[str, NoiseSide]]:
    """By module and dtype, from modules on the reference's own input; from whole passes where only these show one."""
    measured = [f for f in findings if None not in (f.error, f.allowed, f.noise)]
    alone = {finding.module for finding in measured if finding.isolated}
    sides: dict[str, dict[str, NoiseSide]] = {}
    for finding in measured:
        if finding.module in alone and not finding.isolated:
            continue
        of_module = sides.setdefault(finding.module, {})
        share = share_used(finding)
        known = of_module.get(finding.dtype)
        if known is None or share > known.share:
            at = f"{finding.case} {finding.regime} {finding.tap.rpartition('.')[2]} seed {finding.seed}"
            side = NoiseSide(noise=finding.noise, error=finding.error, share=share, at=at)
            of_module[finding.dtype] = side
    return sides


def share_used(finding: Finding) -> float:
    """The share of its limit that an error takes; an exact quantity has no room, and is right or is not."""
    if finding.allowed:
        return finding.error / finding.allowed
    return 0.0 if finding.error == 0.0 else EXACT


def fault_side(kills: Iterable[Kill]) -> dict[str, dict[str, FaultSide]]:
    sides: dict[str, dict[str, FaultSide]] = {}
    for kill in kills:
        of_module = sides.setdefault(kill.module, {})
        known = of_module.get(kill.dtype, FaultSide(faults=0, weakest="", times=EXACT, at=""))
        counted = known.model_copy(update={"faults": known.faults + (kill.status == "caught")})
        if kill.status == "caught" and (kill.times < known.times or not known.weakest):
            at = f"{kill.check} {kill.regime} {kill.tap.rpartition('.')[2]}"
            counted = counted.model_copy(update={"weakest": kill.fault, "times": min(kill.times, EXACT), "at": at})
        of_module[kill.dtype] = counted
    return sides
