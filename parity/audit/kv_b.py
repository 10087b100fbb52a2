"""kv_b_proj: which of its rows are keys and which are values (K3.md §5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from parity.audit.entry import AuditEntry
from parity.audit.probe import attention_probes, measured
from parity.audit.subject import Subject
from parity.fault_catalogue.patches import stored
from parity.faults import Fault
from reference.checkpoint import LAYERS

RIGHT = "head by head, [key | value]"
VALUE_FIRST = "head by head, [value | key]"
ALL_KEYS_FIRST = "all heads' keys, then all heads' values"


def audit_kv_b(subject: Subject) -> Iterator[AuditEntry]:
    if not subject.mla_layers:
        return
    text = subject.config.text_config
    heads, nope, value = text.num_attention_heads, text.qk_nope_head_dim, text.v_head_dim
    orders = {
        VALUE_FIRST: lambda array: value_first(array, heads, nope, value),
        ALL_KEYS_FIRST: lambda array: keys_first(array, heads, nope, value),
    }
    others = {reading: misread(reading, order) for reading, order in orders.items()}
    effect = measured(subject, lambda: attention_probes(subject, subject.mla_layers), others)
    evidence = [
        f"{subject.shape_source()} kv_b_proj has {heads * (nope + value)} rows, {heads}·({nope} + {value}): "
        "the same under every reading"
    ]
    if subject.shards:
        contrasts = {RIGHT: contrast(subject, lambda array: array)}
        contrasts |= {reading: contrast(subject, order) for reading, order in orders.items()}
        told = ", ".join(f"{ratio:.3g} {reading}" for reading, ratio in contrasts.items())
        evidence.append(f"RMS of key rows over RMS of value rows: {told}; all near 1: sizes do not tell")
        if max(contrasts.values()) > 1.5 or min(contrasts.values()) < 1 / 1.5:
            evidence[-1] = f"RMS of key rows over RMS of value rows: {told}; the furthest from 1 is the likeliest"
    if effect.decided:
        verdict, status = f"{RIGHT}; the authors' own output agrees with it alone", "decided"
    else:
        verdict = f"cannot be decided by shapes alone, and sizes only suggest; K3.md: {RIGHT}"
        status = "undecided" if subject.shards else "needs data"
    verdict, status = effect.settled(verdict, status)
    yield AuditEntry(
        name="kv-b",
        question="In which order do the rows of kv_b_proj stand?",
        readings={
            RIGHT: f"per head {nope} rows of the key, then {value} of the value",
            VALUE_FIRST: f"per head {value} rows of the value, then {nope} of the key",
            ALL_KEYS_FIRST: f"{heads}·{nope} rows of keys, then {heads}·{value} of values",
        },
        evidence=(*evidence, *effect.evidence),
        verdict=verdict,
        section="§5",
        status=status,
        apart=effect.apart,
    )


def value_first(array: np.ndarray, heads: int, nope: int, value: int) -> np.ndarray:
    """Rows as K3.md's reading expects them, if what is stored is [value | key] in every head."""
    per_head = array.reshape(heads, nope + value, -1)
    return np.concatenate([per_head[:, value:], per_head[:, :value]], axis=1).reshape(array.shape)


def keys_first(array: np.ndarray, heads: int, nope: int, value: int) -> np.ndarray:
    """The same, if all keys are stored before all values."""
    keys, values = array[: heads * nope], array[heads * nope :]
    parts = [keys.reshape(heads, nope, -1), values.reshape(heads, value, -1)]
    return np.concatenate(parts, axis=1).reshape(array.shape)


def misread(reading: str, order: Callable[[np.ndarray], np.ndarray]) -> Fault:
    change = lambda name, array: order(array) if name.endswith("kv_b_proj.weight") else array  # noqa: E731
    return Fault("kv-b", "mla.attention", reading, "keys and values exchanged", stored(change))


def contrast(subject: Subject, order: Callable[[np.ndarray], np.ndarray]) -> float:
    """RMS of what this reading calls keys over RMS of what it calls values, over all layers."""
    text, squares = subject.config.text_config, []
    nope, value = text.qk_nope_head_dim, text.v_head_dim
    for layer in subject.mla_layers:
        array = order(subject.shards.read(f"{LAYERS}{layer}.self_attn.kv_b_proj.weight").astype(np.float64))
        per_head = array.reshape(-1, nope + value, array.shape[-1])
        squares.append([np.square(part).mean() for part in (per_head[:, :nope], per_head[:, nope:])])
    keys, values = np.mean(squares, axis=0)
    return float(np.sqrt(keys / values))
