"""The converter's lean reader of places finds what the strict reader finds, and fails in its words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fixtures.build import cached
from fixtures.catalogue import CATALOGUE, entry
from port import source_table
from port.source import Files, Source
from reference.errors import InputError
from reference.headers import INDEX
from reference.shards import Shards


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_tensor_is_where_the_strict_reader_finds_it(name: str):
    folder = cached(entry(name))
    strict, lean = Shards(folder), Source(folder)
    assert lean.expert_format == strict.expert_format
    with Files() as files:
        for tensor in strict.names:
            piece = lean.piece(tensor)
            assert Path(piece.file) == strict.file_of(tensor).absolute()
            assert files.read(piece).tobytes() == strict.read(tensor).tobytes()


@pytest.mark.parametrize("chunk", [1, 7, 100, 5000])
def test_an_index_may_be_cut_anywhere(chunk: int, monkeypatch: pytest.MonkeyPatch):
    folder = cached(entry("mini"))
    monkeypatch.setattr(source_table, "CHUNK", chunk)
    expected = json.loads((folder / INDEX).read_text())["weight_map"]
    assert dict(source_table.pairs(folder / INDEX)) == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(cached(entry("mini")), tmp_path / "mini"))


def rewrite(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    text = change(index)
    (folder / INDEX).write_text(text if isinstance(text, str) else json.dumps(index))


NAME = "language_model.model.norm.weight"


def escaped(index: dict) -> str:
    """Another way to write the same document, which the reader in pieces does not know."""
    return json.dumps(index).replace(NAME, NAME.replace("norm", "n\\u006frm"))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: json.dumps(index, indent=8),
        lambda index: json.dumps(dict(reversed(index.items()))),
        lambda index: index["metadata"].update(format="pt"),
        escaped,
    ],
)
def test_other_ways_to_write_an_index(change, folder: Path):
    rewrite(folder, change)
    assert Source(folder).piece(NAME).name == NAME


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["weight_map"].pop(NAME),
        lambda index: index["weight_map"].update({"another.weight": "model-00001-of-00003.safetensors"}),
        lambda index: index["weight_map"].update({NAME: "model-00002-of-00003.safetensors"}),
        lambda index: index["weight_map"].update({NAME: "../model.safetensors"}),
        lambda index: index["weight_map"].update({NAME: "nonesuch.safetensors"}),
        lambda index: index["metadata"].update(total_size=1),
        lambda index: index.pop("metadata"),
        lambda index: index.update(weight_map={}),
        lambda index: json.dumps(index)[:-2],
        lambda index: json.dumps(index)[:-1],
        lambda index: json.dumps(index).replace(f'"{NAME}"', f'"{NAME}": "x", "{NAME}"'),
        lambda index: "",
    ],
)
def test_a_spoilt_index_is_refused_in_the_strict_readers_words(change, folder: Path):
    rewrite(folder, change)
    with pytest.raises(InputError) as strict:
        Shards(folder)
    with pytest.raises(InputError) as lean:
        Source(folder)
    assert str(lean.value) == str(strict.value)


def test_a_configuration_of_another_model_is_refused_in_the_strict_readers_words(folder: Path):
    for field, value in {"moe_intermediate_size": 64, "num_experts": 7, "kv_lora_rank": 21}.items():
        config = json.loads((cached(entry("mini")) / "config.json").read_text())
        config["text_config"][field] = value
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError) as strict:
            Shards(folder)
        with pytest.raises(InputError) as lean:
            Source(folder)
        assert str(lean.value) == str(strict.value)


def test_truncated_shards_are_refused(folder: Path):
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(InputError, match="truncated"):
        Source(folder)
