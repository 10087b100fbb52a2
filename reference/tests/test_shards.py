import json
import shutil
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reference.errors import InputError
from reference.headers import INDEX
from reference.shards import Shards
from reference.tests.models import MINI

SHARDS = sorted(path.name for path in MINI.glob("model-*.safetensors"))
NORM, A_LOG = "language_model.model.norm.weight", "language_model.model.layers.0.self_attn.A_log"
PATCH = "vision_tower.patch_embed.proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A copy of the mini checkpoint that a test may damage."""
    for path in [MINI / "config.json", MINI / INDEX, *(MINI / shard for shard in SHARDS)]:
        shutil.copy(path, tmp_path)
    return tmp_path


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def shard_of(name):
    return json.loads((MINI / INDEX).read_text())["weight_map"][name]


def edit_shard(folder, shard, change):
    tensors = load_file(folder / shard)
    change(tensors)
    save_file(tensors, folder / shard)


def edit_header(folder, shard, change):
    """Change the JSON header and leave the data as it is."""
    data = (folder / shard).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / shard).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def refused(folder, *parts):
    """Opening and reading everything must fail with one line that holds all ``parts``."""
    with pytest.raises(InputError) as caught:
        shards = Shards(folder)
        for name in shards.names:
            shards.read(name)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message


def test_every_tensor_is_read_as_stored():
    shards = Shards(MINI)
    assert shards.expert_format == "mxfp4" and shards.total_size == 945984 and len(shards.names) == 420
    for shard in SHARDS:
        for name, expected in load_file(MINI / shard).items():
            value = shards.read(name)
            assert value.dtype == expected.dtype and value.tobytes() == expected.tobytes()
            assert shards.file_of(name).name == shard and not value.flags.writeable
    assert shards.read(NORM).dtype == ml_dtypes.bfloat16 and shards.read(A_LOG).dtype == np.float32


def test_single_file_needs_no_index(tmp_path):
    shutil.copy(MINI / "config.json", tmp_path)
    tensors = {name: value for shard in SHARDS for name, value in load_file(MINI / shard).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    shards = Shards(tmp_path)
    assert all(shards.read(name).tobytes() == tensors[name].tobytes() for name in tensors)


# files


def test_missing_files(folder):
    refused(folder / "nowhere", "nowhere", "no such folder")
    (folder / SHARDS[1]).unlink()
    refused(folder, SHARDS[1], "nothing there")
    (folder / INDEX).unlink()
    refused(folder, INDEX, "nothing there")
    (folder / "config.json").unlink()
    refused(folder, "config.json")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -1000])
def test_truncated_shard(folder, keep):
    data = (folder / SHARDS[0]).read_bytes()
    (folder / SHARDS[0]).write_bytes(data[:keep])
    refused(folder, SHARDS[0], "fetch the file again")


def test_data_after_the_last_tensor(folder):
    with (folder / SHARDS[0]).open("ab") as file:
        file.write(b"\0")
    refused(folder, SHARDS[0], "the file to end at byte")


@pytest.mark.parametrize("header", [b"{", b"\xff\xfe{}", b"[]", b"null", b'{"a": 1, "a": 2}', b"[" * 100000])
def test_garbage_header(folder, header):
    (folder / SHARDS[0]).write_bytes(struct.pack("<Q", len(header)) + header)
    refused(folder, SHARDS[0])


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"dtype": "BF16"},
        {"dtype": "F64", "shape": [64], "data_offsets": [0, 128]},
        {"dtype": ["BF16"], "shape": [64], "data_offsets": [0, 128]},
        {"dtype": "BF16", "shape": [-64], "data_offsets": [0, 128]},
        {"dtype": "BF16", "shape": [64.0], "data_offsets": [0, 128]},
        {"dtype": "BF16", "shape": [64], "data_offsets": [0]},
        {"dtype": "BF16", "shape": [64], "data_offsets": [128, 0]},
        {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]},
        {"dtype": "BF16", "shape": [10**30], "data_offsets": [0, 2 * 10**30]},
    ],
)
def test_bad_header_entry(folder, entry):
    edit_header(folder, shard_of(NORM), lambda header: header.update({NORM: entry}))
    refused(folder, shard_of(NORM))


def test_overlapping_tensors(folder):
    def overlap(header):
        names = [name for name in header if name.endswith("layernorm.weight") and header[name]["shape"] == [64]]
        header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]

    edit_header(folder, SHARDS[1], overlap)
    refused(folder, SHARDS[1], "data from byte")


# the index


@pytest.mark.parametrize("path", ["/etc/passwd", "../model.safetensors", "a/../../b", "..", "", "..\\b", "a\0b"])
def test_index_must_not_point_outside(folder, path):
    edit_index(folder, lambda index: index["weight_map"].update({NORM: path}))
    refused(folder, INDEX, "inside the checkpoint folder")


def test_a_shard_may_be_a_symbolic_link(folder, tmp_path_factory):
    """As in a hub's cache, whose snapshots are links to blobs elsewhere."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "shard"
    shutil.move(folder / SHARDS[0], elsewhere)
    (folder / SHARDS[0]).symlink_to(elsewhere)
    shards = Shards(folder)
    assert all(shards.read(name) is not None for name in shards.names if shards.file_of(name).name == SHARDS[0])


def test_a_tensor_that_is_nowhere_is_named_before_the_total(folder):
    """Shard and index agree with one another and lack it both: the total is off too, but says less."""
    edit_index(folder, lambda index: index["weight_map"].pop("mm_projector.post_norm.weight"))
    refused(folder, "mm_projector.post_norm.weight")


def test_another_known_dtype_is_named_with_its_tensor(folder):
    def halves(header):
        header[NORM]["dtype"] = "F16"

    edit_header(folder, shard_of(NORM), halves)
    refused(folder, shard_of(NORM), NORM, "BF16", "F16")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_garbage_index(folder, content):
    (folder / INDEX).write_text(content)
    refused(folder, INDEX)


def test_tensor_missing_from_index(folder):
    edit_index(folder, lambda index: index["weight_map"].pop(NORM))
    refused(folder, shard_of(NORM), NORM, "not listed")


def test_tensor_in_another_shard_than_the_index_says(folder):
    other = next(shard for shard in SHARDS if shard != shard_of(NORM))
    edit_index(folder, lambda index: index["weight_map"].update({NORM: other}))
    refused(folder, NORM, shard_of(NORM), other)


def test_stray_tensor_in_index(folder):
    edit_index(folder, lambda index: index["weight_map"].update({"stray.weight": SHARDS[0]}))
    refused(folder, SHARDS[0], "stray.weight", "found nothing")


@pytest.mark.parametrize("total", [0, 945983, 945984.0, "945984", None, True])
def test_total_size_must_hold(folder, total):
    edit_index(folder, lambda index: index["metadata"].update(total_size=total))
    refused(folder, INDEX, "metadata.total_size", "945984")


# tensors against the configuration


def without_total(folder, name, size):
    edit_index(folder, lambda index: index["metadata"].update(total_size=945984 + size))


@pytest.mark.parametrize("name", [NORM, A_LOG, PATCH])
def test_dropped_tensor(folder, name):
    shard, size = shard_of(name), load_file(folder / shard_of(name))[name].nbytes
    edit_shard(folder, shard, lambda tensors: tensors.pop(name))
    edit_index(folder, lambda index: index["weight_map"].pop(name))
    without_total(folder, name, -size)
    refused(folder, INDEX, name, "the tensor that config.json asks for")


def test_stray_tensor(folder):
    edit_shard(folder, SHARDS[0], lambda tensors: tensors.update(stray=np.zeros(2, np.float32)))
    edit_index(folder, lambda index: index["weight_map"].update(stray=SHARDS[0]))
    without_total(folder, "stray", 8)
    refused(folder, SHARDS[0], "stray", "only tensors that config.json asks for")


def test_wrong_shape(folder):
    edit_shard(folder, shard_of(A_LOG), lambda tensors: tensors.update({A_LOG: tensors[A_LOG].reshape(2, 16)}))
    refused(folder, shard_of(A_LOG), A_LOG, "expected shape [32], found [2, 16]")


def test_wrong_dtype(folder):
    def change(tensors):
        tensors[A_LOG] = tensors[A_LOG].astype(ml_dtypes.bfloat16)

    edit_shard(folder, shard_of(A_LOG), change)
    without_total(folder, A_LOG, -64)
    refused(folder, shard_of(A_LOG), A_LOG, "expected dtype F32, found BF16")


def test_half_packed_experts(folder):
    name = "language_model.model.layers.1.block_sparse_moe.experts.2.w1.weight_scale"
    size = load_file(folder / shard_of(name))[name].nbytes
    edit_shard(folder, shard_of(name), lambda tensors: tensors.pop(name))
    edit_index(folder, lambda index: index["weight_map"].pop(name))
    without_total(folder, name, -size)
    refused(folder, name)


# values


@pytest.mark.parametrize("name", [NORM, A_LOG, PATCH])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_must_be_finite(folder, name, value):
    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[-1] = value

    edit_shard(folder, shard_of(name), change)
    refused(folder, shard_of(name), name, "finite numbers", f"found {value}")


def test_scale_byte_255(folder):
    name = "language_model.model.layers.2.block_sparse_moe.experts.7.w2.weight_scale"

    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name][3, 0] = 255

    edit_shard(folder, shard_of(name), change)
    refused(folder, shard_of(name), name, "255 at [3, 0]")


def test_packed_byte_255_is_two_codes_not_nan(folder):
    name = "language_model.model.layers.2.block_sparse_moe.experts.7.w2.weight_packed"

    def change(tensors):
        tensors[name] = np.full_like(tensors[name], 255)

    edit_shard(folder, shard_of(name), change)
    assert (Shards(folder).read(name) == 255).all()


def test_reading_needs_no_tensor_library():
    code = "import sys, reference.shards; assert not {'torch', 'mlx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=MINI.parents[2])
