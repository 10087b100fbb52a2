"""MXFP4: which nibble of a byte comes first (K3.md §8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from parity.audit.entry import AuditEntry
from parity.audit.probe import measured, moe_probes
from parity.audit.subject import Subject
from parity.faults import fault
from reference.checkpoint import expert_format_of
from reference.mxfp4 import GROUP, unpack

LOW, HIGH, HALVES = "low nibble first", "high nibble first", "a block's first half in the low nibbles"
LADDER_BYTES = "00 01 23 45 67 89 ab cd ef a5 5a 80 f7 0f 12 34"
LADDER = (
    0, 0, 0.5, 0, 1.5, 1, 3, 2, 6, 4, -0.5, -0.0, -1.5, -1, -3, -2, -6, -4, 3, -1, -1, 3, 0, -0.0, 6, -6, -6, 0,
    1, 0.5, 2, 1.5,
)  # fmt: skip
"""One block of known values: these bytes under scale byte 127 are these numbers in the released format."""
FORMAT = "mxfp4-pack-quantized"


def pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.stack([low, high], -1).reshape(*low.shape[:-1], -1)


ORDERS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    LOW: pairs,
    HIGH: lambda low, high: pairs(high, low),
    HALVES: lambda low, high: np.concatenate([low, high], -1),
}
"""Reading -> the codes of one block from its low and high nibbles, [..., 16] each."""


def audit_nibbles(subject: Subject) -> Iterator[AuditEntry]:
    """Known values decide what the format means; statistics of a checkpoint cannot, the authors' own results can."""
    ladder = ladder_fits()
    evidence = [f"a ladder of {GROUP} known values: " + ", ".join(f"{n} right {name}" for name, n in ladder.items())]
    evidence.append(mlx_evidence())
    effect = measured(subject, lambda: moe_probes(subject), {HIGH: fault("F68b"), HALVES: fault("F68")})
    evidence += effect.evidence
    if subject.shards and (statistics := statistics_evidence(subject)):
        evidence.append(statistics)
    named, packed = quantization_format(subject), expert_format_of(subject.weight_map or ()) == "mxfp4"
    evidence.append(f"config.json names the format {named!r}" if named else "config.json names no MXFP4 format")
    if not packed:
        verdict, status = "no byte of this checkpoint holds two codes: its experts are stored dense", "decided"
    elif effect.decided:
        verdict, status = f"{LOW}; the authors' own output agrees with it alone", "decided"
    elif named == FORMAT:
        verdict = f"{LOW}, as the named format packs; cannot be decided by this checkpoint's own data"
        status = "undecided" if subject.shards else "needs data"
    else:
        verdict = f"cannot be decided by shapes or data alone; K3.md: {LOW}"
        status = "undecided" if subject.shards else "needs data"
    verdict, status = effect.settled(verdict, status)
    yield AuditEntry(
        name="nibbles",
        question="Which of a byte's two codes is the earlier input?",
        readings={
            LOW: "byte 0xA5 is 3, −1",
            HIGH: "byte 0xA5 is −1, 3",
            HALVES: "inputs 0…15 of a block in the low nibbles, 16…31 in the high ones, as in GGML",
        },
        evidence=tuple(evidence),
        verdict=verdict,
        section="§8",
        status=status,
        apart=effect.apart,
    )


def ladder_fits() -> dict[str, int]:
    """How many of the ladder's values each reading gives."""
    packed = np.frombuffer(bytes.fromhex(LADDER_BYTES), np.uint8)
    return {name: fits(decoded(packed[None], np.array([[127]], np.uint8), name)[0]) for name in ORDERS}


def fits(values: Sequence[float]) -> int:
    return int(np.sum(np.asarray(values) == np.array(LADDER)))


def decoded(packed: np.ndarray, scale: np.ndarray, reading: str) -> np.ndarray:
    """Weights [out, n] of packed bytes [out, n/2] under one of the readings; values and scales are the reference's."""
    blocks = packed.reshape(*packed.shape[:-1], -1, GROUP // 2)
    codes = ORDERS[reading](blocks & 15, blocks >> 4)
    repacked = codes[..., 0::2] | codes[..., 1::2] << 4
    return unpack(repacked.reshape(packed.shape).astype(np.uint8), scale)


def mlx_evidence() -> str:
    """What a decoder that is not this project's makes of the ladder."""
    try:
        import mlx.core as mx
    except ImportError:
        return "MLX is not installed: no second decoder to ask"
    packed = np.frombuffer(bytes.fromhex(LADDER_BYTES), "<u4")
    values = mx.dequantize(
        mx.array(packed[None]), mx.array(np.array([[127]], np.uint8)), None, GROUP, 4, "mxfp4", dtype=mx.float32
    )
    return f"MLX's own mxfp4 decoder gives {fits(np.array(values)[0])} of the {GROUP} values"


def statistics_evidence(subject: Subject) -> str | None:
    """The largest and the mean square of every block of one expert, under each reading: they are the same."""
    name = next((name for name in subject.shards.names if name.endswith(".w1.weight_packed")), None)
    if name is None:
        return None
    packed, scale = (subject.shards.read(name.replace("_packed", part)) for part in ("_packed", "_scale"))
    sizes = []
    for reading in ORDERS:
        blocks = decoded(packed, scale, reading).reshape(len(packed), -1, GROUP)
        sizes.append(np.stack([np.abs(blocks).max(-1), np.square(blocks).mean(-1)]))
    same = all(np.allclose(other, sizes[0], rtol=1e-12, atol=0) for other in sizes[1:])
    return f"the blocks of {name} have {'equal' if same else 'different'} maxima and mean squares under all readings"


def quantization_format(subject: Subject) -> str | None:
    text = subject.document.get("text_config")
    for section in (subject.document, text if isinstance(text, dict) else {}):
        quantization = section.get("quantization_config")
        if isinstance(quantization, dict) and isinstance(quantization.get("format"), str):
            return quantization["format"]
    return None
