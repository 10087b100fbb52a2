"""What decoding carries from one call to the next (K3.md §3, §4, §5, §11)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from reference.config import TextConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class KDACache:
    """One KDA layer: the last K-1 inputs of three convolutions [B, K-1, C] in the model dtype, and the state
    [B, H, D_k, D_v] in float32. Its size does not grow with T."""

    def __init__(self, text_config: TextConfig, batch: int, dtype: torch.dtype) -> None:
        linear = text_config.linear_attn_config
        window = (batch, linear.short_conv_kernel_size - 1, linear.width)
        self.conv_q = torch.zeros(window, dtype=dtype)
        self.conv_k = torch.zeros(window, dtype=dtype)
        self.conv_v = torch.zeros(window, dtype=dtype)
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.state = torch.zeros(batch, linear.num_heads, linear.head_dim, linear.head_dim, dtype=state_dtype)


class MLACache:
    """One MLA layer: per token the latent after its norm [B, T, rank] and the shared key part [B, T, rope]; and which
    tokens are real, key_mask [B, T] bool."""

    def __init__(self, text_config: TextConfig, batch: int, dtype: torch.dtype) -> None:
        self.latent = torch.zeros(batch, 0, text_config.kv_lora_rank, dtype=dtype)
        self.key_rope = torch.zeros(batch, 0, text_config.qk_rope_head_dim, dtype=dtype)
        self.key_mask = torch.zeros(batch, 0, dtype=torch.bool)

    def append(self, latent: Tensor, key_rope: Tensor, key_mask: Tensor) -> None:
        """Take the new tokens' latent [B, T, rank], key part [B, T, rope] and mask [B, T]; all are copied."""
        self.latent = torch.cat([self.latent, latent], dim=1)
        self.key_rope = torch.cat([self.key_rope, key_rope], dim=1)
        self.key_mask = torch.cat([self.key_mask, key_mask], dim=1)


CacheEntry = KDACache | MLACache


class Cache:
    """One entry per layer in ``layers``; ``length`` counts the tokens fed so far, padding included."""

    def __init__(self, layers: list[CacheEntry]) -> None:
        self.layers = layers
        self.length = 0

    def tensors(self) -> Iterator[Tensor]:
        for entry in self.layers:
            yield from vars(entry).values()

    @property
    def nbytes(self) -> int:
        """Bytes kept alive: whole storages, so that a view of something larger would show."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())

    def snapshot(self) -> Cache:
        """A deep copy that later steps do not touch."""
        return copy.deepcopy(self)

    def restore(self, snapshot: Cache) -> None:
        """Become a deep copy of ``snapshot``, which may be restored again later."""
        self.layers, self.length = copy.deepcopy(snapshot.layers), snapshot.length


def new_cache(text_config: TextConfig, batch: int, dtype: str) -> Cache:
    """The cache before the first token; ``dtype`` is the model's: "float32", "bfloat16" or "float64"."""
    entries: list[CacheEntry] = []
    for layer in range(text_config.num_hidden_layers):
        kind = KDACache if text_config.is_kda(layer) else MLACache
        entries.append(kind(text_config, batch, DTYPES[dtype]))
    return Cache(entries)
