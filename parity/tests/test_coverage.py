from __future__ import annotations

import gzip
import json
import shutil
import struct
from pathlib import Path

import pytest

from fixtures.build import build
from fixtures.catalogue import entry
from parity.coverage import folder_coverage, index_coverage, load_config, load_index
from reference.checkpoint import expert_format_of, logical_parameters, names_digest, tensor_specs
from reference.errors import InputError

NAMES_SHA256 = "cf9c59e9b9d9595e03f8dd6667c15e49cf8b1a76fa28f2f865f022a81c5e65f1"
TOTAL = 1_560_860_324_864


@pytest.fixture(scope="module")
def k3_names() -> dict[str, str]:
    return {spec.name: "model-00001-of-00001.safetensors" for spec in tensor_specs(load_config("k3"))}


def problems(config, index) -> list[tuple[str, str]]:
    result = index_coverage(config, index, "test")
    return [(kind, name) for kind, name, _ in result.problems]


def test_the_released_model(k3_names):
    """The figures that the release states: names, digest, bytes, parameters."""
    config = load_config("k3")
    assert len(k3_names) == 497_220
    assert names_digest(k3_names) == NAMES_SHA256
    assert sum(spec.nbytes for spec in tensor_specs(config)) == TOTAL
    assert logical_parameters(config) == 2_779_931_837_184
    assert problems(config, {"weight_map": k3_names, "total_size": TOTAL}) == []


def test_a_removed_a_renamed_and_an_added_name(k3_names):
    config, gone = load_config("k3"), "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale"
    weight_map = dict(k3_names)
    shard = weight_map.pop(gone)
    assert problems(config, {"weight_map": weight_map, "total_size": TOTAL}) == [("missing", gone)]
    weight_map[gone + "s"] = shard
    assert problems(config, {"weight_map": weight_map, "total_size": TOTAL}) == [
        ("missing", gone),
        ("extra", gone + "s"),
    ]
    weight_map[gone] = shard
    assert problems(config, {"weight_map": weight_map, "total_size": TOTAL}) == [("extra", gone + "s")]


def test_a_wrong_total_and_wrong_shard_names(k3_names):
    config = load_config("k3")
    assert problems(config, {"weight_map": k3_names, "total_size": TOTAL - 2}) == [("total", "metadata.total_size")]
    first = next(iter(k3_names))
    outside = k3_names | {first: "../model-00001-of-00001.safetensors"}
    kinds = {kind for kind, _ in problems(config, {"weight_map": outside, "total_size": TOTAL})}
    assert kinds == {"shard"}
    gap = k3_names | {first: "model-00003-of-00003.safetensors"}
    assert {kind for kind, _ in problems(config, {"weight_map": gap, "total_size": TOTAL})} == {"shard"}


def test_index_plain_and_gzipped(tmp_path: Path):
    document = {"metadata": {"total_size": 4}, "weight_map": {"a": "model.safetensors"}}
    plain, packed = tmp_path / "index.json", tmp_path / "index.json.gz"
    plain.write_text(json.dumps(document))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_index(plain) == load_index(packed) == {"weight_map": {"a": "model.safetensors"}, "total_size": 4}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"weight_map": 1}', b'{"weight_map": {"a": 1}}', b'{"weight_map": {}}', b"\x1f\x8bgarbage"],
)
def test_a_bad_index_is_one_line(tmp_path: Path, content: bytes):
    path = tmp_path / "index.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_index(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build(entry("all-mla"), tmp_path / "all-mla")


def rewrite_header(path: Path, change) -> None:
    """Change the JSON header of a safetensors file and leave its data alone."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def folder_problems(folder: Path) -> list[tuple[str, str]]:
    return [(kind, name) for kind, name, _ in folder_coverage(load_config(str(folder)), folder).problems]


def test_a_good_folder(folder: Path):
    assert folder_problems(folder) == []


def test_headers_are_held_against_the_schema(folder: Path):
    index = load_index(folder / "model.safetensors.index.json")["weight_map"]
    name = "language_model.model.layers.0.self_attn.o_proj.weight"
    path = folder / index[name]

    def transposed(header):
        header[name]["shape"].reverse()

    rewrite_header(path, transposed)
    assert folder_problems(folder) == [("shape", name)]
    rewrite_header(path, transposed)
    rewrite_header(path, lambda header: header[name].update(dtype="F16"))
    assert folder_problems(folder) == [("dtype", name)]
    rewrite_header(path, lambda header: header[name].update(dtype="BF16"))
    rewrite_header(path, lambda header: header.update({name + "x": header.pop(name)}))
    assert folder_problems(folder) == [("extra", name + "x"), ("missing", name)]


def test_a_tensor_in_another_shard_than_the_index_says(folder: Path):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, shards = "language_model.lm_head.weight", sorted(set(index["weight_map"].values()))
    assert len(shards) > 1
    index["weight_map"][name] = next(shard for shard in shards if shard != index["weight_map"][name])
    path.write_text(json.dumps(index))
    assert ("shard", name) in folder_problems(folder)


def test_a_missing_shard(folder: Path):
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.unlink()
    assert ("shard", shard.name) in folder_problems(folder)


def test_headers_alone_are_read(folder: Path, tmp_path: Path):
    """With every byte of tensor data gone bad, coverage is still complete: it never looks."""
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)
    for path in spoilt.glob("model-*.safetensors"):
        raw = bytearray(path.read_bytes())
        start = 8 + struct.unpack("<Q", raw[:8])[0]
        raw[start:] = b"\xff" * (len(raw) - start)
        path.write_bytes(raw)
    assert folder_problems(spoilt) == []


def test_expert_format_is_told_from_the_names():
    for name in ("mini", "dense-experts"):
        item = entry(name)
        names = [spec.name for spec in tensor_specs(item.parsed, item.expert_format)]
        assert expert_format_of(names) == item.expert_format
