"""The epsilon of every norm: which fields name one, and how far apart the readings are where inputs are small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from parity.audit.entry import AuditEntry, Status
from parity.audit.probe import (
    TINY,
    Apart,
    Probe,
    apart,
    attention_probes,
    projector_probes,
    vision_probes,
)
from parity.audit.subject import Subject
from parity.fault_catalogue.patches import given
from parity.faults import Fault, fault


class Norm(NamedTuple):
    """One kind of norm: its epsilon, where it is written, and other readings of it (what they say -> the fault)."""

    name: str
    question: str
    section: str
    right: Callable[[Subject], str]
    written: str
    probes: Callable[[Subject], list[Probe]]
    others: dict[str, Fault]


def _kda(subject: Subject) -> list[Probe]:
    return attention_probes(subject, subject.kda_layers) if subject.kda_layers else []


def _mla(subject: Subject) -> list[Probe]:
    return attention_probes(subject, subject.mla_layers) if subject.mla_layers else []


def _with(target: str, eps: float) -> Fault:
    return Fault("eps", "norm", f"eps is {eps:g}", "rows of small size", {target: given(eps=eps)})


NORMS = (
    Norm(
        "eps-latent",
        "Which epsilon do q_a_layernorm and kv_a_layernorm use?",
        "§3",
        lambda subject: "1e-6, their class's default",
        "in no field: rms_norm_eps is another number",
        _mla,
        {"1e-5, the model's rms_norm_eps": fault("F43")},
    ),
    Norm(
        "eps-kda-output",
        "Which epsilon does KDA's o_norm use?",
        "§4",
        lambda subject: f"{subject.config.text_config.rms_norm_eps:g}, rms_norm_eps",
        "in rms_norm_eps, which does not say that this norm is meant too",
        _kda,
        {"1e-6, the latent norms'": fault("F34d")},
    ),
    Norm(
        "eps-key-length",
        "Which epsilon do the lengths of q and k have, and where?",
        "§4",
        lambda subject: "1e-6, inside the root, on the sum of squares",
        "in no field",
        _kda,
        {"1e-6 outside the root": fault("F21"), "1e-12, torch's normalize": fault("F21b")},
    ),
    Norm(
        "eps-tower",
        "Which epsilon do the tower's norms use, which are built without one?",
        "§9",
        lambda subject: "1.1920929e-7, float32's, in bfloat16 too",
        "in no field; what torch takes is measured in torch-rmsnorm-eps",
        vision_probes,
        {"2^-7, bfloat16's": fault("F100"), "1e-6": _with("vision.norm_rounded_once", 1e-6)},
    ),
    Norm(
        "eps-projector",
        "Which epsilon does the projector's post_norm use?",
        "§9",
        lambda subject: f"{subject.config.vision_config.projector_ln_eps:g}, projector_ln_eps",
        "in projector_ln_eps",
        projector_probes,
        {"1.19e-7, the tower's": _with("vision.norm_rounded_once", 1.1920929e-7)},
    ),
)

NAMED = ("eps-projector",)
"""Norms whose epsilon is in a field of its own."""


def audit_eps(subject: Subject) -> Iterator[AuditEntry]:
    """One entry per kind of norm. No weight depends on an epsilon: only a result can decide it."""
    for norm in NORMS:
        evidence, effect = [f"written {norm.written}", "no stored tensor depends on an epsilon"], {}
        probes, told = norm.probes(subject) if subject.shards else [], []
        for reading, other in norm.others.items() if probes else ():
            usual, small = apart(probes, other), apart([probe.tiny() for probe in probes], other)
            evidence.append(moved_text(reading, usual, small))
            effect[reading] = small.most
            told += [reading] if usual.decided else []
        if not probes:
            evidence.append("how far the readings are apart needs the weights")
        right = norm.right(subject)
        verdict, status = judge(norm, right, told)
        yield AuditEntry(
            name=norm.name,
            question=norm.question,
            readings={right: "K3.md's"} | dict.fromkeys(norm.others, "another program's"),
            evidence=tuple(evidence),
            verdict=verdict,
            section=norm.section,
            status=status,
            apart=effect,
        )


def judge(norm: Norm, right: str, told: list[str]) -> tuple[str, Status]:
    """``told`` are the other readings that the authors' own output rules out."""
    if len(told) == len(norm.others):
        return f"{right}; the authors' own output agrees with it alone", "decided"
    if norm.name in NAMED:
        return f"{right}: the field says so", "decided"
    ruled_out = f"; the authors' own output rules out {', '.join(told)}" if told else ""
    return f"{right}; cannot be decided by shapes or weights{ruled_out}", "undecided"


def moved_text(reading: str, usual: Apart, small: Apart) -> str:
    where = ", ".join(usual.labels)
    return (
        f'"{reading}" moves the output of {where} by {usual.most:.1e} on rows of ordinary size, by {small.most:.1e} on '
        f"rows {TINY:g} as large"
    ) + usual.authors_text()
