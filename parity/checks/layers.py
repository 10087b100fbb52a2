"""Every module of every layer, alone, on the truth's own input and on inputs made to hurt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from parity.arrays import cast
from parity.chained import EMBEDDING
from parity.checks.plan import Case, Plan
from parity.compare import Place, isolated_findings
from parity.findings import Finding
from parity.isolate import isolated_calls
from parity.protocol import ModuleCall, Step
from parity.sides import Sides


def tiny(x: np.ndarray) -> np.ndarray:
    """Rows whose latents have a mean square near 1e-5 and below, where a wrong epsilon shows."""
    return 2e-3 * x


def alike(x: np.ndarray) -> np.ndarray:
    """All tokens almost the same: alike keys, and experts that all tokens want."""
    return x[:, :1] + 1e-2 * (x - x[:, :1])


def large(x: np.ndarray) -> np.ndarray:
    """Gates, activations and scores near saturation."""
    return 12.0 * x


REGIMES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"tiny": tiny, "alike": alike, "large": large}
REGIME_KINDS = ("self_attn", "mlp")
"""The mixes have regimes of their own, as a function (parity/cases/attn_res.py)."""


def run(plan: Plan) -> Iterator[Finding]:
    for case, dtype in plan.each():
        yield from case_findings(plan, case, dtype)


def case_findings(plan: Plan, case: Case, dtype: str) -> Iterator[Finding]:
    sides, ids = plan.sides(case, dtype), case.tokens()
    place = Place("layers", case.name, dtype, seed=plan.seed)
    truth = sides.truth.run([Step(input_ids=ids)])[0]
    embed = ModuleCall("embed", None, {"input_ids": ids})
    yield from isolated_findings(place, sides, case.text, embed, (EMBEDDING,))
    for call in isolated_calls(case.text, truth, dtype, truth[EMBEDDING]):
        yield from isolated_findings(place, sides, case.text, call)
        if call.kind in REGIME_KINDS:
            for regime, change in REGIMES.items():
                hurt = replace(call, inputs={"input": cast(change(call.inputs["input"].astype(np.float64)), dtype)})
                yield from isolated_findings(place._replace(regime=regime), sides, case.text, hurt)
        if call.kind == "self_attn":
            yield from other_forms(plan, place, sides, case, call)


def other_forms(plan: Plan, place: Place, sides: Sides, case: Case, call: ModuleCall) -> Iterator[Finding]:
    """The same attention by every other form that the port has: another way to compute one function."""
    module = "kda" if case.text.is_kda(call.layer) else "mla"
    usual, *others = plan.port.capabilities().forms.get(module, ("",))
    for form in others:
        sides.port.use_form(module, form)
        yield from isolated_findings(place._replace(regime=form), sides, case.text, call)
    if others:
        sides.port.use_form(module, usual)
