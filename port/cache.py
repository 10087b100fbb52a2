"""What a model remembers between calls (K3.md §4, §5, §11).

Everything is written out anew at each call, so an entry never keeps a prompt's activations alive.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import mlx.core as mx

from port.linear import DTYPES
from reference.config import LinearAttnConfig, TextConfig


class _Entry:
    """Arrays of one layer, as the fields of a dataclass."""

    def arrays(self) -> list[mx.array]:
        return [getattr(self, field.name) for field in fields(self)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays())

    def copy(self) -> Self:
        """A copy that shares no array with this one."""
        return replace(self, **{field.name: mx.array(getattr(self, field.name)) for field in fields(self)})


@dataclass
class KDACache(_Entry):
    """The inputs of the three convolutions' windows, [B, K-1, C] in model dtype, and the state [B, H, D_k, D_v] float32.

    Its size does not depend on how many tokens were seen.
    """

    conv_q: mx.array
    conv_k: mx.array
    conv_v: mx.array
    state: mx.array


@dataclass
class MLACache(_Entry):
    """Per cached token: the latent after its norm [B, T, c], the shared key part [B, T, r], and whether it is real."""

    latent: mx.array
    key_rope: mx.array
    key_mask: mx.array


@dataclass
class Cache:
    """One entry per layer, and how many tokens (padding counted) they have seen."""

    layers: list[KDACache | MLACache]
    length: int = 0

    def arrays(self) -> list[mx.array]:
        return [array for entry in self.layers for array in entry.arrays()]

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.layers)

    def snapshot(self) -> Cache:
        """A copy that nothing done to this cache changes."""
        return Cache([entry.copy() for entry in self.layers], self.length)

    def restore(self, snapshot: Cache) -> None:
        """Go back to ``snapshot``, which stays good for further use."""
        copied = snapshot.snapshot()
        self.layers, self.length = copied.layers, copied.length


def new_kda_cache(linear: LinearAttnConfig, batch: int, dtype: mx.Dtype) -> KDACache:
    """The entry of a KDA layer that has seen nothing: zeros."""
    conv = mx.zeros((batch, linear.short_conv_kernel_size - 1, linear.width), dtype)
    state = mx.zeros((batch, linear.num_heads, linear.head_dim, linear.head_dim), mx.float32)
    return KDACache(conv, conv, conv, state)


def new_mla_cache(text_config: TextConfig, batch: int, dtype: mx.Dtype) -> MLACache:
    """The entry of an MLA layer that has seen nothing: no token."""
    latent = mx.zeros((batch, 0, text_config.kv_lora_rank), dtype)
    key_rope = mx.zeros((batch, 0, text_config.qk_rope_head_dim), dtype)
    return MLACache(latent, key_rope, mx.zeros((batch, 0), mx.bool_))


def new_cache(text_config: TextConfig, batch: int, dtype: str) -> Cache:
    """An empty cache for ``batch`` rows of a model of ``dtype`` ("float32" or "bfloat16")."""
    stored = DTYPES[dtype]
    return Cache(
        [
            new_kda_cache(text_config.linear_attn_config, batch, stored)
            if text_config.is_kda(layer)
            else new_mla_cache(text_config, batch, stored)
            for layer in range(text_config.num_hidden_layers)
        ]
    )
