"""All that a third party reads to put a port under test: what a port offers, and what it is asked.

A port opens a checkpoint in a dtype and gives a session. A session is asked three kinds of question, all in numpy:
run some steps over one cache and show the taps; run one module on a given input; or (through the port) evaluate one
named function. What a port cannot do it leaves out of its capabilities: that is counted as "unsupported", never as
passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

Taps = dict[str, np.ndarray]
Segments = Sequence[tuple[str, bool]]
TextKind = Literal["embed", "attention_input", "self_attn", "mlp_input", "mlp", "output", "lm_head"]
VisionKind = Literal["patch_embed", "vision_block", "vision_merge", "projector"]
Kind = TextKind | VisionKind
TEXT_KINDS: tuple[Kind, ...] = ("embed", "attention_input", "self_attn", "mlp_input", "mlp", "output", "lm_head")
VISION_KINDS: tuple[Kind, ...] = ("patch_embed", "vision_block", "vision_merge", "projector")
KINDS: tuple[Kind, ...] = TEXT_KINDS + VISION_KINDS
RUNS = ("prefill", "decode", "padded", "vision", "mm")


@dataclass(frozen=True)
class Step:
    """New tokens for the model: ids [B, T] int64, or embeddings [B, T, hidden]; ``mask`` [B, T] is True if real."""

    input_ids: np.ndarray | None = None
    inputs_embeds: np.ndarray | None = None
    mask: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """How many new tokens each row has."""
        given = self.inputs_embeds if self.input_ids is None else self.input_ids
        return int(given.shape[1])


@dataclass(frozen=True)
class ModuleCall:
    """One module on a given input.

    kind              inputs                                              taps that must come back
    embed             input_ids [B, T]                                    embed_tokens.output
    attention_input   prefix_sum [B, T, hidden], blocks [n, B, T, hidden] self_attn.input
    self_attn         input [B, T, hidden], mask [B, T]                   self_attn.* of the layer
    mlp_input         prefix_sum, blocks                                  mlp.input
    mlp               input [B, T, hidden]                                mlp.output, for MoE also router.*, moe.*
    output            prefix_sum, blocks                                  norm.output
    lm_head           hidden [B, T, hidden]                               logits
    patch_embed       pixel_values [L, 3, p, p], grid_thws [N, 3]         patch_embed.output
    vision_block      input [L, dim], grid_thws; ``layer`` is the block   encoder.blocks.{layer}.*
    vision_merge      input [L, dim], grid_thws                           tower.output (final norm, then merge)
    projector         input [tokens, kh·kw, dim]                          projector.output

    ``blocks`` holds the blocks before the module runs; ``imposed`` [B·T, k] replaces the router's choice.
    """

    kind: Kind
    layer: int | None
    inputs: Mapping[str, np.ndarray]
    imposed: np.ndarray | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a port can be asked.

    ``taps`` None means every tap of the reference; else names without their layer or block ("self_attn.core",
    "encoder.blocks.output", "logits"). A tap that is declared and missing is a failure, one that is not declared is
    unsupported. ``forms`` are equal ways to compute. Without ``imposes_routing`` the port cannot be told which experts
    to choose: where it chooses otherwise, what follows is unsupported.
    ``converted``: the port also opens folders that ``k3-parity convert`` wrote.
    """

    dtypes: tuple[str, ...]
    runs: tuple[str, ...] = RUNS
    kinds: tuple[Kind, ...] = KINDS
    functions: frozenset[str] = frozenset()
    taps: frozenset[str] | None = None
    forms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    imposes_routing: bool = True
    converted: bool = False


class Session(Protocol):
    """A loaded model. It may have ``taps``, which then holds for this checkpoint in place of the port's."""

    def run(self, steps: Sequence[Step], imposed: Sequence[Mapping[str, np.ndarray]] | None = None) -> list[Taps]:
        """Feed the steps one after another over one cache; each step's taps, by full name (golden/README.md)."""

    def module(self, call: ModuleCall) -> Taps:
        """Run one module; its taps by full name."""

    def vision(self, pixel_values: np.ndarray, grid_thws: np.ndarray) -> Taps:
        """Tower and projector on patches [L, 3, p, p] of items [N, 3]: patch_embed.output, encoder.blocks.{j}.output,
        tower.output, projector.output."""

    def multimodal(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray,
        pixel_values: np.ndarray,
        grid_thws: np.ndarray,
        imposed: Mapping[str, np.ndarray] | None = None,
    ) -> Taps:
        """One pass over text and pictures: merged_embeds, attention_mask, position_ids, logits, and the text taps."""

    def use_form(self, module: str, form: str) -> None:
        """Compute ``module`` ("kda", "mla") by the named form from now on."""


class Port(Protocol):
    """An implementation of K3."""

    name: str

    def capabilities(self) -> Capabilities: ...

    def versions(self) -> dict[str, str]: ...

    def tensor_names(self, config: Mapping[str, Any], expert_format: str) -> set[str]:
        """The checkpoint names that a model of this configuration would read."""

    def open(self, checkpoint: Path, dtype: str) -> Session:
        """Load a checkpoint folder; InputError if the folder is bad, any other exception if the port is."""

    def call(
        self, function: str, arrays: Mapping[str, np.ndarray | None], settings: Mapping[str, Any]
    ) -> tuple[np.ndarray, ...]:
        """Evaluate ``module.function`` on arrays that come in the dtype to compute in; the results as a tuple."""

    # Three more methods that a port may have; without them these parts are unsupported:
    # picture(bytes of a PNG or TIFF, media_proc_cfg) -> {"pixel_values": [L, 3, p, p], "tokens": int, "prompt": str}
    # chat(call: dict of keyword arguments, as in fixtures/golden/chat.json) -> [(text, is_markup), …], or any exception
    # tokenize(folder with tiktoken.model and tokenizer_config.json, [(text, is_markup), …]) -> [id, …]


class Unsupported(Exception):
    """The port does not offer what was asked: counted apart, never as passed."""
