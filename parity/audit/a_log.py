"""A_log: one value per head, or per channel (K3.md §4)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.audit.entry import AuditEntry, Status
from parity.audit.probe import attention_probes, measured
from parity.audit.subject import Subject
from parity.fault_catalogue.patches import stored
from parity.faults import Fault, fault
from reference.checkpoint import BYTES, LAYERS

PER_CHANNEL = "per channel"
LOUD = 1e3


def audit_a_log(subject: Subject) -> Iterator[AuditEntry]:
    """The length and the total bytes, then the entries beyond the heads, then what each reading does to the output."""
    if not subject.kda_layers:
        return
    linear = subject.config.text_config.linear_attn_config
    heads, channels = linear.num_heads, linear.head_dim
    effect = measured(subject, lambda: attention_probes(subject, subject.kda_layers), {PER_CHANNEL: fault("F01")})
    tails = Tails(subject, heads)
    verdict, status = effect.settled(*judge(subject, tails, effect.decided))
    yield AuditEntry(
        name="a-log",
        question="Is A_log indexed by head or by channel?",
        readings={
            "per head": f"the first {heads} entries, one for each head; any others are padding",
            PER_CHANNEL: f"{channels} entries, one for each channel of a head, shared by all heads",
        },
        evidence=(*length_evidence(subject), *tails.evidence(), *effect.evidence, *tail_effect(subject, tails)),
        verdict=verdict,
        section="§4",
        status=status,
        apart=effect.apart,
    )


class Tails:
    """What the entries beyond the heads hold, layer by layer; nothing without weights, or where there are none."""

    def __init__(self, subject: Subject, heads: int) -> None:
        self.heads, self.length = heads, subject.config.text_config.linear_attn_config.a_log_length
        self.read = subject.shards is not None
        layers = subject.kda_layers if self.read else []
        values = {layer: subject.shards.read(f"{LAYERS}{layer}.self_attn.A_log") for layer in layers}
        self.tails = {layer: array[heads:] for layer, array in values.items()}
        self.filled = {layer: tail for layer, tail in self.tails.items() if tail.any()}
        self.by_head = np.array([array[:heads] for array in values.values()])

    @property
    def padding(self) -> int:
        return self.length - self.heads

    def evidence(self) -> Iterator[str]:
        if not self.read:
            if self.padding:
                yield f"whether entries {self.heads}..{self.length - 1} are zero needs the weights"
            return
        zeros = int((self.by_head == 0).sum())
        span = f"{self.by_head.min():.3g} … {self.by_head.max():.3g}"
        yield f"the first {self.heads} entries of {len(self.tails)} layers lie in {span}; {zeros} of them are zero"
        if not self.padding:
            return
        entries = f"entries {self.heads}..{self.length - 1}"
        if not self.filled:
            yield f"{entries} are exactly 0 in all {len(self.tails)} layers: padding"
            return
        layer, tail = max(self.filled.items(), key=lambda item: float(np.abs(item[1]).max()))
        count, most = int((tail != 0).sum()), float(np.abs(tail).max())
        yield (
            f"{entries} are not all 0 in {len(self.filled)} of {len(self.tails)} layers; "
            f"layer {layer} has {count} of {self.padding} filled, up to {most:.3g}"
        )


def length_evidence(subject: Subject) -> Iterator[str]:
    linear = subject.config.text_config.linear_attn_config
    heads, channels, length = linear.num_heads, linear.head_dim, linear.a_log_length
    yield f"{heads} heads, {channels} channels to a head; {subject.shape_source()} A_log has {length} entries"
    if subject.total_size is not None and length != heads:
        less = len(subject.kda_layers) * (length - heads) * BYTES["F32"]
        total = subject.total_size
        yield (
            f"the bytes of all tensors, {total:,}, are the schema's exactly with {length} entries; "
            f"with {heads} they would be {less:,} fewer"
            if total == schema_bytes(subject)
            else f"the stated total, {total:,} bytes, is not the schema's: it says nothing about the length"
        )


def schema_bytes(subject: Subject) -> int:
    from parity.coverage import grouped_names
    from reference.checkpoint import expert_format_of

    groups = grouped_names(subject.config, expert_format_of(subject.weight_map or ()))
    return sum(nbytes for _, nbytes in groups)


def tail_effect(subject: Subject, tails: Tails) -> Iterator[str]:
    """Whether what stands beyond the heads can be felt under either reading."""
    if not tails.read or not tails.padding:
        return

    def loud(name: str, array: np.ndarray) -> np.ndarray:
        if not name.endswith(".A_log"):
            return array
        return np.concatenate([array[: tails.heads], np.full(tails.padding, np.float32(LOUD))])

    reading = Fault("loud-tail", "kda.gate", "entries beyond the heads are read", "", stored(loud))
    probes = attention_probes(subject, subject.kda_layers[:1])
    by_head = measured(subject, lambda: probes, {"loud": reading}).apart["loud"]
    with fault("F01").applied("reference"):
        by_channel = measured(subject, lambda: probes, {"loud": reading}).apart["loud"]
    yield (
        f"{LOUD:g} in every entry beyond the heads moves the output of {probes[0].label} by {by_head:.2g} where A_log "
        f"is read per head, by {by_channel:.2g} where it is read per channel"
    )


def judge(subject: Subject, tails: Tails, decided: bool) -> tuple[str, Status]:
    linear = subject.config.text_config.linear_attn_config
    heads, channels, length = linear.num_heads, linear.head_dim, linear.a_log_length
    if tails.filled:
        return (
            f"against K3.md: A_log has values beyond its {heads} heads, which a reading per head leaves unused; "
            "this checkpoint may be per channel, or is damaged or another model's",
            "contradicted",
        )
    own = "; the authors' own output agrees with it alone" if decided else ""
    if heads > channels:
        return f"per head: {length} entries are more than the {channels} channels{own}", "decided"
    if heads == channels:
        word = "cannot be decided by shapes alone: heads and channels are equally many, and nothing is padded"
        return (f"per head{own}; {word}", "decided") if decided else (f"{word}; K3.md reads it per head", "undecided")
    if not tails.read:
        return (
            f"cannot be decided by shapes alone: the length, {length}, is the number of channels, and also that of "
            f"{heads} heads with {length - heads} of padding; values beyond the heads decide; K3.md reads it per head",
            "needs data",
        )
    if (tails.by_head == 0).all():
        return "cannot be decided: every entry is 0, in the heads' places too", "undecided"
    return (
        f"per head: all that lies beyond the {heads} heads is zero padding{own}; "
        f"cannot be decided by shapes alone, since the length is the number of channels",
        "decided",
    )
