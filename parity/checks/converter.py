"""Round trip: fixture → convert → load → logits, in every tier (K3.md §15).

The folder is read twice: by the port, and by ``parity.dequantized``, which shares nothing with the converter, as the
truth and the noise. So a wrong name, order, group, mode or bit shows in the logits, and the first wrong tap is named.
And against the source: MXFP4 experts and everything that a tier leaves alone must be its bytes, requantized weights
nowhere further off than their codes are apart.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fixtures.build import cached
from fixtures.catalogue import Entry
from fixtures.inputs import token_ids
from fixtures.widened import widened
from parity.chained import Batch, chained_findings
from parity.checks.plan import BATCH, TOKENS, Plan
from parity.compare import Place
from parity.dequantized import STACKS, Dequantized, Folder
from parity.findings import Finding
from parity.metrics import relative_rms
from parity.protocol import Port, Step
from parity.quantities import Quantity
from parity.requantization import BANDS, expert_error
from parity.sides import Sides
from parity.tolerance import GOLDEN_CHAINED_FLOAT32
from reference.mxfp4 import unpack
from reference.shards import Shards

CONVERTER = Quantity("converter", "§15")
TIERS = ("mxfp4", *BANDS)
DTYPE = "float32"
"""A bfloat16 model rounds its inputs the same whatever holds the weights; modules and layers are checked elsewhere."""

TINY = 1e-30
"""A group of equal weights has steps of size 0, and must be exact."""


class ConvertedSides(Sides):
    """A converted folder: truth and noise are the reference with the weights that its bytes stand for."""

    def __init__(self, port, checkpoint: Path, dtype: str) -> None:
        super().__init__(port, checkpoint, dtype)
        dequantized = Dequantized(checkpoint)
        self._truth, self._in_dtype = dequantized.session("float64"), dequantized.session(dtype)

    @property
    def truth(self):
        return self._truth

    @property
    def in_dtype(self):
        return self._in_dtype


def run(plan: Plan) -> Iterator[Finding]:
    place = Place("converter", "all", DTYPE, seed=plan.seed, isolated=False)
    if not plan.port.capabilities().converted:
        yield place.finding(CONVERTER, "load", "unsupported", note="this port loads no converted folders")
        return
    if DTYPE not in plan.dtypes:
        yield place.finding(CONVERTER, "load", "unsupported", note=f"converted folders are compared in {DTYPE}")
        return
    yield from error_findings(place)
    for case in plan.cases:
        entry = widened(case.entry)
        source = cached(entry, seed=case.seed)
        for tier in TIERS:
            if not (tier == "mxfp4" and entry.expert_format == "dense"):
                yield from round_trip(plan.port, place._replace(case=case.name, regime=tier), entry, source)


def error_findings(place: Place) -> Iterator[Finding]:
    """What requantizing costs on real-looking experts, tier by tier, against the band that is stated."""
    for tier, (low, high) in BANDS.items():
        error = expert_error(tier, place.seed)
        status = "pass" if low <= error <= high else "fail"
        note = f"an expert loses between {low} and {high} of itself"
        yield place._replace(case="experts", regime=tier, isolated=True).finding(
            CONVERTER, "experts", status, error=error, allowed=high, note=note, inputs_agree=True
        )


def round_trip(port: Port, place: Place, entry: Entry, source: Path) -> Iterator[Finding]:
    """The checkpoint ``source`` of ``entry`` in one tier, which is the place's regime."""
    from port.convert import convert

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, place.regime)
        convert(source, folder, place.regime, sync=False)
        before, after = Shards(source), Folder(folder)
        yield bytes_finding(place, before, after)
        if place.regime != "mxfp4":
            yield weights_finding(place, before, after)
        ids = token_ids(entry, "converter.input_ids", (BATCH, TOKENS), place.seed)
        sides = ConvertedSides(port, folder, DTYPE)
        yield from chained_findings(place, sides, entry.parsed.text_config, Batch(ids, None, [TOKENS]))
        if place.regime == "mxfp4":
            yield unchanged_finding(port, sides, place, source, ids)


def bytes_finding(place: Place, source: Shards, result: Folder) -> Finding:
    """Every tensor that the folder holds under the source's name and dtype, and every MXFP4 expert, byte for byte."""
    wrong, compared = [], 0
    for name in source.names:
        found = stored_bytes(name, result)
        if found is not None:
            compared += 1
            array = source.read(name)
            if found.tobytes() != array.tobytes():
                wrong.append(name)
    note = f"other bytes: {wrong[0]} and {len(wrong) - 1} more" if wrong else f"{compared} tensors"
    status = "fail" if wrong or not compared else "pass"
    error = float("inf") if wrong else 0.0
    return place.finding(CONVERTER, "bytes", status, error=error, allowed=0.0, note=note, inputs_agree=True)


def weights_finding(place: Place, source: Shards, result: Folder) -> Finding:
    """How far the worst requantized weight is from the source's, in units of what requantizing may cost it.

    Beyond that the weight is another one's.
    """
    worst, where = 0.0, ""
    for name in source.names:
        matrix = name.replace(".weight_packed", ".weight")
        reach = result.in_source_layout(matrix, result.reach) if matrix.endswith(".weight") else None
        if reach is None:
            continue
        moved = np.abs(result.source_matrix(matrix) - source_weights(name, source)) / np.maximum(reach, TINY)
        if not where or not moved.max() <= worst:
            worst, where = float(moved.max()), matrix
    status = "pass" if where and worst <= 1 else "fail"
    return place.finding(
        CONVERTER, "weights", status, error=worst, allowed=1.0, note=f"the worst is in {where}", inputs_agree=True
    )


def source_weights(name: str, source: Shards) -> np.ndarray:
    """float64 [out, in]."""
    array = source.read(name)
    if name.endswith(".weight_packed"):
        return unpack(array, source.read(name.replace("weight_packed", "weight_scale")))
    return array.astype(np.float64)


def stored_bytes(name: str, result: Folder) -> np.ndarray | None:
    """The tensor of the result that must have the bytes of the source's ``name``; None where it was requantized."""
    prefix, _, rest = name.partition("experts.")
    if rest and prefix.endswith(".block_sparse_moe."):
        expert, part, kind = rest.split(".")
        module = f"{prefix}switch_mlp.{STACKS[part]}"
        if f"{module}.biases" in result:
            return None
        return result.array(f"{module}.{'scales' if kind == 'weight_scale' else 'weight'}")[int(expert)]
    module = name.removesuffix(".weight")
    if name not in result or f"{module}.scales" in result:
        return None
    return result.array(name)


def unchanged_finding(port: Port, sides: Sides, place: Place, source: Path, ids: np.ndarray) -> Finding:
    """Tier mxfp4 changes no weight: the port's logits are those of the source read directly."""
    before, after = (side.run([Step(input_ids=ids)])[0]["logits"] for side in (port.open(source, DTYPE), sides.port))
    error = relative_rms(after, before)
    status = "pass" if error <= GOLDEN_CHAINED_FLOAT32 else "fail"
    fields = {"error": error, "allowed": GOLDEN_CHAINED_FLOAT32, "inputs_agree": True}
    return place.finding(CONVERTER, "logits of the source", status, **fields)
