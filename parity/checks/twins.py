"""That reference and port read side by side: the same files, the same public names in the same order.

It also holds the house to its word: a class without its twin, or a module without a case or a tolerance, is a failure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from parity.checks.plan import Plan
from parity.compare import Place
from parity.findings import Finding
from parity.quantities import Quantity
from parity.tolerance import ISOLATED

ROOT = Path(__file__).parents[2]
TWINS = (
    "norm", "activation", "padding", "short_conv", "kda", "kda_chunk", "mla", "attn_res", "mlp", "moe", "cache",
    "text", "model", "weights", "vision", "vision_position", "projector", "merge", "saliency",
)  # fmt: skip
ONE_SIDED = {
    "reference": {
        "moe.decode_mxfp4": "MLX has kernels for the packed form",
        "moe.MXFP4Linear": "the port stacks all experts of a layer in one tensor",
        "moe.Expert": "the port stacks all experts of a layer in one tensor",
        "kda_chunk.pairs_across": "a view that is written in place, which MLX does not have",
        "weights.to_torch": "the library's own tensor",
    },
    "port": {
        "weights.to_mlx": "the library's own array",
        "vision.row_sum": "MLX's own sum is less exact on Linux",
        "vision.exponential": "MLX's own is slow on Linux",
        "vision.softmax": "MLX's own is slow and less exact on Linux",
    },
}
"""Names that one side has alone, each with its reason."""


def public_names(path: Path) -> list[str]:
    """Top-level public classes and functions, in order, methods as Class.method."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            names.append(node.name)
    return names


def run(plan: Plan) -> Iterator[Finding]:
    if plan.port.name != "mlx":
        return
    for module in TWINS:
        yield _twin_finding(module)
    yield from _tolerances()


def _twin_finding(module: str) -> Finding:
    place, what = Place("twins", module, "any"), Quantity(module, "§", 0)
    sides = {}
    for package in ("reference", "port"):
        path = ROOT / package / f"{module}.py"
        if not path.is_file():
            return place.finding(what, "names", "fail", note=f"{package}/{module}.py does not exist")
        alone = ONE_SIDED[package]
        sides[package] = [name for name in public_names(path) if f"{module}.{name}" not in alone]
    if sides["reference"] == sides["port"]:
        return place.finding(what, "names", "pass", note=f"{len(sides['port'])} names")
    only = {package: sorted(set(names) - set(sides[other])) for package, other, names in _both(sides)}
    if any(only.values()):
        note = "; ".join(f"only in {package}: {', '.join(names)}" for package, names in only.items() if names)
    else:
        note = f"another order: {', '.join(sides['reference'])} against {', '.join(sides['port'])}"
    return place.finding(what, "names", "fail", note=note)


def _both(sides: dict[str, list[str]]):
    yield "reference", "port", sides["reference"]
    yield "port", "reference", sides["port"]


def _tolerances() -> Iterator[Finding]:
    """Every module that a tap or a case belongs to has a tolerance row with a reason."""
    from parity.cases import CASES
    from parity.quantities import DENSE, KDA, LAYER_TAPS, MLA, MOE, TOP_TAPS

    tables = (KDA, MLA, MOE, DENSE, LAYER_TAPS, TOP_TAPS)
    modules = {what.module for table in tables for what in table.values()} | {case.module for case in CASES}
    for module in sorted(modules):
        row = ISOLATED.get(module)
        status = "pass" if row and row.reason else "fail"
        note = row.reason if row else "no tolerance row"
        yield Place("twins", module, "any").finding(Quantity(module, "§", 0), "tolerance", status, note=note)
