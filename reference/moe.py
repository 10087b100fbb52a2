"""Stable LatentMoE: the router, the routed experts in their latent space, the shared experts (K3.md §7, §8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reference.activation import gated_activation
from reference.checkpoint import ExpertFormat
from reference.config import TextConfig
from reference.errors import InputError
from reference.linear import Linear, unset, wide
from reference.mlp import GatedMLP
from reference.mxfp4 import CODE_VALUES, GROUP, NAN_SCALE, SCALE_BIAS, unpack_codes
from reference.norm import RMSNorm
from reference.taps import imposed, listening, tap

RENORM_EPS = 1e-20
BYTE_VALUES = torch.from_numpy(CODE_VALUES[unpack_codes(np.arange(256, dtype=np.uint8)[:, None])])
"""The two values of every packed byte, float64 [256, 2], the low nibble's first."""
SCALE_VALUES = torch.from_numpy(
    np.where(np.arange(256) == NAN_SCALE, np.nan, np.ldexp(1.0, np.arange(256) - SCALE_BIAS))
)
"""The value of every scale byte, float64 [256]."""


def routing_scores(logits: Tensor, activation: Literal["sigmoid", "softmax"]) -> Tensor:
    """Each expert's score, in float32: σ of its logit, or softmax over the experts. logits [N, E] -> [N, E]."""
    logits = wide(logits)
    return torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, dim=-1)


def group_scores(biased_scores: Tensor, groups: int) -> Tensor:
    """A group's score is the sum of its two best biased scores: [N, E] -> [N, groups]."""
    return biased_scores.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1)


def limit_to_groups(biased_scores: Tensor, groups: int, chosen_groups: int) -> Tensor:
    """−inf outside each token's best groups.

    [N, E] -> [N, E]. Not 0 outside: biased scores can be negative, and 0 would win against them.
    """
    if chosen_groups >= groups:
        return biased_scores
    grouped, scores = biased_scores.unflatten(-1, (groups, -1)), group_scores(biased_scores, groups)
    chosen = scores.topk(chosen_groups, dim=-1).indices
    allowed = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    return torch.where(allowed[..., None], grouped, -torch.inf).flatten(-2)


def select_experts(biased_scores: Tensor, top_k: int) -> Tensor:
    """The experts of the ``top_k`` best biased scores, ascending by number: [N, E] -> int64 [N, k]."""
    return biased_scores.topk(top_k, dim=-1).indices.sort(dim=-1).values


def selection_margin(biased_scores: Tensor, top_k: int) -> Tensor:
    """How far the last chosen expert is ahead of the first one left out: [N, E] -> [N], +inf where none is left."""
    if top_k == biased_scores.shape[-1]:
        return torch.full(biased_scores.shape[:1], torch.inf, dtype=biased_scores.dtype)
    best = biased_scores.topk(top_k + 1, dim=-1).values
    return best[:, -2] - best[:, -1]


def group_margin(biased_scores: Tensor, groups: int, chosen_groups: int) -> Tensor:
    """How far the last chosen group is ahead of the first one left out: [N, E] -> [N], +inf where none is left."""
    if chosen_groups >= groups:
        return torch.full(biased_scores.shape[:1], torch.inf, dtype=biased_scores.dtype)
    return selection_margin(group_scores(biased_scores, groups), chosen_groups)


def routing_weights(scores: Tensor, indices: Tensor, renormalize: bool, scaling_factor: float) -> Tensor:
    """The chosen experts' weights: scores without the bias, made to sum to 1 if asked, times the scaling factor.

    scores [N, E], indices [N, k] -> [N, k].
    """
    weights = scores.gather(-1, indices)
    if renormalize and indices.shape[-1] > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + RENORM_EPS)
    return weights * scaling_factor


def decode_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that packed bytes mean, exactly: uint8 [out, n/2], [out, n/32] -> [out, n] in ``dtype``.

    The low nibble is the even input index; the scale of 32 inputs is 2^(byte − 127), and byte 255 is NaN.
    """
    values = F.embedding(packed.int(), BYTE_VALUES.to(dtype)).flatten(-2).unflatten(-1, (-1, GROUP))
    return values.mul_(SCALE_VALUES.to(dtype)[scale.int()][..., None]).flatten(-2)


class MXFP4Linear(nn.Module):
    """``y = W x`` with W in MXFP4: ``weight_packed`` uint8 [out, in/2], ``weight_scale`` uint8 [out, in/32] (§8).

    Until it is loaded every scale is byte 255, so that the weight is NaN.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.register_buffer("weight_packed", torch.zeros(out_features, in_features // 2, dtype=torch.uint8))
        scale = torch.full((out_features, in_features // GROUP), NAN_SCALE, dtype=torch.uint8)
        self.register_buffer("weight_scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x's dtype."""
        return F.linear(x, decode_mxfp4(self.weight_packed, self.weight_scale, x.dtype))


class Router(nn.Module):
    """Chooses each token's experts. ``weight`` [E, hidden]; ``e_score_correction_bias`` [E] only acts on the choice."""

    def __init__(self, text_config: TextConfig) -> None:
        super().__init__()
        self.text_config = text_config
        self.weight = unset(text_config.num_experts, text_config.hidden_size)
        self.e_score_correction_bias = unset(text_config.num_experts)

    def forward(self, x: Tensor, owner: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """x [N, hidden] -> indices int64 [N, k] ascending, weights float32 [N, k].

        ``owner`` is the module under whose path the router's quantities are shown, and the choice imposed. Raises
        InputError if an imposed choice is no choice of this router.
        """
        owner, text, top_k = owner or self, self.text_config, self.text_config.num_experts_per_token
        scores = routing_scores(F.linear(wide(x), wide(self.weight)), text.moe_router_activation_func)
        biased_scores = scores + self.e_score_correction_bias
        selectable = limit_to_groups(biased_scores, text.expert_groups, text.chosen_groups)
        tap(owner, "router.scores", selectable)
        if listening():
            between_groups = group_margin(biased_scores, text.expert_groups, text.chosen_groups)
            tap(owner, "router.margin", torch.minimum(selection_margin(selectable, top_k), between_groups))
        choice = imposed(owner, "router.indices")
        if choice is None:
            indices = select_experts(selectable, top_k)
        else:
            indices = _checked_choice(choice, len(x), top_k, text.num_experts)
        weights = routing_weights(scores, indices, text.moe_renormalize, text.routed_scaling_factor)
        return tap(owner, "router.indices", indices), tap(owner, "router.weights", weights)


def _checked_choice(choice: Any, tokens: int, top_k: int, experts: int) -> Tensor:
    """An imposed choice of experts, as int64 [tokens, top_k]; InputError unless it is one."""
    indices = torch.as_tensor(choice)
    if indices.is_floating_point() or indices.shape != (tokens, top_k):
        expected, found = f"integers [{tokens}, {top_k}]", f"{list(indices.shape)} of {indices.dtype}"
        raise InputError("router.indices", "imposed choice", expected, found, "give top-k experts per token")
    if ((indices < 0) | (indices >= experts)).any():
        mend = "give this checkpoint's expert numbers"
        raise InputError("router.indices", "imposed choice", f"experts in [0, {experts})", indices.tolist(), mend)
    return indices.long()


class Expert(nn.Module):
    """``w2 activation(w1 z, w3 z)``: w1 is the gate, w3 the up, w2 the down projection."""

    def __init__(
        self, latent: int, width: int, activation: Callable[[Tensor, Tensor], Tensor], expert_format: ExpertFormat
    ) -> None:
        super().__init__()
        linear = MXFP4Linear if expert_format == "mxfp4" else Linear
        self.w1 = linear(latent, width)
        self.w2 = linear(width, latent)
        self.w3 = linear(latent, width)
        self.activation = activation

    def forward(self, z: Tensor) -> Tensor:
        """z [N, latent] -> [N, latent]."""
        return self.w2(self.activation(self.w1(z), self.w3(z)))


class Experts(nn.ModuleList):
    """All routed experts of a layer; a token passes through its chosen ones."""

    def forward(self, z: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """``Σ weight · expert(z)`` in float32: z [N, latent], indices and weights [N, k] -> [N, latent]."""
        return (wide(self.outputs(z, indices)) * weights[..., None]).sum(1)

    def outputs(self, z: Tensor, indices: Tensor) -> Tensor:
        """Every chosen expert's output, before they are combined: z [N, latent], indices [N, k] -> [N, k, latent]."""
        outputs = torch.empty(*indices.shape, z.shape[-1], dtype=z.dtype)
        for number, expert in enumerate(self):
            token, place = torch.where(indices == number)
            if len(token):
                outputs[token, place] = expert(z[token])
        return outputs


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
        self.experts = Experts(Expert(latent, width, activation, expert_format) for _ in range(text_config.num_experts))
        if text_config.shared_width:
            self.shared_experts = GatedMLP(hidden, text_config.shared_width, activation)

    def forward(self, x: Tensor, owner: nn.Module | None = None) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]; ``owner`` as for the router."""
        owner, text = owner or self, self.text_config
        tokens = x.flatten(0, 1)
        indices, weights = self.gate(tokens, owner)
        latent = self.routed_expert_down_proj(tokens) if text.routed_expert_hidden_size else tokens
        tap(owner, "moe.latent", latent)
        routed = tap(owner, "moe.routed", self.experts(latent, indices, weights).to(x.dtype))
        if text.has_latent_norm:
            routed = self.routed_expert_norm(routed)
        if text.routed_expert_hidden_size:
            routed = self.routed_expert_up_proj(routed)
        routed = routed.reshape(x.shape)
        return routed + self.shared_experts(x) if text.shared_width else routed
