import json
import shutil
from functools import reduce
from types import SimpleNamespace

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from port import weight_table, weights
from port.model import K3Model
from port.mxfp4 import unpack
from port.tests.models import MINI, f64, randn, random_model, relative_rms
from port.tests.test_text import SETTINGS, small_config
from port.weight_table import table
from port.weights import CheckpointReader, expected_names, load_model, to_mlx
from reference.checkpoint import tensor_specs
from reference.errors import InputError
from reference.shards import Shards

IDS = mx.array([[5, 17, 200, 3, 90]])
TEXT = "language_model."


@pytest.fixture(scope="module")
def shards():
    return Shards(MINI)


@pytest.mark.parametrize("setting", ["as released", *SETTINGS])
@pytest.mark.parametrize("expert_format", ["mxfp4", "dense"])
def test_table_module_tree_and_checkpoint_agree(setting, expert_format):
    """Every source once, and every parameter made by one row: against the names that §2 gives."""
    config = small_config(*SETTINGS.get(setting, ({}, {})))
    names = expected_names(config, expert_format)
    specified = [spec.name for spec in tensor_specs(config, expert_format)]
    assert len(names) == len(set(names))
    assert set(names) == set(specified)
    parameters = {name for name, _ in tree_flatten(K3Model(config, expert_format).parameters())}
    made = [entry.parameter for entry in table(config, expert_format)]
    assert len(made) == len(set(made)) and set(made) == parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_parameter_equals_its_sources_value_for_value(shards, dtype):
    parameters = dict(tree_flatten(load_model(MINI, dtype).parameters()))
    stored_wide = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
    for entry in table(shards.config, "mxfp4"):
        found, sources = parameters[entry.parameter], [shards.read(name) for name in entry.sources]
        if ".experts." in entry.parameter:
            assert np.array(found).tobytes() == np.stack(sources).tobytes(), entry.parameter
            continue
        wide = dtype == "float32" or entry.parameter.endswith(stored_wide)
        assert found.dtype == (mx.float32 if wide else mx.bfloat16), entry.parameter
        np.testing.assert_array_equal(f64(found), sources[0].astype(np.float64), err_msg=entry.parameter)


def test_the_model_is_ready_and_named():
    model = load_model(MINI)
    assert not model.training
    assert model.language_model.model.layers[3].self_attn.tap_path == "language_model.model.layers.3.self_attn"
    assert not any(mx.any(mx.isnan(x)).item() for _, x in tree_flatten(model.parameters()) if x.dtype == mx.float32)


def test_bfloat16_goes_through_its_bits():
    values = np.array([1.0, -0.0, 3.389e38, 2.0**-130], ml_dtypes.bfloat16)
    assert np.array(to_mlx(values).view(mx.uint16)).tolist() == values.view(np.uint16).tolist()


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    """The mini checkpoint with its experts written out in bfloat16, which is exact."""
    folder, shards, tensors, packed = tmp_path_factory.mktemp("dense"), Shards(MINI), {}, "_packed"
    for name in shards.names:
        if name.endswith(packed):
            stem = name.removesuffix(packed)
            codes, scale = mx.array(shards.read(name)).view(mx.uint32), mx.array(shards.read(f"{stem}_scale"))
            tensors[stem] = f64(unpack(codes, scale)).astype(ml_dtypes.bfloat16)
        elif not name.endswith("_scale"):
            tensors[name] = np.array(shards.read(name))
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(MINI / "config.json", folder)
    return folder


@pytest.mark.parametrize("dtype, limit", [("float32", 2e-5), ("bfloat16", 1e-6)])
def test_dense_experts_give_the_same_function(dense_folder, dtype, limit):
    dense = load_model(dense_folder, dtype)
    assert dense.language_model.model.layers[1].block_sparse_moe.experts.w1.weight.shape == (8, 32, 32)
    assert relative_rms(dense(IDS), load_model(MINI, dtype)(IDS)) < limit


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_a_tensor_that_the_table_lacks_or_has_too_much_is_named(monkeypatch, change):
    """The reader of files has its own check; this one is of the port's table against the files."""
    if change == "missing":
        name = f"{TEXT}model.nothing.weight"
        monkeypatch.setitem(weight_table.ROOT, "model.nothing.weight", weight_table.model_dtype)
    else:
        name = f"{TEXT}model.norm.weight"
        monkeypatch.delitem(weight_table.ROOT, "model.norm.weight")
    with pytest.raises(InputError, match=name):
        load_model(MINI)


def test_a_parameter_of_another_shape_or_name_is_refused(shards):
    reader = SimpleNamespace(shards=shards)
    parameters = {
        entry.parameter: CheckpointReader.read(reader, entry, mx.float32) for entry in table(shards.config, "mxfp4")
    }
    name = f"{TEXT}model.norm.weight"
    for wrong in ({**parameters, name: mx.zeros(3)}, {k: v for k, v in parameters.items() if k != name}):
        with pytest.raises(ValueError, match=name):
            weights._assign(K3Model(shards.config), wrong)


def test_a_value_that_is_not_finite_is_refused(dense_folder, tmp_path):
    stored = Shards(dense_folder)
    tensors = {name: np.array(stored.read(name)) for name in stored.names}
    name = f"{TEXT}model.layers.2.self_attn.A_log"
    tensors[name][1] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(dense_folder / "config.json", tmp_path)
    with pytest.raises(InputError, match=name):
        load_model(tmp_path)


def test_unknown_dtype_and_missing_folder_are_one_line(tmp_path):
    with pytest.raises(InputError, match="float32 or bfloat16"):
        load_model(MINI, "float64")
    with pytest.raises(InputError, match="nothing"):
        load_model(tmp_path / "nothing")


def test_no_tensor_is_dead():
    """A change in any source of the table changes the logits, except of the mix that §6 skips in layer 0.

    Of the tower and the projector it changes the features.
    """
    config, ids = small_config({}, {}), IDS[:, :3]
    model, skipped = random_model(config), f"{TEXT}model.layers.0.self_attention_res_"
    pictures = randn(24, 3, 4, 4), mx.array([[2, 2, 4], [1, 4, 2]])

    def output(parameter):
        return model(ids) if parameter.startswith(TEXT) else model.image_features(*pictures)[0]

    before = {part: output(part) for part in (TEXT, "vision")}
    for entry in table(config, "mxfp4"):
        path, _, attribute = entry.parameter.rpartition(".")
        module = reduce(lambda owner, part: owner[int(part)] if part.isdigit() else owner[part], path.split("."), model)
        kept = module[attribute]
        changed = kept ^ 1 if kept.dtype == mx.uint32 else kept + 1 if kept.dtype == mx.uint8 else kept * 1.5 + 0.1
        module[attribute] = -9 * kept if attribute == "e_score_correction_bias" else changed
        unchanged = before[TEXT if path.startswith(TEXT) else "vision"]
        same = mx.array_equal(output(path), unchanged).item()
        assert same == entry.parameter.startswith(skipped), entry.parameter
        module[attribute] = kept
    assert all(mx.array_equal(output(part), value).item() for part, value in before.items())


def test_the_index_of_the_mini_checkpoint_is_read_whole(shards):
    listed = json.loads((MINI / "model.safetensors.index.json").read_text())["weight_map"]
    read = expected_names(shards.config, "mxfp4")
    assert set(read) == set(listed)
