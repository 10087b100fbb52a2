"""Which experts a layer keeps: plans, and what they must be (K3.md §15).

A plan file is ``{"keep": {"1": [5, 0, 7], …}}``: for every MoE layer, by its 0-based number, the experts that stay, in
their new order. Expert ``keep[j]`` becomes expert j; router row and correction bias go with it.

One configuration has one ``num_experts``. A plan that keeps as many in every layer gives a model like any other. An
uneven one is written as it is, ``num_experts`` being the largest count: this port loads it, by the plan that the
configuration records; stock loaders, which build every layer from ``num_experts``, refuse it by a tensor's shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from port.tiers import Plan
from reference.config import K3Config, TextConfig, read_json
from reference.errors import InputError

LIST_ALL = "list every MoE layer with the experts that it keeps"


def read_plan(path: str | Path, config: K3Config) -> Plan:
    """The plan in a file, checked; raises InputError naming file and layer."""
    document = read_json(Path(path))
    if not isinstance(document, dict) or not isinstance(document.get("keep"), dict):
        raise InputError(path, "keep", "layer -> experts that stay", type(document).__name__, LIST_ALL)
    return checked_plan(document["keep"], config, path)


def checked_plan(keep: dict[Any, Any], config: K3Config, source: object = "plan") -> Plan:
    """``keep`` with layer numbers as keys and tuples as values; raises InputError naming the first layer that is wrong.

    Every MoE layer must be there and no other; its experts must exist, each once, and be enough for a token's choice.
    With expert groups every group must keep equally many of its own, at least two, group after group. A softmax router
    cannot lose an expert: its scores would change with the sum that they are divided by.
    """
    text = config.text_config
    layers = [layer for layer in range(text.num_hidden_layers) if text.is_moe(layer)]
    plan = {}
    for layer in layers:
        experts = keep.get(layer, keep.get(str(layer)))
        if experts is None:
            raise InputError(source, f"layer {layer}", "a list of experts", "nothing", LIST_ALL)
        check_layer(experts, text, source, f"layer {layer}")
        plan[layer] = tuple(experts)
    for layer in keep:
        if str(layer) not in map(str, layers):
            raise InputError(source, f"layer {layer}", "only MoE layers", "no routed experts there", "remove it")
    return plan


def check_layer(experts: Any, text: TextConfig, source: object, where: str) -> None:
    if not isinstance(experts, list | tuple) or any(type(expert) is not int for expert in experts):
        raise InputError(source, where, "a list of expert numbers", repr(experts)[:60], "write whole numbers")
    outside = [expert for expert in experts if not 0 <= expert < text.num_experts]
    if outside:
        raise InputError(source, where, f"experts 0 to {text.num_experts - 1}", outside[0], "correct the number")
    if len(set(experts)) < len(experts):
        twice = next(expert for expert in experts if list(experts).count(expert) > 1)
        raise InputError(source, where, "each expert once", f"expert {twice} twice", "remove one")
    if len(experts) < text.num_experts_per_token:
        expected = f"at least {text.num_experts_per_token} experts, which each token needs"
        raise InputError(source, where, expected, len(experts), "keep more")
    if text.expert_groups > 1:
        check_groups(experts, text, source, where)
    if text.moe_router_activation_func == "softmax" and len(experts) < text.num_experts:
        raise InputError(source, where, "all experts of a softmax router", len(experts), "keep them all")


def check_groups(experts: list[int], text: TextConfig, source: object, where: str) -> None:
    size, count = text.num_experts // text.expert_groups, len(experts) // text.expert_groups
    groups = [expert // size for expert in experts]
    if groups != [group for group in range(text.expert_groups) for _ in range(count)] or (count < 2 <= size):
        expected = f"equally many of each of the {text.expert_groups} expert groups, two or more, group after group"
        raise InputError(source, where, expected, f"groups {groups}"[:60], "prune the groups evenly")


def kept_counts(config: K3Config, plan: Plan | None) -> dict[int, int]:
    """0-based MoE layer -> how many experts it has."""
    text = config.text_config
    layers = [layer for layer in range(text.num_hidden_layers) if text.is_moe(layer)]
    return {layer: text.num_experts if plan is None else len(plan[layer]) for layer in layers}
