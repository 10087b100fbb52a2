"""REAP saliency: how much each routed expert adds, over a calibration set, layer by layer (K3.md §15).

``S_j = (1/|C|) Σ_{x routed to j} weight_j(x) · ‖expert_j(x)‖₂``: the weight is the one of the combination, not the
biased score that chose the expert; the norm is of the expert's latent output, before the combination. A layer needs
nothing but what the layers before it gave, so one layer after the other is read, used on the whole calibration set, and
freed. What stays are the activations: the prefix sum of every token, and its block vectors (§6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from port.activation import gated_activation
from port.cache import DTYPES
from port.linear import Embedding, wide
from port.model import K3Model
from port.moe import Experts
from port.text import DecoderLayer, check_token_ids
from port.weight_table import EXPERTS, ROOT, Entry, Transform, layer_sections
from port.weights import CheckpointReader
from reference.checkpoint import LAYERS, TEXT
from reference.config import read_json
from reference.errors import InputError
from reference.saliency_result import Domains, Saliency, Tally, in_order, pieces

PIECE_TOKENS = 1 << 16
"""Tokens that pass through a layer's experts together; every expert is read once for so many."""

Keep = Mapping[int, Sequence[int]]
"""0-based layer -> the experts that take part; the others are as if they were not there."""
Record = Callable[[mx.array, mx.array, mx.array], None]
"""Takes the indices, weights and norms [N, k] of the tokens that passed through a layer's experts."""


def output_norms(outputs: mx.array) -> mx.array:
    """``‖expert(x)‖₂`` in float32: [..., latent] -> [...]."""
    return mx.sqrt(mx.sum(mx.square(wide(outputs)), axis=-1))


def expert_sums(indices: mx.array, weights: mx.array, norms: mx.array, experts: int) -> mx.array:
    """``Σ weight · norm`` over the tokens routed to each expert: three [N, k] -> [experts]; 0 where none is."""
    return mx.zeros(experts).at[indices.flatten()].add((wide(weights) * wide(norms)).flatten())


def expert_counts(indices: mx.array, experts: int) -> mx.array:
    """How many tokens chose each expert: [N, k] -> int64 [experts]."""
    return mx.zeros(experts, mx.int64).at[indices.flatten()].add(1)


class RecordedExperts(nn.Module):
    """A layer's experts, all at once, and ``record`` of what passed through them."""

    def __init__(self, experts: Experts, record: Record) -> None:
        super().__init__()
        self.experts, self.record = experts, record

    def __call__(self, z: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """As Experts: z [N, latent], indices and weights [N, k] -> [N, latent]."""
        self.record(indices, weights, output_norms(self.experts.outputs(z, indices)))
        return self.experts(z, indices, weights)


class StreamedExperts(nn.Module):
    """The same, each expert read when it is its turn and freed after it: ``read(number)`` gives one."""

    def __init__(self, read: Callable[[int], Experts], record: Record) -> None:
        super().__init__()
        self.read, self.record = read, record

    def __call__(self, z: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """As Experts: z [N, latent], indices and weights [N, k] -> [N, latent] in float32."""
        chosen, weight = np.array(indices), np.array(weights)
        # Sums in place: MLX would copy all of them for every expert.
        norms, combined = np.zeros(chosen.shape, np.float32), np.zeros(z.shape, np.float32)
        for number in np.unique(chosen).tolist():
            token, place = np.nonzero(chosen == number)
            rows = mx.array(token)
            output = self.read(number).outputs(z[rows], mx.zeros((len(token), 1), mx.int32))[:, 0]
            norms[token, place] = np.array(output_norms(output))
            combined[token] += weight[token, place, None] * np.array(wide(output))
        self.record(indices, weights, mx.array(norms))
        return mx.array(combined)


class LayerReader:
    """One layer at a time of a checkpoint folder, its routed experts apart."""

    def __init__(self, folder: str | Path, dtype: str) -> None:
        if dtype not in DTYPES:
            raise InputError("calibrate", "dtype", " or ".join(DTYPES), repr(dtype), "choose one of them")
        self.reader, self.dtype = CheckpointReader(folder), DTYPES[dtype]
        self.config, self.expert_format = self.reader.shards.config, self.reader.shards.expert_format
        self.document = read_json(Path(folder) / "config.json")

    def embedding(self) -> Embedding:
        text, name = self.config.text_config, "model.embed_tokens."
        section = {"weight": ROOT[f"{name}weight"]}
        return self._filled(Embedding(text.vocab_size, text.hidden_size), f"{TEXT}{name}", section)

    def layer(self, layer: int, record: Record, keep: Sequence[int] | None) -> DecoderLayer:
        """The 0-based ``layer``, in eval mode; ``record`` hears of its experts, ``keep`` are those that take part."""
        text = self.config.text_config
        # MLX is lazy: the unset parameters of the experts, which are thrown away here, never exist.
        module = DecoderLayer(text, layer, self.expert_format)
        if module.is_moe:
            module.block_sparse_moe.experts = StreamedExperts(lambda number: self.expert(layer, number), record)
        sections = [section for section in layer_sections(text, layer, self.expert_format)]
        own = {name: transform for section in sections for name, transform in section.items() if "{expert}" not in name}
        module = self._filled(module, f"{LAYERS}{layer}.", own)
        if module.is_moe and keep is not None:
            exclude(module, keep)
        return module

    def expert(self, layer: int, number: int) -> Experts:
        """One routed expert, a stack of one."""
        text, place = self.config.text_config, "block_sparse_moe.experts.{expert}."
        sizes = text.latent_size, text.moe_intermediate_size
        section = {name.removeprefix(place): transform for name, transform in EXPERTS[self.expert_format].items()}
        module = Experts(1, *sizes, gated_activation(text), self.expert_format)
        return self._filled(module, f"{LAYERS}{layer}.{place.format(expert=number)}", section)

    def _filled(self, module: nn.Module, prefix: str, section: Mapping[str, Transform]) -> nn.Module:
        """``module`` with the tensors under ``prefix``; ValueError unless they are exactly its parameters."""
        given = {
            name: self.reader.read(Entry((prefix + name,), name, transform), self.dtype)
            for name, transform in section.items()
        }
        own = {name: array.shape for name, array in tree_flatten(module.parameters())}
        if own != {name: array.shape for name, array in given.items()}:
            raise ValueError(f"{prefix}: the table does not give this module its parameters")
        module.update(tree_unflatten(list(given.items())))
        return module.eval()


def exclude(layer: DecoderLayer, keep: Sequence[int]) -> None:
    """No token chooses an expert that is not in ``keep``: what a pruned checkpoint computes."""
    gate = layer.block_sparse_moe.gate
    kept = mx.array(np.isin(np.arange(len(gate.e_score_correction_bias)), list(keep)))
    gate.e_score_correction_bias = mx.where(kept, gate.e_score_correction_bias, -mx.inf)


class LayerRecord:
    """Writes a layer's sums and counts to ``tally``; ``domain`` int64 [N] is that of every token that comes next."""

    def __init__(self, tally: Tally, layer: int) -> None:
        self.tally, self.layer, self.domain = tally, layer, np.zeros(0, np.int64)

    def __call__(self, indices: mx.array, weights: mx.array, norms: mx.array) -> None:
        experts = self.tally.mass.shape[-1]
        for number in range(len(self.tally.domains)):
            own = np.flatnonzero(self.domain == number)
            if len(own):
                rows = mx.array(own)
                sums = expert_sums(indices[rows], weights[rows], norms[rows], experts)
                self.tally.add(self.layer, number, np.array(sums), np.array(expert_counts(indices[rows], experts)))


def calibrate(
    folder: str | Path,
    domains: Domains,
    dtype: str = "float32",
    keep: Keep | None = None,
    piece_tokens: int = PIECE_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> Saliency:
    """The saliency of every expert of a checkpoint folder, holding one layer without its experts, and one expert.

    ``keep`` measures the model that a plan leaves. ``progress(layers done, layers in all)`` is called after each.
    Raises InputError for whatever is wrong with the folder or the tokens.
    """
    reader = LayerReader(folder, dtype)
    text, sequences = reader.config.text_config, in_order(domains)
    tally = Tally(domains, reader.config, reader.document, reader.expert_format)
    states = embedded(reader.embedding(), [ids for _, ids in sequences], text.vocab_size)
    parts = pieces([len(ids) for _, ids in sequences], piece_tokens)
    for number in range(text.num_hidden_layers):
        record = LayerRecord(tally, number)
        # Nothing here holds the layer: it is gone before the next one is read.
        layer_over(
            reader.layer(number, record, None if keep is None else keep.get(number)), record, sequences, parts, states
        )
        if progress:
            progress(number + 1, text.num_hidden_layers)
    return tally.result()


def embedded(embedding: Embedding, sequences: Sequence, vocab_size: int) -> list[tuple[mx.array, list[mx.array]]]:
    """The state of every sequence before the first layer: (prefix sum [1, T, hidden], no blocks)."""
    states = []
    for ids in sequences:
        row = mx.array(ids)[None]
        check_token_ids(row, vocab_size)
        states.append((embedding(row), []))
    mx.eval([prefix_sum for prefix_sum, _ in states])
    return states


def layer_over(
    layer: DecoderLayer, record: LayerRecord, sequences: Sequence, parts: Sequence[slice], states: list
) -> None:
    """One layer over the whole calibration set, part after part; ``states`` become those after the layer."""
    for part in parts:
        record.domain = np.concatenate([np.full(len(ids), domain) for domain, ids in sequences[part]])
        states[part] = through_layer(layer, states[part])


def through_layer(
    layer: DecoderLayer, states: list[tuple[mx.array, list[mx.array]]]
) -> list[tuple[mx.array, list[mx.array]]]:
    """One layer over several sequences: attention within each, the MLP or the experts over all tokens at once."""
    states = [layer.add_attention(prefix_sum, blocks) for prefix_sum, blocks in states]
    added = layer.feed_forward(mx.concatenate([layer.mlp_input(*state) for state in states], axis=1))
    ends = np.cumsum([prefix_sum.shape[1] for prefix_sum, _ in states])[:-1].tolist()
    parts = mx.split(added, ends, axis=1)
    states = [(prefix_sum + part, blocks) for (prefix_sum, blocks), part in zip(states, parts, strict=True)]
    # Until a state is computed it keeps the layer alive that it comes from.
    mx.eval(states)
    return states


def model_saliency(model: K3Model, domains: Domains, keep: Keep | None = None) -> Saliency:
    """The same of a whole model in memory, sequence after sequence: the definition, which ``calibrate`` must equal.

    The model's experts and biases are as before afterwards.
    """
    tally, text = Tally(domains, model.config, {}), model.language_model.model
    moe = {layer.layer: layer for layer in text.layers if layer.is_moe}
    before = {number: (layer.block_sparse_moe.experts, bias_of(layer)) for number, layer in moe.items()}
    records: dict[int, LayerRecord] = {}
    try:
        for number, layer in moe.items():
            if keep is not None:
                exclude(layer, keep[number])
            records[number] = LayerRecord(tally, number)
            layer.block_sparse_moe.experts = RecordedExperts(before[number][0], records[number])
        for domain, ids in in_order(domains):
            for record in records.values():
                record.domain = np.full(len(ids), domain)
            mx.eval(model.language_model(mx.array(ids)[None]))
    finally:
        for number, layer in moe.items():
            layer.block_sparse_moe.experts, layer.block_sparse_moe.gate.e_score_correction_bias = before[number]
    return tally.result()


def bias_of(layer: DecoderLayer) -> mx.array:
    return layer.block_sparse_moe.gate.e_score_correction_bias
