"""Mini checkpoints with single tensors replaced, and both twins' ways to measure saliency."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from fixtures.build import cached
from fixtures.catalogue import Entry
from fixtures.inputs import token_ids
from reference.headers import INDEX, read_indexed
from reference.saliency_result import Domains, Saliency
from reference.shards import NUMPY_DTYPES

TWINS = ("reference", "port")
Edits = Mapping[str, Callable[[np.ndarray], np.ndarray]]


def moe_name(layer: int, rest: str) -> str:
    return f"language_model.model.layers.{layer}.block_sparse_moe.{rest}"


def edited(item: Entry, folder: Path, edits: Edits) -> Path:
    """A copy of the entry's checkpoint, with ``edits`` of its tensors: name -> function of the array."""
    shutil.copytree(cached(item), folder)
    stored, _ = read_indexed(folder, folder / INDEX)
    for name, edit in edits.items():
        place = stored[name]
        data = np.memmap(place.file, np.uint8, "r+", place.begin, (place.end - place.begin,))
        array = np.array(data).view(NUMPY_DTYPES[place.dtype]).reshape(place.shape)
        changed = np.ascontiguousarray(edit(array).astype(array.dtype))
        data[:] = changed.reshape(-1).view(np.uint8)
        data.flush()
    return folder


def two_domains(item: Entry) -> dict[str, list[np.ndarray]]:
    """Three sequences of one domain and one of another."""
    return {"a": list(token_ids(item, "a", (3, 20))), "b": [token_ids(item, "b", (27,))]}


def streamed(twin: str, folder: Path, domains: Domains, **more) -> Saliency:
    return importlib.import_module(f"{twin}.saliency").calibrate(folder, domains, **more)


def whole(twin: str, folder: Path, domains: Domains, **more) -> Saliency:
    model = importlib.import_module(f"{twin}.weights").load_model(folder)
    return importlib.import_module(f"{twin}.saliency").model_saliency(model, domains, **more)


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative, of the worst element; +inf where one side is 0 and the other is not."""
    scale = np.where(expected > 0, expected, 1)
    different = np.abs(found - expected) / scale
    return float(np.where((expected == 0) & (found != 0), np.inf, different).max())
