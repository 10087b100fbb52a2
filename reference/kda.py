"""Kimi Delta Attention (K3.md §4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reference.cache import KDACache
from reference.config import TextConfig
from reference.kda_chunk import chunked_kda
from reference.linear import Linear, unset, wide
from reference.norm import RMSNorm
from reference.padding import back_in_place, real_first, to_front, zero_padding
from reference.short_conv import ShortConv, next_conv_state
from reference.taps import listening, tap

L2_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """``x / sqrt(Σx² + 1e-6)`` over the last axis, in float32, cast back to x's dtype.

    The epsilon is inside the root, on the sum. x [..., D] -> [..., D].
    """
    x_wide = wide(x)
    return (x_wide * torch.rsqrt(x_wide.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


def scaled_query(q: Tensor) -> Tensor:
    """The query that reads the state: l2-normalized, then, in float32, times D^-1/2. q [..., D]."""
    return wide(l2_normalize(q)) * q.shape[-1] ** -0.5


def write_strength(logits: Tensor) -> Tensor:
    """``β = σ(W_b x)`` per head, in float32. logits [B, T, H]."""
    return torch.sigmoid(wide(logits))


def log_decay(decay_logit: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The logarithm of the factor by which each key channel of the state decays; below 0, in float32.

    decay_logit z [B, T, H, D]; A_log [≥ H], one value per head, then padding that is not used; dt_bias [H·D].
    Bounded (K3): ``lower_bound · σ(exp(A_log[h])·(z + dt_bias))``. Unbounded (``lower_bound`` None, Kimi-Linear):
    ``-exp(A_log[h]) · softplus(z + dt_bias)``. Neither is a clamp of the other.
    """
    heads, head_dim = decay_logit.shape[-2:]
    rate = torch.exp(A_log[:heads])[:, None]
    biased = wide(decay_logit) + dt_bias.reshape(heads, head_dim)
    if lower_bound is None:
        return -rate * F.softplus(biased)
    return lower_bound * torch.sigmoid(rate * biased)


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule, token by token: ``S ← diag(exp g) S``; ``S ← S + β k (v − kᵀS)``; ``o = Sᵀ q``.

    q, k [B, T, H, D_k] already normalized and q scaled, v [B, T, H, D_v], log_decay [B, T, H, D_k], beta [B, T, H],
    state [B, H, D_k, D_v], all in float32 -> o [B, T, H, D_v] and the state after the last token.
    """
    outputs = []
    for t in range(q.shape[1]):
        key = k[:, t, :, :, None]
        state = log_decay[:, t].exp()[..., None] * state
        error = v[:, t, :, None] - (key * state).sum(-2, keepdim=True)
        state = state + beta[:, t, :, None, None] * key * error
        outputs.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outputs, dim=1), state


def gated_output_norm(o: Tensor, weight: Tensor, gate_logit: Tensor, eps: float) -> Tensor:
    """``RMSNorm_D(o) · w · σ(gate)``, the norm over each head's own D, in float32.

    o, gate_logit [B, T, H, D], weight [D] -> [B, T, H, D] in gate_logit's dtype.
    """
    o = wide(o)
    normalized = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)
    return (normalized * weight * torch.sigmoid(wide(gate_logit))).to(gate_logit.dtype)


class KimiDeltaAttention(nn.Module):
    """One KDA layer's attention. ``form``, "chunked" or "recurrent", chooses between two forms of one function."""

    def __init__(self, text_config: TextConfig) -> None:
        super().__init__()
        linear, hidden = text_config.linear_attn_config, text_config.hidden_size
        width = linear.width
        self.text_config = text_config
        self.form, self.chunk_size = "chunked", 32
        self.q_proj = Linear(hidden, width)
        self.k_proj = Linear(hidden, width)
        self.v_proj = Linear(hidden, width)
        self.q_conv1d = ShortConv(width, linear.short_conv_kernel_size)
        self.k_conv1d = ShortConv(width, linear.short_conv_kernel_size)
        self.v_conv1d = ShortConv(width, linear.short_conv_kernel_size)
        self.f_a_proj = Linear(hidden, linear.head_dim)
        self.f_b_proj = Linear(linear.head_dim, width)
        self.b_proj = Linear(hidden, linear.num_heads)
        self.A_log = unset(linear.a_log_length)
        self.dt_bias = unset(width)
        if linear.use_full_rank_gate:
            self.g_proj = Linear(hidden, width)
        else:
            self.g_a_proj = Linear(hidden, linear.head_dim)
            self.g_b_proj = Linear(linear.head_dim, width)
        self.o_norm = RMSNorm(linear.head_dim, text_config.rms_norm_eps)
        self.o_proj = Linear(width, hidden)

    def forward(self, x: Tensor, token_mask: Tensor | None = None, cache: KDACache | None = None) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]; padded positions' outputs mean nothing.

        token_mask [B, T] bool, None where all tokens are real. ``cache`` is read and brought up to date.
        """
        if cache is None:
            cache = KDACache(self.text_config, x.shape[0], x.dtype)
        if token_mask is None:
            token_mask = torch.ones(x.shape[:2], dtype=torch.bool)
        order, lengths = real_first(token_mask)
        x = to_front(zero_padding(x, token_mask), order)
        q, k, v = self.convolutions(x, cache, lengths)
        decay = self.decay(x)
        beta = write_strength(self.b_proj(x))
        o = self.recurrence(q, k, v, decay, beta, cache, lengths)
        gated = gated_output_norm(o, self.o_norm.weight, self.heads(self.gate_logit(x)), self.o_norm.eps)
        if listening():
            for what, value in {"q": q, "k": k, "v": v, "log_decay": decay, "beta": beta, "core": o}.items():
                tap(self, what, back_in_place(value, order))
            tap(self, "state", cache.state)
        return back_in_place(self.o_proj(gated.flatten(2)), order)

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, H·D] -> [B, T, H, D]."""
        return x.unflatten(-1, (-1, self.text_config.linear_attn_config.head_dim))

    def convolutions(self, x: Tensor, cache: KDACache, lengths: Tensor) -> list[Tensor]:
        """q, k, v [B, T, H, D] after their short convolutions; x has each row's real tokens first."""
        results = []
        for part in "qkv":
            projected, state = getattr(self, f"{part}_proj")(x), getattr(cache, f"conv_{part}")
            results.append(self.heads(getattr(self, f"{part}_conv1d")(projected, state)))
            setattr(cache, f"conv_{part}", next_conv_state(projected, state, lengths))
        return results

    def decay(self, x: Tensor) -> Tensor:
        """The log-decay [B, T, H, D] from the low-rank decay logit ``W_fb W_fa x``."""
        z = self.heads(self.f_b_proj(self.f_a_proj(x)))
        return log_decay(z, self.A_log, self.dt_bias, self.text_config.linear_attn_config.gate_lower_bound)

    def gate_logit(self, x: Tensor) -> Tensor:
        """``W_g x`` or ``W_gb W_ga x``, [B, T, H·D]."""
        if self.text_config.linear_attn_config.use_full_rank_gate:
            return self.g_proj(x)
        return self.g_b_proj(self.g_a_proj(x))

    def recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: KDACache, lengths: Tensor
    ) -> Tensor:
        """The delta rule over each row's real tokens: o [B, T, H, D] in v's dtype.

        Steps beyond a row's length are made no-ops: with zero inputs alone, σ(0) would still write at half strength.
        """
        real = torch.arange(q.shape[1]) < lengths[:, None]
        q, k = scaled_query(q), zero_padding(wide(l2_normalize(k)), real)
        decay, beta = zero_padding(decay, real), zero_padding(beta, real)
        if self.form == "recurrent":
            o, cache.state = recurrent_kda(q, k, wide(v), decay, beta, cache.state)
        else:
            o, cache.state = chunked_kda(q, k, wide(v), decay, beta, cache.state, self.chunk_size)
        return o.to(v.dtype)
