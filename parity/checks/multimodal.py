"""Pictures within text: the merge exactly, the logits of the whole model, rows of different numbers of pictures."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.chained import chain_findings
from parity.checks.plan import Case, Plan
from parity.checks.vision import distinct_towers
from parity.compare import Place
from parity.findings import Finding
from parity.protocol import Session, Taps, Unsupported
from parity.tracing import load_inputs

COMPARED = ("merged_embeds", "attention_mask", "position_ids", "logits")


def run(plan: Plan) -> Iterator[Finding]:
    for case, dtype in distinct_towers(plan):
        inputs = load_inputs(case.checkpoint / "inputs.safetensors")
        ids, mask = inputs["mm.input_ids"], inputs["mm.attention_mask"]
        pictures = (inputs["mm.pixel_values"], inputs["mm.grid_thws"])
        yield from merged_findings(plan, case, dtype, "left", ids, mask, pictures)
        yield from merged_findings(plan, case, dtype, "right", *padded_right(ids, mask), pictures)


def padded_right(ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same rows with their padding at the other end; the pad id stays what stands there."""
    rows = [np.roll(np.arange(ids.shape[1]), int(row.sum()) - ids.shape[1]) for row in mask]
    return np.take_along_axis(ids, np.stack(rows), 1), np.take_along_axis(mask, np.stack(rows), 1)


def merged_findings(plan: Plan, case: Case, dtype: str, regime: str, ids, mask, pictures) -> Iterator[Finding]:
    sides = plan.sides(case, dtype)
    place = Place("multimodal", case.name, dtype, regime, plan.seed, isolated=False)
    truth = sides.truth.multimodal(ids, mask, *pictures)
    real = truth["attention_mask"].astype(bool)
    inputs = (ids, mask, *pictures)
    computed = (lambda side=side: with_routing(side(), inputs, routing(truth)) for side in sides.two)
    compared, shown = {name: truth[name] for name in COMPARED}, plan.port.capabilities().taps
    yield from chain_findings(place, case.text, compared, *computed, real=real, shown=shown)


def with_routing(session: Session, inputs: tuple[np.ndarray, ...], imposed: Taps) -> Taps:
    """The pass with the truth's routing. A port that merges to another length cannot take it: then its own routing
    shows that length, which says what is wrong."""
    try:
        return session.multimodal(*inputs, imposed)
    except Unsupported:
        raise
    except Exception:
        return session.multimodal(*inputs)


def routing(truth) -> dict[str, np.ndarray]:
    """The truth's choices, imposed: what routers choose is judged by the checks of the text tower."""
    return {name: array for name, array in truth.items() if name.endswith("router.indices")}
