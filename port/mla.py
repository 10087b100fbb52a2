"""Gated multi-head latent attention without position encoding (K3.md §5)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.cache import MLACache
from port.linear import Linear, wide
from port.norm import RMSNorm
from port.padding import zero_padding
from reference.config import TextConfig
from reference.taps import tap

LATENT_NORM_EPS = 1e-6


def allowed_keys(key_mask: mx.array, new_tokens: int) -> mx.array:
    """Which keys each new token may attend to: itself and earlier ones, never padding.

    key_mask [B, L] bool over cached and new keys -> [B, T, L] bool for the last T = ``new_tokens`` positions.
    """
    length = key_mask.shape[1]
    position = mx.arange(length - new_tokens, length)[:, None]
    causal = mx.arange(length) <= position
    return causal & key_mask[:, None]


def attention_weights(scores: mx.array, allowed: mx.array) -> mx.array:
    """Softmax over the allowed keys, in float32; a query that has none gets weights of 0.

    scores [B, H, T, L], allowed [B, T, L] -> [B, H, T, L].
    """
    allowed = allowed[:, None]
    weights = mx.softmax(mx.where(allowed, wide(scores), -mx.inf), axis=-1)
    # A row of nothing but −inf has softmax NaN: chosen away, not multiplied.
    return mx.where(allowed, weights, 0.0)


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, allowed: mx.array) -> mx.array:
    """q [B, T, H, D], k [B, L, H, D], v [B, L, H, D_v], allowed [B, T, L] -> [B, T, H, D_v]."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2)
    # A Python number times a bfloat16 array is itself rounded to bfloat16: the scale would be off by up to 0.4 %.
    scores = (wide(scores) * scale).astype(scores.dtype)
    weights = attention_weights(scores, allowed).astype(v.dtype)
    return (weights @ v).swapaxes(1, 2)


def absorbed_attention(
    query: mx.array,
    latent: mx.array,
    key_rope: mx.array,
    key_up: mx.array,
    value_up: mx.array,
    scale: float,
    allowed: mx.array,
) -> mx.array:
    """The same function with ``W_kvb`` folded into the query and the output, so that keys and values stay latent.

    query [B, T, H, nope + rope], latent [B, L, c], key_rope [B, L, rope], key_up [H, nope, c], value_up [H, v, c],
    allowed [B, T, L] -> [B, T, H, v] in the query's dtype; all between is float32.
    """
    query_nope, query_rope = mx.split(wide(query).swapaxes(1, 2), [key_up.shape[1]], axis=-1)
    latent, key_rope = wide(latent)[:, None], wide(key_rope)[:, None]
    latent_query = query_nope @ wide(key_up)
    scores = latent_query @ latent.swapaxes(-1, -2) + query_rope @ key_rope.swapaxes(-1, -2)
    mean_latent = attention_weights(scores * scale, allowed) @ latent
    return (mean_latent @ wide(value_up).swapaxes(-1, -2)).swapaxes(1, 2).astype(query.dtype)


class GatedMLA(nn.Module):
    """One full-attention layer's attention. ``form``, "plain" or "absorbed": two forms of one function."""

    def __init__(self, text_config: TextConfig) -> None:
        super().__init__()
        hidden, heads = text_config.hidden_size, text_config.num_attention_heads
        nope, rope, value = text_config.qk_nope_head_dim, text_config.qk_rope_head_dim, text_config.v_head_dim
        rank, query_rank = text_config.kv_lora_rank, text_config.q_lora_rank
        self.text_config = text_config
        self.form = "plain"
        self.scale = text_config.query_head_dim**-0.5
        if query_rank:
            self.q_a_proj = Linear(hidden, query_rank)
            self.q_a_layernorm = RMSNorm(query_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(query_rank, heads * (nope + rope))
        else:
            self.q_proj = Linear(hidden, heads * (nope + rope))
        self.kv_a_proj_with_mqa = Linear(hidden, rank + rope)
        self.kv_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(rank, heads * (nope + value))
        if text_config.mla_use_output_gate:
            self.g_proj = Linear(hidden, heads * value)
        self.o_proj = Linear(heads * value, hidden)

    def __call__(self, x: mx.array, token_mask: mx.array | None = None, cache: MLACache | None = None) -> mx.array:
        """x [B, T, hidden] -> [B, T, hidden]; padded positions' outputs mean nothing.

        token_mask [B, T] bool, None where all tokens are real. ``cache`` is read and brought up to date.
        """
        if cache is None:
            cache = MLACache(self.text_config, x.shape[0], x.dtype)
        if token_mask is None:
            token_mask = mx.ones(x.shape[:2], mx.bool_)
        # A weight of 0 does not silence a NaN, so padding must not reach the keys.
        x = zero_padding(x, token_mask)
        query = tap(self, "query", self.query(x))
        latent, key_rope = self.latent(x)
        cache.append(tap(self, "latent", latent), tap(self, "key_rope", key_rope), token_mask)
        attended = tap(self, "attention", self.attend(query, cache)).flatten(2)
        if self.text_config.mla_use_output_gate:
            # Not mx.sigmoid of a bfloat16 array: on the CPU one value in seven comes out wrongly rounded.
            attended = attended * mx.sigmoid(wide(self.g_proj(x))).astype(x.dtype)
        return self.o_proj(attended)

    def query(self, x: mx.array) -> mx.array:
        """``W_qb RMSNorm(W_qa x)`` or ``W_q x``, [B, T, H, nope + rope]; no rotation is applied to either part."""
        low_rank = self.text_config.q_lora_rank
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if low_rank else self.q_proj(x)
        return q.reshape(*x.shape[:-1], self.text_config.num_attention_heads, self.text_config.query_head_dim)

    def latent(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """What the cache keeps of a token: the latent after its norm [B, T, c], the shared key part [B, T, rope]."""
        latent, key_rope = mx.split(self.kv_a_proj_with_mqa(x), [self.text_config.kv_lora_rank], axis=-1)
        return self.kv_a_layernorm(latent), key_rope

    def attend(self, query: mx.array, cache: MLACache) -> mx.array:
        """query [B, T, H, nope + rope] over everything in the cache -> [B, T, H, v]."""
        heads, nope = self.text_config.num_attention_heads, self.text_config.qk_nope_head_dim
        allowed = allowed_keys(cache.key_mask, query.shape[1])
        if self.form == "absorbed":
            up = self.kv_b_proj.weight.reshape(heads, -1, self.text_config.kv_lora_rank)
            key_up, value_up = mx.split(up, [nope], axis=1)
            return absorbed_attention(query, cache.latent, cache.key_rope, key_up, value_up, self.scale, allowed)
        key_value = self.kv_b_proj(cache.latent).reshape(*cache.latent.shape[:-1], heads, -1)
        key_nope, v = mx.split(key_value, [nope], axis=-1)
        key_rope = cache.key_rope[:, :, None]
        key_rope = mx.broadcast_to(key_rope, (*key_nope.shape[:-1], key_rope.shape[-1]))
        return attention(query, mx.concatenate([key_nope, key_rope], axis=-1), v, self.scale, allowed)
