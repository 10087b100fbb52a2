import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reference.checkpoint import tensor_specs
from reference.errors import InputError
from reference.moe import decode_mxfp4
from reference.shards import Shards
from reference.taps import Recorder, recording
from reference.tests.models import MINI, SETTINGS, small_config
from reference.weights import CheckpointReader, expected_names, load_model

INPUTS = load_file(MINI / "inputs.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_parameter_equals_its_file_bit_for_bit(dtype):
    state, shards = load_model(MINI, dtype).state_dict(), Shards(MINI)
    assert sorted(state) == sorted(shards.names)
    wide = "float64" if dtype == "float64" else "float32"
    for name, tensor in state.items():
        stored = shards.specs[name].dtype
        assert tensor.dtype == getattr(torch, {"U8": "uint8", "F32": wide, "BF16": dtype}[stored]), name
        assert np.array_equal(tensor.double().numpy(), shards.read(name).astype(np.float64)), name


def test_model_is_ready_and_named():
    model = load_model(MINI)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert model.language_model.model.layers[3].self_attn.tap_path == "language_model.model.layers.3.self_attn"


@pytest.mark.parametrize("expert_format", ["mxfp4", "dense"])
@pytest.mark.parametrize("setting", [None, *SETTINGS])
def test_module_tree_has_the_checkpoints_names_and_shapes(setting, expert_format):
    linear, text = SETTINGS.get(setting, ({}, {}))
    config = small_config(linear, **text)
    names = expected_names(config, expert_format)
    assert sorted(names) == sorted(spec.name for spec in tensor_specs(config, expert_format))


def one_file(folder, change):
    """The mini checkpoint as a single ``model.safetensors`` in ``folder``, after ``change(tensors)``."""
    tensors = {}
    for shard in sorted(MINI.glob("model-*.safetensors")):
        tensors |= load_file(shard)
    change(tensors)
    shutil.copy(MINI / "config.json", folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_single_file_gives_the_same_model(tmp_path):
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(load_model(one_file(tmp_path, lambda tensors: None))(ids), load_model(MINI)(ids))


def make_dense(tensors):
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        scale = tensors.pop(name.replace("packed", "scale"))
        tensors[name.removesuffix("_packed")] = decode_mxfp4(tensors.pop(name), scale, torch.bfloat16)


def test_dense_experts_give_the_same_function(tmp_path):
    ids, folder = torch.tensor([[1, 2, 3]]), one_file(tmp_path, make_dense)
    assert CheckpointReader(folder).shards.expert_format == "dense"
    assert torch.equal(load_model(folder)(ids), load_model(MINI)(ids))


@pytest.mark.parametrize("name", ["language_model.model.norm.weight", "language_model.model.layers.0.self_attn.A_log"])
def test_not_finite_is_refused(tmp_path, name):
    def spoil(tensors):
        tensors[name][3] = torch.nan

    with pytest.raises(InputError, match=rf"model.safetensors: {name}: expected finite numbers, found nan at \[3\]"):
        load_model(one_file(tmp_path, spoil))


def test_nan_scale_is_refused(tmp_path):
    name = "language_model.model.layers.1.block_sparse_moe.experts.2.w3.weight_scale"

    def spoil(tensors):
        tensors[name][1, 0] = 255

    with pytest.raises(
        InputError, match=rf"{name}: expected E8M0 scales below 255, which is NaN, found 255 at \[1, 0\]"
    ):
        load_model(one_file(tmp_path, spoil))


def test_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="dtype: expected float32 or bfloat16 or float64, found 'float16'"):
        load_model(MINI, "float16")


def perturbed(tensor):
    if tensor.dtype == torch.uint8:
        return tensor ^ 1
    return tensor + 0.25 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor.dtype)


def dead_tensors(module, output_of):
    """Names of the tensors of ``module`` that may change without changing any output."""
    before, dead = output_of(), set()
    for name, tensor in module.state_dict().items():
        if ".experts." in name and ".experts.0." not in name and ".experts.7." not in name:
            continue  # the first and the last expert stand for all
        kept = tensor.clone()
        tensor.copy_(perturbed(tensor))
        if torch.equal(output_of(), before):
            dead.add(name)
        tensor.copy_(kept)
    return dead


def test_no_tensor_is_dead():
    """Every tensor changes its layer's output, except the mix that layer 0 skips for want of blocks.

    The layer runs with its own choice of experts and with one in which every expert has its tokens.
    """
    tower = load_model(MINI, "float64").language_model.model
    prefix_sum, blocks = tower.embed(torch.arange(300).reshape(2, 150)[:, ::38]), []
    every_expert = (torch.arange(8)[:, None] + torch.arange(3)) % 8

    def both(layer):
        with recording(Recorder({f"{layer.tap_path}.router.indices": every_expert})):
            imposed = layer(prefix_sum, blocks)[0]
        return torch.stack([layer(prefix_sum, blocks)[0], imposed])

    for number, layer in enumerate(tower.layers):
        skipped = {"self_attention_res_norm.weight", "self_attention_res_proj.weight"} if number == 0 else set()
        assert dead_tensors(layer, partial(both, layer)) == skipped, number
        prefix_sum, blocks = layer(prefix_sum, blocks)


def test_no_vision_tensor_is_dead():
    model = load_model(MINI, "float64")
    pictures = INPUTS["vision.pixel_values"].double(), INPUTS["vision.grid_thws"]
    both = torch.nn.ModuleList([model.vision_tower, model.mm_projector])
    assert len(both.state_dict()) == 6 + 6 * 3
    assert dead_tensors(both, lambda: model.image_features(*pictures)[0]) == set()


def test_no_top_level_tensor_is_dead():
    model, ids = load_model(MINI, "float64"), torch.tensor([[1, 2, 3]])
    top = torch.nn.Module()
    for name in ("embed_tokens", "norm", "output_attn_res_norm", "output_attn_res_proj"):
        top.add_module(name, getattr(model.language_model.model, name))
    top.add_module("lm_head", model.language_model.lm_head)
    assert len(top.state_dict()) == 5
    assert dead_tensors(top, lambda: model(ids)) == set()
