"""Against what the model authors' own code computed: the anchor of the reference itself, and of every port.

Isolated: each module is fed the golden trace's own input. Chained: whole passes. Where the folder is not given, the
golden case inside this project is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from parity.arrays import stored_dtype
from parity.chained import EMBEDDING
from parity.checks import decode, padding
from parity.checks.plan import GOLDEN_IN_REPO, Plan, case_named
from parity.compare import Place, choice_finding, guarded, missing_finding
from parity.compare_traces import Yardstick, trace_findings, yardstick_for
from parity.findings import Finding, measure
from parity.isolate import isolated_calls
from parity.metrics import relative_rms
from parity.ports.traces import TracesPort
from parity.protocol import ModuleCall, Taps
from parity.quantities import TOP_TAPS, Quantity, computed_order, inputs_agree, quantity
from parity.routing import INDICES, compare_choice
from parity.sides import Sides, reference_port
from parity.tolerance import GOLDEN_ISOLATED_FLOAT32, ISOLATED
from parity.trace import load_trace
from parity.tracing import load_inputs, trace_port
from reference.config import K3Config, TextConfig

RUN = "prefill/"
INPUTS = "inputs.safetensors"
WHOLE = {"kda.output": "kda", "mla.output": "mla"}
PARTS_OF = {whole: part for part, whole in WHOLE.items()}


def run(plan: Plan) -> Iterator[Finding]:
    folder = plan.golden or GOLDEN_IN_REPO
    for dtype in plan.dtypes:
        if dtype not in plan.port.capabilities().dtypes:
            place, what = Place("golden", folder.name, dtype), TOP_TAPS["logits"]
            yield place.finding(what, "logits", "unsupported", note=f"this port has no {dtype}")
            continue
        if isinstance(plan.port, TracesPort):
            found, metadata = plan.port.trace(dtype)
            yield from chained(folder, dtype, found, metadata)
            continue
        yield from isolated(plan, folder, dtype)
        place = Place("golden", folder.name, dtype)
        inputs = load_inputs(folder / INPUTS)
        traced: list = []
        _, problem = guarded(
            place,
            TOP_TAPS["logits"],
            "logits",
            lambda traced=traced, inputs=inputs, dtype=dtype: (
                traced.append(trace_port(plan.port, folder, inputs, dtype)) or {}
            ),
        )
        if problem:
            yield problem
        else:
            yield from chained(folder, dtype, *traced[0])


def chained(folder: Path, dtype: str, found: Taps, metadata: dict[str, str]) -> Iterator[Finding]:
    """A port's trace against the golden one of the same dtype."""
    file = folder / f"trace-{dtype}.safetensors"
    golden, _ = load_trace(file)
    yield from trace_findings(folder.name, dtype, found, metadata, golden, yardstick_for(file, dtype, found, None))


def isolated(plan: Plan, folder: Path, dtype: str) -> Iterator[Finding]:
    """Each module of the prefill pass on the golden trace's own input."""
    text = K3Config.from_file(folder).text_config
    golden, _ = load_trace(folder / f"trace-{dtype}.safetensors")
    golden = {name.removeprefix(RUN): array for name, array in golden.items() if name.startswith(RUN)}
    sides = plan.sides_at(folder, dtype)
    ids = load_inputs(folder / INPUTS)["text.input_ids"]
    embedding = sides.truth.module(ModuleCall("embed", None, {"input_ids": ids}))[EMBEDDING]
    place = Place("golden", folder.name, dtype, "isolated")
    for call in isolated_calls(text, golden, dtype, embedding):
        yield from _call_findings(place, sides, text, call, golden)


def _call_findings(place: Place, sides: Sides, text: TextConfig, call: ModuleCall, golden: Taps) -> Iterator[Finding]:
    truth = sides.truth.module(call)
    names = sorted((name for name in truth if name in golden), key=lambda tap: computed_order(text, tap))
    indices = next((name for name in names if name.endswith(INDICES)), None)
    choice = None
    found, problem = guarded(place, quantity(text, names[-1]), names[-1], lambda: sides.port.module(call))
    if found is None:
        yield problem
        return
    noise = sides.noise.module(call)
    if indices and indices in found:
        choice = compare_choice(found[indices], truth | {indices: golden[indices]}, noise, indices)
        same = np.array_equal(np.sort(found[indices]), np.sort(golden[indices]))
        call = ModuleCall(call.kind, call.layer, call.inputs, golden[indices])
        noise, truth = sides.noise.module(call), sides.truth.module(call)
        if not same:
            what = whole_module(quantity(text, indices))
            found, problem = guarded(place, what, indices, lambda: sides.port.module(call))
            if found is None:
                yield choice_finding(place, what, indices, choice)
                yield problem
                return
    wrong: list[str] = []
    for name in names:
        what = whole_module(quantity(text, name))
        if name == indices and choice is not None:
            finding = choice_finding(place, what, name, choice)
        elif name not in found:
            finding = missing_finding(place, what, name, sides.shown)
        else:
            finding = _value(place, what, name, found, truth, noise, golden)
        yield finding.model_copy(update={"inputs_agree": inputs_agree(text, name, wrong)})
        wrong += [name] if finding.status == "fail" else []


def whole_module(what: Quantity) -> Quantity:
    """A golden trace shows attention's input and output and nothing between: the module is all that can be named."""
    return what._replace(module=WHOLE.get(what.module, what.module))


def anchor(plan: Plan) -> Iterator[Finding]:
    """The reference itself against the authors' float32, module by module: the truth must not be its own judge.

    And its own caches and masks against its single pass, which is all that other checks take for true. It takes part
    whatever port is under test; where the reference is that port, the golden check already says it.
    """
    reference = reference_port()
    if plan.port.name == reference.name:
        return
    own = replace(plan, port=reference, opened={}, cases=(case_named("mini", plan.seed),), dtypes=("float32",))
    for finding in (
        *isolated(own, GOLDEN_IN_REPO, "float32"),
        *_anchored_passes(),
        *decode.run(own),
        *padding.run(own),
    ):
        yield finding.model_copy(update={"check": "anchor", "module": f"reference: {finding.module}"})


def _anchored_passes() -> Iterator[Finding]:
    """The reference's whole passes against the authors' float32: text, decoding, padding, pictures."""
    golden, _ = load_trace(GOLDEN_IN_REPO / "trace-float32.safetensors")
    inputs = load_inputs(GOLDEN_IN_REPO / INPUTS)
    found, metadata = trace_port(reference_port(), GOLDEN_IN_REPO, inputs, "float32")
    text = K3Config.from_file(GOLDEN_IN_REPO).text_config
    masks = {run: mask.astype(bool) for run, mask in _masks(inputs, golden)}
    yardstick = Yardstick({}, {}, masks, text, False, "the golden trace alone")
    yield from trace_findings(GOLDEN_IN_REPO.name, "float32", found, metadata, golden, yardstick)


def _masks(inputs: Taps, golden: Taps) -> Iterator[tuple[str, np.ndarray]]:
    """(run, mask) of the runs with positions that mean nothing."""
    yield "padded", inputs["padded.attention_mask"]
    yield "mm", golden["mm/attention_mask"]


def _value(place, what, name, found, truth, noise, golden) -> Finding:
    """float32: within 1e-5 of the authors' output. bfloat16: within twice the reference's own error from float64."""
    own = relative_rms(noise[name], truth[name])
    if place.dtype == "float32":
        target, allowed = golden[name], GOLDEN_ISOLATED_FLOAT32
    else:
        row = ISOLATED[PARTS_OF.get(what.module, what.module)]
        target, allowed = truth[name], row.allowed(place.dtype, own, stored_dtype(noise[name]))
    result = measure(found[name], target)
    status = "pass" if result["error"] <= allowed else "fail"
    return place.finding(what, name, status, allowed=allowed, noise=own, **result)
