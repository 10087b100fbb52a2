"""Every module of a model, each with the input that a given trace says it had.

A trace holds each layer's inputs and outputs; from these the prefix sum and the block bank before every AttnRes mix
follow (K3.md §6), so that each module can be run alone, on the right input, whatever the modules before it do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from parity.arrays import cast
from parity.protocol import ModuleCall, Taps
from parity.quantities import TEXT_MODEL
from reference.config import TextConfig


def isolated_calls(
    text: TextConfig, taps: Mapping[str, np.ndarray], dtype: str, embedding: np.ndarray
) -> Iterator[ModuleCall]:
    """The calls of one full pass in forward order, ``taps`` being that pass's trace (names without the run).

    ``embedding`` [B, T, hidden] is the first prefix sum. Inputs are rounded to ``dtype``: all sides get the same ones.
    """
    for bank in banks(text, taps, dtype, embedding):
        yield ModuleCall("attention_input", bank.layer, bank.before_attention)
        yield ModuleCall("self_attn", bank.layer, {"input": cast(taps[f"{bank.prefix}self_attn.input"], dtype)})
        yield ModuleCall("mlp_input", bank.layer, bank.before_mlp)
        yield ModuleCall("mlp", bank.layer, {"input": cast(taps[f"{bank.prefix}mlp.input"], dtype)})
        final = bank
    yield ModuleCall("output", None, final.after_layer)
    yield ModuleCall("lm_head", None, {"hidden": cast(taps[f"{TEXT_MODEL}norm.output"], dtype)})


class Bank:
    """Prefix sum and block vectors around one layer, as inputs of its two mixes and of the mix after it."""

    def __init__(self, layer: int, before: Taps, middle: Taps, after: Taps) -> None:
        self.layer, self.prefix = layer, f"{TEXT_MODEL}layers.{layer}."
        self.before_attention, self.before_mlp, self.after_layer = before, middle, after


def banks(text: TextConfig, taps: Mapping[str, np.ndarray], dtype: str, embedding: np.ndarray) -> Iterator[Bank]:
    """Follow the prefix sum through the layers by the trace's own module outputs (K3.md §6, steps 1 to 4)."""
    prefix_sum, blocks = cast(embedding, dtype), []
    for layer in range(text.num_hidden_layers):
        prefix = f"{TEXT_MODEL}layers.{layer}."
        before = _sources(prefix_sum, blocks)
        attended = cast(taps[f"{prefix}self_attn.output"], dtype)
        if text.attn_res_block_size and layer % text.attn_res_block_size == 0:
            blocks = [*blocks, prefix_sum]
            prefix_sum = attended
        else:
            prefix_sum = _add(prefix_sum, attended, dtype)
        middle = _sources(prefix_sum, blocks)
        prefix_sum = cast(taps[f"{prefix}output"], dtype)
        yield Bank(layer, before, middle, _sources(prefix_sum, blocks))


def _add(left: np.ndarray, right: np.ndarray, dtype: str) -> np.ndarray:
    return cast(left.astype(np.float64) + right.astype(np.float64), dtype)


def _sources(prefix_sum: np.ndarray, blocks: list[np.ndarray]) -> Taps:
    bank = np.stack(blocks) if blocks else np.zeros((0, *prefix_sum.shape), prefix_sum.dtype)
    return {"prefix_sum": prefix_sum, "blocks": bank}
