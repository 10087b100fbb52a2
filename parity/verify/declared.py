"""What a tier promises, tensor by tensor, said a second time (K3.md §2, §15): nothing is taken from the converter.

A tier quantizes the routed experts, and maybe the router and every other matrix of the text model. A *matrix* is a
bfloat16 tensor of two axes under ``language_model.`` that is no projection of an attention residual. Everything else
keeps bytes, shape and dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from reference.checkpoint import ExpertFormat, expert_rows, tensor_rows
from reference.config import K3Config

PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
LAYER = re.compile(r"language_model\.model\.layers\.(\d+)\.")
ROUTER_ROWS = (".block_sparse_moe.gate.weight", ".block_sparse_moe.gate.e_score_correction_bias")


class Coding(NamedTuple):
    """``bits`` per weight; ``group`` consecutive inputs of a row share a scale, in affine mode also a bias."""

    mode: str
    bits: int
    group: int

    def settings(self) -> dict[str, object]:
        """As ``config.json`` writes it for the loaders."""
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}


MXFP4 = Coding("mxfp4", 4, 32)


def affine(bits: int) -> Coding:
    return Coding("affine", bits, 64)


class Promise(NamedTuple):
    """What a tier does to the routed experts, to the router and to other matrices; None leaves them as they are."""

    experts: Coding
    router: Coding | None
    rest: Coding | None


PROMISES = {
    ("mxfp4", None): Promise(MXFP4, None, None),
    ("mxfp4", 8): Promise(MXFP4, affine(8), affine(8)),
    ("3bit", None): Promise(affine(3), affine(8), affine(4)),
    ("mixed2", None): Promise(affine(2), None, None),
    ("mixed2", 8): Promise(affine(2), affine(8), affine(8)),
    ("2bit", None): Promise(affine(2), affine(8), affine(4)),
}
"""(tier, ``--nonexpert-bits``) -> what it promises."""

BANDS = {2: (0.25, 0.46), 3: (0.12, 0.225), 4: (0.04, 0.15), 8: (0.002, 0.015)}
"""Bits of affine groups of 64 -> least and largest relative error, RMS of the difference over RMS of the weights.

Bell-shaped weights lie at 0.41, 0.19, 0.09 and 0.006; over the catalogue 0.36 to 0.43, 0.17 to 0.21, 0.083 to 0.090 and
0.0060 to 0.0077 were measured. Router and other matrices, in 4 or 8 bits, may have longer tails than experts. The bands
need not be tighter: every group is judged by itself, see ``measure``."""


@dataclass(frozen=True)
class Entry:
    """One source tensor, or the stack of one projection of a layer's experts, and what the folder must hold of it.

    ``source``: the tensor's name, with ``{expert}`` for a stack, then without an ending; ``module``: the name in the
    folder without its last part; ``shape``: the source's, [out, in] of one expert; ``dtype`` the source's;
    ``experts``: the source's numbers in the folder's order, where an axis counts experts.
    """

    kind: Literal["same", "matrix", "kv_b", "experts"]
    source: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    coding: Coding | None = None
    experts: tuple[int, ...] | None = None
    halves: tuple[tuple[int, ...], ...] = ()

    @property
    def layer(self) -> int | None:
        found = LAYER.match(self.source)
        return int(found[1]) if found else None

    @property
    def projection(self) -> str | None:
        """w1, w2 or w3, of a stack."""
        return self.source.rsplit(".", 1)[1] if self.kind == "experts" else None

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of everything that the folder holds of it."""
        if self.kind == "same":
            return {self.source: (self.dtype, self.kept(self.shape))}
        if self.kind == "kv_b":
            keys, values = self.modules()
            return coded(keys, self.halves[0], self.coding) | coded(values, self.halves[1], self.coding)
        shape = (len(self.experts), *self.shape) if self.kind == "experts" else self.kept(self.shape)
        return coded(self.module, shape, self.coding)

    def kept(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.experts is None else (len(self.experts), *shape[1:])

    def modules(self) -> tuple[str, ...]:
        """Names of the quantized modules in the folder."""
        if self.kind == "kv_b":
            return tuple(self.module.replace("kv_b_proj", half) for half in ("embed_q", "unembed_out"))
        return () if self.coding is None else (self.module,)


def coded(module: str, shape: tuple[int, ...], coding: Coding) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Codes in 32-bit words, a scale per group, and in affine mode a bias per group."""
    *rows, inputs = shape
    groups = (*rows, inputs // coding.group)
    words = {f"{module}.weight": ("U32", (*rows, inputs * coding.bits // 32))}
    if coding.mode == "mxfp4":
        return words | {f"{module}.scales": ("U8", groups)}
    return words | {f"{module}.scales": ("BF16", groups), f"{module}.biases": ("BF16", groups)}


def entries(
    config: K3Config, expert_format: ExpertFormat, promise: Promise, plan: Mapping[int, Sequence[int]] | None
) -> Iterator[Entry]:
    """Everything that the folder must hold; ``config`` is the source's, ``plan`` layer -> the experts it keeps."""
    text = config.text_config
    for prefixes, rows in tensor_rows(config, expert_format):
        found = LAYER.match(prefixes[0])
        kept = tuple(plan[int(found[1])]) if plan and found and int(found[1]) in plan else None
        if ".experts." in prefixes[0]:
            moe, every = prefixes[0].split("experts.")[0], tuple(range(text.num_experts))
            for name, shape, dtype in expert_rows(text, "dense"):
                part = name.split(".")[0]
                module = f"{moe}switch_mlp.{PROJECTIONS[part]}"
                source = f"{moe}experts.{{expert}}.{part}"
                yield Entry("experts", source, module, shape, dtype, promise.experts, kept or every)
            continue
        for name, shape, dtype in rows:
            yield entry_of(config, Entry("same", prefixes[0] + name, "", shape, dtype), promise, kept)


def entry_of(config: K3Config, entry: Entry, promise: Promise, kept: tuple[int, ...] | None) -> Entry:
    """What becomes of a tensor that is no routed expert's; a group that does not divide its width leaves it."""
    name, module = entry.source, entry.source.removesuffix(".weight")
    if name.endswith(ROUTER_ROWS):
        entry = replace(entry, experts=kept)
    is_matrix = name.startswith("language_model.") and entry.dtype == "BF16" and len(entry.shape) == 2
    if not is_matrix or name.endswith("_res_proj.weight"):
        return entry
    coding = promise.router if name.endswith(ROUTER_ROWS) else promise.rest
    if coding is None:
        return entry
    if name.endswith(".kv_b_proj.weight"):
        text = config.text_config
        heads, rank = text.num_attention_heads, text.kv_lora_rank
        halves = ((heads, rank, text.qk_nope_head_dim), (heads, text.v_head_dim, rank))
        if all(half[-1] % coding.group == 0 for half in halves):
            return replace(entry, kind="kv_b", module=module, coding=coding, halves=halves)
        return entry
    if entry.shape[1] % coding.group:
        return entry
    return replace(entry, kind="matrix", module=module, coding=coding)


def loader_settings(config: K3Config, declared: Sequence[Entry]) -> dict[str, dict[str, object]]:
    """Module path of the stock loaders -> settings: their MoE is ``mlp``, KDA's q, k and v are one ``qkv_proj``."""
    result = {}
    for entry in declared:
        for module in entry.modules():
            path = module.replace(".block_sparse_moe.", ".mlp.")
            if entry.layer is not None and config.text_config.is_kda(entry.layer):
                path = re.sub(r"\.self_attn\.[qkv]_proj$", ".self_attn.qkv_proj", path)
            result[path] = entry.coding.settings()
    return result
