"""The routed experts of every layer on several ranks, each expert on one; all else on all of them (K3.md §7).

Every rank routes every token, and adds up what its own experts give. The norm that follows is not linear: the ranks'
partial sums are added before it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from port.activation import gated_activation
from port.linear import wide
from port.model import K3Model
from port.moe import Experts
from port.part import load_part, open_reader, text_only
from port.pipeline import stages
from port.transport import Transport
from port.weight_table import Entry
from reference.checkpoint import ExpertFormat
from reference.errors import InputError
from reference.taps import name_modules


def share(experts: int, ranks: int, rank: int) -> range:
    """The experts of one rank: contiguous, each on one rank; InputError if a rank would have none."""
    if ranks > experts:
        raise InputError("expert split", "ranks", f"at most {experts}, one per expert", ranks, "use fewer")
    return stages(experts, ranks)[rank]


class SplitExperts(Experts):
    """The experts ``own`` of a layer, in the place of all of them."""

    def __init__(
        self,
        own: range,
        latent: int,
        width: int,
        activation: Callable[[mx.array, mx.array], mx.array],
        expert_format: ExpertFormat,
        transport: Transport,
    ) -> None:
        super().__init__(len(own), latent, width, activation, expert_format)
        self.own, self.transport = own, transport

    def partial(self, z: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``Σ weight · expert(z)`` over this rank's own experts, in float32: arguments as Experts -> [N, latent].

        A choice that another rank holds is computed with the first expert here and left out, not multiplied by 0: it
        might overflow.
        """
        mine = (indices >= self.own.start) & (indices < self.own.stop)
        here = mx.where(mine, indices - self.own.start, 0)
        weighted = wide(self.outputs(z, here)) * weights[..., None]
        return mx.sum(mx.where(mine[..., None], weighted, 0.0), axis=1)

    def __call__(self, z: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``Σ weight · expert(z)`` over all ranks, in float32, the same on each."""
        return self.transport.all_sum(self.partial(z, indices, weights))


def split_experts(model: K3Model, own: range, expert_format: ExpertFormat, transport: Transport) -> K3Model:
    """``model`` with only ``own`` of each layer's experts. Nothing of the others existed yet: MLX is lazy."""
    text = model.config.text_config
    sizes = text.latent_size, text.moe_intermediate_size
    for layer in text_only(model).language_model.model.layers:
        if layer.is_moe:
            experts = SplitExperts(own, *sizes, gated_activation(text), expert_format, transport)
            layer.block_sparse_moe.experts = experts
    name_modules(model)
    return model


def load_share(folder: str | Path, dtype: str, transport: Transport) -> tuple[K3Model, tuple[str, ...]]:
    """This rank's part of a released checkpoint, and the checkpoint names that were read: of experts, its own alone.

    Raises InputError as ``share``, and for a bad folder.
    """
    reader = open_reader(folder, dtype)
    config, expert_format = reader.shards.config, reader.shards.expert_format
    count = config.text_config.num_experts
    own = share(count, transport.size, transport.rank)

    def mine(row: Entry) -> Entry:
        return row._replace(sources=row.sources[own.start : own.stop]) if is_expert(row) else row

    model = split_experts(K3Model(config, expert_format), own, expert_format, transport)
    return model, load_part(model, reader, dtype, mine)


def is_expert(row: Entry) -> bool:
    """Whether a row of the table stacks the experts of a layer."""
    return ".block_sparse_moe.experts." in row.parameter
