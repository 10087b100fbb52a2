"""Faults of the way from a checkpoint to a tier, each put into the converter (K3.md §8, §15).

They are not in the matrix of the twins: a wrong conversion is no wrong model, and ``k3-parity verify`` must find it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.fault_catalogue.patches import around, given, result
from parity.faults import Fault


@dataclass(frozen=True)
class ConversionFault:
    """``fault`` shows in a conversion to ``tier``, maybe pruned, as problems of ``kind`` that look like ``looks_like``.

    ``number``: a wrong constant that has to be made from the right one: ``module.CONSTANT`` and a function.
    """

    fault: Fault
    tier: str
    kind: str
    looks_like: str = ""
    pruned: bool = False
    number: tuple[str, Callable[[Any], Any]] | None = None

    def in_force(self) -> Any:
        """Context manager: the converter has the fault."""
        if self.number is None:
            return self.fault.applied("port")
        import importlib

        name, change = self.number
        module, constant = name.split(".")
        right = getattr(importlib.import_module(f"port.{module}"), constant)
        return replace(self.fault, numbers={name: change(right)}).applied("port")


def low_then_high(packed: np.ndarray) -> np.ndarray:
    """GGML's order of nibbles put into ours: byte j holds inputs j and 16 + j of its group, not 2j and 2j + 1."""
    groups = packed.reshape(len(packed), -1, 16)
    codes = np.concatenate([groups & 15, groups >> 4], axis=-1)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(packed.shape)


def swap(packed: np.ndarray) -> np.ndarray:
    return packed >> 4 | packed << 4


def copied_swapped(original: Callable, package: str, self: Any, piece: Any, target: int, offset: int) -> None:
    from port.source import write_all

    data = self.read(piece)
    write_all(target, swap(data) if piece.name.endswith("weight_packed") else data, offset)


def transposed(original: Callable, package: str, packed: np.ndarray, scale: np.ndarray, format: Any) -> Any:
    """The rows of what is quantized are the columns."""
    from port.requantize import dequantize_mxfp4, quantize

    weights = dequantize_mxfp4(packed, scale)
    return quantize(np.ascontiguousarray(weights.T).reshape(weights.shape), format)


def read_from(rename: Callable[[str], str]) -> dict[str, Callable]:
    """The source tensor ``rename(name)`` where ``name`` should be read."""

    def pieces(original: Callable, package: str, output: Any, source: Any) -> Iterator[Any]:
        for piece in original(output, source):
            yield source.piece(rename(piece.name))

    return {"convert.pieces_of": around(pieces)}


def next_expert(name: str) -> str:
    """The number after, the last one its own."""
    return re.sub(r"\.experts\.(\d+)\.", lambda match: f".experts.{min(int(match[1]) + 1, 7)}.", name)


def next_layer(name: str) -> str:
    """The norms of the layer after, the last one's its own."""
    if not name.endswith("_layernorm.weight"):
        return name
    return re.sub(r"layers\.(\d+)\.(input|post)", lambda found: f"layers.{min(int(found[1]) + 1, 4)}.{found[2]}", name)


def tied(name: str) -> str:
    return name.replace("lm_head.weight", "model.embed_tokens.weight")


def exchanged(left: str, right: str) -> Callable[[str], str]:
    return lambda name: name.replace(left, right) if left in name else name.replace(right, left)


def by_text(original: Callable, package: str, prefix: str, tier: Any, rows: Any, experts: Any) -> Iterator[Any]:
    """Experts in the order in which a listing sorts them: 10 before 2."""
    return original(prefix, tier, rows, sorted(experts, key=str))


def rows_in_old_order(ending: str) -> dict[str, Callable]:
    """The rows that stay are not put into their new order."""

    def row_output(original: Callable, package: str, config: Any, row: Any, tier: Any, keep: Any) -> Any:
        return original(config, row, tier, tuple(sorted(keep)) if keep and row[0].endswith(ending) else keep)

    return {"tiers.row_output": around(row_output)}


def tiers_with(name: str, change: Callable[[Any, dict], Any]) -> tuple[str, Callable]:
    """The table of tiers, one of which is made from the table."""
    return "tiers.TIERS", lambda right: right | {name: replace(change(right[name], right), name=name)}


def pattern_with(more: str) -> tuple[str, Callable]:
    """The pattern of what is quantized, which fits more names."""
    return "tiers.LINEARS", lambda right: re.compile(f"{right.pattern}|{more}")


def as_affine_4(tier: Any, table: dict) -> Any:
    from port.tiers import Format

    return replace(tier, experts=Format("affine", 4, 32))


def default_settings(document: dict, package: str) -> dict:
    """What another program's own 4-bit format would be."""
    block = document["quantization"] | {"mode": "affine", "bits": 4, "group_size": 32}
    return document | {"quantization": block, "quantization_config": block}


REQUANTIZE, QUANTIZE = "requantize_mxfp4.requantize", "requantize.quantize"


def of(id: str, module: str, claim: str, shows: str, patches: Any = None, case: str = "quantizable") -> Fault:
    return Fault(id, module, claim, shows, patches or {}, case=case)


FAULTS: tuple[ConversionFault, ...] = (
    ConversionFault(
        of("F68", "mxfp4", "a byte's nibbles are inputs 16 apart", "all group statistics right",
           {REQUANTIZE: given(packed=low_then_high)}),
        "2bit", "expert", "nibbles taken for the halves of a group",
    ),
    ConversionFault(
        of("F68b", "mxfp4", "the high nibble comes first", "all group statistics right",
           {REQUANTIZE: given(packed=swap)}),
        "3bit", "expert", "nibbles swapped",
    ),
    ConversionFault(
        of("F68c", "mxfp4", "the loader's words hold the high nibble first", "bytes that only look copied",
           {"source.Files.copy": around(copied_swapped)}),
        "mxfp4", "expert", "nibbles swapped",
    ),
    ConversionFault(
        of("F69", "mxfp4", "the exponent's bias is 129", "every weight four times too small",
           {REQUANTIZE: given(scale=lambda scale: scale - np.uint8(2))}),
        "2bit", "expert", "0.25 times its size",
    ),
    ConversionFault(
        of("F70", "mxfp4", "scales are laid out a group later", "groups with their neighbours' sizes",
           {REQUANTIZE: given(scale=lambda scale: np.roll(scale, 1, axis=0))}),
        "2bit", "expert",
    ),
    ConversionFault(
        of("F73", "converter", "the sign bit is set for positive codes", "weights negated",
           {REQUANTIZE: given(packed=lambda packed: packed ^ 0x88)}),
        "3bit", "expert", "its negative",
    ),
    ConversionFault(
        of("F80", "converter", "experts are stored [in, out]", "shapes right, weights in other places",
           {REQUANTIZE: around(transposed)}),
        "2bit", "expert", "transposed",
    ),
    ConversionFault(
        of("F73b", "converter", "a group has no offset", "weights of one sign",
           {REQUANTIZE: result(lambda parts, package: (*parts[:2], np.zeros_like(parts[2])))}),
        "2bit", "expert",
    ),
    ConversionFault(
        of("F77b", "converter", "scales are halves of IEEE", "sizes off by powers of two",
           {QUANTIZE: result(lambda parts, package: (parts[0], parts[1] << 1, parts[2]))}),
        "2bit", "tensor",
    ),
    ConversionFault(
        of("F72", "converter", "compressed-tensors is affine 4-bit in groups of 32", "the same bits, another meaning"),
        "mxfp4", "dtype", number=tiers_with("mxfp4", as_affine_4),
    ),
    ConversionFault(
        of("F72b", "converter", "the settings are those of an own 4-bit format", "loaders read another code",
           {"output_config.converted_config": result(default_settings)}),
        "mxfp4", "config",
    ),
    ConversionFault(
        of("F75", "converter", "what starts like self_attn is attention", "residual projections quantized"),
        "2bit", "dtype",
        number=pattern_with(r"language_model\.model\.layers\.\d+\.(self_attention|mlp)_res_proj\.weight"),
    ),
    ConversionFault(
        of("F75b", "converter", "the router is a linear map like others", "router in 4 bits"),
        "2bit", "shape", "codes of 4 bits where the tier has 8",
        number=tiers_with("2bit", lambda tier, table: replace(tier, router=tier.linears)),
    ),
    ConversionFault(
        of("F77", "converter", "the vision tower is quantized like the rest", "the model sees badly"),
        "2bit", "dtype", number=pattern_with(r"(vision_tower|mm_projector)\..*(wqkv|wo|fc\d|proj\.\d)\.weight"),
    ),
    ConversionFault(
        of("F82", "converter", "3bit has the recipe of 2bit", "one model under two names"),
        "3bit", "shape", "codes of 2 bits where the tier has 3",
        number=tiers_with("3bit", lambda tier, table: table["2bit"]),
    ),
    ConversionFault(
        of("F80b", "converter", "w1 is the up, w3 the gate projection", "another function"),
        "mxfp4", "expert", "exchanged",
        number=("tiers.EXPERT_NAMES", lambda right: right | {"w1": "up_proj", "w3": "gate_proj"}),
    ),
    ConversionFault(
        of("F59", "converter", "experts come in the order of a listing", "experts with others' scores",
           {"tiers.expert_outputs": around(by_text)}, case="many-experts"),
        "mxfp4", "expert", "is the source's expert",
    ),
    ConversionFault(
        of("F86d", "converter", "experts count from 1", "experts with others' scores", read_from(next_expert)),
        "2bit", "expert", "is the source's expert",
    ),
    ConversionFault(
        of("F86", "prune", "the bias has no rows", "a pruned gate with all biases"),
        "mxfp4", "shape", "the plan was not followed", pruned=True,
        number=("tiers.EXPERT_ROWS", lambda right: right[:1]),
    ),
    ConversionFault(
        of("F86b", "prune", "biases stay in their old order", "experts chosen by others' biases",
           rows_in_old_order("e_score_correction_bias")),
        "mxfp4", "tensor", pruned=True,
    ),
    ConversionFault(
        of("F86c", "prune", "router rows stay in their old order", "experts with others' scores",
           rows_in_old_order("gate.weight")),
        "2bit", "tensor", pruned=True,
    ),
    ConversionFault(
        of("F78", "converter", "the head is tied to the embedding", "another next token", read_from(tied)),
        "2bit", "tensor", "is language_model.model.embed_tokens.weight",
    ),
    ConversionFault(
        of("F74", "converter", "q and k are interchangeable", "reads with what should write",
           read_from(exchanged("self_attn.q_conv1d", "self_attn.k_conv1d"))),
        "2bit", "tensor", "_conv1d.weight",
    ),
    ConversionFault(
        of("F76", "converter", "layers count from 1 in names of norms", "every norm a layer late",
           read_from(next_layer)),
        "mxfp4", "tensor", "is language_model.model.layers.",
    ),
)  # fmt: skip
