"""The configuration of a converted folder: written for stock loaders, read back by this port (K3.md §1, §15).

Against the source's ``config.json``: the compressed-tensors block is gone; ``quantization`` and, the same,
``quantization_config`` hold the experts' ``group_size``, ``bits`` and ``mode`` and the settings of every quantized
module under the loaders' path; ``text_config.num_experts`` is what a plan left; and ``k3_parity_conversion`` records
``tier``, ``nonexpert_bits``, the source's ``num_experts`` and ``expert_format``, the ``plan`` (layer -> the source's
expert numbers in their new order, or null), and the ``digest`` of everything that the conversion depended on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from port.prune import checked_plan, kept_counts
from port.tiers import Output, Plan, Tier, outputs, quantized_modules, tier_named
from reference.checkpoint import ExpertFormat
from reference.config import K3Config, read_json
from reference.errors import InputError

RECORD, FORMAT = "k3_parity_conversion", 1
REMOVED = ("quantization", "quantization_config", "compression_config")
CONVERT_AGAIN = "convert the checkpoint again"


@dataclass(frozen=True)
class Conversion:
    """What a converted folder says of itself: ``config`` is the source's, before any pruning."""

    config: K3Config
    expert_format: ExpertFormat
    tier: Tier
    plan: Plan | None
    digest: str

    def outputs(self) -> list[Output]:
        """Everything that the folder must hold, in order."""
        return list(outputs(self.config, self.expert_format, self.tier, self.plan))


def converted_config(
    document: dict[str, Any],
    config: K3Config,
    expert_format: ExpertFormat,
    tier: Tier,
    plan: Plan | None,
    written: Sequence[Output],
    digest: str,
) -> dict[str, Any]:
    """The ``config.json`` of the result, from that of the source."""
    result = copy.deepcopy(document)
    for section in (result, result["text_config"]):
        for key in REMOVED:
            section.pop(key, None)
    result["text_config"]["num_experts"] = max(
        kept_counts(config, plan).values(), default=config.text_config.num_experts
    )
    modules = {path: asdict(format) for path, format in quantized_modules(config, written).items()}
    block = asdict(tier.experts) | modules
    result["quantization"], result["quantization_config"] = block, copy.deepcopy(block)
    result[RECORD] = {
        "format": FORMAT,
        "tier": tier.name,
        "nonexpert_bits": tier.nonexpert_bits,
        "num_experts": config.text_config.num_experts,
        "expert_format": expert_format,
        "plan": None if plan is None else {str(layer): list(experts) for layer, experts in plan.items()},
        "digest": digest,
    }
    return result


def is_converted(folder: str | Path) -> bool:
    """Whether the folder's configuration has the record of a conversion; false where it cannot be read."""
    try:
        document = read_json(Path(folder) / "config.json")
    except InputError:
        return False
    return isinstance(document, dict) and RECORD in document


def read_conversion(folder: str | Path) -> Conversion:
    """The record of a converted folder; raises InputError naming the file and the field that is wrong."""
    path = Path(folder) / "config.json"
    document = read_json(path)
    record = document.get(RECORD) if isinstance(document, dict) else None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise InputError(path, RECORD, f"the record of a conversion, format {FORMAT}", repr(record)[:60], CONVERT_AGAIN)
    source = copy.deepcopy(document)
    if isinstance(source.get("text_config"), dict):
        source["text_config"]["num_experts"] = record.get("num_experts")
    config = K3Config.from_dict(source, path)
    if record.get("expert_format") not in ("mxfp4", "dense"):
        raise InputError(path, f"{RECORD}.expert_format", "mxfp4 or dense", record.get("expert_format"), CONVERT_AGAIN)
    try:
        tier = tier_named(record.get("tier"), record.get("nonexpert_bits"))
    except (InputError, TypeError):
        raise InputError(path, f"{RECORD}.tier", "a tier", repr(record.get("tier")), CONVERT_AGAIN) from None
    plan = record.get("plan")
    if plan is not None and not isinstance(plan, dict):
        raise InputError(path, f"{RECORD}.plan", "layer -> experts, or null", repr(plan)[:60], CONVERT_AGAIN)
    plan = None if plan is None else checked_plan(plan, config, path)
    return Conversion(config, record["expert_format"], tier, plan, str(record.get("digest")))
