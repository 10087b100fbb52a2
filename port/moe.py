"""Stable LatentMoE: the router, the routed experts in their latent space, the shared experts (K3.md §7, §8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from port.activation import gated_activation
from port.linear import Linear, StackedLinear, unset, wide
from port.mlp import GatedMLP
from port.mxfp4 import MXFP4Linear
from port.norm import RMSNorm
from reference.checkpoint import ExpertFormat
from reference.config import TextConfig
from reference.errors import InputError
from reference.taps import imposed, listening, tap

RENORM_EPS = 1e-20


def routing_scores(logits: mx.array, activation: Literal["sigmoid", "softmax"]) -> mx.array:
    """Each expert's score, in float32: σ of its logit, or softmax over the experts. logits [N, E] -> [N, E]."""
    logits = wide(logits)
    return mx.sigmoid(logits) if activation == "sigmoid" else mx.softmax(logits, axis=-1)


def group_scores(biased_scores: mx.array, groups: int) -> mx.array:
    """A group's score is the sum of its two best biased scores: [N, E] -> [N, groups]."""
    grouped = biased_scores.reshape(len(biased_scores), groups, -1)
    return mx.sum(mx.sort(grouped, axis=-1)[..., -2:], axis=-1)


def limit_to_groups(biased_scores: mx.array, groups: int, chosen_groups: int) -> mx.array:
    """−inf wherever an expert's group is not among the ``chosen_groups`` best; [N, E] -> [N, E].

    Not 0 there: biased scores can be negative, and 0 would win against them.
    """
    if chosen_groups >= groups:
        return biased_scores
    grouped = biased_scores.reshape(len(biased_scores), groups, -1)
    rank = mx.argsort(mx.argsort(-group_scores(biased_scores, groups), axis=-1), axis=-1)
    return mx.where((rank < chosen_groups)[..., None], grouped, -mx.inf).reshape(biased_scores.shape)


def select_experts(biased_scores: mx.array, top_k: int) -> mx.array:
    """Indices of the ``top_k`` largest of [N, E], ascending per token: int32 [N, top_k]."""
    best = mx.argsort(-biased_scores, axis=-1)[:, :top_k]
    return mx.sort(best.astype(mx.int32), axis=-1)


def selection_margin(biased_scores: mx.array, top_k: int) -> mx.array:
    """How far the last chosen score of [N, E] is from the first left out: [N] float32; +inf where none is left out."""
    if top_k == biased_scores.shape[-1]:
        return mx.full(biased_scores.shape[:1], mx.inf)
    ranked = mx.sort(biased_scores, axis=-1)
    last, left_out = ranked[:, -top_k], ranked[:, -top_k - 1]
    return mx.where(left_out == -mx.inf, mx.inf, last - left_out)


def group_margin(biased_scores: mx.array, groups: int, chosen_groups: int) -> mx.array:
    """How far the last chosen group is ahead of the first one left out: [N, E] -> [N], +inf where none is left."""
    if chosen_groups >= groups:
        return mx.full(biased_scores.shape[:1], mx.inf)
    return selection_margin(group_scores(biased_scores, groups), chosen_groups)


def routing_weights(scores: mx.array, indices: mx.array, renormalize: bool, scaling_factor: float) -> mx.array:
    """The scores, without the bias, at the chosen experts; made to sum to 1 if asked, times ``scaling_factor``.

    scores [N, E], indices [N, k] below E -> [N, k] float32.
    """
    chosen = mx.take_along_axis(wide(scores), indices, axis=-1)
    if renormalize and indices.shape[-1] > 1:
        chosen = chosen / (mx.sum(chosen, axis=-1, keepdims=True) + RENORM_EPS)
    return chosen * scaling_factor


class Router(nn.Module):
    """Chooses each token's experts. ``weight`` [E, hidden]; ``e_score_correction_bias`` [E] only acts on the choice."""

    def __init__(self, text_config: TextConfig) -> None:
        super().__init__()
        self.text_config = text_config
        self.weight = unset(text_config.num_experts, text_config.hidden_size)
        self.e_score_correction_bias = unset(text_config.num_experts)

    def __call__(self, x: mx.array, owner: nn.Module | None = None) -> tuple[mx.array, mx.array]:
        """x [N, hidden] -> indices int32 [N, k] ascending, weights float32 [N, k].

        ``owner`` is the module under whose path the router's quantities are shown, and the choice imposed. Raises
        InputError if an imposed choice is no choice of this router.
        """
        owner = self if owner is None else owner
        text, top_k = self.text_config, self.text_config.num_experts_per_token
        scores = routing_scores(wide(x) @ wide(self.weight).T, text.moe_router_activation_func)
        biased_scores = scores + self.e_score_correction_bias
        selectable = limit_to_groups(biased_scores, text.expert_groups, text.chosen_groups)
        tap(owner, "router.scores", selectable)
        if listening():
            between_groups = group_margin(biased_scores, text.expert_groups, text.chosen_groups)
            tap(owner, "router.margin", mx.minimum(selection_margin(selectable, top_k), between_groups))
        choice = imposed(owner, "router.indices")
        if choice is None:
            indices = select_experts(selectable, top_k)
        else:
            indices = _checked_choice(choice, len(x), top_k, text.num_experts)
        weights = routing_weights(scores, indices, text.moe_renormalize, text.routed_scaling_factor)
        return tap(owner, "router.indices", indices), tap(owner, "router.weights", weights)


class Experts(nn.Module):
    """All routed experts of a layer; a token passes through its chosen ones.

    The matrices of all experts stand in one stack each: w1 the gates, w3 the up, w2 the down projections.
    """

    def __init__(
        self,
        experts: int,
        latent: int,
        width: int,
        activation: Callable[[mx.array, mx.array], mx.array],
        expert_format: ExpertFormat,
    ) -> None:
        super().__init__()
        linear = MXFP4Linear if expert_format == "mxfp4" else StackedLinear
        self.w1 = linear(experts, latent, width)
        self.w2 = linear(experts, width, latent)
        self.w3 = linear(experts, latent, width)
        self.activation = activation

    def outputs(self, z: mx.array, indices: mx.array) -> mx.array:
        """``w2 activation(w1 z, w3 z)`` of each chosen expert: z [N, latent], indices [N, k] -> [N, k, latent]."""
        z = z[:, None]
        return self.w2(self.activation(self.w1(z, indices), self.w3(z, indices)), indices)

    def __call__(self, z: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``Σ weight · expert(z)`` in float32: z [N, latent], indices and weights [N, k] -> [N, latent]."""
        return mx.sum(wide(self.outputs(z, indices)) * weights[..., None], axis=1)


class LatentMoE(nn.Module):
    """``W_up RMSNorm(Σ weight · expert(W_down x)) + shared(x)``; latent, norm and shared experts may be absent."""

    def __init__(self, text_config: TextConfig, expert_format: ExpertFormat) -> None:
        super().__init__()
        hidden, latent = text_config.hidden_size, text_config.latent_size
        activation, width = gated_activation(text_config), text_config.moe_intermediate_size
        self.text_config = text_config
        self.gate = Router(text_config)
        if text_config.routed_expert_hidden_size:
            self.routed_expert_down_proj = Linear(hidden, latent)
            self.routed_expert_up_proj = Linear(latent, hidden)
        if text_config.has_latent_norm:
            self.routed_expert_norm = RMSNorm(latent, text_config.rms_norm_eps)
        self.experts = Experts(text_config.num_experts, latent, width, activation, expert_format)
        if text_config.shared_width:
            self.shared_experts = GatedMLP(hidden, text_config.shared_width, activation)

    def __call__(self, x: mx.array, owner: nn.Module | None = None) -> mx.array:
        """x [B, T, hidden] -> [B, T, hidden]; ``owner`` as for the router."""
        owner, text = self if owner is None else owner, self.text_config
        tokens = x.flatten(0, 1)
        indices, weights = self.gate(tokens, owner)
        latent = self.routed_expert_down_proj(tokens) if text.routed_expert_hidden_size else tokens
        tap(owner, "moe.latent", latent)
        routed = tap(owner, "moe.routed", self.experts(latent, indices, weights).astype(x.dtype))
        if text.has_latent_norm:
            routed = self.routed_expert_norm(routed)
        if text.routed_expert_hidden_size:
            routed = self.routed_expert_up_proj(routed)
        routed = routed.reshape(x.shape)
        return routed + self.shared_experts(x) if text.shared_width else routed


def _checked_choice(choice: mx.array, tokens: int, top_k: int, experts: int) -> mx.array:
    """An imposed choice of experts, as int32 [tokens, top_k]; InputError unless it is one.

    MLX reads past the end of its arrays without a word when an index is out of range.
    """
    if choice.shape != (tokens, top_k) or not mx.issubdtype(choice.dtype, mx.integer):
        found, mend = f"{list(choice.shape)} of {choice.dtype}", "impose the choice of a router of this configuration"
        raise InputError("router.indices", "shape and dtype", f"integers [{tokens}, {top_k}]", found, mend)
    low, high = mx.min(choice).item(), mx.max(choice).item()
    if low < 0 or high >= experts:
        found, mend = low if low < 0 else high, "number the experts from 0"
        raise InputError("router.indices", "expert", f"numbers in [0, {experts})", found, mend)
    return choice.astype(mx.int32)
