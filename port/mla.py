"""Gated multi-head latent attention without position encoding (K3.md §5)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.cache import MLACache, new_mla_cache
from port.linear import Linear, wide
from port.norm import RMSNorm
from port.padding import zero_padding
from reference.config import TextConfig
from reference.taps import tap

LATENT_NORM_EPS = 1e-6
"""The epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``, whatever ``rms_norm_eps`` is (§3)."""


def allowed_keys(key_mask: mx.array, new_tokens: int) -> mx.array:
    """Which keys each of the last ``new_tokens`` positions may see: real ones, not later than itself (§5, §11).

    key_mask [B, L] bool, True at real keys -> [B, T, L] bool.
    """
    length = key_mask.shape[1]
    query_place = mx.arange(length - new_tokens, length)
    causal = mx.arange(length)[None, :] <= query_place[:, None]
    return causal[None] & key_mask[:, None, :]


def attention_weights(scores: mx.array, allowed: mx.array) -> mx.array:
    """Softmax over the allowed keys, float32; all 0 where no key is allowed. scores [B, H, T, L], allowed [B, T, L]."""
    allowed = allowed[:, None]
    weights = mx.softmax(mx.where(allowed, scores, -mx.inf), axis=-1)
    # A row of nothing but −inf has softmax NaN: chosen away, not multiplied.
    return mx.where(allowed, weights, 0.0)


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, allowed: mx.array) -> mx.array:
    """Softmax attention, each head with its own keys and values (§5).

    q [B, T, H, D_k], k [B, L, H, D_k], v [B, L, H, D_v], allowed [B, T, L] -> [B, T, H, D_v] in q's dtype.
    """
    query, key, value = (wide(x).swapaxes(1, 2) for x in (q, k, v))
    weights = attention_weights(scale * (query @ key.swapaxes(-1, -2)), allowed)
    return (weights @ value).swapaxes(1, 2).astype(q.dtype)


def absorbed_attention(
    query: mx.array,
    latent: mx.array,
    key_rope: mx.array,
    key_up: mx.array,
    value_up: mx.array,
    scale: float,
    allowed: mx.array,
) -> mx.array:
    """The same function with ``W_kvb`` folded into the query and the output, so that keys stay latents (§5).

    query [B, T, H, nope + rope], latent [B, L, c], key_rope [B, L, r], key_up [H, nope, c], value_up [H, v, c],
    allowed [B, T, L] -> [B, T, H, v] in the query's dtype; everything between is float32.
    """
    nope = key_up.shape[1]
    q = wide(query).swapaxes(1, 2)
    c, k_r = wide(latent)[:, None], wide(key_rope)[:, None]
    q_latent = q[..., :nope] @ wide(key_up)
    scores = q_latent @ c.swapaxes(-1, -2) + q[..., nope:] @ k_r.swapaxes(-1, -2)
    mixed = attention_weights(scale * scores, allowed) @ c
    return (mixed @ wide(value_up).swapaxes(-1, -2)).swapaxes(1, 2).astype(query.dtype)


class GatedMLA(nn.Module):
    """One MLA layer (§5). ``form`` is "plain" or "absorbed": two ways to compute the same."""

    def __init__(self, text_config: TextConfig) -> None:
        super().__init__()
        self.text_config = config = text_config
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        self.form = "plain"
        query_width, value_width = heads * config.query_head_dim, heads * config.v_head_dim
        if config.q_lora_rank:
            self.q_a_proj = Linear(hidden, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, query_width)
        else:
            self.q_proj = Linear(hidden, query_width)
        self.kv_a_proj_with_mqa = Linear(hidden, rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        if config.mla_use_output_gate:
            self.g_proj = Linear(hidden, value_width)
        self.o_proj = Linear(value_width, hidden)

    def query(self, x: mx.array) -> mx.array:
        """``W_qb RMSNorm(W_qa x)``, or ``W_q x``: [B, T, H, nope + rope]."""
        low_rank = self.text_config.q_lora_rank
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if low_rank else self.q_proj(x)
        return q.reshape(*x.shape[:2], self.text_config.num_attention_heads, -1)

    def latent(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """(the latent after its norm [B, T, c], the key part that all heads share [B, T, r])."""
        both = self.kv_a_proj_with_mqa(x)
        rank = self.text_config.kv_lora_rank
        return self.kv_a_layernorm(both[..., :rank]), both[..., rank:]

    def plain(self, query: mx.array, cache: MLACache, allowed: mx.array) -> mx.array:
        """Attention with every head's keys and values written out: [B, T, H, v]."""
        heads, nope = self.text_config.num_attention_heads, self.text_config.qk_nope_head_dim
        batch, length, _ = cache.latent.shape
        up = self.kv_b_proj(cache.latent).reshape(batch, length, heads, -1)
        shared = mx.broadcast_to(cache.key_rope[:, :, None], (batch, length, heads, cache.key_rope.shape[-1]))
        key = mx.concatenate([up[..., :nope], shared], axis=-1)
        return attention(query, key, up[..., nope:], self.scale, allowed)

    def absorbed(self, query: mx.array, cache: MLACache, allowed: mx.array) -> mx.array:
        """Attention over the latents themselves: [B, T, H, v]."""
        heads, nope = self.text_config.num_attention_heads, self.text_config.qk_nope_head_dim
        up = self.kv_b_proj.weight.reshape(heads, -1, self.text_config.kv_lora_rank)
        key_up, value_up = up[:, :nope], up[:, nope:]
        return absorbed_attention(query, cache.latent, cache.key_rope, key_up, value_up, self.scale, allowed)

    @property
    def scale(self) -> float:
        """Over both parts of a head, the unrotated one included (§5)."""
        return self.text_config.query_head_dim**-0.5

    def __call__(self, x: mx.array, token_mask: mx.array | None = None, cache: MLACache | None = None) -> mx.array:
        """x [B, T, hidden], token_mask [B, T] True at real tokens -> [B, T, hidden]; ``cache`` is updated in place.

        Padded tokens are never seen as keys, now or later (§11).
        """
        batch, tokens, _ = x.shape
        mask = mx.ones((batch, tokens), mx.bool_) if token_mask is None else token_mask
        # A weight of 0 does not silence a NaN, so padding must not reach the keys.
        x = zero_padding(x, mask)
        cache = new_mla_cache(self.text_config, batch, x.dtype) if cache is None else cache
        query = tap(self, "query", self.query(x))
        latent, key_rope = self.latent(x)
        tap(self, "latent", latent), tap(self, "key_rope", key_rope)
        cache.latent = mx.concatenate([cache.latent, latent], axis=1)
        cache.key_rope = mx.concatenate([cache.key_rope, key_rope], axis=1)
        cache.key_mask = mx.concatenate([cache.key_mask, mask], axis=1)
        form = self.absorbed if self.form == "absorbed" else self.plain
        attended = tap(self, "attention", form(query, cache, allowed_keys(cache.key_mask, tokens)))
        attended = attended.reshape(batch, tokens, -1)
        if self.text_config.mla_use_output_gate:
            attended = attended * mx.sigmoid(self.g_proj(x))
        return self.o_proj(attended)
