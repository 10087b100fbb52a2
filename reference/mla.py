"""Gated multi-head latent attention without position encoding (K3.md §5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reference.cache import MLACache
from reference.config import TextConfig
from reference.linear import Linear, wide
from reference.norm import RMSNorm
from reference.padding import zero_padding
from reference.taps import tap

LATENT_NORM_EPS = 1e-6


def allowed_keys(key_mask: Tensor, new_tokens: int) -> Tensor:
    """Which keys each new token may attend to: itself and earlier ones, never padding.

    key_mask [B, L] bool over cached and new keys -> [B, T, L] bool for the last T = ``new_tokens`` positions.
    """
    length = key_mask.shape[1]
    position = torch.arange(length - new_tokens, length)[:, None]
    causal = torch.arange(length) <= position
    return causal & key_mask[:, None]


def attention_weights(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys, in float32; a query that has none gets weights of 0.

    scores [B, H, T, L], allowed [B, T, L] -> [B, H, T, L].
    """
    allowed = allowed[:, None]
    weights = torch.softmax(wide(scores).masked_fill(~allowed, -torch.inf), dim=-1)
    return torch.where(allowed, weights, torch.zeros((), dtype=weights.dtype))


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor) -> Tensor:
    """q [B, T, H, D], k [B, L, H, D], v [B, L, H, D_v], allowed [B, T, L] -> [B, T, H, D_v]."""
    scores = torch.einsum("bthd,blhd->bhtl", q, k) * scale
    weights = attention_weights(scores, allowed).to(v.dtype)
    return torch.einsum("bhtl,blhv->bthv", weights, v)


def absorbed_attention(
    query: Tensor, latent: Tensor, key_rope: Tensor, key_up: Tensor, value_up: Tensor, scale: float, allowed: Tensor
) -> Tensor:
    """The same function with ``W_kvb`` folded into the query and the output, so that keys and values stay latent.

    query [B, T, H, nope + rope], latent [B, L, c], key_rope [B, L, rope], key_up [H, nope, c], value_up [H, v, c],
    allowed [B, T, L] -> [B, T, H, v].
    """
    query_nope, query_rope = query.split([key_up.shape[1], key_rope.shape[-1]], dim=-1)
    latent_query = torch.einsum("bthn,hnc->bthc", query_nope, key_up)
    scores = torch.einsum("bthc,blc->bhtl", latent_query, latent)
    scores = (scores + torch.einsum("bthr,blr->bhtl", query_rope, key_rope)) * scale
    weights = attention_weights(scores, allowed).to(latent.dtype)
    mean_latent = torch.einsum("bhtl,blc->bthc", weights, latent)
    return torch.einsum("bthc,hvc->bthv", mean_latent, value_up)


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

    def forward(self, x: Tensor, token_mask: Tensor | None = None, cache: MLACache | None = None) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]; padded positions' outputs mean nothing.

        token_mask [B, T] bool, None where all tokens are real. ``cache`` is read and brought up to date.
        """
        if cache is None:
            cache = MLACache(self.text_config, x.shape[0], x.dtype)
        if token_mask is None:
            token_mask = torch.ones(x.shape[:2], dtype=torch.bool)
        x = zero_padding(x, token_mask)
        query = tap(self, "query", self.query(x))
        latent, key_rope = self.latent(x)
        cache.append(tap(self, "latent", latent), tap(self, "key_rope", key_rope), token_mask)
        attended = tap(self, "attention", self.attend(query, cache)).flatten(2)
        if self.text_config.mla_use_output_gate:
            attended = attended * torch.sigmoid(self.g_proj(x))
        return self.o_proj(attended)

    def query(self, x: Tensor) -> Tensor:
        """``W_qb RMSNorm(W_qa x)`` or ``W_q x``, [B, T, H, nope + rope]; no rotation is applied to either part."""
        low_rank = self.text_config.q_lora_rank
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if low_rank else self.q_proj(x)
        return q.unflatten(-1, (self.text_config.num_attention_heads, self.text_config.query_head_dim))

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache keeps of a token: the latent after its norm [B, T, c], the shared key part [B, T, rope]."""
        rank, rope = self.text_config.kv_lora_rank, self.text_config.qk_rope_head_dim
        latent, key_rope = self.kv_a_proj_with_mqa(x).split([rank, rope], dim=-1)
        return self.kv_a_layernorm(latent), key_rope

    def attend(self, query: Tensor, cache: MLACache) -> Tensor:
        """query [B, T, H, nope + rope] over everything in the cache -> [B, T, H, v]."""
        heads, nope = self.text_config.num_attention_heads, self.text_config.qk_nope_head_dim
        value = self.text_config.v_head_dim
        allowed = allowed_keys(cache.key_mask, query.shape[1])
        if self.form == "absorbed":
            key_up, value_up = self.kv_b_proj.weight.unflatten(0, (heads, nope + value)).split([nope, value], dim=1)
            return absorbed_attention(query, cache.latent, cache.key_rope, key_up, value_up, self.scale, allowed)
        key_value = self.kv_b_proj(cache.latent).unflatten(-1, (heads, nope + value))
        key_nope, v = key_value.split([nope, value], dim=-1)
        key_rope = cache.key_rope[:, :, None].expand(-1, -1, heads, -1)
        return attention(query, torch.cat([key_nope, key_rope], dim=-1), v, self.scale, allowed)
