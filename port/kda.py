"""Kimi Delta Attention (K3.md §4)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.cache import KDACache, new_kda_cache
from port.kda_chunk import chunked_kda
from port.linear import Linear, unset, wide
from port.padding import back_in_place, real_first, to_front, zero_padding
from port.short_conv import ShortConv, next_conv_state
from reference.config import TextConfig
from reference.taps import tap

L2_EPS = 1e-6
EVALUATE_EVERY = 64
"""Steps of the recurrence after which the lazy graph is computed, so that it does not grow with T."""
SHORT = 4
"""Up to so many new tokens the chunked form has nothing to gain and the recurrence is run instead."""


def l2_normalize(x: mx.array) -> mx.array:
    """``x / sqrt(sum(x²) + 1e-6)`` over the last axis, float32: the epsilon is inside the root, on the sum (§4.2)."""
    x = wide(x)
    return x * mx.rsqrt(mx.sum(mx.square(x), axis=-1, keepdims=True) + L2_EPS)


def scaled_query(q: mx.array) -> mx.array:
    """The normalized query times ``D^-1/2``; q [..., D] -> [..., D] float32 (§4.2). Nothing scales it again."""
    return l2_normalize(q) * q.shape[-1] ** -0.5


def write_strength(logits: mx.array) -> mx.array:
    """``β = σ(W_b x)`` per head, float32, in (0, 1); logits [B, T, H] (§4.3)."""
    return mx.sigmoid(wide(logits))


def log_decay(decay_logit: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None) -> mx.array:
    """The logarithm of the decay factor, float32, below 0 (§4.4).

    decay_logit z [B, T, H, D]; A_log [>= H], one value **per head** and then padding that is never read; dt_bias [H·D].
    With ``lower_bound``: ``lower_bound · σ(exp(A_log[h]) · (z + dt_bias))``; without: ``-exp(A_log[h]) · softplus(…)``.
    """
    heads, head_dim = decay_logit.shape[-2:]
    rate = mx.exp(wide(A_log)[:heads, None])
    biased = wide(decay_logit) + wide(dt_bias).reshape(heads, head_dim)
    if lower_bound is None:
        return -rate * mx.logaddexp(biased, mx.zeros_like(biased))
    return lower_bound * mx.sigmoid(rate * biased)


def recurrent_kda(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The delta rule with decay, token by token, in float32 (§4.5).

    Per head and token: ``S ← diag(exp g) S``; ``S ← S + β k (v − kᵀS)``; ``o = Sᵀ q``.
    q, k [B, T, H, D_k], k normalized and q normalized and scaled; v [B, T, H, D_v]; log_decay [B, T, H, D_k];
    beta [B, T, H]; state [B, H, D_k, D_v]. Returns (o [B, T, H, D_v], the state after the last token).
    """
    q, k, v, beta, state = wide(q), wide(k), wide(v), wide(beta), wide(state)
    decay = mx.exp(wide(log_decay))
    outputs = []
    for t in range(q.shape[1]):
        key = k[:, t, :, :, None]
        state = decay[:, t, :, :, None] * state
        read = mx.sum(key * state, axis=-2)
        written = beta[:, t, :, None] * (v[:, t] - read)
        state = state + key * written[:, :, None, :]
        outputs.append(mx.sum(q[:, t, :, :, None] * state, axis=-2))
        if (t + 1) % EVALUATE_EVERY == 0:
            mx.eval(state, outputs[-EVALUATE_EVERY:])
    return mx.stack(outputs, axis=1), state


def gated_output_norm(o: mx.array, weight: mx.array, gate_logit: mx.array, eps: float) -> mx.array:
    """``RMSNorm_D(o) · w · σ(gate)`` in float32, cast to the gate's dtype (§4.6).

    o [B, T, H, D], weight [D], gate_logit [B, T, H, D]; the norm is over each head's D.
    """
    o = wide(o)
    normalized = o * mx.rsqrt(mx.mean(mx.square(o), axis=-1, keepdims=True) + eps)
    return (normalized * wide(weight) * mx.sigmoid(wide(gate_logit))).astype(gate_logit.dtype)


class OutputNorm(nn.Module):
    """``gated_output_norm`` with its ``weight`` [dim], stored in float32 (§2)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = unset(dim), eps

    def __call__(self, o: mx.array, gate_logit: mx.array) -> mx.array:
        return gated_output_norm(o, self.weight, gate_logit, self.eps)


class KimiDeltaAttention(nn.Module):
    """One KDA layer (§4). ``form`` is "chunked" or "recurrent": two ways to compute the same."""

    def __init__(self, text_config: TextConfig) -> None:
        super().__init__()
        self.linear = linear = text_config.linear_attn_config
        hidden, head_dim, width = text_config.hidden_size, linear.head_dim, linear.width
        self.form, self.chunk_size = "chunked", 64
        self.q_proj, self.k_proj, self.v_proj = Linear(hidden, width), Linear(hidden, width), Linear(hidden, width)
        kernel = linear.short_conv_kernel_size
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(width, kernel) for _ in range(3))
        self.f_a_proj, self.f_b_proj = Linear(hidden, head_dim), Linear(head_dim, width)
        self.b_proj = Linear(hidden, linear.num_heads)
        self.A_log, self.dt_bias = unset(linear.a_log_length), unset(width)
        if linear.use_full_rank_gate:
            self.g_proj = Linear(hidden, width)
        else:
            self.g_a_proj, self.g_b_proj = Linear(hidden, head_dim), Linear(head_dim, width)
        self.o_norm = OutputNorm(head_dim, text_config.rms_norm_eps)
        self.o_proj = Linear(width, hidden)

    def gate_logit(self, x: mx.array) -> mx.array:
        """``W_g x``, or ``W_gb W_ga x`` without a full-rank gate: [B, T, H·D] (§4.6)."""
        return self.g_proj(x) if self.linear.use_full_rank_gate else self.g_b_proj(self.g_a_proj(x))

    def recurrence(self, *operands: mx.array) -> tuple[mx.array, mx.array]:
        """(o, state) by the chosen form; the operands of ``recurrent_kda``."""
        if self.form == "recurrent" or operands[0].shape[1] <= SHORT:
            return recurrent_kda(*operands)
        return chunked_kda(*operands, chunk_size=self.chunk_size)

    def __call__(self, x: mx.array, token_mask: mx.array | None = None, cache: KDACache | None = None) -> mx.array:
        """x [B, T, hidden], token_mask [B, T] True at real tokens -> [B, T, hidden]; ``cache`` is updated in place.

        Padding enters neither the convolutions nor the state, wherever it stands (§11).
        """
        batch, tokens, _ = x.shape
        mask = mx.ones((batch, tokens), mx.bool_) if token_mask is None else token_mask
        order, lengths = real_first(mask)
        x = to_front(zero_padding(x, mask), order)
        real = mx.arange(tokens) < lengths[:, None]
        cache = new_kda_cache(self.linear, batch, x.dtype) if cache is None else cache

        def show(what: str, value: mx.array) -> mx.array:
            tap(self, what, back_in_place(value, order))
            return value

        def per_head(value: mx.array) -> mx.array:
            return value.reshape(batch, tokens, self.linear.num_heads, self.linear.head_dim)

        convolved = []
        for part in "qkv":
            before, state = getattr(self, f"{part}_proj")(x), getattr(cache, f"conv_{part}")
            convolved.append(show(part, per_head(getattr(self, f"{part}_conv1d")(before, state))))
            setattr(cache, f"conv_{part}", next_conv_state(before, state, lengths))
        q, k, v = convolved
        beta = show("beta", write_strength(self.b_proj(x)))
        decay_logit = per_head(self.f_b_proj(self.f_a_proj(x)))
        g = show("log_decay", log_decay(decay_logit, self.A_log, self.dt_bias, self.linear.gate_lower_bound))
        # A padded step must leave the state alone: no key, no write, no decay.
        k, beta, g = (zero_padding(value, real) for value in (l2_normalize(k), beta, g))
        o, cache.state = self.recurrence(scaled_query(q), k, v, g, beta, cache.state)
        show("core", o)
        tap(self, "state", cache.state)
        gated = self.o_norm(o, per_head(self.gate_logit(x)))
        return back_in_place(self.o_proj(gated.reshape(batch, tokens, -1)), order)
