"""From a checkpoint folder to a module, strictly and without renaming anything (K3.md §2)."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from reference.cache import DTYPES
from reference.checkpoint import ExpertFormat
from reference.config import K3Config
from reference.errors import InputError
from reference.model import K3Model
from reference.shards import Shards


class CheckpointReader:
    """A checkpoint folder as torch tensors; ``shards`` has checked its files against its configuration."""

    def __init__(self, folder: str | Path) -> None:
        self.shards = Shards(folder)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor, copied, for a model of ``dtype``.

        A bf16 tensor takes the model's dtype; an f32 one stays float32 in a bfloat16 model; bytes stay bytes. Both
        conversions are exact. Raises InputError naming file and tensor if a value is not finite.
        """
        tensor = to_torch(self.shards.read(name))
        if tensor.dtype == torch.float32:
            return tensor.to(torch.promote_types(dtype, torch.float32))
        return tensor if tensor.dtype == torch.uint8 else tensor.to(dtype)


def to_torch(array: np.ndarray) -> Tensor:
    """A copy of an array as a tensor of the same dtype; numpy's bfloat16 goes through its bits."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def expected_names(config: K3Config, expert_format: ExpertFormat) -> list[str]:
    """The checkpoint names that a model of this configuration reads: those of its own parameters and buffers."""
    with torch.device("meta"):
        return list(K3Model(config, expert_format).state_dict())


def load_model(folder: str | Path, dtype: str = "float32") -> K3Model:
    """The model of a checkpoint folder, in eval mode; ``dtype`` "float32", "bfloat16" or "float64".

    Raises InputError, in one line naming file and tensor, for everything that is wrong with the folder.
    """
    if dtype not in DTYPES:
        raise InputError("load_model", "dtype", " or ".join(DTYPES), repr(dtype), "choose one of them")
    reader = CheckpointReader(folder)
    model = K3Model(reader.shards.config, reader.shards.expert_format)
    state = {name: reader.read(name, DTYPES[dtype]) for name in model.state_dict()}
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()
