"""Faults of the router, the latent experts, the activation and MXFP4 (K3.md §3, §7, §8)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from parity.fault_catalogue.patches import (
    around,
    cast_like,
    configured,
    exchanged,
    given,
    instead,
    result,
    rounded_to_bfloat16,
    stored,
)
from parity.faults import Fault, library
from reference.taps import tap


def masked_with_zero(limited: Any, package: str) -> Any:
    lib = library(package)
    return lib.where(lib.isinf(limited), lib.zeros_like(limited), limited)


def best_of_group(package: str, biased_scores, groups) -> Any:
    grouped = biased_scores.reshape(len(biased_scores), groups, -1)
    return library(package).amax(grouped, -1) if package == "reference" else grouped.max(-1)


def weights_with_bias(original: Callable, package: str, self, x, owner=None) -> Any:
    """Combination weights from the biased scores."""
    module, bias = importlib.import_module(f"{package}.moe"), self.e_score_correction_bias
    right = module.routing_weights
    module.routing_weights = lambda scores, *rest: right(scores + bias, *rest)
    try:
        return original(self, x, owner)
    finally:
        module.routing_weights = right


def renormalized_over_all(package: str, scores, indices, renormalize, scaling_factor) -> Any:
    lib = library(package)
    shares = scores / (scores.sum(-1)[..., None] + 1e-20) if renormalize else scores
    return (
        lib.take_along_dim(shares, indices, -1) * scaling_factor
        if package == "reference"
        else (lib.take_along_axis(shares, indices, axis=-1) * scaling_factor)
    )


def two_experts(indices: Any, package: str) -> Any:
    """A default of 2 experts per token: the other places repeat the second."""
    return library(package).stack([indices[:, min(place, 1)] for place in range(indices.shape[-1])], -1)


def next_expert(original: Callable, package: str, self, z, indices) -> Any:
    count = len(self) if package == "reference" else next(iter(self.w1.parameters().values())).shape[0]
    return original(self, z, (indices + 1) % count)


def weights_on_the_input(package: str, self, z, indices, weights) -> Any:
    """Each expert reads the input times its weight, and outputs are summed as they are."""
    parts = []
    for place in range(indices.shape[-1]):
        scaled = cast_like(z * weights[:, place, None], z, package)
        parts.append(self.outputs(scaled, indices[:, place : place + 1])[:, 0])
    return sum(parts)


def halves_normed_apart(original: Callable, package: str, self, x, owner=None) -> Any:
    """Two ranks with half of the experts each, whose sums are normed before they are added."""
    text, owner = self.text_config, self if owner is None else owner
    if not text.has_latent_norm:
        return original(self, x, owner)
    tokens = x.flatten(0, 1)
    indices, weights = self.gate(tokens, owner)
    latent = tap(owner, "moe.latent", self.routed_expert_down_proj(tokens))
    first = indices < text.num_experts // 2
    halves = [self.experts(latent, indices, weights * mine) for mine in (first, first ^ True)]
    tap(owner, "moe.routed", cast_like(halves[0] + halves[1], x, package))
    normed = sum(self.routed_expert_norm(cast_like(half, x, package)) for half in halves)
    routed = self.routed_expert_up_proj(normed).reshape(x.shape)
    return routed + self.shared_experts(x) if text.shared_width else routed


def silu_instead(package: str, gate, up, beta, linear_beta) -> Any:
    return gate * library(package).sigmoid(gate) * up


def tanh_without_beta(package: str, gate, up, beta, linear_beta) -> Any:
    lib = library(package)
    bounded_up = up if linear_beta is None else lib.tanh(up)
    return cast_like(lib.tanh(gate) * lib.sigmoid(gate) * bounded_up, gate, package)


def sigmoid_of_the_bounded(package: str, gate, up, beta, linear_beta) -> Any:
    lib = library(package)
    bounded = beta * lib.tanh(gate / beta)
    bounded_up = up if linear_beta is None else linear_beta * lib.tanh(up / linear_beta)
    return cast_like(bounded * lib.sigmoid(bounded) * bounded_up, gate, package)


def nibbles_exchanged(name: str, array: np.ndarray) -> np.ndarray:
    return array << 4 | array >> 4 if name.endswith("weight_packed") else array


def halves_of_a_block(name: str, array: np.ndarray) -> np.ndarray:
    """Elements 0…15 of a block in the low nibbles, 16…31 in the high ones: what is read as such comes from pairs."""
    if not name.endswith("weight_packed"):
        return array
    blocks = array.reshape(*array.shape[:-1], -1, 16)
    codes = np.concatenate([blocks & 15, blocks >> 4], axis=-1)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(array.shape).astype(np.uint8)


def exponent_lowered(name: str, array: np.ndarray) -> np.ndarray:
    return array - 2 if name.endswith("weight_scale") else array


def scales_of_wider_groups(name: str, array: np.ndarray) -> np.ndarray:
    """Groups of 64: every second scale is not used."""
    return np.repeat(array[..., ::2], 2, axis=-1)[..., : array.shape[-1]] if name.endswith("weight_scale") else array


def sign_flipped(name: str, array: np.ndarray) -> np.ndarray:
    return array ^ 0x88 if name.endswith("weight_packed") else array


def missed_lookups(name: str, array: np.ndarray) -> np.ndarray:
    return array * 0 if name.endswith("w2.weight_packed") else array


def bias_in_bfloat16(name: str, array: np.ndarray) -> np.ndarray:
    if not name.endswith("e_score_correction_bias"):
        return array
    return (array.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)


def no_bias(name: str, array: np.ndarray) -> np.ndarray:
    return array * 0 if name.endswith("e_score_correction_bias") else array


FAULTS: tuple[Fault, ...] = (
    Fault(
        "F52",
        "router",
        "the correction bias may be stored in bfloat16",
        "other experts for many tokens where biases are near 7",
        stored(bias_in_bfloat16),
    ),
    Fault("F52b", "router", "the correction bias is for training only", "other experts", stored(no_bias)),
    Fault(
        "F53",
        "router",
        "the model's dtype is enough for router logits",
        "another choice of experts for a few percent of tokens",
        {
            "moe.routing_scores": around(
                lambda original, package, logits, activation: original(rounded_to_bfloat16(logits, package), activation)
            )
        },
    ),
    Fault(
        "F55",
        "router",
        "the weights come from the biased scores",
        "experts weigh by their popularity",
        {"moe.Router.forward": around(weights_with_bias)},
    ),
    Fault(
        "F55b",
        "router",
        "the weights are not made to sum to 1",
        "a routed branch of another size; its norm hides most",
        {"moe.routing_weights": given(renormalize=False)},
    ),
    Fault(
        "F55c",
        "router",
        "the weights sum to 1 over all experts",
        "a routed branch of another size; its norm hides most",
        {"moe.routing_weights": instead(renormalized_over_all)},
    ),
    Fault(
        "F55d",
        "router",
        "the scaling factor belongs to training",
        "a routed branch of another size; its norm hides most",
        {"moe.routing_weights": given(scaling_factor=1.0)},
    ),
    Fault(
        "F55e",
        "router",
        "scores are a softmax over the experts",
        "other weights; the same experts where there is no bias",
        {"moe.routing_scores": given(activation="softmax")},
    ),
    Fault(
        "F56",
        "router",
        "a group is as good as its best expert",
        "other groups for some tokens",
        {"moe.group_scores": instead(best_of_group)},
        case="groups",
    ),
    Fault(
        "F57",
        "router",
        "groups that do not take part are masked with 0",
        "wrong experts where biased scores are negative",
        {"moe.limit_to_groups": result(masked_with_zero)},
        case="groups",
    ),
    Fault(
        "F57b",
        "router",
        "expert groups may be ignored",
        "other experts",
        {"moe.limit_to_groups": given(groups=1)},
        case="groups",
    ),
    Fault(
        "F58",
        "router",
        "there are at most 512 experts",
        "experts from 512 on are never chosen",
        {"moe.select_experts": given(biased_scores=lambda scores: scores[:, :512])},
    ),
    Fault(
        "F59",
        "router",
        "num_experts_per_tok is missing, so it is 2",
        "two experts do the work of all",
        {"moe.select_experts": result(two_experts)},
    ),
    Fault(
        "F61",
        "latent_moe",
        "nothing stands between the experts and the up-projection",
        "a routed branch of another size",
        {"moe.LatentMoE.forward": configured(latent_moe_use_norm=False)},
    ),
    Fault(
        "F62",
        "latent_moe",
        "partial sums of ranks may be normed before they are added",
        "right on one rank, wrong on two",
        {"moe.LatentMoE.forward": around(halves_normed_apart)},
    ),
    Fault(
        "F62b",
        "latent_moe",
        "there are no shared experts",
        "half of the layer is missing",
        {"moe.LatentMoE.forward": configured(num_shared_experts=0)},
    ),
    Fault(
        "F63",
        "experts",
        "a token's weight may be applied to what an expert reads",
        "right for linear experts only",
        {"moe.Experts.forward": instead(weights_on_the_input)},
    ),
    Fault(
        "F63b",
        "experts",
        "expert outputs may be combined in bfloat16",
        "small",
        {"moe.Experts.outputs": result(rounded_to_bfloat16)},
        hidden="the sum is rounded to bfloat16 next: a sum of k rounded terms stays within twice that",
    ),
    Fault(
        "F64",
        "experts",
        "experts are numbered from 1",
        "every token meets its expert's neighbour",
        {"moe.Experts.outputs": around(next_expert)},
    ),
    Fault(
        "F66",
        "activation",
        "u is not bounded",
        "small drift for small inputs, large for big ones",
        {"activation.situ_glu": given(linear_beta=None)},
    ),
    Fault(
        "F66b",
        "activation",
        "gate and up are interchangeable",
        "another function, equal where both inputs are equal",
        {
            "activation.situ_glu": lambda original, package: (
                lambda gate, up, *rest, **named: original(up, gate, *rest, **named)
            )
        },
    ),
    Fault(
        "F66c",
        "activation",
        "SiTU is another name of SiLU",
        "small drift for small inputs, large for big ones",
        {"activation.situ_glu": instead(silu_instead)},
    ),
    Fault(
        "F66d",
        "activation",
        "tanh bounds at 1; β is for training",
        "outputs far too small",
        {"activation.situ_glu": instead(tanh_without_beta)},
    ),
    Fault(
        "F66e",
        "activation",
        "the sigmoid reads the bounded gate",
        "only large gates, and little",
        {"activation.situ_glu": instead(sigmoid_of_the_bounded)},
    ),
    Fault(
        "F68",
        "experts",
        "a block's second half stands in the high nibbles, as in GGML",
        "every statistic right, every product wrong",
        stored(halves_of_a_block),
    ),
    Fault(
        "F68b",
        "experts",
        "the high nibble comes first",
        "every statistic right, every product wrong",
        stored(nibbles_exchanged),
    ),
    Fault(
        "F69",
        "experts",
        "the exponent of a scale has another offset",
        "weights 4 times too small; the latent norm hides most",
        stored(exponent_lowered),
    ),
    Fault(
        "F70",
        "experts",
        "one scale serves 64 inputs",
        "half of the groups off by a power of two",
        stored(scales_of_wider_groups),
    ),
    Fault("F72", "experts", "the codes' sign bit is inverted", "weights of the wrong sign", stored(sign_flipped)),
    Fault("F73", "experts", "a tensor that is not found is zero", "experts that say nothing", stored(missed_lookups)),
    Fault(
        "F76",
        "experts",
        "w1 is the up and w3 the gate projection",
        "another function, equal where both inputs are equal",
        exchanged(".w1.", ".w3."),
    ),
)
