"""Single layers at true width, every module on the reference's own input: reference float32, float64 and port.

A layer is given a drawn prefix sum and a full bank of drawn blocks; what its modules read follows from the reference's
float32 pass through it. Each module is then judged twice: against float64 by the usual tolerances, and float32 against
float32 by ``AGREEMENT``. Where a checkpoint is only partly there, what can be computed is checked and the rest named.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fixtures import values
from parity.compare import NOT_COMPARED, Place, guarded, isolated_findings
from parity.findings import Finding, measure
from parity.protocol import ModuleCall
from parity.quantities import LAYER_TAPS, quantity
from parity.routing import INDICES, same_choices
from parity.true_width.partial import ATTENTION, KINDS, has_router, lacking_tensors, not_there, with_present_experts
from parity.true_width.session import ROUTER, Position
from parity.true_width.sides import LayerSides, Run
from reference.checkpoint import LAYERS
from reference.config import TextConfig

AGREEMENT = 1e-5
"""Relative RMS that port and reference, both in float32, may be apart in any tap of a module on the same input."""


def given_position(text: TextConfig, layer: int, tokens: int, seed: int) -> Position:
    """What the layers before ``layer`` could have left: a drawn prefix sum and as many blocks as there would be."""
    size = text.attn_res_block_size
    count = -(-layer // size) if size else 0
    shape = (1, tokens, text.hidden_size)

    def drawn(what: str, scale: float) -> np.ndarray:
        word = values.words(seed, f"width.{layer}.{what}", 0, tokens * text.hidden_size)
        return values.normal(word, scale).reshape(shape)

    blocks = [drawn(f"block.{number}", 1.0 + number % 3) for number in range(count)]
    return Position(drawn("prefix_sum", 2.0), np.stack(blocks) if blocks else np.zeros((0, *shape), np.float32))


def layer_findings(run: Run, layer: int, kinds: tuple[str, ...] = tuple(KINDS)) -> Iterator[Finding]:
    """Judge the modules ``kinds`` of one layer; what is not there is a finding that names it."""
    sides = LayerSides(run, layer, tuple(begin for kind in kinds for begin in KINDS[kind]))
    lacking = {kind: lacking_tensors(run, layer, kind, sides) for kind in kinds}
    readable = {kind for kind in kinds if not lacking[kind]}
    position = given_position(run.text, layer, run.tokens, run.seed)
    for kind in kinds:
        if kind not in readable:
            yield not_there(run, layer, kind, lacking[kind])
        call = ModuleCall(kind, layer, module_input(sides, kind, layer, position, readable))
        yield from kind_findings(run, sides, call, kind in readable)
        if kind == "self_attn" and readable >= set(ATTENTION):
            yield from residual_findings(run, sides, layer, position)
        if kind == "self_attn":
            attended = sides.noise.module(call)[f"{LAYERS}{layer}.self_attn.output"] if kind in readable else None
            position = after_attention(run.text, layer, position, attended)
    run.experts[layer] = len(sides.bank)


def module_input(
    sides: LayerSides, kind: str, layer: int, position: Position, readable: set[str]
) -> dict[str, np.ndarray]:
    """What a module is given: the position before it, or what the reference's float32 mix makes of that; where the
    mix cannot be computed, the prefix sum stands in for it."""
    if kind.endswith("_input"):
        return position._asdict()
    mix, part = ("attention_input", "self_attn") if kind == "self_attn" else ("mlp_input", "mlp")
    if mix not in readable:
        return {"input": position.prefix_sum}
    return {"input": sides.noise.module(ModuleCall(mix, layer, position._asdict()))[f"{LAYERS}{layer}.{part}.input"]}


def after_attention(text: TextConfig, layer: int, before: Position, attended: np.ndarray | None) -> Position:
    """Prefix sum and bank that the MLP's mix reads (K3.md §6, steps 2 and 3), by the harness's own arithmetic."""
    attended = np.zeros_like(before.prefix_sum) if attended is None else attended
    size = text.attn_res_block_size
    if size and layer % size == 0:
        return Position(attended, np.concatenate([before.blocks, before.prefix_sum[None]]))
    return Position(before.prefix_sum + attended, before.blocks)


def kind_findings(run: Run, sides: LayerSides, call: ModuleCall, readable: bool) -> Iterator[Finding]:
    """One module on all sides. Of an MoE that is partly there: the router, then a choice among the experts there."""
    if call.kind == "mlp" and run.text.is_moe(call.layer) and has_router(run, call.layer, sides):
        call, finding = with_present_experts(run, sides, call)
        if finding is not None or not readable:
            yield from judged(run, sides, ModuleCall(ROUTER, call.layer, call.inputs))
        if finding is not None:
            yield finding
            readable = readable and call.imposed is not None
    if readable:
        yield from judged(run, sides, call)


def judged(run: Run, sides: LayerSides, call: ModuleCall) -> Iterator[Finding]:
    """Against float64 by the measured tolerances, then float32 against float32 by AGREEMENT."""
    yield from isolated_findings(run.place("width"), sides, run.text, call)
    truth, noise = sides.truth.module(call), sides.noise.module(call)
    names = [name for name in noise if not name.endswith((INDICES, *NOT_COMPARED))]
    found, _ = guarded(run.place("agreement"), quantity(run.text, names[0]), names[0], lambda: sides.port.module(call))
    if found is None:
        return
    if call.imposed is None and not (same_choices(truth, found) and same_choices(truth, noise)):
        index = next(name for name in truth if name.endswith(INDICES))
        call = ModuleCall(call.kind, call.layer, call.inputs, truth[index])
        found, noise = sides.port.module(call), sides.noise.module(call)
    for name in names:
        yield compared(run.place("agreement"), run.text, name, found[name], noise[name], AGREEMENT)


def residual_findings(run: Run, sides: LayerSides, layer: int, before: Position) -> Iterator[Finding]:
    """Prefix sum and bank after attention: the bank must be the old one, or this and the prefix sum, exactly."""
    place, what = run.place("agreement"), LAYER_TAPS["mlp.input"]
    expected = sides.noise.residual(before)
    tap = f"{LAYERS}{layer}.blocks"
    found, problem = guarded(place, what, tap, lambda: sides.port.residual(before)._asdict())
    if found is None:
        yield problem
        return
    for field_, allowed in {"blocks": 0.0, "prefix_sum": AGREEMENT}.items():
        result = measure(found[field_], getattr(expected, field_))
        status = "pass" if result["error"] <= allowed else "fail"
        yield place.finding(what, f"{LAYERS}{layer}.{field_}", status, allowed=allowed, inputs_agree=True, **result)


def compared(
    place: Place, text: TextConfig, name: str, found: np.ndarray, expected: np.ndarray, allowed: float
) -> Finding:
    """One tap of the port against the reference in the same dtype."""
    result = measure(found, expected)
    status = "pass" if result["error"] <= allowed else "fail"
    return place.finding(quantity(text, name), name, status, allowed=allowed, inputs_agree=True, **result)
