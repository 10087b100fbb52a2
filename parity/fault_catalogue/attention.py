"""Faults of gated latent attention without position encoding, and of its cache (K3.md §5, §11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parity.fault_catalogue.patches import around, configured, given, instead, result, rounded_to_bfloat16
from parity.faults import Fault, library

THETA = 10000.0


def rotated(x: Any, package: str) -> Any:
    """A rotary embedding over axis 1 on the last axis of ``x`` [B, T, ..., r], halves paired."""
    lib, half = library(package), x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * THETA ** (-np.arange(half) / half)
    shape = (x.shape[1], *[1] * (len(x.shape) - 3), half)
    cos, sin = (_array(f(angles).reshape(shape), x, package) for f in (np.cos, np.sin))
    left, right = x[..., :half], x[..., half : 2 * half]
    return lib.concatenate([left * cos - right * sin, right * cos + left * sin, x[..., 2 * half :]], -1)


def _array(values: np.ndarray, like: Any, package: str) -> Any:
    lib = library(package)
    return lib.tensor(values).to(like.dtype) if package == "reference" else lib.array(values).astype(like.dtype)


def query_rotated(original: Callable, package: str, self, x) -> Any:
    query, nope = original(self, x), self.text_config.qk_nope_head_dim
    return library(package).concatenate([query[..., :nope], rotated(query[..., nope:], package)], -1)


def key_rotated(pair: Any, package: str) -> Any:
    latent, key_rope = pair
    return latent, rotated(key_rope, package)


def query_not_normed(package: str, self, x) -> Any:
    text = self.text_config
    q = self.q_b_proj(self.q_a_proj(x)) if text.q_lora_rank else self.q_proj(x)
    return q.reshape(*q.shape[:-1], text.num_attention_heads, text.query_head_dim)


def latent_not_normed(package: str, self, x) -> Any:
    both, rank = self.kv_a_proj_with_mqa(x), self.text_config.kv_lora_rank
    return both[..., :rank], both[..., rank:]


def scaled_by(dimension: Callable[[Any], int]) -> Callable:
    def attend(original: Callable, package: str, self, query, cache) -> Any:
        right, self.scale = self.scale, dimension(self.text_config) ** -0.5
        try:
            return original(self, query, cache)
        finally:
            self.scale = right

    return around(attend)


def one_key_ahead(original: Callable, package: str, key_mask, new_tokens) -> Any:
    allowed = original(key_mask, new_tokens)
    ahead = library(package).concatenate([allowed[..., :1], allowed[..., :-1]], -1)
    return allowed | ahead


def not_itself(original: Callable, package: str, key_mask, new_tokens) -> Any:
    allowed = original(key_mask, new_tokens)
    return library(package).concatenate([allowed[..., 1:], allowed[..., -1:] ^ allowed[..., -1:]], -1) & allowed


def newest_first(original: Callable, package: str, self, latent, key_rope, key_mask) -> None:
    join = lambda new, old: library(package).concatenate([new, old], 1)  # noqa: E731
    self.latent, self.key_rope = join(latent, self.latent), join(key_rope, self.key_rope)
    self.key_mask = join(key_mask, self.key_mask)


def only_new_keys(original: Callable, package: str, self, latent, key_rope, key_mask) -> None:
    original(self, latent, key_rope, key_mask)
    if latent.shape[1] == 1:
        old = self.latent.shape[1] - 1
        self.key_mask = library(package).concatenate([self.key_mask[:, :old] ^ self.key_mask[:, :old], key_mask], 1)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "F39",
        "mla.query",
        "queries are rotated by their positions",
        "wears off slowly with distance; one token is right",
        {"mla.GatedMLA.query": around(query_rotated)},
    ),
    Fault(
        "F39b",
        "mla.latent",
        "the shared key part is rotated by its position",
        "wears off slowly with distance; one token is right",
        {"mla.GatedMLA.latent": result(key_rotated)},
    ),
    Fault(
        "F41",
        "mla.query",
        "the low-rank query has no norm in the middle",
        "scores of another size",
        {"mla.GatedMLA.query": instead(query_not_normed)},
    ),
    Fault(
        "F41b",
        "mla.latent",
        "the latent is cached as it comes, without its norm",
        "keys and values of another size",
        {"mla.GatedMLA.latent": instead(latent_not_normed)},
    ),
    Fault(
        "F41c",
        "mla.output",
        "full attention has no output gate",
        "outputs about twice as large",
        {"mla.GatedMLA.forward": configured(mla_use_output_gate=False)},
    ),
    Fault(
        "F42",
        "mla.attention",
        "scores are scaled by the part of the key without position",
        "attention sharper by a fifth",
        {"mla.GatedMLA.attend": scaled_by(lambda text: text.qk_nope_head_dim)},
    ),
    Fault(
        "F42b",
        "mla.attention",
        "scores are scaled by the size of the values",
        "attention sharper",
        {"mla.GatedMLA.attend": scaled_by(lambda text: text.v_head_dim)},
        case="wide-values",
    ),
    Fault(
        "F42c",
        "mla.attention",
        "a token may see the next one",
        "prefill too good, decoding not",
        {"mla.allowed_keys": around(one_key_ahead)},
    ),
    Fault(
        "F42d",
        "mla.attention",
        "a token does not see itself",
        "the first token sees nothing",
        {"mla.allowed_keys": around(not_itself)},
    ),
    Fault(
        "F42e",
        "mla.attention",
        "padding is a key like any other",
        "wrong only in padded batches",
        {"mla.allowed_keys": given(key_mask=lambda mask: mask | True)},
    ),
    Fault(
        "F42f",
        "mla.attention",
        "the softmax may run in bfloat16",
        "small",
        {"mla.attention_weights": result(rounded_to_bfloat16)},
        hidden="the weights are rounded to bfloat16 after the softmax anyway",
    ),
    Fault(
        "F42g",
        "mla.attention",
        "the cache may be kept in any order",
        "prefill right; the causal mask fits no key while decoding",
        {"cache.MLACache.append": around(newest_first)},
    ),
    Fault(
        "F42h",
        "mla.attention",
        "a single token attends to what came with it",
        "decoding forgets the prompt",
        {"cache.MLACache.append": around(only_new_keys)},
    ),
    Fault(
        "F43",
        "mla.latent",
        "q_a and kv_a norms use the model's epsilon",
        "scale off by up to 35 % where latents are small; invisible at ordinary size",
        numbers={"mla.LATENT_NORM_EPS": 1e-5},
    ),
)
