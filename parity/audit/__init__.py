"""The audit: assumptions that a shape, a name or a manual suggests, and what the data or the program really says."""

from parity.audit.entry import AuditEntry
from parity.audit.torch_eps import audit_torch_eps

ENTRIES = (audit_torch_eps,)

__all__ = ["ENTRIES", "AuditEntry"]
