"""What decoding carries from one call to the next (K3.md §3, §4, §5, §11)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import mlx.core as mx

from reference.config import TextConfig

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


class KDACache:
    """One KDA layer: the last K-1 inputs of three convolutions [B, K-1, C] in the model dtype, and the state
    [B, H, D_k, D_v] in float32. Its size does not grow with T."""

    def __init__(self, text_config: TextConfig, batch: int, dtype: mx.Dtype) -> None:
        linear = text_config.linear_attn_config
        window = (batch, linear.short_conv_kernel_size - 1, linear.width)
        self.conv_q = mx.zeros(window, dtype)
        self.conv_k = mx.zeros(window, dtype)
        self.conv_v = mx.zeros(window, dtype)
        self.state = mx.zeros((batch, linear.num_heads, linear.head_dim, linear.head_dim))


class MLACache:
    """One MLA layer: per token the latent after its norm [B, T, rank] and the shared key part [B, T, rope]; and which
    tokens are real, key_mask [B, T] bool."""

    def __init__(self, text_config: TextConfig, batch: int, dtype: mx.Dtype) -> None:
        self.latent = mx.zeros((batch, 0, text_config.kv_lora_rank), dtype)
        self.key_rope = mx.zeros((batch, 0, text_config.qk_rope_head_dim), dtype)
        self.key_mask = mx.zeros((batch, 0), mx.bool_)

    def append(self, latent: mx.array, key_rope: mx.array, key_mask: mx.array) -> None:
        """Take the new tokens' latent [B, T, rank], key part [B, T, rope] and mask [B, T]; all are copied."""
        self.latent = mx.concatenate([self.latent, latent], axis=1)
        self.key_rope = mx.concatenate([self.key_rope, key_rope], axis=1)
        self.key_mask = mx.concatenate([self.key_mask, key_mask], axis=1)


CacheEntry = KDACache | MLACache


class Cache:
    """One entry per layer in ``layers``; ``length`` counts the tokens fed so far, padding included."""

    def __init__(self, layers: list[CacheEntry]) -> None:
        self.layers = layers
        self.length = 0

    def arrays(self) -> Iterator[mx.array]:
        for entry in self.layers:
            yield from vars(entry).values()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays())

    def snapshot(self) -> Cache:
        """A deep copy that later steps do not touch."""
        return copy.deepcopy(self)

    def restore(self, snapshot: Cache) -> None:
        """Become a deep copy of ``snapshot``, which may be restored again later."""
        self.layers, self.length = copy.deepcopy(snapshot.layers), snapshot.length


def new_cache(text_config: TextConfig, batch: int, dtype: str) -> Cache:
    """The cache before the first token; ``dtype`` is the model's: "float32" or "bfloat16"."""
    entries: list[CacheEntry] = []
    for layer in range(text_config.num_hidden_layers):
        kind = KDACache if text_config.is_kda(layer) else MLACache
        entries.append(kind(text_config, batch, DTYPES[dtype]))
    return Cache(entries)
