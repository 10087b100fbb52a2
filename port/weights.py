"""From a checkpoint folder to a module, strictly, by the table of ``weight_table.py`` (K3.md §2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from port.cache import DTYPES
from port.model import K3Model
from port.output_config import is_converted
from port.weight_table import Entry, table
from reference.checkpoint import ExpertFormat
from reference.config import K3Config
from reference.errors import InputError
from reference.shards import Shards


class CheckpointReader:
    """A checkpoint folder as MLX parameters; ``shards`` has checked its files against its configuration."""

    def __init__(self, folder: str | Path) -> None:
        self.shards = Shards(folder)

    def read(self, entry: Entry, dtype: mx.Dtype) -> mx.array:
        """The parameter of one row of the table, for a model of ``dtype``.

        A bf16 tensor takes the model's dtype; an f32 one stays float32 in a bfloat16 model; bytes stay bytes. Every
        conversion is exact. Raises InputError naming file and tensor if a value is not finite.
        """
        return entry.transform([to_mlx(self.shards.read(name)) for name in entry.sources], dtype)


def to_mlx(array: np.ndarray) -> mx.array:
    """A copy of an array as an MLX array of the same dtype; numpy's bfloat16 goes through its bits."""
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def expected_names(config: K3Config, expert_format: ExpertFormat) -> list[str]:
    """The checkpoint names that a model of this configuration reads: the sources of the table."""
    return [source for entry in table(config, expert_format) for source in entry.sources]


def load_model(folder: str | Path, dtype: str = "float32") -> K3Model:
    """The model of a checkpoint folder, in eval mode; ``dtype`` "float32" or "bfloat16".

    A folder that ``convert`` wrote is loaded with its quantized weights (``converted.py``). Raises InputError, in one
    line naming file and tensor, for everything that is wrong with the folder.
    """
    if dtype not in DTYPES:
        raise InputError("load_model", "dtype", " or ".join(DTYPES), repr(dtype), "choose one of them")
    if is_converted(folder):
        from port.converted import load_converted

        return load_converted(folder, dtype)
    reader = CheckpointReader(folder)
    config, expert_format = reader.shards.config, reader.shards.expert_format
    _check_sources(expected_names(config, expert_format), reader.shards.names, folder)
    model = K3Model(config, expert_format)
    _assign(model, {entry.parameter: reader.read(entry, DTYPES[dtype]) for entry in table(config, expert_format)})
    return model.eval()


def _check_sources(wanted: Sequence[str], present: Sequence[str], where: object) -> None:
    """InputError unless ``wanted`` are exactly the tensors that are ``present``; ValueError if one is read twice."""
    for name in sorted(set(wanted) - set(present)):
        raise InputError(where, name, "a tensor that the model reads", "nothing", "fetch the whole checkpoint")
    for name in sorted(set(present) - set(wanted)):
        raise InputError(where, name, "only tensors that the model reads", "this one too", "correct config.json")
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"the table reads {next(name for name in wanted if wanted.count(name) > 1)} twice")


def _assign(model: K3Model, parameters: Mapping[str, mx.array]) -> None:
    """Give ``model`` all its parameters; ValueError unless they are exactly those it has, in their shapes."""
    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    given = {name: array.shape for name, array in parameters.items()}
    if shapes != given:
        wrong = min(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
        raise ValueError(f"{wrong}: shape {shapes.get(wrong)} in the model, {given.get(wrong)} in the table")
    model.update(tree_unflatten(list(parameters.items())))
