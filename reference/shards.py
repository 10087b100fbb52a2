"""The strict reader of a checkpoint folder: config, index, shards (K3.md §2). numpy only, no tensor library.

Everything that headers can tell is checked when the folder is opened, before any weight is read; values are checked
as each tensor is read. Nothing is guessed and nothing is left over: the tensors of the folder are exactly those that
its ``config.json`` asks for.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from reference.checkpoint import TensorSpec, expert_format_of, tensor_specs
from reference.config import K3Config
from reference.errors import InputError
from reference.headers import FETCH_AGAIN, INDEX, SINGLE, Stored, check_total_size, inside, read_header, read_indexed
from reference.mxfp4 import NAN_SCALE

NUMPY_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype("<f4"), "U8": np.dtype(np.uint8)}


class Shards:
    """A checkpoint folder whose headers have been checked against its configuration.

    ``config`` K3Config; ``expert_format`` "mxfp4" or "dense", told from the names; ``specs`` name -> TensorSpec of the
    whole checkpoint, vision included; ``names`` in the same fixed order; ``total_size`` bytes of all tensors.

    Raises InputError, naming the file and the tensor, for a missing or unreadable file, a damaged header, an index
    that points outside the folder or disagrees with its shards, and a tensor that is missing, unknown, or of another
    shape or dtype than the configuration asks for.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(folder, "folder", "a checkpoint folder", "no such folder", "check the path")
        self.config = K3Config.from_file(self.folder / "config.json")
        listing, content = self.folder / INDEX, None
        if not listing.exists() and (self.folder / SINGLE).exists():
            listing = self.folder / SINGLE
            self._stored = read_header(inside(self.folder, SINGLE, listing))
        else:
            self._stored, content = read_indexed(self.folder, listing)
        self.expert_format = expert_format_of(self._stored)
        specs = tensor_specs(self.config, self.expert_format, self.folder / "config.json")
        self.specs: dict[str, TensorSpec] = {spec.name: spec for spec in specs}
        self.names = tuple(self.specs)
        self.total_size = sum(spec.nbytes for spec in self.specs.values())
        check_against_specs(self._stored, self.specs, listing)
        if content is not None:
            check_total_size(content, self._stored, listing)
        self._maps: dict[Path, np.memmap] = {}

    def file_of(self, name: str) -> Path:
        """The shard that holds ``name``."""
        return self._stored[name].file

    def read(self, name: str) -> np.ndarray:
        """One tensor as a read-only, memory-mapped array: bfloat16 (ml_dtypes), float32 or uint8.

        Raises InputError if a float is NaN or infinite, or if a byte of an expert's scale is 255, which is NaN (§8).
        """
        stored = self._stored[name]
        if stored.file not in self._maps:
            self._maps[stored.file] = np.memmap(stored.file, np.uint8, mode="r")
        data = self._maps[stored.file][stored.begin : stored.end]
        array = np.asarray(data).view(NUMPY_DTYPES[stored.dtype]).reshape(stored.shape)
        check_values(array, name, stored.file)
        return array


def check_against_specs(stored: dict[str, Stored], specs: dict[str, TensorSpec], listing: Path) -> None:
    """Exactly the tensors of ``specs``, each with its shape and dtype."""
    for name in specs:
        if name not in stored:
            mend = "fetch the whole checkpoint, or the config.json that belongs to it"
            raise InputError(listing, name, "the tensor that config.json asks for", "nothing", mend)
    for name, tensor in stored.items():
        if name not in specs:
            mend = "remove it, or correct the config.json that does not ask for it"
            raise InputError(tensor.file, name, "only tensors that config.json asks for", "this one too", mend)
        spec, mend = specs[name], "fetch the shard again, or the config.json that belongs to it"
        if tensor.shape != spec.shape:
            raise InputError(tensor.file, name, f"shape {list(spec.shape)}", list(tensor.shape), mend)
        if tensor.dtype != spec.dtype:
            raise InputError(tensor.file, name, f"dtype {spec.dtype}", tensor.dtype, "convert the tensor exactly")


def check_values(array: np.ndarray, name: str, file: Path) -> None:
    """No NaN and no infinity in a float tensor, no byte 255 in an E8M0 scale."""
    if array.dtype != np.uint8:
        good, expected = np.isfinite(array), "finite numbers"
    elif name.endswith(".weight_scale"):
        good, expected = array != NAN_SCALE, "E8M0 scales below 255, which is NaN"
    else:
        return
    if not good.all():
        where = tuple(int(axis) for axis in np.unravel_index(int(np.argmin(good)), array.shape))
        raise InputError(file, name, expected, f"{array[where]} at {list(where)}", FETCH_AGAIN)
