"""A converted folder read a second way: the reference with the weights that its bytes stand for (K3.md §8, §15).

Nothing here comes from the converter or from MLX. Names, stacking, code order and group settings are read off the
folder as stock loaders read it, and codes become float64 by the formulas below: so a converted folder's logits have a
truth that shares no mistake with whatever wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from reference.config import K3Config
from reference.mxfp4 import unpack

if TYPE_CHECKING:
    from parity.ports.twin import TwinSession

GROUP = 64
STACKS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(w[123])\.weight")
STORED = {"BF16": ml_dtypes.bfloat16, "F32": np.dtype("<f4"), "U8": np.uint8, "U32": np.dtype("<u4")}


def affine_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [..., n·bits/32] -> codes uint8 [..., n]: one stream of bits, least significant first."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return (stream.reshape(*words.shape[:-1], -1, bits) * weights).sum(-1, dtype=np.uint8)


def affine_weights(words: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """``scale · code + bias`` in float64, [..., n]; scales and biases [..., n/64] tell how many bits a code has."""
    inputs = GROUP * scales.shape[-1]
    codes = affine_codes(words, 32 * words.shape[-1] // inputs)
    scale, bias = (np.repeat(array.astype(np.float64), GROUP, axis=-1) for array in (scales, biases))
    return codes * scale + bias


class Folder:
    """The tensors of a converted folder, by name, and matrices as float64."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        self._places: dict[str, tuple[np.ndarray, dict]] = {}
        for name in sorted(set(index["weight_map"].values())):
            shard = np.asarray(np.memmap(folder / name, np.uint8, "r"))
            length = int.from_bytes(shard[:8].tobytes(), "little")
            header = json.loads(shard[8 : 8 + length].tobytes())
            tensors = {key: entry for key, entry in header.items() if key != "__metadata__"}
            self._places |= {key: (shard[8 + length :], entry) for key, entry in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self):
        return iter(self._places)

    def array(self, name: str) -> np.ndarray:
        """As stored, memory-mapped."""
        data, entry = self._places[name]
        begin, end = entry["data_offsets"]
        return data[begin:end].view(STORED[entry["dtype"]]).reshape(entry["shape"])

    def matrix(self, module: str, expert: int | None = None) -> np.ndarray:
        """The weights of a module, float64 [..., out, in]; of one expert where it is a stack."""
        place = slice(None) if expert is None else expert
        weight = self.array(f"{module}.weight")[place]
        if f"{module}.scales" not in self:
            return weight.astype(np.float64)
        scales = self.array(f"{module}.scales")[place]
        if f"{module}.biases" in self:
            return affine_weights(weight, scales, self.array(f"{module}.biases")[place])
        return unpack(np.ascontiguousarray(weight).view(np.uint8), scales)

    def reach(self, module: str, expert: int | None = None) -> np.ndarray | None:
        """How far requantizing may move each weight, float64 [..., out, in]; None if the module is not affine.

        Half a step between two codes where a code is near; up to a whole one at the far end of a group, since MLX puts
        the nearer end and zero exactly on codes; and what rounding scale and bias to bfloat16 adds, 2^-9 of each.
        """
        if f"{module}.biases" not in self:
            return None
        place = slice(None) if expert is None else expert
        words, scales = (self.array(f"{module}.{part}")[place] for part in ("weight", "scales"))
        levels = 2 ** (32 * words.shape[-1] // (GROUP * scales.shape[-1])) - 1
        steps = np.repeat(np.abs(scales.astype(np.float64)), GROUP, axis=-1)
        return steps * (1 + 2 * levels * 2.0**-9)

    def in_source_layout(self, name: str, of: Callable[..., np.ndarray | None]) -> np.ndarray | None:
        """``of`` (``matrix`` or ``reach``) what the source calls ``name``: a matrix's name, experts' as dense ones."""
        if match := EXPERT.fullmatch(name):
            return of(f"{match[1]}switch_mlp.{STACKS[match[3]]}", int(match[2]))
        module = name.removesuffix(".weight")
        if module.endswith(".kv_b_proj") and name not in self:
            keys, values = (of(module.replace("kv_b_proj", part)) for part in ("embed_q", "unembed_out"))
            return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, keys.shape[1])
        return of(module)

    def source_matrix(self, name: str) -> np.ndarray:
        """What the source calls ``name`` (a name of the reference with dense experts), float64."""
        if name.endswith(".weight"):
            return self.in_source_layout(name, self.matrix)
        return self.array(name).astype(np.float64)


class Dequantized:
    """The reference with a converted folder's weights, read once for any number of sessions."""

    def __init__(self, folder: Path) -> None:
        import torch

        self.config = K3Config.from_file(folder)
        tensors, names = Folder(folder), self._empty_model().state_dict()
        self.weights = {name: torch.from_numpy(tensors.source_matrix(name)) for name in names}

    def session(self, dtype: str) -> TwinSession:
        """In ``dtype`` "float64" or "float32"."""
        import torch

        from parity.ports.reference import PORT
        from parity.ports.twin import TwinSession

        kind, model = {"float64": torch.float64, "float32": torch.float32}[dtype], self._empty_model()
        model.load_state_dict(
            {name: tensor.to(kind) for name, tensor in self.weights.items()}, strict=True, assign=True
        )
        return TwinSession(PORT, model.eval(), self.config, dtype)

    def _empty_model(self):
        import torch

        from reference.model import K3Model

        with torch.device("meta"):
            return K3Model(self.config, "dense")
