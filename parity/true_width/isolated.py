"""Single layers at true width, every module on the reference's own input: reference float32, float64 and port.

A layer is given a drawn prefix sum and a full bank of drawn blocks; what its modules read follows from the reference's
float32 pass through it. Each module is then judged twice: against float64 by the usual tolerances, and float32 against
float32 by ``AGREEMENT``. Where a checkpoint is only partly there, what can be computed is checked and the rest named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fixtures import values
from parity.compare import NOT_COMPARED, Place, guarded, isolated_findings
from parity.faults import FaultySession
from parity.findings import Finding, measure
from parity.ports.mlx import PORT as MLX
from parity.ports.reference import PORT as REFERENCE
from parity.protocol import ModuleCall
from parity.quantities import LAYER_TAPS, quantity
from parity.routing import INDICES, SCORES, own_choice, same_choices
from parity.true_width import port_side, reference_side
from parity.true_width.session import ROUTER, LayerSession, Position, Remembered
from parity.true_width.source import layer_specs
from parity.true_width.weights import ExpertBank, Reader, layer_arrays
from reference.checkpoint import LAYERS, TensorSpec
from reference.config import TextConfig

AGREEMENT = 1e-5
"""Relative RMS that port and reference, both in float32, may be apart in any tap of a module on the same input."""
KINDS: dict[str, tuple[str, ...]] = {
    "attention_input": ("input_layernorm.", "self_attention_res_"),
    "self_attn": ("self_attn.",),
    "mlp_input": ("post_attention_layernorm.", "mlp_res_"),
    "mlp": ("mlp.", "block_sparse_moe."),
}
"""The modules of a layer in forward order, and how the names of their tensors begin."""
ATTENTION, MLP = ("attention_input", "self_attn"), ("mlp_input", "mlp")
GATE = "block_sparse_moe.gate."


@dataclass
class Run:
    """What a run shares: where weights come from, how many tokens, which port, and who hears of progress.

    ``in_force`` is entered around everything that the port is asked: a known fault, or nothing.
    """

    reader: Reader
    case: str
    tokens: int
    seed: int
    note: Callable[[str], None] = lambda line: None
    in_force: Callable[[], AbstractContextManager] = nullcontext
    experts: dict[int, int] = field(default_factory=dict)

    @property
    def text(self) -> TextConfig:
        return self.reader.source.config.text_config

    def place(self, check: str, isolated: bool = True) -> Place:
        return Place(check, self.case, "float32", seed=self.seed, isolated=isolated)


class LayerSides:
    """One layer on all sides, on one copy of its weights: ``truth`` float64, ``noise`` float32, ``port``."""

    shown = None

    def __init__(self, run: Run, layer: int, begins: tuple[str, ...] = ("",), truth: bool = True) -> None:
        source = run.reader.source
        self.bank = ExpertBank(run.reader, layer)
        shared = layer_arrays(run.reader, layer, begins)
        self.present = frozenset(shared.views)

        def reference(dtype: str) -> LayerSession:
            wide = dtype == "float64"
            built = reference_side.build_layer(run.text, layer, source.expert_format, shared.views, self.bank, wide)
            return LayerSession(REFERENCE, built, source.config, dtype)

        built = port_side.build_layer(run.text, layer, source.expert_format, shared.arrays, self.bank)
        port = LayerSession(MLX, built, source.config, "float32")
        self.port: Any = Remembered(FaultySession(port, run.in_force))
        self.noise = Remembered(reference("float32"))
        self.truth = Remembered(reference("float64")) if truth else None


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
    position, prefix = given_position(run.text, layer, run.tokens, run.seed), f"{LAYERS}{layer}."
    before = position
    for kind in kinds:
        if lacking[kind]:
            yield not_there(run, layer, kind, lacking[kind])
        if kind.endswith("_input"):
            inputs = position._asdict()
        else:
            asked = f"{prefix}{'self_attn' if kind == 'self_attn' else 'mlp'}.input"
            read_by = "attention_input" if kind == "self_attn" else "mlp_input"
            known = read_by in kinds and not lacking[read_by]
            x = sides.noise.module(ModuleCall(read_by, layer, position._asdict()))[asked] if known else None
            inputs = {"input": position.prefix_sum if x is None else x}
        yield from kind_findings(run, sides, ModuleCall(kind, layer, inputs), bool(lacking[kind]))
        if kind == "self_attn":
            both = not lacking[kind] and "attention_input" in kinds and not lacking["attention_input"]
            if both:
                yield from residual_findings(run, sides, layer, before)
            attended = None
            if not lacking[kind]:
                attended = sides.noise.module(ModuleCall(kind, layer, inputs))[f"{prefix}self_attn.output"]
            position = after_attention(run.text, layer, before, attended)
    run.experts[layer] = len(sides.bank)


def after_attention(text: TextConfig, layer: int, before: Position, attended: np.ndarray | None) -> Position:
    """Prefix sum and bank that the MLP's mix reads (K3.md §6, steps 2 and 3), by the harness's own arithmetic."""
    attended = np.zeros_like(before.prefix_sum) if attended is None else attended
    size = text.attn_res_block_size
    if size and layer % size == 0:
        return Position(attended, np.concatenate([before.blocks, before.prefix_sum[None]]))
    return Position(before.prefix_sum + attended, before.blocks)


def kind_findings(run: Run, sides: LayerSides, call: ModuleCall, lacks: bool) -> Iterator[Finding]:
    """One module on all sides. Of an MoE whose experts are partly there: the router, then a choice among these."""
    routed = call.kind == "mlp" and run.text.is_moe(call.layer)
    if routed and not any(name.startswith(GATE) for name in absent(run, call.layer, sides)):
        call, finding = with_present_experts(run, sides, call)
        if finding is not None:
            yield from judged(run, sides, ModuleCall(ROUTER, call.layer, call.inputs))
            yield finding
            if call.imposed is None:
                return
    if not lacks:
        yield from judged(run, sides, call)


def with_present_experts(run: Run, sides: LayerSides, call: ModuleCall) -> tuple[ModuleCall, Finding | None]:
    """The call as it is if all experts that the reference chooses are there; else with the best of those that are
    there imposed, and a finding that names the lacking ones."""
    text, layer = run.text, call.layer
    taps = sides.noise.module(ModuleCall(ROUTER, layer, call.inputs))
    indices, scores = (taps[f"{LAYERS}{layer}.{what}"] for what in (INDICES, SCORES))
    chosen = np.unique(indices)
    lacking = [int(number) for number in chosen if not sides.bank.has(int(number))]
    if not lacking:
        return call, None
    present = [number for number in range(text.num_experts) if sides.bank.has(number)]
    first = next(iter(sides.bank.specs(lacking[0]).values()))
    note = (
        f"{len(lacking)} of the {len(chosen)} chosen experts are not there ({spans(lacking)}), "
        f"{text.num_experts - len(present)} of {text.num_experts} in all; first {located(run, first)}"
    )
    what = quantity(text, f"{LAYERS}{layer}.moe.routed")
    if len(present) < text.num_experts_per_token:
        note += f"; {len(present)} are too few to choose {text.num_experts_per_token} from: experts not checked"
        call = ModuleCall(call.kind, layer, call.inputs)
    else:
        masked = np.full_like(scores, -np.inf)
        masked[:, present] = scores[:, present]
        imposed = own_choice(masked, text.num_experts_per_token)
        note += f"; checked with the best of the {len(present)} that are there imposed on all sides"
        call = ModuleCall(call.kind, layer, call.inputs, imposed)
    return call, run.place("width").finding(what, f"{LAYERS}{layer}.moe.experts", "unsupported", note=note)


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


def absent(run: Run, layer: int, sides: LayerSides) -> dict[str, TensorSpec]:
    """The layer's tensors, without routed experts, that the source lacks or this run did not ask for."""
    return {
        name: spec for name, spec in layer_specs(run.reader.source.config, layer).items() if name not in sides.present
    }


def lacking_tensors(run: Run, layer: int, kind: str, sides: LayerSides) -> dict[str, TensorSpec]:
    """What a module lacks; its routed experts are another matter."""
    return {name: spec for name, spec in absent(run, layer, sides).items() if name.startswith(KINDS[kind])}


def not_there(run: Run, layer: int, kind: str, lacking: dict[str, TensorSpec]) -> Finding:
    module, end = "self_attn" if kind in ATTENTION else "mlp", "input" if kind.endswith("_input") else "output"
    tap = f"{LAYERS}{layer}.{module}.{end}"
    listed = ", ".join(located(run, spec) for spec in list(lacking.values())[:4])
    more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
    note = f"not checked: {len(lacking)} tensors are not there: {listed}{more}"
    return run.place("width").finding(quantity(run.text, tap), tap, "unsupported", note=note)


def located(run: Run, spec: TensorSpec) -> str:
    """A tensor's name, and its shard where the index tells."""
    shard = run.reader.source.place(spec)
    return f"{spec.name} (in {shard})" if shard else spec.name


def spans(numbers: list[int]) -> str:
    """Ascending numbers, runs shortened: 40-57, 60."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
