"""The layers of one model on several ranks, each layer on one, and what passes from rank to rank (K3.md §6).

Between two layers there is more than a hidden state: the prefix sum and the whole list of blocks. Caches never travel:
a layer's cache lives on the rank of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from port.attn_res import starts_block
from port.cache import DTYPES, Cache, new_cache
from port.model import K3Model
from port.padding import as_token_mask, zero_padding
from port.part import Elsewhere, load_part, open_reader, text_only
from port.text import check_inputs, check_token_ids
from port.transport import Transport
from reference.config import TextConfig
from reference.errors import InputError
from reference.taps import tap

CODES = (mx.float32, mx.bfloat16, mx.float16)
"""A dtype's number in a header."""
AXES = 4
Shapes = Mapping[str, tuple[tuple[int, ...], mx.Dtype]]


class HandOverError(RuntimeError):
    """Two ranks do not agree about what passes between them."""


class Described(NamedTuple):
    """What a header says of the array that follows it: the layer that will read it, its dtype and shape."""

    layer: int
    dtype: mx.Dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} for layer {self.layer}"


def stages(layers: int, ranks: int) -> list[range]:
    """The 0-based layers of each rank: contiguous, in order, each once; lengths differ by one at most.

    With more ranks than layers some are empty: such a rank passes on what it gets.
    """
    length, longer = divmod(layers, ranks)
    starts = [rank * length + min(rank, longer) for rank in range(ranks + 1)]
    return [range(first, end) for first, end in zip(starts, starts[1:], strict=False)]


def stages_at(cuts: Sequence[int], layers: int) -> list[range]:
    """The same, cut before the layers ``cuts``, in order; InputError unless they ascend within 0 … ``layers``."""
    ends = [0, *cuts, layers]
    if any(first > end for first, end in zip(ends, ends[1:], strict=False)):
        raise InputError("cuts", "layers", f"ascending numbers from 0 to {layers}", list(cuts), "correct them")
    return [range(first, end) for first, end in zip(ends, ends[1:], strict=False)]


def appended_blocks(text_config: TextConfig, layer: int) -> int:
    """How many block vectors there are before the 0-based ``layer`` (§6, step 2)."""
    size = text_config.attn_res_block_size
    return sum(starts_block(number, size) for number in range(layer)) if size else 0


def handed_over(text_config: TextConfig, layer: int, batch: int, tokens: int, dtype: mx.Dtype) -> Shapes:
    """All that passes before the 0-based ``layer``: name -> shape and dtype, in the order of sending.

    prefix_sum [B, T, hidden]; blocks [n, B, T, hidden], where there are any.
    """
    one = (batch, tokens, text_config.hidden_size)
    count = appended_blocks(text_config, layer)
    return {"prefix_sum": (one, dtype)} | ({"blocks": ((count, *one), dtype)} if count else {})


def header(described: Described) -> mx.array:
    """int32 [2 + AXES]: the layer, the dtype's number, the shape filled up with zeros."""
    shape = [*described.shape, *[0] * (AXES - len(described.shape))]
    return mx.array([described.layer, CODES.index(described.dtype), *shape], mx.int32)


def described(numbers: Sequence[int]) -> Described:
    """What a header says; raises HandOverError if these numbers are none."""
    layer, code, *shape = numbers
    if not 0 <= code < len(CODES):
        raise HandOverError(f"hand-over: a header was expected, found {list(numbers)}")
    return Described(layer, CODES[code], tuple(axis for axis in shape if axis))


def agree(name: str, expected: Described, found: Described) -> None:
    """Raise HandOverError where the array ``name`` is not what was agreed upon."""
    if expected != found:
        raise HandOverError(f"hand-over of {name}: expected {expected}, found {found}")


def send_state(transport: Transport, to: int, layer: int, state: Mapping[str, mx.array], shapes: Shapes) -> None:
    """Send the arrays that ``shapes`` names, each behind a header; they must be what ``shapes`` says."""
    for name, (shape, dtype) in shapes.items():
        found = Described(layer, state[name].dtype, tuple(state[name].shape))
        agree(name, Described(layer, dtype, shape), found)
        transport.send(header(found), to)
        transport.send(state[name], to)


def receive_state(transport: Transport, sender: int, layer: int, shapes: Shapes) -> dict[str, mx.array]:
    """The arrays that ``shapes`` names; their headers are looked at before a buffer is filled with them."""
    state = {}
    for name, (shape, dtype) in shapes.items():
        found = described(transport.receive((2 + AXES,), mx.int32, sender).tolist())
        agree(name, Described(layer, dtype, shape), found)
        state[name] = transport.receive(shape, dtype, sender)
    return state


class PipelineModel:
    """One rank's layers. The first rank also embeds, the last one also gives the logits.

    ``model`` holds only what this rank computes with; ``layers`` are its 0-based numbers; ``read`` the checkpoint
    names that were read for it.
    """

    def __init__(
        self, model: K3Model, layers: range, dtype: str, transport: Transport, read: Sequence[str] = ()
    ) -> None:
        self.model, self.layers, self.transport, self.read = model, layers, transport, tuple(read)
        self.dtype = DTYPES[dtype]
        self.language_model, self.text_config = model.language_model, model.config.text_config
        self.first, self.last = transport.rank == 0, transport.rank == transport.size - 1

    def new_cache(self, batch: int, dtype: str) -> Cache:
        """The cache of this rank's layers alone."""
        entries = new_cache(self.text_config, batch, dtype).layers
        return Cache([entries[layer] for layer in self.layers])

    def __call__(
        self,
        input_ids: mx.array | None = None,
        inputs_embeds: mx.array | None = None,
        attention_mask: mx.array | None = None,
        cache: Cache | None = None,
    ) -> mx.array | None:
        """Every rank is called with the same inputs, as K3Model, without pictures; ``cache`` is this rank's.

        input_ids [B, T] int or inputs_embeds [B, T, hidden] -> logits [B, T, vocab] on the last rank, else None.
        Raises InputError on every rank for inputs that do not fit, HandOverError where two ranks disagree.
        """
        token_mask = None if attention_mask is None else as_token_mask(attention_mask)
        prefix_sum = self.embedded(input_ids, inputs_embeds, token_mask, cache)
        batch, tokens = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        blocks: list[mx.array] = []
        if not self.first:
            prefix_sum, blocks = self.receive(batch, tokens)
        entries = cache.layers if cache is not None else [None] * len(self.layers)
        for layer, entry in zip(self.layers, entries, strict=True):
            prefix_sum, blocks = self.language_model.model.layers[layer](prefix_sum, blocks, token_mask, entry)
        logits = self.finish(prefix_sum, blocks)
        if cache is not None:
            cache.length += tokens
            mx.eval(*cache.arrays())
        return logits

    def embedded(
        self,
        input_ids: mx.array | None,
        inputs_embeds: mx.array | None,
        token_mask: mx.array | None,
        cache: Cache | None,
    ) -> mx.array | None:
        """The first prefix sum, on the first rank; every rank checks the inputs, so that all stop or none."""
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise InputError("inputs", "input_ids and inputs_embeds", "one of the two", given, "give exactly one")
        if inputs_embeds is None:
            check_token_ids(input_ids, self.text_config.vocab_size)
        if self.first:
            embeddings = self.language_model.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        else:
            # Only shape and dtype are looked at; lazy, it never exists.
            shape = (*input_ids.shape, self.text_config.hidden_size) if inputs_embeds is None else None
            embeddings = inputs_embeds if shape is None else mx.zeros(shape, self.dtype)
        check_inputs(embeddings, self.dtype, token_mask, cache if cache is not None and cache.layers else None)
        return embeddings if token_mask is None else zero_padding(embeddings, token_mask)

    def receive(self, batch: int, tokens: int) -> tuple[mx.array, list[mx.array]]:
        """(prefix sum, blocks) before this rank's first layer, from the rank before."""
        layer = self.layers.start
        shapes = handed_over(self.text_config, layer, batch, tokens, self.dtype)
        state = receive_state(self.transport, self.transport.rank - 1, layer, shapes)
        return state["prefix_sum"], list(state.get("blocks", []))

    def finish(self, prefix_sum: mx.array, blocks: list[mx.array]) -> mx.array | None:
        """The logits on the last rank; else all is handed over."""
        if self.last:
            logits = self.language_model.lm_head(self.language_model.model.output(prefix_sum, blocks))
            return tap(self.model, "logits", logits)
        layer, (batch, tokens) = self.layers.stop, prefix_sum.shape[:2]
        shapes = handed_over(self.text_config, layer, batch, tokens, self.dtype)
        state = {"prefix_sum": prefix_sum} | ({"blocks": mx.stack(blocks)} if blocks else {})
        send_state(self.transport, self.transport.rank + 1, layer, state, shapes)
        return None


def keep_stage(model: K3Model, layers: range, first: bool, last: bool) -> K3Model:
    """``model`` without what other ranks hold. Nothing of it existed yet: MLX is lazy."""
    language = text_only(model).language_model
    text, at = language.model, "language_model.model"
    kept = set(layers)
    text.layers = [
        layer if number in kept else Elsewhere(f"{at}.layers.{number}") for number, layer in enumerate(text.layers)
    ]
    if not first:
        text.embed_tokens = Elsewhere(f"{at}.embed_tokens")
    if not last:
        text.norm, language.lm_head = Elsewhere(f"{at}.norm"), Elsewhere("language_model.lm_head")
        if model.config.text_config.attn_res_block_size:
            text.output_attn_res_norm = Elsewhere(f"{at}.output_attn_res_norm")
            text.output_attn_res_proj = Elsewhere(f"{at}.output_attn_res_proj")
    return model


def load_stage(
    folder: str | Path, dtype: str, transport: Transport, cuts: Sequence[int] | None = None
) -> PipelineModel:
    """This rank's part of a released checkpoint, split evenly or before the layers ``cuts``; no other tensor is read.

    Raises InputError for a bad folder, or for cuts that do not make as many stages as there are ranks.
    """
    reader = open_reader(folder, dtype)
    config = reader.shards.config
    count = config.text_config.num_hidden_layers
    ranges = stages(count, transport.size) if cuts is None else stages_at(cuts, count)
    if len(ranges) != transport.size:
        expected = f"{transport.size - 1} for {transport.size} ranks"
        raise InputError("cuts", "number", expected, len(ranges) - 1, "give one less than ranks")
    layers, last = ranges[transport.rank], transport.rank == transport.size - 1
    model = keep_stage(K3Model(config, reader.shards.expert_format), layers, transport.rank == 0, last)
    return PipelineModel(model, layers, dtype, transport, load_part(model, reader, dtype))
