"""Stable LatentMoE: router, routed experts, shared experts (K3.md §7)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port import mxfp4
from port.activation import GatedActivation, gated_activation
from port.linear import Linear, unset, wide
from port.mlp import GatedMLP
from port.norm import RMSNorm
from reference.checkpoint import ExpertFormat
from reference.config import TextConfig
from reference.errors import InputError
from reference.taps import imposed, tap

RENORM_EPS = 1e-20


def routing_scores(logits: mx.array, activation: str) -> mx.array:
    """``σ`` or softmax over the experts, float32; logits [N, E], activation "sigmoid" or "softmax"."""
    logits = wide(logits)
    return mx.sigmoid(logits) if activation == "sigmoid" else mx.softmax(logits, axis=-1)


def limit_to_groups(biased_scores: mx.array, groups: int, chosen_groups: int) -> mx.array:
    """−inf wherever an expert's group is not among the ``chosen_groups`` best; [N, E] -> [N, E].

    A group's score is the sum of its two best. Not 0: biased scores can be negative.
    """
    if chosen_groups >= groups:
        return biased_scores
    tokens, experts = biased_scores.shape
    grouped = biased_scores.reshape(tokens, groups, experts // groups)
    group_scores = mx.sum(mx.sort(grouped, axis=-1)[..., -2:], axis=-1)
    rank = mx.argsort(best_first(group_scores), axis=-1)
    return mx.where((rank < chosen_groups)[..., None], grouped, -mx.inf).reshape(tokens, experts)


def best_first(scores: mx.array) -> mx.array:
    """Indices of [N, n] scores, the largest first."""
    return mx.argsort(-scores, axis=-1)


def select_experts(biased_scores: mx.array, top_k: int) -> mx.array:
    """Indices of the ``top_k`` largest of [N, E], ascending per token: int32 [N, top_k]."""
    return mx.sort(best_first(biased_scores)[:, :top_k].astype(mx.int32), axis=-1)


def routing_weights(scores: mx.array, indices: mx.array, renormalize: bool, scaling_factor: float) -> mx.array:
    """The scores, without the bias, at the chosen experts; made to sum to 1 if asked, times ``scaling_factor``.

    scores [N, E], indices [N, k] below E -> [N, k] float32.
    """
    chosen = mx.take_along_axis(wide(scores), indices, axis=-1)
    if renormalize and indices.shape[-1] > 1:
        chosen = chosen / (mx.sum(chosen, axis=-1, keepdims=True) + RENORM_EPS)
    return chosen * scaling_factor


def selection_margin(biased_scores: mx.array, top_k: int) -> mx.array:
    """How far the last chosen score of [N, E] is from the first left out: [N] float32; +inf where none is left out."""
    ranked = -mx.sort(-wide(biased_scores), axis=-1)
    if top_k == ranked.shape[-1]:
        return mx.full(ranked.shape[:1], mx.inf)
    last, next_best = ranked[:, top_k - 1], ranked[:, top_k]
    return mx.where(mx.isinf(next_best), mx.inf, last - next_best)


def check_imposed(indices: mx.array, tokens: int, top_k: int, experts: int) -> mx.array:
    """``indices`` if they are [tokens, top_k] experts of this layer; MLX would read past its arrays without a word.

    Raises InputError.
    """
    where, mend = "router.indices", "impose the choice of a router of this configuration"
    if indices.shape != (tokens, top_k) or not mx.issubdtype(indices.dtype, mx.integer):
        expected = f"integers [{tokens}, {top_k}]"
        raise InputError(where, "imposed choice", expected, f"{indices.dtype} {list(indices.shape)}", mend)
    low, high = mx.min(indices).item(), mx.max(indices).item()
    if low < 0 or high >= experts:
        raise InputError(where, "imposed choice", f"experts 0..{experts - 1}", low if low < 0 else high, mend)
    return indices.astype(mx.int32)


class Router(nn.Module):
    """The choice of experts, in float32 from float32 weights and inputs (§7)."""

    def __init__(self, text_config: TextConfig) -> None:
        super().__init__()
        self.text_config = text_config
        self.weight = unset(text_config.num_experts, text_config.hidden_size)
        self.e_score_correction_bias = unset(text_config.num_experts)

    def scores(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """(scores, biased scores within the best groups), both float32 [N, E]; x [N, hidden]."""
        config = self.text_config
        scores = routing_scores(wide(x) @ wide(self.weight).T, config.moe_router_activation_func)
        biased = scores + wide(self.e_score_correction_bias)
        return scores, limit_to_groups(biased, config.expert_groups, config.chosen_groups)

    def __call__(self, x: mx.array, owner: nn.Module | None = None) -> tuple[mx.array, mx.array]:
        """(indices [N, k] ascending, weights [N, k] float32) for x [N, hidden]; taps stand under ``owner``."""
        config, owner = self.text_config, self if owner is None else owner
        top_k = config.num_experts_per_token
        scores, biased = self.scores(x)
        given = imposed(owner, "router.indices")
        indices = (
            select_experts(biased, top_k)
            if given is None
            else check_imposed(given, x.shape[0], top_k, config.num_experts)
        )
        weights = routing_weights(scores, indices, config.moe_renormalize, config.routed_scaling_factor)
        tap(owner, "router.scores", biased)
        tap(owner, "router.margin", selection_margin(biased, top_k))
        return tap(owner, "router.indices", indices), tap(owner, "router.weights", weights)


class DenseStack(nn.Module):
    """One matrix per expert, ``weight`` [E, out, in]."""

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = unset(experts, out_features, in_features)

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [N, k or 1, in], chosen [N, k] -> [N, k, out]: every row times the matrix of its expert."""
        # MLX's CPU has gather_mm in float32 only.
        matrices = wide(self.weight).swapaxes(-1, -2)
        y = mx.gather_mm(wide(x)[..., None, :], matrices, rhs_indices=chosen.astype(mx.uint32))
        return y[..., 0, :].astype(x.dtype)


class MXFP4Stack(nn.Module):
    """One MXFP4 matrix per expert (§8): ``weight_packed`` uint32 [E, out, in/8], ``weight_scale`` uint8 [E, out, in/32]."""

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight_packed = mx.zeros((experts, out_features, in_features // 8), mx.uint32)
        # Scale byte 255 is NaN.
        self.weight_scale = mx.full((experts, out_features, in_features // mxfp4.GROUP), 255, mx.uint8)

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [N, k or 1, in], chosen [N, k] -> [N, k, out]: every row times the matrix of its expert."""
        return mxfp4.gather_matmul(x, self.weight_packed, self.weight_scale, chosen)


class Experts(nn.Module):
    """All routed experts of a layer, each of their three matrices stacked: w1 the gate, w3 the up, w2 the down one."""

    def __init__(
        self, experts: int, latent: int, width: int, activation: GatedActivation, expert_format: ExpertFormat
    ) -> None:
        super().__init__()
        stack = MXFP4Stack if expert_format == "mxfp4" else DenseStack
        self.w1, self.w2, self.w3 = stack(experts, latent, width), stack(experts, width, latent), stack(experts, latent, width)
        self.activation = activation

    def outputs(self, z: mx.array, chosen: mx.array) -> mx.array:
        """``w2 activation(w1 z, w3 z)`` of each chosen expert: z [N, latent], chosen [N, k] -> [N, k, latent]."""
        z = z[:, None]
        return self.w2(self.activation(self.w1(z, chosen), self.w3(z, chosen)), chosen)

    def __call__(self, z: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``u = Σ weight · expert(z)``, summed in float32: [N, latent] float32."""
        return mx.sum(weights[..., None] * wide(self.outputs(z, indices)), axis=1)


class LatentMoE(nn.Module):
    """``W_up RMSNorm(Σ weight · expert(W_down x)) + shared(x)`` (§7); each of the three around the sum may be off."""

    def __init__(self, text_config: TextConfig, expert_format: ExpertFormat) -> None:
        super().__init__()
        self.text_config = config = text_config
        hidden, latent, activation = config.hidden_size, config.latent_size, gated_activation(config)
        self.gate = Router(config)
        self.experts = Experts(config.num_experts, latent, config.moe_intermediate_size, activation, expert_format)
        if config.routed_expert_hidden_size:
            self.routed_expert_down_proj = Linear(hidden, latent)
            self.routed_expert_up_proj = Linear(latent, hidden)
        if config.has_latent_norm:
            self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps)
        if config.shared_width:
            self.shared_experts = GatedMLP(hidden, config.shared_width, activation)

    def __call__(self, x: mx.array, owner: nn.Module | None = None) -> mx.array:
        """x [B, T, hidden] -> [B, T, hidden]; taps stand under ``owner``, the layer."""
        config, owner = self.text_config, self if owner is None else owner
        flat = x.reshape(-1, x.shape[-1])
        indices, weights = self.gate(flat, owner)
        z = self.routed_expert_down_proj(flat) if config.routed_expert_hidden_size else flat
        u = self.experts(tap(owner, "moe.latent", z), indices, weights)
        # The norm is not linear: it comes after the whole sum.
        y = tap(owner, "moe.routed", u).astype(x.dtype)
        if config.has_latent_norm:
            y = self.routed_expert_norm(y)
        if config.routed_expert_hidden_size:
            y = self.routed_expert_up_proj(y)
        y = y.reshape(x.shape)
        return y + self.shared_experts(x) if config.shared_width else y
