"""Kimi Delta Attention (K3.md §4)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.cache import KDACache
from port.kda_chunk import chunked_kda
from port.linear import Linear, unset, wide
from port.norm import RMSNorm
from port.padding import back_in_place, real_first, to_front, zero_padding
from port.short_conv import ShortConv, next_conv_state
from reference.config import TextConfig
from reference.taps import listening, tap

L2_EPS = 1e-6
EVALUATE_EVERY = 64
"""Steps of the recurrence after which the lazy graph is computed, so that it does not grow with T."""
SHORT = 4
"""Up to so many new tokens the chunked form has nothing to gain, and the recurrence runs instead."""


def l2_normalize(x: mx.array) -> mx.array:
    """``x / sqrt(Σx² + 1e-6)`` over the last axis, in float32, cast back to x's dtype.

    The epsilon is inside the root, on the sum. x [..., D] -> [..., D].
    """
    x_wide = wide(x)
    return (x_wide * mx.rsqrt(mx.sum(mx.square(x_wide), axis=-1, keepdims=True) + L2_EPS)).astype(x.dtype)


def scaled_query(q: mx.array) -> mx.array:
    """The query that reads the state: l2-normalized, then, in float32, times D^-1/2. q [..., D]."""
    return wide(l2_normalize(q)) * q.shape[-1] ** -0.5


def write_strength(logits: mx.array) -> mx.array:
    """``β = σ(W_b x)`` per head, in float32. logits [B, T, H]."""
    return mx.sigmoid(wide(logits))


def log_decay(decay_logit: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None) -> mx.array:
    """The logarithm of the factor by which each key channel of the state decays; below 0, in float32.

    decay_logit z [B, T, H, D]; A_log [≥ H], one value per head, then padding that is not used; dt_bias [H·D].
    Bounded (K3): ``lower_bound · σ(exp(A_log[h])·(z + dt_bias))``. Unbounded (``lower_bound`` None, Kimi-Linear):
    ``-exp(A_log[h]) · softplus(z + dt_bias)``. Neither is a clamp of the other.
    """
    heads, head_dim = decay_logit.shape[-2:]
    rate = mx.exp(wide(A_log)[:heads])[:, None]
    biased = wide(decay_logit) + wide(dt_bias).reshape(heads, head_dim)
    if lower_bound is None:
        return -rate * mx.logaddexp(biased, mx.zeros_like(biased))
    return lower_bound * mx.sigmoid(rate * biased)


def recurrent_kda(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The delta rule, token by token: ``S ← diag(exp g) S``; ``S ← S + β k (v − kᵀS)``; ``o = Sᵀ q``.

    q, k [B, T, H, D_k] already normalized and q scaled, v [B, T, H, D_v], log_decay [B, T, H, D_k], beta [B, T, H],
    state [B, H, D_k, D_v] -> o [B, T, H, D_v] and the state after the last token, all in float32.
    """
    q, k, v, log_decay, beta, state = (wide(x) for x in (q, k, v, log_decay, beta, state))
    outputs = []
    for t in range(q.shape[1]):
        key = k[:, t, :, :, None]
        state = mx.exp(log_decay[:, t])[..., None] * state
        error = v[:, t, :, None] - mx.sum(key * state, axis=-2, keepdims=True)
        state = state + beta[:, t, :, None, None] * key * error
        outputs.append(mx.sum(q[:, t, :, :, None] * state, axis=-2))
        if len(outputs) % EVALUATE_EVERY == 0:
            mx.eval(state, outputs[-EVALUATE_EVERY:])
    return mx.stack(outputs, axis=1), state


def gated_output_norm(o: mx.array, weight: mx.array, gate_logit: mx.array, eps: float) -> mx.array:
    """``RMSNorm_D(o) · w · σ(gate)``, the norm over each head's own D, in float32.

    o, gate_logit [B, T, H, D], weight [D] -> [B, T, H, D] in gate_logit's dtype.
    """
    o = wide(o)
    normalized = o * mx.rsqrt(mx.mean(mx.square(o), axis=-1, keepdims=True) + eps)
    return (normalized * wide(weight) * mx.sigmoid(wide(gate_logit))).astype(gate_logit.dtype)


class KimiDeltaAttention(nn.Module):
    """One KDA layer's attention. ``form``, "chunked" or "recurrent", chooses between two forms of one function."""

    def __init__(self, text_config: TextConfig) -> None:
        super().__init__()
        linear, hidden = text_config.linear_attn_config, text_config.hidden_size
        width = linear.width
        self.text_config = text_config
        self.form, self.chunk_size = "chunked", 64
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

    def __call__(self, x: mx.array, token_mask: mx.array | None = None, cache: KDACache | None = None) -> mx.array:
        """x [B, T, hidden] -> [B, T, hidden]; padded positions' outputs mean nothing.

        token_mask [B, T] bool, None where all tokens are real. ``cache`` is read and brought up to date.
        """
        if cache is None:
            cache = KDACache(self.text_config, x.shape[0], x.dtype)
        if token_mask is None:
            token_mask = mx.ones(x.shape[:2], mx.bool_)
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

    def heads(self, x: mx.array) -> mx.array:
        """[B, T, H·D] -> [B, T, H, D]."""
        return x.reshape(*x.shape[:-1], -1, self.text_config.linear_attn_config.head_dim)

    def convolutions(self, x: mx.array, cache: KDACache, lengths: mx.array) -> list[mx.array]:
        """q, k, v [B, T, H, D] after their short convolutions; x has each row's real tokens first."""
        results = []
        for part in "qkv":
            projected, state = getattr(self, f"{part}_proj")(x), getattr(cache, f"conv_{part}")
            results.append(self.heads(getattr(self, f"{part}_conv1d")(projected, state)))
            setattr(cache, f"conv_{part}", next_conv_state(projected, state, lengths))
        return results

    def decay(self, x: mx.array) -> mx.array:
        """The log-decay [B, T, H, D] from the low-rank decay logit ``W_fb W_fa x``."""
        z = self.heads(self.f_b_proj(self.f_a_proj(x)))
        return log_decay(z, self.A_log, self.dt_bias, self.text_config.linear_attn_config.gate_lower_bound)

    def gate_logit(self, x: mx.array) -> mx.array:
        """``W_g x`` or ``W_gb W_ga x``, [B, T, H·D]."""
        if self.text_config.linear_attn_config.use_full_rank_gate:
            return self.g_proj(x)
        return self.g_b_proj(self.g_a_proj(x))

    def recurrence(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        decay: mx.array,
        beta: mx.array,
        cache: KDACache,
        lengths: mx.array,
    ) -> mx.array:
        """The delta rule over each row's real tokens: o [B, T, H, D] in v's dtype.

        Steps beyond a row's length are made no-ops: with zero inputs alone, σ(0) would still write at half strength.
        """
        real = mx.arange(q.shape[1]) < lengths[:, None]
        q, k = scaled_query(q), zero_padding(l2_normalize(k), real)
        decay, beta = zero_padding(decay, real), zero_padding(beta, real)
        if self.form == "recurrent" or q.shape[1] <= SHORT:
            o, cache.state = recurrent_kda(q, k, v, decay, beta, cache.state)
        else:
            o, cache.state = chunked_kda(q, k, v, decay, beta, cache.state, self.chunk_size)
        return o.astype(v.dtype)
