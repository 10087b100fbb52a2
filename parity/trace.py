"""Traces: tap name -> array, kept in a safetensors file whose metadata says who made it and how.

Names are ``<run>/<module path in the checkpoint>.<what>`` or ``<run>/<what>``. bfloat16 arrays stay bfloat16.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from reference.errors import InputError

RUN_NAMES = ("prefill", "decode", "padded", "vision", "mm")


def save_trace(path: Path, taps: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write the whole file or nothing; raises InputError if the place cannot be written to."""
    data = save({name: np.ascontiguousarray(array) for name, array in taps.items()}, metadata=dict(metadata))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise InputError(
            path, "output file", "a place that can be written", error.strerror, "choose another path"
        ) from None


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays, metadata) of a safetensors file; raises InputError if it is missing or not one."""
    if not path.is_file():
        raise InputError(path, "file", "a safetensors file", "nothing there", "check the path")
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(path, "content", "a whole safetensors file", error, "fetch or write the file again") from None


def load_trace(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A trace file's taps and metadata; raises InputError if a name has no known run in front."""
    taps, metadata = load_arrays(path)
    for name in taps:
        if name.partition("/")[0] not in RUN_NAMES or "/" not in name:
            raise InputError(
                path, name, f"a tap name <run>/<tap> with a run of {', '.join(RUN_NAMES)}", name, "give a trace file"
            )
    return taps, metadata


def unsupported_runs(metadata: Mapping[str, str]) -> list[str]:
    """The runs that the trace's port said it cannot do."""
    return json.loads(metadata.get("unsupported_runs", "[]"))


def shown_taps(metadata: Mapping[str, str]) -> frozenset[str] | None:
    """The taps that the trace's port declares; None if all of them."""
    names = json.loads(metadata.get("shown_taps", "null"))
    return None if names is None else frozenset(names)
