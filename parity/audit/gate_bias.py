"""dt_bias: head by head, or channel by channel (K3.md §4)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.audit.entry import AuditEntry
from parity.audit.probe import attention_probes, measured
from parity.audit.subject import Subject
from parity.faults import fault
from reference.checkpoint import LAYERS

OTHER = "channel first"
STRUCTURE = 10.0
"""Variance between heads over variance within, 1 by chance, from which one may speak of heads."""


def audit_dt_bias(subject: Subject) -> Iterator[AuditEntry]:
    if not subject.kda_layers:
        return
    linear = subject.config.text_config.linear_attn_config
    heads, channels = linear.num_heads, linear.head_dim
    effect = measured(subject, lambda: attention_probes(subject, subject.kda_layers), {OTHER: fault("F08b")})
    right, other = between_heads(subject)
    told = max(right, other) > STRUCTURE and max(right, other) > 3 * min(right, other)
    agree = "; the authors' own output agrees with it alone" if effect.decided else ""
    verdict, status = f"head first{agree}", "decided"
    if told and other > right and not effect.decided:
        verdict = f"against K3.md: values gather by head only if read {OTHER} ({other:.3g} against {right:.3g})"
        status = "contradicted"
    elif not effect.decided and told:
        verdict = f"head first: values gather by head so ({right:.3g} against {other:.3g})"
    elif not effect.decided:
        verdict = "cannot be decided by shapes alone, nor by these values; K3.md reads it head first"
        status = "undecided" if subject.shards else "needs data"
    verdict, status = effect.settled(verdict, status)
    evidence = [
        f"{subject.shape_source()} dt_bias has {heads * channels} entries, {heads} heads of {channels} channels: "
        "either layout has this shape, so that none of it can be per head or per channel alone"
    ]
    if subject.shards:
        evidence.append(
            f"variance between heads over variance within: {right:.3g} head first, {other:.3g} {OTHER}; 1 by chance"
        )
    yield AuditEntry(
        name="dt-bias",
        question="In which order do dt_bias's entries stand?",
        readings={"head first": "entry h·D + d", OTHER: "entry d·H + h"},
        evidence=(*evidence, *effect.evidence),
        verdict=verdict,
        section="§4",
        status=status,
        apart=effect.apart,
    )


def between_heads(subject: Subject) -> tuple[float, float]:
    """The F ratio of grouping by head, averaged over layers, under either layout; (1, 1) without weights."""
    if subject.shards is None:
        return 1.0, 1.0
    linear = subject.config.text_config.linear_attn_config
    heads, channels = linear.num_heads, linear.head_dim
    if heads < 2 or channels < 2:
        return 1.0, 1.0
    ratios = []
    for layer in subject.kda_layers:
        values = subject.shards.read(f"{LAYERS}{layer}.self_attn.dt_bias").astype(np.float64)
        layouts = (values.reshape(heads, channels), values.reshape(channels, heads).T)
        ratios.append([variance_ratio(by_head) for by_head in layouts])
    return tuple(float(x) for x in np.mean(ratios, axis=0))


def variance_ratio(groups: np.ndarray) -> float:
    """Between rows over within rows of [groups, members], each by its degrees of freedom."""
    count, members = groups.shape
    between = members * groups.mean(1).var(ddof=1)
    within = groups.var(1, ddof=1).mean()
    if within == 0:
        return 1.0 if between == 0 else float("inf")
    return float(between / within)
