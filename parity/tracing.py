"""Running a port over the inputs of a checkpoint and keeping every tap: the runs prefill, decode and padded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from parity.chained import FLATTENED, LOGITS, PER_SEQUENCE, Batch
from parity.protocol import Port, Session, Taps
from parity.routing import INDICES
from parity.trace import RUN_NAMES, load_arrays
from reference.errors import InputError

DECODE_TAPS = (LOGITS, PER_SEQUENCE)
NEEDED = {
    "prefill": ("text.input_ids",),
    "decode": ("text.input_ids", "text.prefill_length"),
    "padded": ("padded.input_ids", "padded.attention_mask"),
}


def load_inputs(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an ``inputs.safetensors``; raises InputError if none of the text inputs are in it."""
    inputs, _ = load_arrays(path)
    if not any(all(name in inputs for name in names) for names in NEEDED.values()):
        raise InputError(
            path, "content", "text.input_ids or padded.input_ids", f"{len(inputs)} other tensors", "give an inputs file"
        )
    return inputs


def batches(inputs: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Batch]]:
    """(run, batch) for every text run that ``inputs`` has what it needs for."""
    for run, names in NEEDED.items():
        if not all(name in inputs for name in names):
            continue
        ids = inputs[names[0]]
        tokens, mask, pieces = ids.shape[1], None, [ids.shape[1]]
        if run == "decode":
            prefill = int(inputs["text.prefill_length"])
            pieces = [prefill] + (tokens - prefill) * [1]
        if run == "padded":
            mask = inputs["padded.attention_mask"].astype(bool)
        yield run, Batch(ids, mask, pieces)


def run_batch(session: Session, batch: Batch, imposed: Mapping[str, np.ndarray] | None = None) -> Taps:
    """One run's taps by full name, tokens of router taps flattened as in the golden traces.

    ``imposed`` maps a router.indices tap to [B·T, k].
    """
    pieces = None
    if imposed:
        split = {name: batch.split(array.reshape(*batch.ids.shape, -1)) for name, array in imposed.items()}
        pieces = [{name: parts[number] for name, parts in split.items()} for number in range(len(batch.pieces))]
    taps = batch.join(session.run(batch.steps(None), pieces))
    return {
        name: array.reshape(-1, *array.shape[2:]) if name.endswith(FLATTENED) else array for name, array in taps.items()
    }


def trace_port(
    port: Port,
    checkpoint: Path,
    inputs: Mapping[str, np.ndarray],
    dtype: str,
    imposed: Mapping[str, np.ndarray] | None = None,
) -> tuple[Taps, dict[str, str]]:
    """(taps, metadata) of a port over all the runs it can do; ``imposed`` holds ``<run>/<tap>`` router choices."""
    able = port.capabilities()
    if dtype not in able.dtypes:
        raise InputError("--dtype", port.name, f"one of {', '.join(able.dtypes)}", dtype, "choose a dtype the port has")
    session, taps = port.open(checkpoint, dtype), {}
    shown = getattr(session, "taps", able.taps)
    for run, batch in batches(inputs):
        if run not in able.runs:
            continue
        prefix = f"{run}/"
        own = {name.removeprefix(prefix): array for name, array in (imposed or {}).items() if name.startswith(prefix)}
        for name, array in run_batch(session, batch, own).items():
            if run != "decode" or name.endswith(DECODE_TAPS) or ".router." in name:
                taps[prefix + name] = array
    for run, result in picture_runs(session, inputs, able.runs, imposed or {}):
        taps |= {f"{run}/{name}": array for name, array in result.items() if keeps(run, name)}
    metadata = {
        "port": port.name,
        "dtype": dtype,
        "unsupported_runs": json.dumps([run for run in RUN_NAMES if run not in able.runs]),
        "shown_taps": json.dumps(None if shown is None else sorted(shown)),
        "versions": json.dumps(port.versions(), sort_keys=True),
    }
    return taps, metadata


def picture_runs(
    session: Session, inputs: Mapping[str, np.ndarray], runs: tuple[str, ...], imposed: Mapping
) -> Iterator:
    """(run, taps) of the runs vision and mm, as far as the inputs have them and the port is able to."""
    if "vision" in runs and "vision.pixel_values" in inputs:
        yield "vision", session.vision(inputs["vision.pixel_values"], inputs["vision.grid_thws"])
    if "mm" in runs and "mm.input_ids" in inputs:
        given = [inputs[f"mm.{what}"] for what in ("input_ids", "attention_mask", "pixel_values", "grid_thws")]
        own = {name.removeprefix("mm/"): array for name, array in imposed.items() if name.startswith("mm/")}
        yield "mm", session.multimodal(*given, own)


def keeps(run: str, name: str) -> bool:
    """Of the multimodal run the merge, the logits and the routers' choices are kept; the rest is compared elsewhere."""
    return run == "vision" or name in ("merged_embeds", "attention_mask", "position_ids", LOGITS) or ".router." in name


def routing_of(taps: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The router.indices taps of a trace, to impose them on another run."""
    return {name: array for name, array in taps.items() if name.endswith(INDICES)}
