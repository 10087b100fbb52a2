"""The vision tower: how wqkv is packed, and which axis turns which pair (K3.md §9)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.audit.entry import AuditEntry, Status
from parity.audit.probe import Measured, measured, vision_probes
from parity.audit.subject import Subject
from parity.fault_catalogue.patches import stored
from parity.faults import Fault, fault

PART_FIRST, HEAD_FIRST = "[q, k, v] of all heads each", "head by head, [q, k, v] in each"
COLUMN_FIRST, ROW_FIRST, HALVES = (
    "even pairs turn by the column",
    "even pairs turn by the row",
    "channels pair in halves",
)


def audit_tower_qkv(subject: Subject) -> Iterator[AuditEntry]:
    vision = subject.config.vision_config
    heads, rows = vision.vt_num_attention_heads, 3 * vision.qkv_hidden_size

    def by_head(name: str, array: np.ndarray) -> np.ndarray:
        if not name.endswith("wqkv.weight"):
            return array
        return array.reshape(heads, 3, -1, array.shape[1]).swapaxes(0, 1).reshape(array.shape)

    other = Fault("qkv", "vision.attention", HEAD_FIRST, "heads read each other's parts", stored(by_head))
    effect = measured(subject, lambda: vision_probes(subject), {HEAD_FIRST: other})
    verdict, status = effect.settled(*told(subject, effect, PART_FIRST))
    yield AuditEntry(
        name="tower-qkv",
        question="How are q, k and v packed in the tower's wqkv?",
        readings={
            PART_FIRST: f"{rows} rows as [3, {heads}, {vision.head_dim}]",
            HEAD_FIRST: f"{rows} rows as [{heads}, 3, {vision.head_dim}]",
        },
        evidence=(f"{subject.shape_source()} wqkv has {rows} rows: the same under both readings", *effect.evidence),
        verdict=verdict,
        section="§9",
        status=status,
        apart=effect.apart,
    )


def audit_rope_axis(subject: Subject) -> Iterator[AuditEntry]:
    others = {ROW_FIRST: fault("F92"), HALVES: fault("F92b")}
    effect = measured(subject, lambda: vision_probes(subject), others)
    verdict, status = effect.settled(*told(subject, effect, COLUMN_FIRST))
    yield AuditEntry(
        name="rope-axis",
        question="Which pairs of channels does the tower's rope turn, and by which axis?",
        readings={
            COLUMN_FIRST: "pair 2i, channels (4i, 4i + 1), turns by column·f_i, pair 2i + 1 by row·f_i",
            ROW_FIRST: "as the released docstring says; the released code does not",
            HALVES: "channel j turns with channel j + D/2, as in language models",
        },
        evidence=("the rope has no tensor: nothing in a checkpoint speaks of it", *effect.evidence),
        verdict=verdict,
        section="§9",
        status=status,
        apart=effect.apart,
    )


def told(subject: Subject, effect: Measured, right: str) -> tuple[str, Status]:
    if effect.apart and not any(effect.apart.values()):
        return f"{right}; the readings are the same in this configuration", "decided"
    if effect.decided:
        return f"{right}; the authors' own output agrees with it alone", "decided"
    if subject.shards is None:
        return f"cannot be decided by shapes alone; K3.md: {right}", "needs data"
    without = "nor by weights without the authors' own results"
    return f"cannot be decided by shapes alone, {without}; K3.md: {right}", "undecided"
