"""Everything that is known about one tap: its place in K3.md, its limit, both sides of it, the faults that it shows."""

from __future__ import annotations

from parity.cases import CASES
from parity.fault_catalogue import FAULTS
from parity.limits import EXACT, FaultSide, NoiseSide, stored
from parity.quantities import DENSE, KDA, LAYER_TAPS, MLA, MOE, TEXT_MODEL, TOP_TAPS, VISION_TAPS, Quantity, layer_of
from parity.tolerance import FLOOR, ISOLATED
from reference.errors import InputError

TABLES = (TOP_TAPS, LAYER_TAPS, KDA, MLA, MOE, DENSE, VISION_TAPS)


def quantities_of(name: str) -> dict[str, Quantity]:
    """The taps that ``name`` (a tap, with or without its layer or run, or a module) stands for.

    Raises InputError if there is none.
    """
    bare = layer_of(name.rpartition("/")[2])[1].removeprefix(TEXT_MODEL)
    found = {
        f"{tap} ({item.module})": item
        for table in TABLES
        for tap, item in table.items()
        if bare in (tap, tap.removeprefix(TEXT_MODEL), item.module) or tap.endswith(f".{bare}")
    }
    if not found and bare in ISOLATED:
        found = {bare: Quantity(bare, next((case.section for case in CASES if case.module == bare), ""))}
    if not found:
        raise InputError("explain", "TAP", f"one of {', '.join(known_names())}", name, "name a tap or a module")
    return found


def known_names() -> list[str]:
    taps = {tap.removeprefix(TEXT_MODEL) for table in TABLES for tap in table}
    return sorted(taps | set(ISOLATED))


def explained(name: str) -> dict[str, str | list[str]]:
    """What to print about a tap or module, by heading."""
    found = quantities_of(name)
    document: dict[str, str | list[str]] = {}
    for tap, item in found.items():
        needs = ", ".join(item.needs) or "the module's input"
        document[tap] = f"K3.md {item.section}, computed from {needs}"
    for module in dict.fromkeys(item.module for item in found.values()):
        document[module] = list(module_lines(module))
    return document


def module_lines(module: str):
    row = ISOLATED.get(module)
    if row is not None:
        for dtype, factor in row.factor.items():
            floor = row.floor * FLOOR[dtype]
            yield f"{dtype}: allowed {factor:g} × the larger of {floor:.2g} and the reference's own error from float64"
        yield f"because: {row.reason}"
    limits = stored()
    for dtype, side in limits.noise.get(module, {}).items():
        yield noise_line(dtype, side)
    for dtype, side in limits.faults.get(module, {}).items():
        yield fault_line(dtype, side)
    regimes = sorted({regime for case in CASES if case.module == module for regime in case.regimes})
    if regimes:
        yield f"regimes of its functions: {', '.join(regimes)}"
    for item in FAULTS:
        if item.module == module:
            yield f"{item.id}: {item.claim}"


def noise_line(dtype: str, side: NoiseSide) -> str:
    return (
        f"{dtype}, right ports: at most {side.share:.2g} of the limit is used up "
        f"(error {side.error:.2g}, the reference's own {side.noise:.2g}; {side.at})"
    )


def fault_line(dtype: str, side: FaultSide) -> str:
    if not side.weakest:
        return f"{dtype}, known faults: none is seen"
    times = "something exact is wrong" if side.times >= EXACT else f"{side.times:.2g} times the limit"
    return f"{dtype}, known faults: {side.faults} seen, the weakest {side.weakest}, {times} ({side.at})"
