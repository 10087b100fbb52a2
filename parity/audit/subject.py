"""What is audited: a configuration, and as much of its checkpoint as is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from parity.coverage import PRESETS, load_index
from reference.checkpoint import expert_format_of, tensor_specs
from reference.config import K3Config, read_json
from reference.errors import InputError
from reference.headers import INDEX, LENGTH_BYTES, SINGLE, inside, parse_object, stored_tensor
from reference.shards import Shards, check_against_specs

Level = Literal["configuration", "index", "headers", "data"]
TRACE, INPUTS = "trace-float32.safetensors", "inputs.safetensors"


@dataclass(frozen=True)
class Subject:
    """``document`` is ``config.json`` as it stands, ``config`` what the reference reads of it.

    ``weight_map`` and ``total_size`` are the index's; ``shapes`` come from shard headers; ``shards`` can be read.
    """

    config: K3Config
    document: dict[str, Any]
    source: str
    weight_map: Mapping[str, str] | None = None
    total_size: int | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    shards: Shards | None = None

    @property
    def level(self) -> Level:
        if self.shards is not None:
            return "data"
        if self.shapes is not None:
            return "headers"
        return "configuration" if self.weight_map is None else "index"

    @property
    def kda_layers(self) -> list[int]:
        text = self.config.text_config
        return [layer for layer in range(text.num_hidden_layers) if text.is_kda(layer)]

    @property
    def mla_layers(self) -> list[int]:
        return sorted(set(range(self.config.text_config.num_hidden_layers)) - set(self.kda_layers))

    @cached_property
    def golden(self) -> dict[str, np.ndarray]:
        """What the authors' own code computed on this checkpoint, in float32, with its inputs; {} where it is not."""
        from parity.trace import load_arrays

        folder = self.shards.folder if self.shards else None
        if folder is None or not (folder / TRACE).is_file() or not (folder / INPUTS).is_file():
            return {}
        return load_arrays(folder / TRACE)[0] | load_arrays(folder / INPUTS)[0]

    def shape_source(self) -> str:
        """Where shapes come from, as the beginning of a sentence."""
        return "the headers say" if self.level in ("headers", "data") else "K3.md §2 says (no header was given)"


def subject_of(checkpoint: Path | None, config: str | None, index: Path | None) -> Subject:
    """A folder, or a configuration with or without an index; the released configuration if nothing is given."""
    if checkpoint is not None:
        if config is not None or index is not None:
            mend = "give the folder alone: it has its own"
            raise InputError("--checkpoint", "options", "--checkpoint, or --config and --index", "both", mend)
        return folder_subject(checkpoint)
    if config is None and index is not None:
        raise InputError("--index", "options", "a configuration beside it", "nothing", "give --config too")
    path = config_path(config or "k3")
    subject = Subject(K3Config.from_file(path), read_json(path), str(path))
    return subject if index is None else with_index(subject, index)


def config_path(source: str) -> Path:
    """The file of a configuration: a path, its folder, or a preset's name."""
    preset = PRESETS / f"{source}.json"
    path = preset if preset.is_file() and not Path(source).exists() else Path(source)
    return path / "config.json" if path.is_dir() else path


def with_index(subject: Subject, index: Path) -> Subject:
    content = load_index(index)
    return Subject(
        subject.config, subject.document, f"{subject.source}, {index}", content["weight_map"], content["total_size"]
    )


def folder_subject(folder: Path) -> Subject:
    """A whole checkpoint, or one of which only the headers were fetched; InputError for anything else."""
    if not folder.is_dir():
        raise InputError(folder, "folder", "a checkpoint folder", "no such folder", "check the path")
    path = folder / "config.json"
    bare = Subject(K3Config.from_file(path), read_json(path), str(folder))
    if (folder / INDEX).exists():
        bare = with_index(bare, folder / INDEX)
        shards = sorted(set(bare.weight_map.values()))
        if all(is_header_alone(inside(folder, shard, folder / INDEX)) for shard in shards):
            return headers_subject(bare, folder, shards)
    shards = Shards(folder)
    shapes = {name: spec.shape for name, spec in shards.specs.items()}
    weight_map = bare.weight_map or dict.fromkeys(shapes, SINGLE)
    return Subject(bare.config, bare.document, str(folder), weight_map, shards.total_size, shapes, shards)


def headers_subject(bare: Subject, folder: Path, shards: list[str]) -> Subject:
    stored = {}
    for path in (folder / shard for shard in shards):
        header = parse_object(path.read_bytes()[LENGTH_BYTES:], path)
        header.pop("__metadata__", None)
        stored |= {name: stored_tensor(path, name, entry, 0) for name, entry in header.items()}
    specs = tensor_specs(bare.config, expert_format_of(stored), folder / "config.json")
    check_against_specs(stored, {spec.name: spec for spec in specs}, folder / INDEX)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    return Subject(bare.config, bare.document, str(folder), bare.weight_map, bare.total_size, shapes)


def is_header_alone(path: Path) -> bool:
    """Whether a shard ends where its header ends, as after fetching no more than that."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        return path.stat().st_size == LENGTH_BYTES + length
    except OSError:
        return False
