"""The audit: assumptions that a shape, a name or a manual suggests, and what the data or the program really says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parity.audit.a_log import audit_a_log
from parity.audit.conv import audit_conv
from parity.audit.entry import AuditEntry
from parity.audit.eps import audit_eps
from parity.audit.gate_bias import audit_dt_bias
from parity.audit.ids import audit_ids
from parity.audit.inert import audit_inert
from parity.audit.kv_b import audit_kv_b
from parity.audit.layer_lists import audit_layer_lists
from parity.audit.nibbles import audit_nibbles
from parity.audit.subject import Subject, subject_of
from parity.audit.torch_eps import audit_torch_eps
from parity.audit.tower import audit_rope_axis, audit_tower_qkv

ENTRIES: tuple[Callable[[Subject], Iterator[AuditEntry]], ...] = (
    audit_a_log,
    audit_dt_bias,
    audit_conv,
    audit_kv_b,
    audit_layer_lists,
    audit_tower_qkv,
    audit_rope_axis,
    audit_nibbles,
    audit_eps,
    audit_torch_eps,
    audit_inert,
    audit_ids,
)

__all__ = ["ENTRIES", "AuditEntry", "Subject", "audited", "subject_of"]


def audited(subject: Subject) -> Iterator[AuditEntry]:
    """Every entry that ``subject`` has something to say about, in a fixed order."""
    for entry in ENTRIES:
        yield from entry(subject)
