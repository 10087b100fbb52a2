"""What a conversion would write, from configuration and index alone (K3.md §15): no shard is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parity.coverage import index_coverage, load_config, load_index
from port.output_shards import cut, default_shard_bytes
from port.prune import checked_plan, read_plan
from port.tiers import TIERS, Plan, outputs, tier_named
from reference.checkpoint import ExpertFormat, expert_format_of
from reference.config import K3Config
from reference.errors import InputError
from reference.headers import INDEX

EXPERT_KINDS = ("stack", "quantize_experts")


@dataclass(frozen=True)
class Size:
    """One tier: ``expert_bytes`` of routed experts and ``other_bytes``, in ``tensors`` tensors and ``shards`` files; or
    ``refusal``, why it cannot be."""

    tier: str
    nonexpert_bits: int | None
    expert_bytes: int = 0
    other_bytes: int = 0
    tensors: int = 0
    shards: int = 0
    refusal: str | None = None

    @property
    def nbytes(self) -> int:
        return self.expert_bytes + self.other_bytes


def read_source(source: str) -> tuple[K3Config, ExpertFormat]:
    """Configuration and expert format of a folder that has at least ``config.json``, or of a preset.

    An index beside it, plain or gzipped, must name exactly the tensors that the configuration asks for; raises
    InputError otherwise.
    """
    config = load_config(source)
    candidates = [Path(source) / INDEX, Path(source) / f"{INDEX}.gz"]
    index_file = next((path for path in candidates if path.is_file()), None)
    if index_file is None:
        return config, "mxfp4"
    index = load_index(index_file)
    for _, name, what in index_coverage(config, index, source).problems:
        raise InputError(index_file, name, "the tensors that config.json asks for", what, "fetch both of one revision")
    return config, expert_format_of(index["weight_map"])


def sizes(
    source: str, tier: str | None, nonexpert_bits: int | None, plan_file: Path | None, shard_bytes: int | None = None
) -> list[Size]:
    """The size of one tier, or of every tier that allows ``nonexpert_bits``; raises InputError."""
    config, expert_format = read_source(source)
    plan = None if plan_file is None else checked_plan(dict(read_plan(plan_file, config)), config, plan_file)
    names = [tier] if tier else [name for name in TIERS if nonexpert_bits is None or TIERS[name].linears is None]
    rows = []
    for name in names:
        try:
            rows.append(size(config, expert_format, name, nonexpert_bits, plan, shard_bytes, source))
        except InputError as error:
            if tier:
                raise
            rows.append(Size(name, nonexpert_bits, refusal=str(error)))
    return rows


def size(
    config: K3Config,
    expert_format: ExpertFormat,
    name: str,
    nonexpert_bits: int | None,
    plan: Plan | None,
    shard_bytes: int | None,
    source: object,
) -> Size:
    written = list(outputs(config, expert_format, tier_named(name, nonexpert_bits), plan, source))
    experts = sum(output.nbytes for output in written if output.kind in EXPERT_KINDS)
    total = sum(output.nbytes for output in written)
    tensors = sum(len(output.tensors) for output in written)
    shards = len(cut(written, shard_bytes or default_shard_bytes(total)))
    return Size(name, nonexpert_bits, experts, total - experts, tensors, shards)
