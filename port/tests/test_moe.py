import mlx.core as mx
import numpy as np
import pytest

from port.moe import (
    Experts,
    LatentMoE,
    Router,
    group_margin,
    limit_to_groups,
    routing_scores,
    routing_weights,
    select_experts,
    selection_margin,
)
from port.mxfp4 import unpack
from port.tests.models import f64, filled, mini_text, randn, relative_rms, same_bits
from reference.errors import InputError
from reference.taps import Recorder, recording


def latent_moe(expert_format="mxfp4", **text):
    return filled(LatentMoE(mini_text(**text), expert_format))


def chosen_under(biases, scores=None):
    biases = mx.array([biases], mx.float32)
    return select_experts(biases if scores is None else biases + scores, 1).item()


def test_scores():
    logits = randn(3, 8).astype(mx.bfloat16)
    x = f64(logits)
    assert routing_scores(logits, "sigmoid").dtype == mx.float32
    assert relative_rms(routing_scores(logits, "sigmoid"), 1 / (1 + np.exp(-x))) < 1e-6
    assert relative_rms(routing_scores(logits, "softmax"), np.exp(x) / np.exp(x).sum(-1, keepdims=True)) < 1e-6


def test_biases_that_differ_below_bfloat16_decide():
    equal = mx.full((1, 2), 0.25)
    assert chosen_under([7.0, 7.0 + 2.0**-12], equal) == 1
    assert chosen_under([7.0 + 2.0**-12, 7.0], equal) == 0


def test_groups_outside_the_best_are_masked_with_minus_infinity():
    biased = mx.array([[-0.1, -0.2, -2.9, -2.95]])
    assert select_experts(limit_to_groups(biased, 2, 1), 2).tolist() == [[0, 1]]
    assert limit_to_groups(biased, 2, 1).tolist()[0][2:] == [-np.inf, -np.inf]
    assert same_bits(limit_to_groups(biased, 2, 2), biased)


def test_a_group_is_scored_by_its_two_best():
    biased = mx.array([[0.9, 0.0, 0.0, 0.5, 0.5, 0.0, 0.6, 0.6, -5.0]])
    assert select_experts(limit_to_groups(biased, 3, 1), 2).tolist() == [[6, 7]]
    assert select_experts(limit_to_groups(biased, 3, 2), 3).tolist() == [[3, 6, 7]]


def test_expert_599_of_600():
    biased = mx.array(np.random.default_rng(0).random((4, 600)).astype(np.float32)).at[:, 599].add(2.0)
    assert select_experts(biased, 1).tolist() == [[599]] * 4


def test_experts_ascend_by_number_and_nan_gives_legal_numbers():
    assert select_experts(mx.array([[0.1, 0.9, 0.5, 0.7]]), 3).tolist() == [[1, 2, 3]]
    numbers = select_experts(mx.full((2, 8), mx.nan), 3)
    assert mx.all((numbers >= 0) & (numbers < 8)).item()


def test_margin():
    biased = mx.array([[0.1, 0.9, 0.5, 0.7], [0.0, -mx.inf, 0.4, 0.5]])
    np.testing.assert_allclose(selection_margin(biased, 2).tolist(), [0.2, 0.4], rtol=1e-6)
    assert selection_margin(biased, 3).tolist()[1] == np.inf
    assert selection_margin(biased, 4).tolist() == [np.inf, np.inf]


def test_margin_between_groups():
    """A choice may hang on two groups whose sums are near, however far the experts are from one another."""
    biased = mx.array([[0.9, 0.1, 0.6, 0.375]])
    np.testing.assert_allclose(group_margin(biased, 2, 1).tolist(), [0.025], rtol=1e-5)
    assert group_margin(biased, 2, 2).tolist() == group_margin(biased, 1, 1).tolist() == [np.inf]


def test_weights():
    scores, indices = mx.array([[0.1, 0.2, 0.3, 0.4]]), mx.array([[1, 3]])
    np.testing.assert_allclose(routing_weights(scores, indices, True, 1.0).tolist(), [[1 / 3, 2 / 3]], rtol=1e-6)
    np.testing.assert_allclose(routing_weights(scores, indices, False, 2.5).tolist(), [[0.5, 1.0]], rtol=1e-6)
    assert routing_weights(scores, indices[:, :1], True, 1.0).item() == pytest.approx(0.2)
    tiny = routing_weights(1e-9 * scores, indices, True, 1.0)
    np.testing.assert_allclose(tiny.tolist(), [[1 / 3, 2 / 3]], rtol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_router_works_in_float32(dtype):
    router = filled(Router(mini_text()))
    router.weight = router.weight.astype(dtype)
    x = randn(9, 64).astype(dtype)
    indices, weights = router(x)
    scores = 1 / (1 + np.exp(-f64(x) @ f64(router.weight).T))
    best = np.sort(np.argsort(-(scores + f64(router.e_score_correction_bias)), axis=-1)[:, :3], axis=-1)
    chosen = np.take_along_axis(scores, best, axis=-1)
    assert indices.tolist() == best.tolist() and weights.dtype == mx.float32
    assert relative_rms(weights, chosen / chosen.sum(-1, keepdims=True)) < 1e-6


def test_the_bias_moves_the_choice_and_never_the_weights():
    router, x = filled(Router(mini_text())), randn(9, 64)
    indices, weights = router(x)
    router.e_score_correction_bias = router.e_score_correction_bias + 3.0
    again, same = router(x)
    assert same_bits(indices, again) and same_bits(weights, same)
    everything = Router(mini_text(num_experts_per_token=8))
    everything.weight, everything.e_score_correction_bias = router.weight, mx.zeros(8)
    unbiased = everything(x)[1]
    everything.e_score_correction_bias = randn(8)
    assert same_bits(everything(x)[1], unbiased)


def test_a_bias_of_minus_infinity_removes_the_expert():
    router, x = filled(Router(mini_text())), randn(9, 64)
    router.e_score_correction_bias = router.e_score_correction_bias.at[2].add(-mx.inf)
    indices, weights = router(x)
    keep = mx.array([0, 1, 3, 4, 5, 6, 7])
    without = Router(mini_text(num_experts=7))
    without.weight, without.e_score_correction_bias = router.weight[keep], router.e_score_correction_bias[keep]
    pruned, same = without(x)
    assert keep[pruned].tolist() == indices.tolist()
    assert relative_rms(weights, same) < 1e-6


def test_an_imposed_choice_takes_its_own_scores_and_is_checked():
    router, x = filled(Router(mini_text())), randn(2, 64)
    choice = mx.array([[0, 4, 5], [1, 2, 7]])
    with recording(Recorder({"router.indices": choice})):
        indices, weights = router(x)
    scores = routing_scores(x @ router.weight.T, "sigmoid")
    assert indices.tolist() == choice.tolist()
    assert relative_rms(weights, routing_weights(scores, choice, True, 1.0)) < 1e-6
    for wrong in (mx.array([[0, 4, 8], [1, 2, 7]]), mx.array([[-1, 4, 5], [1, 2, 7]]), choice[:1], choice * 1.0):
        with recording(Recorder({"router.indices": wrong})), pytest.raises(InputError, match="router.indices"):
            router(x)


@pytest.mark.parametrize("expert_format", ["mxfp4", "dense"])
@pytest.mark.parametrize("dtype, limit", [("float32", 1e-6), ("bfloat16", 8e-3)])
def test_every_chosen_expert_by_definition(expert_format, dtype, limit):
    """w1 is the gate, w3 the up, w2 the down projection; the sum is in float32."""
    model_dtype = getattr(mx, dtype)
    experts = filled(Experts(5, 32, 64, lambda gate, up: gate + 2 * up, expert_format), dtype)
    z, indices, weights = (
        randn(4, 32).astype(model_dtype),
        mx.array([[0, 4], [1, 2], [3, 4], [0, 1]]),
        randn(4, 2, seed=1),
    )
    w1, w2, w3 = (
        f64(unpack(part.weight_packed, part.weight_scale) if expert_format == "mxfp4" else part.weight)
        for part in (experts.w1, experts.w2, experts.w3)
    )
    truth = [
        [w2[e] @ (w1[e] @ row + 2 * w3[e] @ row) for e in chosen]
        for row, chosen in zip(f64(z), indices.tolist(), strict=True)
    ]
    assert relative_rms(experts.outputs(z, indices), np.array(truth)) < limit
    combined = experts(z, indices, weights)
    assert combined.dtype == mx.float32
    assert relative_rms(combined, (f64(experts.outputs(z, indices)) * f64(weights)[..., None]).sum(1)) < 1e-6


@pytest.mark.parametrize("expert_format", ["mxfp4", "dense"])
def test_a_token_is_computed_alike_alone_and_in_a_batch(expert_format):
    module, x = latent_moe(expert_format), randn(1, 9, 64)
    together = module(x)
    alone = mx.concatenate([module(x[:, t : t + 1]) for t in range(9)], axis=1)
    assert relative_rms(alone, together) < 1e-6


def test_the_whole_layer_by_definition():
    module, x = latent_moe(), randn(2, 3, 64)
    flat = x.reshape(6, 64)
    indices, weights = module.gate(flat)
    u = f64(module.experts(flat @ module.routed_expert_down_proj.weight.T, indices, weights))
    u = u / np.sqrt(np.square(u).mean(-1, keepdims=True) + 1e-5) * f64(module.routed_expert_norm.weight)
    truth = u @ f64(module.routed_expert_up_proj.weight).T + f64(module.shared_experts(flat))
    assert relative_rms(module(x), truth.reshape(2, 3, 64)) < 1e-6


def test_scaling_every_w2_leaves_the_routed_branch_alone():
    module, x = latent_moe(num_shared_experts=None), randn(1, 5, 64)
    before = module(x)
    module.experts.w2.weight_scale = module.experts.w2.weight_scale + 3
    assert relative_rms(module(x), before) < 1e-5


def test_half_sets_of_experts_are_added_before_the_norm():
    module, x = latent_moe(num_shared_experts=None), randn(5, 64)
    indices, weights = module.gate(x)
    z = module.routed_expert_down_proj(x)
    halves = [module.experts(z, indices, mx.where(indices % 2 == parity, weights, 0.0)) for parity in (0, 1)]
    finish = lambda u: module.routed_expert_up_proj(module.routed_expert_norm(u))  # noqa: E731
    whole = module(x[None])[0]
    assert relative_rms(finish(halves[0] + halves[1]), whole) < 1e-6
    assert relative_rms(finish(halves[0]) + finish(halves[1]), whole) > 0.1


def test_a_zero_routed_sum_gives_zero():
    module = latent_moe(num_shared_experts=None)
    module.experts.w2.weight_packed = mx.zeros_like(module.experts.w2.weight_packed)
    assert mx.all(module(randn(1, 3, 64)) == 0).item()


@pytest.mark.parametrize(
    "text, absent",
    [
        (
            {"routed_expert_hidden_size": None},
            ["routed_expert_down_proj", "routed_expert_up_proj", "routed_expert_norm"],
        ),
        ({"latent_moe_use_norm": None}, ["routed_expert_norm"]),
        ({"num_shared_experts": None}, ["shared_experts"]),
        ({"num_shared_experts": 0}, ["shared_experts"]),
    ],
)
def test_parts_that_are_off_are_absent(text, absent):
    module = latent_moe(**text)
    names = {
        "gate",
        "experts",
        "routed_expert_down_proj",
        "routed_expert_up_proj",
        "routed_expert_norm",
        "shared_experts",
    }
    assert set(module.parameters()) == names - set(absent)
    assert mx.all(mx.isfinite(module(randn(1, 3, 64)))).item()


def test_quantities_are_shown_under_the_owner():
    module, owner = latent_moe(), Router(mini_text())
    owner.tap_path = "layers.7"
    with recording(Recorder()) as recorder:
        module(randn(1, 3, 64), owner)
    shown = ("router.scores", "router.margin", "router.indices", "router.weights", "moe.latent", "moe.routed")
    assert set(recorder.values) == {f"layers.7.{name}" for name in shown}
    assert recorder.values["layers.7.router.scores"].shape == (3, 8)
