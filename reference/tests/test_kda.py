import math

import pytest
import torch
from torch.nn import functional as F

from reference.cache import KDACache
from reference.kda import (
    KimiDeltaAttention,
    gated_output_norm,
    l2_normalize,
    log_decay,
    recurrent_kda,
    scaled_query,
    write_strength,
)
from reference.tests.models import filled, mini_text, randn

LN2 = math.log(2)


def gate(z, a_log, bound=-5.0):
    z, a_log = torch.tensor(z, dtype=torch.float64).reshape(1, 1, 1, 1), torch.tensor([a_log], dtype=torch.float64)
    return log_decay(z, a_log, torch.zeros(1, dtype=torch.float64), bound).item()


def inputs(batch=2, tokens=6, heads=3, dk=4, dv=4, seed=0):
    """q, k, v, log_decay, beta, state for the recurrence."""
    q, k = (
        scaled_query(randn(batch, tokens, heads, dk, seed=seed)),
        l2_normalize(randn(batch, tokens, heads, dk, seed=1)),
    )
    decay = -5 * torch.sigmoid(randn(batch, tokens, heads, dk, seed=3))
    beta = torch.sigmoid(randn(batch, tokens, heads, seed=4))
    return [q, k, randn(batch, tokens, heads, dv, seed=2), decay, beta, randn(batch, heads, dk, dv, seed=5)]


# the gate


@pytest.mark.parametrize(
    "z, a_log, expected", [(2, 0, -4.40399), (2, LN2, -4.91007), (-4, 0, -0.08993), (-4, LN2, -0.001677)]
)
def test_bounded_gate_values(z, a_log, expected):
    assert gate(z, a_log) == pytest.approx(expected, rel=1e-3, abs=5e-6)


@pytest.mark.parametrize("z, expected", [(2, -2.12693), (-4, -0.01815)])
def test_unbounded_gate_values(z, expected):
    assert gate(z, 0.0, None) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("a_log", [-3.0, 0.0, 3.0])
def test_zero_logit_gives_half_the_bound(a_log):
    assert gate(0, a_log) == -2.5


@pytest.mark.parametrize("bound", [-5.0, None])
def test_a_log_is_per_head_and_its_tail_is_not_used(bound):
    heads, head_dim = 3, 5
    z, dt_bias, a_log = randn(2, 4, heads, head_dim), randn(heads * head_dim, seed=1), randn(head_dim, seed=2)
    result = log_decay(z, a_log, dt_bias, bound)
    for head in range(heads):
        bias = dt_bias.reshape(heads, head_dim)[head]
        rate = a_log[head].exp()
        expected = (
            -rate * F.softplus(z[:, :, head] + bias)
            if bound is None
            else bound * torch.sigmoid(rate * (z[:, :, head] + bias))
        )
        torch.testing.assert_close(result[:, :, head], expected)
    a_log[heads:] = 1e3
    assert torch.equal(log_decay(z, a_log, dt_bias, bound), result)


def test_decay_factor_is_in_zero_to_one():
    z = 3 * randn(2, 4, 3, 5)
    for bound in (-5.0, None):
        factor = log_decay(z, randn(3, seed=1), randn(15, seed=2), bound).exp()
        assert (factor > 0).all() and (factor <= 1).all()


def test_gate_and_write_strength_never_pass_through_bfloat16():
    z, a_log, dt_bias = torch.full((1, 1, 1, 1), -7.0), torch.zeros(1), torch.zeros(1)
    decay = log_decay(z.bfloat16(), a_log, dt_bias, -5.0)
    assert decay.dtype == torch.float32 and 0.99 < decay.exp().item() < 0.9999
    assert torch.equal(write_strength(z.bfloat16()), torch.sigmoid(z))


# normalization


def test_l2_epsilon_is_inside_the_root_on_the_sum():
    x = torch.full((4,), 5e-4, dtype=torch.float64)
    torch.testing.assert_close(l2_normalize(x), x / math.sqrt(4 * 25e-8 + 1e-6))


def test_keys_are_at_most_of_length_one_and_queries_scaled_once():
    x = randn(10, 128)
    assert (l2_normalize(x).norm(dim=-1) <= 1).all()
    torch.testing.assert_close(scaled_query(x), l2_normalize(x) / math.sqrt(128))


def test_normalized_keys_are_cast_and_queries_scaled_after_the_cast():
    x = randn(10, 32).bfloat16()
    assert l2_normalize(x).dtype == torch.bfloat16
    assert torch.equal(scaled_query(x), l2_normalize(x).float() * 32**-0.5)


# the recurrence


def test_one_token_closed_form():
    q, k, v, decay, beta, state = inputs(tokens=1)
    o, _ = recurrent_kda(q, k, v, decay, beta, torch.zeros_like(state))
    torch.testing.assert_close(o, beta[..., None] * (q * k).sum(-1, keepdim=True) * v)


def test_delta_rule_overwrites():
    key = l2_normalize(torch.ones(1, 1, 1, 4, dtype=torch.float64)).repeat(1, 2, 1, 1)
    key = key / key.norm(dim=-1, keepdim=True)
    v, zeros = randn(1, 2, 1, 3), torch.zeros(1, 2, 1, 4, dtype=torch.float64)
    state = torch.zeros(1, 1, 4, 3, dtype=torch.float64)
    o, _ = recurrent_kda(key, key, v, zeros, torch.ones(1, 2, 1, dtype=torch.float64), state)
    torch.testing.assert_close(o[:, 1], v[:, 1])


def test_matrix_form_with_rectangular_state():
    q, k, v, decay, beta, state = inputs(dk=5, dv=3)
    o, final = recurrent_kda(q, k, v, decay, beta, state)
    for b in range(2):
        for h in range(3):
            S = state[b, h]
            for t in range(6):
                key = k[b, t, h]
                S = torch.diag(decay[b, t, h].exp()) @ S
                S = (torch.eye(5, dtype=torch.float64) - beta[b, t, h] * torch.outer(key, key)) @ S
                S = S + beta[b, t, h] * torch.outer(key, v[b, t, h])
                torch.testing.assert_close(o[b, t, h], S.T @ q[b, t, h])
            torch.testing.assert_close(final[b, h], S)


def test_long_memory():
    decay = torch.full((1, 4096, 1, 1), math.log(0.999))
    zeros = torch.zeros(1, 4096, 1, 1)
    _, state = recurrent_kda(zeros, zeros, zeros, decay, zeros[..., 0], torch.ones(1, 1, 1, 1))
    assert state.item() == pytest.approx(0.999**4096, rel=1e-3)
    assert state.item() == pytest.approx(0.0166, abs=1e-4)


def test_the_future_does_not_matter():
    values = inputs()
    o, _ = recurrent_kda(*values)
    changed = [x.clone() for x in values]
    for x in changed[:5]:
        x[:, 4:] = -x[:, 4:].abs() - 1
    assert torch.equal(recurrent_kda(*changed)[0][:, :4], o[:, :4])
    short, state = recurrent_kda(*[x[:, :4] for x in values[:5]], values[5])
    assert torch.equal(short, o[:, :4])
    assert torch.equal(recurrent_kda(*[x[:, 4:] for x in values[:5]], state)[0], o[:, 4:])


# the output


def test_gated_output_norm_is_per_head_and_rounds_once():
    o, logit, weight = randn(2, 3, 4, 8), randn(2, 3, 4, 8, seed=1), randn(8, seed=2)
    expected = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight / (1 + (-logit).exp())
    torch.testing.assert_close(gated_output_norm(o, weight, logit, 1e-5), expected)
    o, logit, weight = o.bfloat16(), logit.bfloat16(), weight.float()
    wide = gated_output_norm(o.float(), weight, logit.float(), 1e-5)
    assert torch.equal(gated_output_norm(o, weight, logit, 1e-5), wide.bfloat16())


# the module


VARIANTS = {
    "k3": {},
    "unbounded": {"gate_lower_bound": None},
    "low-rank gate": {"use_full_rank_gate": False},
    "kernel 1": {"short_conv_kernel_size": 1},
    "kernel 6": {"short_conv_kernel_size": 6},
    "more heads than head size": {"num_heads": 9, "head_dim": 4},
}


def attention(variant="k3"):
    text = mini_text(VARIANTS[variant])
    return filled(KimiDeltaAttention(text)), text


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunked_and_recurrent_are_one_function_in_every_split(variant):
    module, text = attention(variant)
    x = randn(2, 11, text.hidden_size, seed=1)
    module.form = "recurrent"
    cache = KDACache(text, 2, torch.float64)
    whole = module(x, None, cache)
    assert whole.isfinite().all() and whole.abs().max() > 1e-3
    for form, chunk_size, sizes in [
        ("chunked", 4, [11]),
        ("chunked", 64, [5, 1, 5]),
        ("recurrent", 4, [1, 2, 3, 4, 1]),
    ]:
        module.form, module.chunk_size = form, chunk_size
        other = KDACache(text, 2, torch.float64)
        parts = [module(part, None, other) for part in x.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-10, rtol=1e-9)
        torch.testing.assert_close(other.state, cache.state, atol=1e-10, rtol=1e-9)


def test_one_token_through_the_whole_module_by_definition():
    """With a value so small that the epsilon of the output norm counts."""
    module, text = attention()
    module.v_proj.weight.data *= 1e-2
    x = randn(2, 1, text.hidden_size, seed=1)

    def convolved(part):
        weight = getattr(module, f"{part}_conv1d").weight[:, 0, -1]
        return F.silu(getattr(module, f"{part}_proj")(x) * weight).unflatten(-1, (4, 32))

    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (convolved("q"), convolved("k")))
    beta = 1 / (1 + (-x @ module.b_proj.weight.T).exp())
    o = beta[..., None] * (q * k).sum(-1, keepdim=True) / math.sqrt(32) * convolved("v")
    normed = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.o_norm.weight
    expected = module.o_proj(normed.flatten(2) * torch.sigmoid(module.g_proj(x)))
    torch.testing.assert_close(module(x), expected, rtol=1e-8, atol=1e-10)
    assert o.square().mean() < 1e-4


def test_module_ignores_the_tail_of_a_log_but_no_head():
    module, text = attention()
    x, heads = randn(1, 5, text.hidden_size, seed=1), text.linear_attn_config.num_heads
    before = module(x)
    module.A_log.data[heads:] = 1e3
    assert torch.equal(module(x), before)
    for head in range(heads):
        module.A_log.data[head] += 1
        assert not torch.allclose(module(x), before)
        module.A_log.data[head] -= 1


MASK = torch.tensor(
    [[0, 0, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0, 1]]
).bool()


@pytest.mark.parametrize("sizes", [[7], [2, 5], [3, 1, 3], [1] * 7])
@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_padded_rows_equal_rows_alone_and_padding_moves_no_bit(form, sizes):
    module, text = attention()
    module.form, module.chunk_size = form, 4
    x = randn(5, 7, text.hidden_size, seed=1)
    results = []
    for filling in (torch.nan, 1e30):
        padded = torch.where(MASK[..., None], x, filling)
        cache = KDACache(text, 5, torch.float64)
        pairs = zip(padded.split(sizes, dim=1), MASK.split(sizes, dim=1), strict=True)
        results.append((torch.cat([module(part, mask, cache) for part, mask in pairs], dim=1)[MASK], cache))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1].state, results[1][1].state)
    alone_cache = [KDACache(text, 1, torch.float64) for _ in range(5)]
    alone = [module(x[row : row + 1, MASK[row]], None, alone_cache[row])[0] for row in range(5)]
    torch.testing.assert_close(results[0][0], torch.cat(alone), atol=1e-10, rtol=1e-9)
    for name, value in vars(results[0][1]).items():
        expected = torch.cat([getattr(cache, name) for cache in alone_cache])
        torch.testing.assert_close(value, expected, atol=1e-10, rtol=1e-9)


def test_a_row_that_is_empty_in_a_chunk_keeps_its_state():
    module, text = attention()
    cache = KDACache(text, 1, torch.float64)
    module(randn(1, 3, text.hidden_size, seed=1), None, cache)
    before = {name: value.clone() for name, value in vars(cache).items()}
    module(randn(1, 2, text.hidden_size, seed=2), torch.zeros(1, 2, dtype=torch.bool), cache)
    for name, value in vars(cache).items():
        assert torch.equal(value, before[name])
