"""What a converted folder says of itself, and whether its ``config.json`` is that of its source (K3.md §1, §15)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity.verify.declared import PROMISES, Entry, Promise, loader_settings
from parity.verify.findings import Problem
from reference.config import K3Config, read_json
from reference.errors import InputError

RECORD, FORMAT = "k3_parity_conversion", 1
BLOCKS = ("quantization", "quantization_config")
REMOVED = (*BLOCKS, "compression_config")
NOT_CONVERTED = "name a folder that k3-parity convert wrote"

Plan = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Record:
    """``plan``: 0-based layer -> the source's experts in their new order, None where all stay."""

    tier: str
    nonexpert_bits: int | None
    plan: Plan | None

    @property
    def promise(self) -> Promise:
        return PROMISES[self.tier, self.nonexpert_bits]


def read_record(folder: Path, config: K3Config) -> tuple[Record, dict[str, Any]]:
    """The record of a converted folder, and its configuration; raises InputError where there is none to go by.

    ``config`` is the source's.
    """
    path = folder / "config.json"
    document = read_json(path)
    record = document.get(RECORD) if isinstance(document, dict) else None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise InputError(path, RECORD, f"the record of a conversion, format {FORMAT}", repr(record)[:60], NOT_CONVERTED)
    tier, bits = record.get("tier"), record.get("nonexpert_bits")
    if not isinstance(tier, str) or isinstance(bits, list | dict) or (tier, bits) not in PROMISES:
        raise InputError(path, f"{RECORD}.tier", "a tier of this project", f"{tier!r}, {bits!r}", NOT_CONVERTED)
    return Record(tier, bits, read_plan(record.get("plan"), config, path)), document


def read_plan(plan: Any, config: K3Config, path: Path) -> Plan | None:
    """Layer -> experts that exist, each once, for every MoE layer and no other; InputError naming the layer."""
    text = config.text_config
    layers = {layer for layer in range(text.num_hidden_layers) if text.is_moe(layer)}
    if plan is None:
        return None
    if not isinstance(plan, dict) or set(plan) != {str(layer) for layer in layers}:
        found = repr(plan)[:60]
        raise InputError(path, f"{RECORD}.plan", "null, or experts for every MoE layer", found, NOT_CONVERTED)
    for layer, kept in plan.items():
        whole = isinstance(kept, list) and all(type(expert) is int for expert in kept)
        if not whole or not kept or len(set(kept)) < len(kept) or not set(kept) <= set(range(text.num_experts)):
            expected = f"some of the experts 0 to {text.num_experts - 1}, each once"
            raise InputError(path, f"{RECORD}.plan, layer {layer}", expected, repr(kept)[:60], NOT_CONVERTED)
    return {int(layer): tuple(kept) for layer, kept in plan.items()}


def config_problems(
    document: dict[str, Any], source: dict[str, Any], config: K3Config, record: Record, declared: Sequence[Entry]
) -> list[Problem]:
    """Everything in ``config.json`` that is not the source's, or not what the record promises."""
    problems = []
    if document.get(BLOCKS[0]) != document.get(BLOCKS[1]):
        problems.append(Problem("config", "config.json", f"{BLOCKS[0]} and {BLOCKS[1]} differ"))
    problems += block_problems(document.get(BLOCKS[0]), config, record, declared)
    kept = max(map(len, record.plan.values()), default=0) if record.plan else config.text_config.num_experts
    expected = without(source, *REMOVED)
    expected["text_config"] = without(source["text_config"], *REMOVED)
    if record.plan:
        expected["text_config"]["num_experts"] = kept
    found = without(document, *BLOCKS, RECORD)
    problems += [Problem("config", "config.json", what) for what in differences(found, expected)]
    return problems


def block_problems(block: Any, config: K3Config, record: Record, declared: Sequence[Entry]) -> list[Problem]:
    """The quantization block against what the tier quantizes, module by module."""
    expected = record.promise.experts.settings() | loader_settings(config, declared)
    return [
        Problem("config", "config.json", f"quantization: {what}")
        for what in differences(block if isinstance(block, dict) else {}, expected)
    ]


def without(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in keys}


def differences(found: dict[str, Any], expected: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two JSON objects, one line a field."""
    result = []
    for key in sorted(found.keys() | expected.keys()):
        mine, theirs = found.get(key), expected.get(key)
        if key in found and key in expected and mine == theirs:
            continue
        if isinstance(mine, dict) and isinstance(theirs, dict):
            result += differences(mine, theirs, f"{prefix}{key}.")
        else:
            shown = [repr(side[key])[:60] if key in side else "nothing" for side in (expected, found)]
            result.append(f"{prefix}{key}: expected {shown[0]}, found {shown[1]}")
    return result
