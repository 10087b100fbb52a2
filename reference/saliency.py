"""REAP saliency: how much each routed expert adds, over a calibration set, layer by layer (K3.md §15).

``S_j = (1/|C|) Σ_{x routed to j} weight_j(x) · ‖expert_j(x)‖₂``: the weight is the one of the combination, not the
biased score that chose the expert; the norm is of the expert's latent output, before the combination. A layer needs
nothing but what the layers before it gave, so one layer after the other is read, used on the whole calibration set, and
freed. What stays are the activations: the prefix sum of every token, and its block vectors (§6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from reference.activation import gated_activation
from reference.cache import DTYPES
from reference.checkpoint import LAYERS, TEXT
from reference.config import read_json
from reference.errors import InputError
from reference.linear import Embedding, wide
from reference.model import K3Model
from reference.moe import Expert, Experts
from reference.saliency_result import Domains, Saliency, Tally, in_order, pieces
from reference.text import DecoderLayer, check_token_ids
from reference.weights import CheckpointReader

PIECE_TOKENS = 1 << 16
"""Tokens that pass through a layer's experts together; every expert is read once for so many."""

Keep = Mapping[int, Sequence[int]]
"""0-based layer -> the experts that take part; the others are as if they were not there."""
Record = Callable[[Tensor, Tensor, Tensor], None]
"""Takes the indices, weights and norms [N, k] of the tokens that passed through a layer's experts."""


def output_norms(outputs: Tensor) -> Tensor:
    """``‖expert(x)‖₂`` in float32: [..., latent] -> [...]."""
    return wide(outputs).square().sum(-1).sqrt()


def expert_sums(indices: Tensor, weights: Tensor, norms: Tensor, experts: int) -> Tensor:
    """``Σ weight · norm`` over the tokens routed to each expert: three [N, k] -> [experts]; 0 where none is."""
    sums = torch.zeros(experts, dtype=norms.dtype)
    return sums.index_add(0, indices.flatten(), (weights * norms).flatten().to(norms.dtype))


def expert_counts(indices: Tensor, experts: int) -> Tensor:
    """How many tokens chose each expert: [N, k] -> int64 [experts]."""
    return torch.bincount(indices.flatten(), minlength=experts)


class RecordedExperts(nn.Module):
    """A layer's experts, all at once, and ``record`` of what passed through them."""

    def __init__(self, experts: Experts, record: Record) -> None:
        super().__init__()
        self.experts, self.record = experts, record

    def forward(self, z: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """As Experts: z [N, latent], indices and weights [N, k] -> [N, latent]."""
        self.record(indices, weights, output_norms(self.experts.outputs(z, indices)))
        return self.experts(z, indices, weights)


class StreamedExperts(nn.Module):
    """The same, each expert read when it is its turn and freed after it: ``read(number)`` gives one."""

    def __init__(self, read: Callable[[int], Expert], record: Record) -> None:
        super().__init__()
        self.read, self.record = read, record

    def forward(self, z: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """As Experts: z [N, latent], indices and weights [N, k] -> [N, latent] in float32."""
        norms = torch.zeros(indices.shape, dtype=wide(z).dtype)
        combined = torch.zeros(z.shape, dtype=norms.dtype)
        for number in indices.unique().tolist():
            token, place = torch.where(indices == number)
            output = self.read(number)(z[token])
            norms[token, place] = output_norms(output)
            combined[token] += weights[token, place, None] * wide(output)
        self.record(indices, weights, norms)
        return combined


class LayerReader:
    """One layer at a time of a checkpoint folder, its routed experts apart."""

    def __init__(self, folder: str | Path, dtype: str) -> None:
        if dtype not in DTYPES:
            raise InputError("calibrate", "dtype", " or ".join(DTYPES), repr(dtype), "choose one of them")
        self.reader, self.dtype = CheckpointReader(folder), DTYPES[dtype]
        self.config, self.expert_format = self.reader.shards.config, self.reader.shards.expert_format
        self.document = read_json(Path(folder) / "config.json")

    def embedding(self) -> Embedding:
        text = self.config.text_config
        return self._filled(lambda: Embedding(text.vocab_size, text.hidden_size), f"{TEXT}model.embed_tokens.")

    def layer(self, layer: int, record: Record, keep: Sequence[int] | None) -> DecoderLayer:
        """The 0-based ``layer``, in eval mode; ``record`` hears of its experts, ``keep`` are those that take part."""
        text = self.config.text_config

        def build() -> DecoderLayer:
            module = DecoderLayer(text, layer, self.expert_format)
            if module.is_moe:
                module.block_sparse_moe.experts = StreamedExperts(lambda number: self.expert(layer, number), record)
            return module

        module = self._filled(build, f"{LAYERS}{layer}.")
        if module.is_moe and keep is not None:
            exclude(module, keep)
        return module

    def expert(self, layer: int, number: int) -> Expert:
        """One routed expert."""
        text = self.config.text_config
        sizes = text.latent_size, text.moe_intermediate_size
        prefix = f"{LAYERS}{layer}.block_sparse_moe.experts.{number}."
        return self._filled(lambda: Expert(*sizes, gated_activation(text), self.expert_format), prefix)

    def _filled(self, build: Callable[[], nn.Module], prefix: str) -> nn.Module:
        """What ``build`` makes, without ever holding unset parameters, with the tensors under ``prefix``."""
        with torch.device("meta"):
            module = build()
        state = {name: self.reader.read(prefix + name, self.dtype) for name in module.state_dict()}
        module.load_state_dict(state, strict=True, assign=True)
        return module.eval()


def exclude(layer: DecoderLayer, keep: Sequence[int]) -> None:
    """No token chooses an expert that is not in ``keep``: what a pruned checkpoint computes."""
    bias = layer.block_sparse_moe.gate.e_score_correction_bias
    kept = torch.isin(torch.arange(len(bias)), torch.tensor(list(keep)))
    bias.data = torch.where(kept, bias.data, -torch.inf)


class LayerRecord:
    """Writes a layer's sums and counts to ``tally``; ``domain`` int64 [N] is that of every token that comes next."""

    def __init__(self, tally: Tally, layer: int) -> None:
        self.tally, self.layer, self.domain = tally, layer, torch.zeros(0, dtype=torch.int64)

    def __call__(self, indices: Tensor, weights: Tensor, norms: Tensor) -> None:
        experts = self.tally.mass.shape[-1]
        for number in range(len(self.tally.domains)):
            own = self.domain == number
            sums = expert_sums(indices[own], weights[own], norms[own], experts)
            self.tally.add(self.layer, number, sums.numpy(), expert_counts(indices[own], experts).numpy())


@torch.inference_mode()
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


def embedded(embedding: Embedding, sequences: Sequence, vocab_size: int) -> list[tuple[Tensor, list[Tensor]]]:
    """The state of every sequence before the first layer: (prefix sum [1, T, hidden], no blocks)."""
    states = []
    for ids in sequences:
        row = torch.as_tensor(ids)[None]
        check_token_ids(row, vocab_size)
        states.append((embedding(row), []))
    return states


def layer_over(
    layer: DecoderLayer, record: LayerRecord, sequences: Sequence, parts: Sequence[slice], states: list
) -> None:
    """One layer over the whole calibration set, part after part; ``states`` become those after the layer."""
    for part in parts:
        record.domain = torch.cat([torch.full((len(ids),), domain) for domain, ids in sequences[part]])
        states[part] = through_layer(layer, states[part])


def through_layer(layer: DecoderLayer, states: list[tuple[Tensor, list[Tensor]]]) -> list[tuple[Tensor, list[Tensor]]]:
    """One layer over several sequences: attention within each, the MLP or the experts over all tokens at once."""
    states = [layer.add_attention(prefix_sum, blocks) for prefix_sum, blocks in states]
    added = layer.feed_forward(torch.cat([layer.mlp_input(*state) for state in states], dim=1))
    parts = added.split([prefix_sum.shape[1] for prefix_sum, _ in states], dim=1)
    return [(prefix_sum + part, blocks) for (prefix_sum, blocks), part in zip(states, parts, strict=True)]


@torch.inference_mode()
def model_saliency(model: K3Model, domains: Domains, keep: Keep | None = None) -> Saliency:
    """The same of a whole model in memory, sequence after sequence: the definition, which ``calibrate`` must equal.

    The model's experts and biases are as before afterwards.
    """
    tally, text = Tally(domains, model.config, {}), model.language_model.model
    moe = {layer.layer: layer for layer in text.layers if layer.is_moe}
    records: dict[int, LayerRecord] = {}
    before = {number: (layer.block_sparse_moe.experts, bias_of(layer).clone()) for number, layer in moe.items()}
    try:
        for number, layer in moe.items():
            if keep is not None:
                exclude(layer, keep[number])
            records[number] = LayerRecord(tally, number)
            layer.block_sparse_moe.experts = RecordedExperts(before[number][0], records[number])
        for domain, ids in in_order(domains):
            for record in records.values():
                record.domain = torch.full((len(ids),), domain)
            model.language_model(torch.as_tensor(ids)[None])
    finally:
        for number, layer in moe.items():
            layer.block_sparse_moe.experts, bias = before[number]
            bias_of(layer).data = bias
    return tally.result()


def bias_of(layer: DecoderLayer) -> Tensor:
    return layer.block_sparse_moe.gate.e_score_correction_bias
