import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from port.projector import Projector, gelu_erf
from port.tests.models import f64, filled, randn, relative_rms
from port.tests.vision_models import CONFIG, golden, loaded
from port.vision import gelu_tanh
from reference.checkpoint import vision_rows


def test_gelu_is_the_exact_form():
    x = np.linspace(-6, 6, 1001).astype(np.float32)
    assert gelu_erf(mx.array([-2.7])).item() == pytest.approx(-0.0094, abs=5e-5)
    expected = np.array([value / 2 * math.erfc(-value / math.sqrt(2)) for value in x.astype(np.float64)])
    assert np.abs(f64(gelu_erf(mx.array(x))) - expected).max() < 2e-6
    assert np.abs(f64(gelu_erf(mx.array(x)) - gelu_tanh(mx.array(x)))).max() == pytest.approx(4.7e-4, abs=1e-5)


def test_gelu_rounds_once():
    x = randn(1000).astype(mx.bfloat16)
    assert mx.array_equal(gelu_erf(x), gelu_erf(x.astype(mx.float32)).astype(mx.bfloat16))


def test_parameters_have_the_checkpoints_names_and_shapes():
    prefix = "mm_projector."
    expected = {name[len(prefix) :]: shape for name, shape, _ in vision_rows(CONFIG) if name.startswith(prefix)}
    assert {name: tensor.shape for name, tensor in tree_flatten(Projector(CONFIG).parameters())} == expected


def test_a_projector_that_was_never_loaded_gives_nan():
    assert mx.isnan(Projector(CONFIG)(mx.ones((2, 4, CONFIG.vt_hidden_size)))).all()


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-6), ("bfloat16", 1e-3)])
def test_equals_the_golden_trace_on_its_own_input(dtype, limit):
    trace, projector = golden(dtype), loaded(Projector(CONFIG), "mm_projector.", dtype)
    output = projector(trace["tower.output"])
    assert output.dtype == getattr(mx, dtype)
    assert relative_rms(output, trace["projector.output"]) < limit


def test_written_out():
    projector, merged = filled(Projector(CONFIG)), randn(3, 4, CONFIG.vt_hidden_size)
    first, second = f64(projector.proj[0].weight), f64(projector.proj[2].weight)
    hidden = np.stack([np.concatenate(list(token)) for token in f64(merged)]) @ first.T
    hidden = np.vectorize(lambda value: value / 2 * math.erfc(-value / math.sqrt(2)))(hidden) @ second.T
    expected = hidden / np.sqrt(np.square(hidden).mean(-1, keepdims=True) + 1e-5) * f64(projector.post_norm.weight)
    assert relative_rms(projector(merged), expected) < 1e-6


def test_epsilon_comes_from_the_configuration():
    config = CONFIG.model_copy(update={"projector_ln_eps": 0.25})
    small = 1e-3 * randn(2, 4, CONFIG.vt_hidden_size)
    ordinary, damped = (np.linalg.norm(f64(filled(Projector(each))(small))) for each in (CONFIG, config))
    assert Projector(config).post_norm.eps == 0.25
    assert ordinary / damped > 10


def test_every_tensor_counts():
    projector, merged = filled(Projector(CONFIG)), randn(3, 4, CONFIG.vt_hidden_size)
    before = projector(merged)
    for name, saved in tree_flatten(projector.parameters()):
        changed = dict(tree_flatten(projector.parameters()))
        changed[name] = saved + 0.1 * randn(*saved.shape, seed=7)
        other = Projector(CONFIG)
        other.load_weights(list(changed.items()), strict=True)
        assert relative_rms(other(merged), before) > 1e-4, name
