import math

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from reference.checkpoint import vision_rows
from reference.config import K3Config
from reference.projector import Projector, gelu_erf
from reference.shards import Shards
from reference.tests.models import MINI, filled, randn, relative_rms
from reference.vision import norm_rounded_once
from reference.weights import to_torch

CONFIG = K3Config.from_file(MINI).vision_config


def mini_projector(dtype):
    shards, projector = Shards(MINI), Projector(CONFIG)
    state = {name: to_torch(shards.read("mm_projector." + name)).to(dtype) for name in projector.state_dict()}
    projector.load_state_dict(state, strict=True, assign=True)
    return projector.requires_grad_(False).eval()


def test_gelu_is_the_exact_form():
    x = torch.tensor([-2.7, 0.0, 1.0], dtype=torch.float64)
    assert gelu_erf(x)[0].item() == pytest.approx(-0.0094, abs=5e-5)
    expected = torch.tensor([value / 2 * math.erfc(-value / math.sqrt(2)) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(gelu_erf(x), expected, rtol=1e-13, atol=1e-14)
    assert (gelu_erf(x) - functional.gelu(x, approximate="tanh")).abs().max().item() == pytest.approx(4.7e-4, abs=1e-5)


def test_parameters_have_the_checkpoints_names_and_shapes():
    prefix = "mm_projector."
    expected = {name[len(prefix) :]: shape for name, shape, _ in vision_rows(CONFIG) if name.startswith(prefix)}
    assert {name: tuple(tensor.shape) for name, tensor in Projector(CONFIG).state_dict().items()} == expected


def test_a_projector_that_was_never_loaded_gives_nan():
    assert Projector(CONFIG)(torch.ones(2, 4, CONFIG.vt_hidden_size)).isnan().all()


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-6), ("bfloat16", 2e-4)])
def test_equals_the_golden_trace_on_its_own_input(dtype, limit):
    trace = load_file(MINI / f"trace-{dtype}.safetensors")
    output = mini_projector(getattr(torch, dtype))(trace["vision/tower.output"])
    assert output.dtype == getattr(torch, dtype)
    assert relative_rms(output, trace["vision/projector.output"]) < limit


def test_float64_is_what_the_float32_trace_rounds():
    trace = load_file(MINI / "trace-float32.safetensors")
    truth = mini_projector(torch.float64)(trace["vision/tower.output"].double())
    assert truth.dtype == torch.float64
    assert relative_rms(trace["vision/projector.output"], truth) < 1e-6


def test_written_out():
    projector, merged = filled(Projector(CONFIG)), randn(3, 4, CONFIG.vt_hidden_size)
    first, second = projector.proj[0].weight, projector.proj[2].weight
    window_by_window = torch.stack([torch.cat(list(token)) for token in merged])
    expected = gelu_erf(window_by_window @ first.T) @ second.T
    expected = norm_rounded_once(expected, projector.post_norm.weight, 1e-5)
    torch.testing.assert_close(projector(merged), expected)


def test_epsilon_comes_from_the_configuration():
    config = CONFIG.model_copy(update={"projector_ln_eps": 0.25})
    small = 1e-3 * randn(2, 4, CONFIG.vt_hidden_size)
    ratio = filled(Projector(CONFIG))(small).norm() / filled(Projector(config))(small).norm()
    assert Projector(config).post_norm.eps == 0.25
    assert ratio > 10


def test_every_tensor_counts():
    projector, merged = filled(Projector(CONFIG)), randn(3, 4, CONFIG.vt_hidden_size)
    before = projector(merged)
    for name, parameter in projector.named_parameters():
        saved = parameter.data.clone()
        parameter.data = saved + 0.1 * randn(*saved.shape, seed=7)
        assert relative_rms(projector(merged), before) > 1e-4, name
        parameter.data = saved
