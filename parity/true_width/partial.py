"""Checkpoints that are only partly there: what a layer lacks, and how its experts are checked all the same."""

from __future__ import annotations

import numpy as np

from parity.findings import Finding
from parity.protocol import ModuleCall
from parity.quantities import quantity
from parity.routing import INDICES, SCORES, own_choice
from parity.true_width.session import ROUTER
from parity.true_width.sides import LayerSides, Run
from parity.true_width.source import layer_specs
from reference.checkpoint import LAYERS, TensorSpec

KINDS: dict[str, tuple[str, ...]] = {
    "attention_input": ("input_layernorm.", "self_attention_res_"),
    "self_attn": ("self_attn.",),
    "mlp_input": ("post_attention_layernorm.", "mlp_res_"),
    "mlp": ("mlp.", "block_sparse_moe."),
}
"""The modules of a layer in forward order, and how the names of their tensors begin."""
ATTENTION, MLP = ("attention_input", "self_attn"), ("mlp_input", "mlp")
GATE = "block_sparse_moe.gate."


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


def absent(run: Run, layer: int, sides: LayerSides) -> dict[str, TensorSpec]:
    """The layer's tensors, without routed experts, that the source lacks or this run did not ask for."""
    return {
        name: spec for name, spec in layer_specs(run.reader.source.config, layer).items() if name not in sides.present
    }


def has_router(run: Run, layer: int, sides: LayerSides) -> bool:
    return not any(name.startswith(GATE) for name in absent(run, layer, sides))


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
