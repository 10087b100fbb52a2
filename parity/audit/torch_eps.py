"""Which epsilon the installed torch uses in an RMSNorm that is built without one (K3.md §9)."""

from __future__ import annotations

from collections.abc import Iterator

from parity.audit.entry import AuditEntry
from parity.audit.subject import Subject

CANDIDATES = {
    "2^-7, bfloat16's own": 2.0**-7,
    "1.19e-7, float32's": 2.0**-23,
    "2.2e-16, float64's": 2.0**-52,
    "1e-5": 1e-5,
    "1e-6": 1e-6,
    "none": 0.0,
}
PROBES = (2.0**-4, 2.0**-8, 2.0**-11, 2.0**-13)
"""Every element of a row has this value: its mean square is around one or another of the candidates."""


def audit_torch_eps(subject: Subject) -> Iterator[AuditEntry]:
    """One entry for float32 and one for bfloat16, whatever the subject: rows of known mean square tell them apart."""
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        outputs = {probe: _normalized(torch, probe, dtype) for probe in PROBES}
        misfit = {
            name: max(abs(outputs[probe] / (probe * (probe**2 + eps) ** -0.5) - 1) for probe in PROBES)
            for name, eps in CANDIDATES.items()
        }
        best = min(misfit, key=misfit.get)
        second = sorted(misfit.values())[1]
        measured = ", ".join(f"{probe:.3g} → {value:.4g}" for probe, value in outputs.items())
        name = str(dtype).removeprefix("torch.")
        yield AuditEntry(
            name=f"torch-rmsnorm-eps-{name}",
            question=f"Which epsilon does torch.nn.RMSNorm(dim), built without one, use in {name}?",
            readings={key: f"off by at most {value:.2g}" for key, value in misfit.items()},
            evidence=(f"torch {torch.__version__}: rows of equal values {measured}",),
            verdict=f"{best} (off by {misfit[best]:.1g}; the next reading is off by {second:.1g})",
            section="§9",
            status="decided",
        )


def _normalized(torch, value: float, dtype) -> float:
    norm = torch.nn.RMSNorm(64).to(dtype)
    return float(norm(torch.full((1, 64), value, dtype=dtype))[0, 0].detach().double())
