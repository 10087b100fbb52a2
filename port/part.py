"""A part of a model: the modules that one rank holds, and only their tensors read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from port.cache import DTYPES
from port.model import K3Model
from port.output_config import is_converted
from port.weight_table import Entry, table
from port.weights import CheckpointReader
from reference.errors import InputError


class Elsewhere(nn.Module):
    """Stands where a module would that another rank holds: no parameters, and no result."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.tap_path = path

    def __call__(self, *given: object, **more: object) -> mx.array:
        raise RuntimeError(f"{self.tap_path} is on another rank")


def text_only(model: K3Model) -> K3Model:
    """Without tower and projector: pictures are merged before (K3.md §10), and come in as embeddings."""
    model.vision_tower, model.mm_projector = Elsewhere("vision_tower"), Elsewhere("mm_projector")
    return model


def open_reader(folder: str | Path, dtype: str) -> CheckpointReader:
    """The reader of a released checkpoint; InputError for another dtype, or a folder that ``convert`` wrote."""
    if dtype not in DTYPES:
        raise InputError("split model", "dtype", " or ".join(DTYPES), repr(dtype), "choose one of them")
    if is_converted(folder):
        found, mend = "a converted one", "split the checkpoint that it was converted from"
        raise InputError(folder, "config.json", "a checkpoint in the released format", found, mend)
    return CheckpointReader(folder)


def whole(entry: Entry) -> Entry:
    """A row of the table as it is: all experts."""
    return entry


def load_part(
    model: K3Model, reader: CheckpointReader, dtype: str, share: Callable[[Entry], Entry] = whole
) -> tuple[str, ...]:
    """Fill what ``model`` has of parameters, and return the checkpoint names that were read for it.

    ``share`` leaves of a row's sources those that this rank holds. Raises ValueError unless every parameter is given,
    in its shape.
    """
    wanted = {name for name, _ in tree_flatten(model.parameters())}
    rows = [row for row in table(model.config, reader.shards.expert_format) if row.parameter in wanted]
    rows = [share(row) for row in rows]
    model.load_weights([(row.parameter, reader.read(row, DTYPES[dtype])) for row in rows], strict=True)
    mx.eval(model.parameters())
    model.eval()
    return tuple(name for row in rows for name in row.sources)
