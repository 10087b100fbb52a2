import numpy as np
import pytest
import torch

from reference import mxfp4
from reference.errors import InputError
from reference.moe import (
    Expert,
    Experts,
    LatentMoE,
    MXFP4Linear,
    Router,
    decode_mxfp4,
    group_margin,
    limit_to_groups,
    routing_scores,
    routing_weights,
    select_experts,
    selection_margin,
)
from reference.norm import rms_norm
from reference.taps import Recorder, recording
from reference.tests.models import filled, mini_text, randn


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


# the router's pieces


def test_scores_are_sigmoid_or_softmax():
    logits = row(0.0, 1.0, -2.0)
    torch.testing.assert_close(routing_scores(logits, "sigmoid"), 1 / (1 + (-logits).exp()))
    torch.testing.assert_close(routing_scores(logits, "softmax"), logits.exp() / logits.exp().sum())


def test_groups_outside_the_best_are_masked_with_minus_infinity():
    biased = row(-0.1, -0.2, -2.9, -2.95)
    limited = limit_to_groups(biased, 2, 1)
    assert limited.tolist() == [[-0.1, -0.2, -torch.inf, -torch.inf]]
    assert select_experts(limited, 2).tolist() == [[0, 1]]


def test_a_group_is_scored_by_its_two_best():
    biased = row(9.0, 0.0, 0.0, 5.0, 5.0, 0.0)
    assert select_experts(limit_to_groups(biased, 2, 1), 2).tolist() == [[3, 4]]
    assert limit_to_groups(biased, 2, 2) is biased


def test_experts_are_sorted_by_number_not_by_score():
    assert select_experts(row(0.5, 0.1, 0.9, 0.7), 3).tolist() == [[0, 2, 3]]


def test_margin_is_the_gap_between_chosen_and_left_out():
    biased = torch.cat([row(0.5, 0.1, 0.9, 0.75), row(1.0, 1.0, 0.0, 0.0)])
    torch.testing.assert_close(selection_margin(biased, 2), torch.tensor([0.25, 1.0], dtype=torch.float64))
    assert selection_margin(biased, 4).tolist() == [torch.inf, torch.inf]
    assert selection_margin(limit_to_groups(row(-0.1, -0.2, -2.9, -2.95), 2, 1), 2).tolist() == [torch.inf]


def test_margin_between_groups():
    """A choice may hang on two groups whose sums are near, however far the experts are from one another."""
    biased = row(0.9, 0.1, 0.6, 0.375)
    torch.testing.assert_close(group_margin(biased, 2, 1), torch.tensor([0.025], dtype=biased.dtype))
    assert group_margin(biased, 2, 2).tolist() == group_margin(biased, 1, 1).tolist() == [torch.inf]


def test_weights_come_from_the_scores_at_the_chosen_experts():
    scores, indices = row(0.2, 0.6, 0.1), torch.tensor([[0, 1]])
    torch.testing.assert_close(routing_weights(scores, indices, True, 2.0), row(0.5, 1.5))
    torch.testing.assert_close(routing_weights(scores, indices, False, 2.0), row(0.4, 1.2))
    torch.testing.assert_close(routing_weights(scores, torch.tensor([[1]]), True, 1.0), row(0.6))


def test_renormalization_epsilon_does_not_count_for_small_scores():
    tiny = row(1e-9, 3e-9)
    torch.testing.assert_close(routing_weights(tiny, torch.tensor([[0, 1]]), True, 1.0), row(0.25, 0.75))
    assert routing_weights(torch.zeros(1, 2), torch.tensor([[0, 1]]), True, 1.0).eq(0).all()


# the router


def router(experts=8, top_k=3, dtype=torch.float64, **text):
    return filled(Router(mini_text(num_experts=experts, num_experts_per_token=top_k, **text)), dtype)


@pytest.mark.parametrize("larger", [0, 1])
def test_biases_that_differ_below_bfloat16_decide(larger):
    gate = router(2, 1, torch.float32)
    gate.weight.data = torch.zeros(2, 64, dtype=torch.bfloat16)
    gate.e_score_correction_bias.data = torch.full((2,), 7.0)
    gate.e_score_correction_bias.data[larger] += 2**-12
    assert gate(torch.ones(1, 64, dtype=torch.bfloat16))[0].tolist() == [[larger]]


def test_router_works_in_float32_on_bfloat16_input():
    gate = router(dtype=torch.bfloat16)
    gate.e_score_correction_bias.data = torch.zeros(8)
    x = randn(50, 64, seed=1).bfloat16()
    scores = torch.sigmoid(x.float() @ gate.weight.float().T)
    indices, weights = gate(x)
    assert weights.dtype == torch.float32
    assert torch.equal(indices, scores.topk(3).indices.sort().values)
    torch.testing.assert_close(weights, scores.gather(1, indices) / scores.gather(1, indices).sum(1, keepdim=True))


def test_a_constant_in_all_biases_changes_nothing():
    gate, x = router(), randn(20, 64, seed=1)
    indices, weights = gate(x)
    gate.e_score_correction_bias.data += 3
    assert torch.equal(gate(x)[0], indices) and torch.equal(gate(x)[1], weights)


def test_bias_moves_the_choice_but_not_the_weights():
    gate, x = router(), randn(20, 64, seed=1)
    scores = torch.sigmoid(x @ gate.weight.T)
    gate.e_score_correction_bias.data = torch.tensor([0.0, 0, 0, 0, 0, 10, 20, 30], dtype=torch.float64)
    indices, weights = gate(x)
    assert indices.eq(torch.tensor([5, 6, 7])).all()
    torch.testing.assert_close(weights, scores[:, 5:] / scores[:, 5:].sum(1, keepdim=True))


def test_bias_of_minus_infinity_removes_the_expert():
    gate, smaller, x = router(8), router(7), randn(20, 64, seed=1)
    smaller.weight.data = gate.weight.data[:7]
    smaller.e_score_correction_bias.data = gate.e_score_correction_bias.data[:7]
    gate.e_score_correction_bias.data[7] = -torch.inf
    assert torch.equal(gate(x)[0], smaller(x)[0])
    torch.testing.assert_close(gate(x)[1], smaller(x)[1])


def test_expert_599_of_600():
    gate = router(600, 1)
    gate.e_score_correction_bias.data = torch.zeros(600, dtype=torch.float64)
    gate.e_score_correction_bias.data[599] = 2
    assert gate(randn(3, 64, seed=1))[0].tolist() == [[599]] * 3


def test_router_applies_groups():
    gate, x = router(num_expert_group=4, topk_group=2), randn(50, 64, seed=1)
    biased = torch.sigmoid(x @ gate.weight.T) + gate.e_score_correction_bias
    pairs = biased.unflatten(1, (4, 2)).sum(-1)
    for token, (indices, best) in enumerate(zip(gate(x)[0], pairs.topk(2).indices, strict=True)):
        allowed = sorted(expert for group in best.tolist() for expert in (2 * group, 2 * group + 1))
        worst = min(allowed, key=lambda expert: biased[token, expert].item())
        assert indices.tolist() == [expert for expert in allowed if expert != worst]


def test_imposed_choice_takes_its_own_scores():
    gate, x = router(), randn(4, 64, seed=1)
    imposed = torch.tensor([[0, 1, 2]] * 4)
    with recording(Recorder({"router.indices": imposed})) as recorder:
        indices, weights = gate(x)
    scores = torch.sigmoid(x @ gate.weight.T)[:, :3]
    assert torch.equal(indices, imposed)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))
    assert recorder.values["router.margin"].shape == (4,) and recorder.values["router.scores"].shape == (4, 8)


@pytest.mark.parametrize(
    "choice", [[[0, 1, 8]] * 4, [[-1, 1, 2]] * 4, [[0, 1]] * 4, [[0, 1, 2]], [[0.0, 1.0, 2.0]] * 4]
)
def test_imposed_choice_must_be_one(choice):
    with (
        pytest.raises(InputError, match="router.indices: imposed choice"),
        recording(Recorder({"router.indices": choice})),
    ):
        router()(randn(4, 64, seed=1))


# MXFP4


def test_every_byte_with_every_scale_is_decoded_exactly():
    packed = torch.arange(256, dtype=torch.uint8).reshape(1, 256).expand(255, -1).reshape(255 * 16, 16)
    scale = torch.arange(255, dtype=torch.uint8).repeat_interleave(16).reshape(-1, 1)
    expected = torch.from_numpy(mxfp4.unpack(packed.numpy(), scale.numpy()))
    assert torch.equal(decode_mxfp4(packed, scale, torch.float64), expected)
    below_overflow = scale[:, 0] < 252
    for dtype in (torch.float32, torch.bfloat16):
        decoded = decode_mxfp4(packed, scale, dtype)[below_overflow]
        assert torch.equal(decoded.double(), expected[below_overflow])


def test_known_bytes_low_nibble_first():
    packed = torch.tensor([[0xA5, 0x5A, 0x80, 0xF7] + [0] * 12 + [0x02] + [0] * 15], dtype=torch.uint8)
    weight = decode_mxfp4(packed, torch.tensor([[127, 129]], dtype=torch.uint8), torch.float32)
    assert weight[0, :8].tolist() == [3, -1, -1, 3, 0, -0.0, 6, -6]
    assert weight[0, 32].item() == 4 and np.signbit(weight[0, 5].item())


def test_unloaded_expert_is_nan():
    assert MXFP4Linear(32, 4)(torch.zeros(1, 32)).isnan().all()


# the experts


def moe(expert_format="mxfp4", dtype=torch.float64, **text):
    return filled(LatentMoE(mini_text(**text), expert_format), dtype)


def test_expert_uses_w1_as_gate_w3_as_up_w2_as_down():
    expert = filled(Expert(32, 64, lambda gate, up: gate * 2 + up, "dense"))
    z = randn(3, 32, seed=1)
    expected = (2 * z @ expert.w1.weight.T + z @ expert.w3.weight.T) @ expert.w2.weight.T
    torch.testing.assert_close(expert(z), expected)


@pytest.mark.parametrize("expert_format", ["mxfp4", "dense"])
def test_combination_equals_the_sum_over_experts(expert_format):
    layer = moe(expert_format)
    z, indices = randn(9, 32, seed=1), torch.tensor([[0, 2, 7]] * 4 + [[1, 2, 3]] * 5)
    weights = randn(9, 3, seed=2).abs()
    expected = torch.stack(
        [sum(weights[n, j] * layer.experts[indices[n, j]](z[n : n + 1])[0] for j in range(3)) for n in range(9)]
    )
    torch.testing.assert_close(layer.experts(z, indices, weights), expected)


def test_bfloat16_outputs_are_combined_in_float32():
    layer = moe(dtype=torch.bfloat16)
    z, weights = randn(9, 32, seed=1).bfloat16(), randn(9, 2, seed=2).float().abs()
    outputs = [layer.experts[number](z).float() for number in (0, 3)]
    combined = layer.experts(z, torch.tensor([[0, 3]] * 9), weights)
    assert combined.dtype == torch.float32
    torch.testing.assert_close(combined, outputs[0] * weights[:, :1] + outputs[1] * weights[:, 1:])


def test_whole_layer_by_definition():
    layer, x = moe(), randn(2, 3, 64, seed=1)
    tokens = x.flatten(0, 1)
    indices, weights = layer.gate(tokens)
    u = layer.experts(tokens @ layer.routed_expert_down_proj.weight.T, indices, weights)
    u = rms_norm(u, layer.routed_expert_norm.weight, 1e-5)
    expected = (u @ layer.routed_expert_up_proj.weight.T).reshape(2, 3, 64) + layer.shared_experts(x)
    torch.testing.assert_close(layer(x), expected)


def routed_branch(layer, x):
    return layer(x) - layer.shared_experts(x)


def test_scaling_every_w2_does_not_change_the_routed_branch():
    layer, x = moe(rms_norm_eps=1e-12), randn(2, 3, 64, seed=1)
    without_norm = moe(latent_moe_use_norm=False)
    before, before_without = routed_branch(layer, x), routed_branch(without_norm, x)
    for experts in (layer.experts, without_norm.experts):
        for expert in experts:
            expert.w2.weight_scale += 3
    torch.testing.assert_close(routed_branch(layer, x), before, atol=1e-9, rtol=1e-8)
    torch.testing.assert_close(routed_branch(without_norm, x), 8 * before_without)


def test_half_sets_of_experts_are_added_before_the_norm():
    layer = moe("dense", num_experts=2, num_experts_per_token=2)
    layer.experts[1].load_state_dict(layer.experts[0].state_dict())
    layer.experts[1].w2.weight.data *= -0.9
    layer.gate.weight.data[1] = layer.gate.weight.data[0]
    x = randn(1, 4, 64, seed=1)
    u = 0.05 * layer.experts[0](x[0] @ layer.routed_expert_down_proj.weight.T)
    norm, up = layer.routed_expert_norm, layer.routed_expert_up_proj
    torch.testing.assert_close(routed_branch(layer, x)[0], up(norm(u)))
    assert not torch.allclose(routed_branch(layer, x)[0], up(norm(10 * u) + norm(-9 * u)), rtol=0.1)


def test_a_zero_routed_sum_gives_zero():
    assert routed_branch(moe(), torch.zeros(1, 2, 64, dtype=torch.float64)).eq(0).all()


@pytest.mark.parametrize(
    "text, absent",
    [
        (
            {"routed_expert_hidden_size": None},
            {"routed_expert_down_proj", "routed_expert_up_proj", "routed_expert_norm"},
        ),
        ({"latent_moe_use_norm": None}, {"routed_expert_norm"}),
        ({"num_shared_experts": None}, {"shared_experts"}),
        ({"num_shared_experts": 0}, {"shared_experts"}),
    ],
)
def test_parts_that_are_off_are_absent(text, absent):
    layer = moe(**text)
    assert {name for name, _ in moe().named_children()} - {name for name, _ in layer.named_children()} == absent
    output = layer(randn(2, 3, 64, seed=1))
    assert output.shape == (2, 3, 64) and output.isfinite().all() and output.abs().max() > 1e-3


def test_experts_only_combination_where_everything_is_off():
    layer = moe(routed_expert_hidden_size=None, num_shared_experts=None)
    x = randn(1, 3, 64, seed=1)
    torch.testing.assert_close(layer(x)[0], layer.experts(x[0], *layer.gate(x[0])))
    assert isinstance(layer.experts, Experts)


def test_quantities_are_shown_under_the_owner():
    layer, owner = moe(), torch.nn.Module()
    owner.tap_path = "layers.7"
    with recording(Recorder()) as recorder:
        layer(randn(2, 3, 64, seed=1), owner)
    names = ("router.scores", "router.margin", "router.indices", "router.weights", "moe.latent", "moe.routed")
    assert set(recorder.values) == {f"layers.7.{name}" for name in names}
