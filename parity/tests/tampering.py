"""Converted folders with something wrong in them: bytes changed in place, or a shard written again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fixtures.base import merged
from fixtures.build import cached
from fixtures.catalogue import Entry, entry
from port.convert import convert
from reference.headers import INDEX, LENGTH_BYTES

SHARD_BYTES = 300_000
"""Several shards, so that one can be exchanged or cut."""
LAYERS = "language_model.model.layers."
DTYPES = {"BF16": "<u2", "F32": "<f4", "U8": "u1", "U32": "<u4"}
OBLONG = {"text_config": {"moe_intermediate_size": 128}}
PLAN = {layer: (3, 0, 6, 5, 1, 7) for layer in (1, 2, 3, 4)}


@cache
def source() -> Path:
    """A checkpoint that every tier can hold, whose experts are not square: w1 and w3 [128, 64], w2 [64, 128]."""
    base = entry("quantizable")
    return cached(Entry("oblong", merged(base.config, OBLONG), "mxfp4", base.reason, base.shard_bytes))


def converted(target: Path, tier: str, **options: Any) -> Path:
    convert(source(), target, tier, shard_bytes=SHARD_BYTES, sync=False, **options)
    return target


def stack(layer: int, projection: str, part: str = "weight") -> str:
    name = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[projection]
    return f"{LAYERS}{layer}.block_sparse_moe.switch_mlp.{name}.{part}"


class Folder:
    """A copy of a converted folder, to be tampered with."""

    def __init__(self, original: Path, copy: Path) -> None:
        self.path = Path(shutil.copytree(original, copy))
        self.map: dict[str, str] = json.loads((self.path / INDEX).read_text())["weight_map"]

    def array(self, name: str) -> np.ndarray:
        """A tensor, writable in place."""
        shard = self.path / self.map[name]
        header, start = self.header(shard)
        begin, end = header[name]["data_offsets"]
        data = np.memmap(shard, np.uint8, "r+", start + begin, (end - begin,))
        return data.view(DTYPES[header[name]["dtype"]]).reshape(header[name]["shape"])

    def header(self, shard: Path) -> tuple[dict[str, Any], int]:
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            return json.loads(file.read(length)), LENGTH_BYTES + length

    def write_again(self, name: str, change: Callable[[dict[str, tuple]], None]) -> None:
        """The shard that holds ``name``, its tensors name -> (dtype, shape, bytes) changed by ``change``; index too."""
        shard = self.path / self.map[name]
        header, start = self.header(shard)
        data, header = shard.read_bytes()[start:], {key: header[key] for key in header if key != "__metadata__"}
        tensors = {
            key: (place["dtype"], place["shape"], data[slice(*place["data_offsets"])]) for key, place in header.items()
        }
        change(tensors)
        at, header = 0, {}
        for key, (dtype, shape, content) in tensors.items():
            header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(content)]}
            at += len(content)
        text = json.dumps(header).encode()
        content = b"".join(content for _, _, content in tensors.values())
        shard.write_bytes(len(text).to_bytes(LENGTH_BYTES, "little") + text + content)
        self.list_again()

    def list_again(self) -> None:
        """The index, as the shards now are: so that nothing but the tampering itself is wrong."""
        weight_map, total = {}, 0
        for shard in sorted(self.path.glob("*.safetensors")):
            header, _ = self.header(shard)
            for key, place in header.items():
                if key != "__metadata__":
                    weight_map[key] = shard.name
                    total += place["data_offsets"][1] - place["data_offsets"][0]
        (self.path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
