"""The short convolutions: which axis is which, and which tap is now (K3.md §3)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.audit.entry import AuditEntry
from parity.audit.probe import attention_probes, measured
from parity.audit.subject import Subject
from parity.faults import fault
from reference.checkpoint import LAYERS

RIGHT, OTHER = "the last tap is the current token's", "the first tap is the current token's"


def audit_conv(subject: Subject) -> Iterator[AuditEntry]:
    """The shape tells the axes; the order of the taps only values or the authors' own results can tell."""
    if not subject.kda_layers:
        return
    linear = subject.config.text_config.linear_attn_config
    width, kernel = linear.width, linear.short_conv_kernel_size
    evidence = [
        f"{subject.shape_source()} a kernel is [{width}, 1, {kernel}]: channels first, one input each, taps last; "
        f"the first axis is that of q, k and v ({width}), the last short_conv_kernel_size ({kernel})"
    ]
    effect = measured(subject, lambda: attention_probes(subject, subject.kda_layers), {OTHER: fault("F30")})
    if subject.shards:
        sizes = tap_sizes(subject)
        evidence.append(f"RMS of the taps in stored order: {', '.join(f'{size:.3g}' for size in sizes)}")
        heavy = "last" if sizes[-1] == max(sizes) else "first" if sizes[0] == max(sizes) else "neither end"
        evidence.append(f"a filter weighs the current token most as a rule; here the heaviest tap is: {heavy}")
    if kernel == 1:
        verdict, status = "there is one tap and no order", "decided"
    elif effect.decided:
        verdict = f"{RIGHT}; the authors' own output agrees with it alone"
        status = "decided"
    else:
        verdict = f"cannot be decided by shapes alone, and sizes only suggest; K3.md: {RIGHT}"
        status = "undecided" if subject.shards else "needs data"
    verdict, status = effect.settled(verdict, status)
    yield AuditEntry(
        name="conv-taps",
        question="Which axis of a convolution kernel is time, and which tap multiplies the current token?",
        readings={
            RIGHT: "taps stand in the order of time",
            OTHER: "taps stand newest first, as in an impulse response",
        },
        evidence=(*evidence, *effect.evidence),
        verdict=verdict,
        section="§3",
        status=status,
        apart=effect.apart,
    )


def tap_sizes(subject: Subject) -> list[float]:
    """RMS of each stored tap over all channels of q, k and v and all layers."""
    names = [f"{LAYERS}{layer}.self_attn.{part}_conv1d.weight" for layer in subject.kda_layers for part in "qkv"]
    squares = [np.square(subject.shards.read(name)[:, 0].astype(np.float64)).mean(0) for name in names]
    return [float(size) for size in np.sqrt(np.mean(squares, axis=0))]
