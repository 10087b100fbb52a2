import math

import pytest
import torch

from reference.cache import MLACache
from reference.mla import LATENT_NORM_EPS, GatedMLA, allowed_keys, attention, attention_weights
from reference.taps import Recorder, recording
from reference.tests.models import filled, mini_text, randn

VARIANTS = {
    "k3": {},
    "plain query": {"q_lora_rank": None},
    "no output gate": {"mla_use_output_gate": False},
    "unlike widths": {"qk_nope_head_dim": 5, "qk_rope_head_dim": 3, "v_head_dim": 7, "kv_lora_rank": 11},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
}


def attend(variant="k3"):
    text = mini_text(**VARIANTS[variant])
    return filled(GatedMLA(text)), text


def test_allowed_keys_are_earlier_and_real():
    key_mask = torch.tensor([[True, False, True, True]])
    assert allowed_keys(key_mask, 2).tolist() == [[[True, False, True, False], [True, False, True, True]]]


def test_scores_are_scaled_and_softmaxed_over_allowed_keys():
    q, k, v = randn(1, 2, 1, 3), randn(1, 2, 1, 3, seed=1), randn(1, 2, 1, 4, seed=2)
    allowed = torch.tensor([[[True, False], [True, True]]])
    scores = 0.5 * q[0, 1, 0] @ k[0, :, 0].T
    expected = torch.stack([v[0, 0, 0], scores.softmax(0) @ v[0, :, 0]])
    torch.testing.assert_close(attention(q, k, v, 0.5, allowed)[0, :, 0], expected)


def test_a_query_without_keys_gives_zero():
    weights = attention_weights(randn(1, 2, 1, 3), torch.tensor([[[False, False, False]]]))
    assert weights.eq(0).all()


def test_softmax_is_in_float32():
    scores = torch.tensor([[[[20.0, 20.0625]]]])
    weights = attention_weights(scores.bfloat16(), torch.ones(1, 1, 2, dtype=torch.bool))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.softmax(scores.bfloat16().float(), -1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_absorbed_equals_plain(variant, tokens):
    module, text = attend(variant)
    x = randn(2, tokens, text.hidden_size, seed=1)
    plain = module(x)
    assert plain.isfinite().all() and plain.abs().max() > 1e-3
    module.form = "absorbed"
    torch.testing.assert_close(module(x), plain, atol=1e-11, rtol=1e-10)


def test_order_of_earlier_tokens_does_not_matter():
    module, text = attend()
    x = randn(2, 8, text.hidden_size, seed=1)
    shuffled = x[:, [3, 6, 0, 2, 5, 1, 4, 7]]
    torch.testing.assert_close(module(shuffled)[:, -1], module(x)[:, -1])
    assert not torch.allclose(module(shuffled)[:, -2], module(x)[:, -2])


def test_one_token_reads_its_own_value_through_the_gate():
    module, text = attend()
    x = randn(1, 1, text.hidden_size, seed=1)
    latent, _ = module.latent(x)
    nope, value = text.qk_nope_head_dim, text.v_head_dim
    v = module.kv_b_proj(latent).unflatten(-1, (text.num_attention_heads, nope + value))[..., nope:].flatten(2)
    expected = module.o_proj(v / (1 + (-module.g_proj(x)).exp()))
    torch.testing.assert_close(module(x), expected)
    module.q_b_proj.weight.data *= -3
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("mean_square, factor", [(1e-5, 1.348), (1e-4, 1.044)])
def test_latent_norms_use_their_own_epsilon(mean_square, factor):
    module, text = attend()
    assert LATENT_NORM_EPS == 1e-6
    for norm in (module.q_a_layernorm, module.kv_a_layernorm):
        width = norm.weight.shape[0]
        norm.weight.data = torch.ones(width, dtype=torch.float64)
        latent = torch.full((width,), math.sqrt(mean_square), dtype=torch.float64)
        with_model_eps = latent / math.sqrt(mean_square + text.rms_norm_eps)
        assert (norm(latent) / with_model_eps)[0].item() == pytest.approx(factor, abs=1e-3)


def test_softmax_scale_counts_both_parts_of_the_query():
    text = mini_text()
    assert GatedMLA(text).scale == pytest.approx((text.qk_nope_head_dim + text.qk_rope_head_dim) ** -0.5)


@pytest.mark.parametrize("form", ["plain", "absorbed"])
@pytest.mark.parametrize("sizes", [[1, 8], [8, 1], [4, 1, 4], [1] * 9])
def test_every_split_equals_one_pass(form, sizes):
    module, text = attend()
    x = randn(2, 9, text.hidden_size, seed=1)
    whole = module(x)
    module.form, cache = form, MLACache(text, 2, torch.float64)
    parts = [module(part, None, cache) for part in x.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-11, rtol=1e-10)


MASK = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0]]).bool()


@pytest.mark.parametrize("form", ["plain", "absorbed"])
@pytest.mark.parametrize("sizes", [[6], [2, 4], [3, 1, 1, 1]])
def test_padded_rows_equal_rows_alone_and_padding_moves_no_bit(form, sizes):
    module, text = attend()
    module.form = form
    x, results = randn(4, 6, text.hidden_size, seed=1), []
    for filling in (torch.nan, 1e30):
        padded, cache = torch.where(MASK[..., None], x, filling), MLACache(text, 4, torch.float64)
        pairs = zip(padded.split(sizes, dim=1), MASK.split(sizes, dim=1), strict=True)
        results.append(torch.cat([module(part, mask, cache) for part, mask in pairs], dim=1))
    assert torch.equal(results[0], results[1]) and results[0].isfinite().all()
    alone = [module(x[row : row + 1, MASK[row]])[0] for row in range(4)]
    torch.testing.assert_close(results[0][MASK], torch.cat(alone), atol=1e-11, rtol=1e-10)


def test_taps_show_the_named_quantities():
    module, text = attend()
    recorder = Recorder()
    with recording(recorder):
        output = module(randn(2, 3, text.hidden_size, seed=1))
    shapes = {name: tuple(value.shape) for name, value in recorder.values.items()}
    heads = text.num_attention_heads
    assert shapes == {
        "query": (2, 3, heads, text.query_head_dim),
        "latent": (2, 3, text.kv_lora_rank),
        "key_rope": (2, 3, text.qk_rope_head_dim),
        "attention": (2, 3, heads, text.v_head_dim),
    }
    x = randn(2, 3, text.hidden_size, seed=1)
    gated = recorder.values["attention"].flatten(2) * torch.sigmoid(module.g_proj(x))
    torch.testing.assert_close(module.o_proj(gated), output)
