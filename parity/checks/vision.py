"""The vision tower and the projector: every module alone, then the whole, on pictures and videos of uneven shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from parity.arrays import cast
from parity.chained import chain_findings
from parity.checks.plan import Case, Plan
from parity.compare import Place, isolated_findings
from parity.findings import Finding
from parity.protocol import ModuleCall, Taps
from parity.tracing import load_inputs

PATCHES, GRIDS = "vision.pixel_values", "vision.grid_thws"


def small(x: np.ndarray) -> np.ndarray:
    """Rows of mean square near 1e-7: between epsilons of 0, 1.19e-7 and 1e-6 every norm answers differently."""
    return 3e-4 * x


def run(plan: Plan) -> Iterator[Finding]:
    for case, dtype in distinct_towers(plan):
        inputs = load_inputs(case.checkpoint / "inputs.safetensors")
        yield from tower_findings(plan, case, dtype, inputs[PATCHES], inputs[GRIDS])


def distinct_towers(plan: Plan) -> Iterator[tuple[Case, str]]:
    """Each dtype with the first case of every vision configuration: cases that differ in text alone share a tower."""
    seen = set()
    for case, dtype in plan.each():
        key = (case.config.vision_config.model_dump_json(exclude={"text_hidden_size"}), dtype)
        if key not in seen:
            seen.add(key)
            yield case, dtype


def tower_findings(plan: Plan, case: Case, dtype: str, pixels: np.ndarray, grids: np.ndarray) -> Iterator[Finding]:
    sides = plan.sides(case, dtype)
    place = Place("vision", case.name, dtype, seed=plan.seed)
    pixels = cast(pixels, dtype)
    truth = sides.truth.vision(pixels, grids)
    for call in vision_calls(truth, pixels, grids, dtype, case.config.vision_config.vt_num_hidden_layers):
        yield from isolated_findings(place, sides, case.text, call)
        if call.kind in ("vision_block", "vision_merge"):
            hurt = replace(call, inputs=call.inputs | {"input": cast(small(call.inputs["input"]), dtype)})
            yield from isolated_findings(place._replace(regime="small"), sides, case.text, hurt)
    chain = place._replace(regime="whole", isolated=False)
    computed = (lambda side=side: side().vision(pixels, grids) for side in sides.two)
    yield from chain_findings(chain, case.text, truth, *computed, shown=plan.port.capabilities().taps)


def vision_calls(taps: Taps, pixels: np.ndarray, grids: np.ndarray, dtype: str, blocks: int) -> Iterator[ModuleCall]:
    """Each module of the tower with the input that the trace ``taps`` says it had."""
    yield ModuleCall("patch_embed", None, {"pixel_values": pixels, "grid_thws": grids})
    hidden = taps["patch_embed.output"]
    for block in range(blocks):
        yield ModuleCall("vision_block", block, {"input": cast(hidden, dtype), "grid_thws": grids})
        hidden = taps[f"encoder.blocks.{block}.output"]
    yield ModuleCall("vision_merge", None, {"input": cast(hidden, dtype), "grid_thws": grids})
    yield ModuleCall("projector", None, {"input": cast(taps["tower.output"], dtype)})
