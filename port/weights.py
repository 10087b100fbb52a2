"""From checkpoint names to this port's parameters, by a declared table (K3.md §2).

A parameter has the name of its source, except that the experts of a layer are stacked: the sources
``experts.{expert}.w1.weight`` for all experts make the parameter ``experts.w1.weight``. Every source is used once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from port import mxfp4
from port.linear import DTYPES
from port.model import K3Model
from reference.checkpoint import ExpertFormat
from reference.config import K3Config, TextConfig
from reference.errors import InputError
from reference.shards import Shards
from reference.taps import name_modules

Transform = Callable[[Sequence[np.ndarray], mx.Dtype], mx.array]
"""(the arrays of all sources, the model's dtype) -> the parameter."""

ANOTHER_PART = ("vision_tower.", "mm_projector.")
"""Names with these prefixes belong to parts of a checkpoint that the model of this file does not have."""


def to_mlx(array: np.ndarray) -> mx.array:
    """The same values as an MLX array; bfloat16 goes through its bits, because MLX does not take ml_dtypes' type."""
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def model_dtype(arrays: Sequence[np.ndarray], dtype: mx.Dtype) -> mx.array:
    """One tensor, stored in bfloat16, in the dtype of the model."""
    return to_mlx(arrays[0]).astype(dtype)


def float32(arrays: Sequence[np.ndarray], dtype: mx.Dtype) -> mx.array:
    """One tensor that is float32 in every model: convolutions, A_log, dt_bias, o_norm, the correction bias."""
    return to_mlx(arrays[0]).astype(mx.float32)


def stacked(arrays: Sequence[np.ndarray], dtype: mx.Dtype) -> mx.array:
    """One matrix per expert in the dtype of the model: [E, out, in]."""
    return to_mlx(np.stack(arrays)).astype(dtype)


def stacked_words(arrays: Sequence[np.ndarray], dtype: mx.Dtype) -> mx.array:
    """The experts' packed codes, byte for byte, as 32-bit words: uint32 [E, out, in/8]."""
    return to_mlx(mxfp4.words(np.stack(arrays)))


def stacked_bytes(arrays: Sequence[np.ndarray], dtype: mx.Dtype) -> mx.array:
    """The experts' scale bytes as they are: uint8 [E, out, in/32]."""
    return to_mlx(np.stack(arrays))


ROOT: dict[str, Transform] = {
    "lm_head.weight": model_dtype,
    "model.embed_tokens.weight": model_dtype,
    "model.norm.weight": model_dtype,
}
ROOT_ATTN_RES: dict[str, Transform] = {
    "model.output_attn_res_norm.weight": model_dtype,
    "model.output_attn_res_proj.weight": model_dtype,
}
LAYER: dict[str, Transform] = {
    "input_layernorm.weight": model_dtype,
    "post_attention_layernorm.weight": model_dtype,
}
ATTN_RES: dict[str, Transform] = {
    "self_attention_res_norm.weight": model_dtype,
    "self_attention_res_proj.weight": model_dtype,
    "mlp_res_norm.weight": model_dtype,
    "mlp_res_proj.weight": model_dtype,
}
KDA: dict[str, Transform] = {
    "self_attn.q_proj.weight": model_dtype,
    "self_attn.k_proj.weight": model_dtype,
    "self_attn.v_proj.weight": model_dtype,
    "self_attn.q_conv1d.weight": float32,
    "self_attn.k_conv1d.weight": float32,
    "self_attn.v_conv1d.weight": float32,
    "self_attn.f_a_proj.weight": model_dtype,
    "self_attn.f_b_proj.weight": model_dtype,
    "self_attn.b_proj.weight": model_dtype,
    "self_attn.A_log": float32,
    "self_attn.dt_bias": float32,
    "self_attn.o_norm.weight": float32,
    "self_attn.o_proj.weight": model_dtype,
}
FULL_RANK_GATE: dict[str, Transform] = {"self_attn.g_proj.weight": model_dtype}
LOW_RANK_GATE: dict[str, Transform] = {"self_attn.g_a_proj.weight": model_dtype, "self_attn.g_b_proj.weight": model_dtype}
MLA: dict[str, Transform] = {
    "self_attn.kv_a_proj_with_mqa.weight": model_dtype,
    "self_attn.kv_a_layernorm.weight": model_dtype,
    "self_attn.kv_b_proj.weight": model_dtype,
    "self_attn.o_proj.weight": model_dtype,
}
LOW_RANK_QUERY: dict[str, Transform] = {
    "self_attn.q_a_proj.weight": model_dtype,
    "self_attn.q_a_layernorm.weight": model_dtype,
    "self_attn.q_b_proj.weight": model_dtype,
}
FULL_RANK_QUERY: dict[str, Transform] = {"self_attn.q_proj.weight": model_dtype}
MLA_GATE: dict[str, Transform] = {"self_attn.g_proj.weight": model_dtype}
DENSE_MLP: dict[str, Transform] = {
    "mlp.gate_proj.weight": model_dtype,
    "mlp.up_proj.weight": model_dtype,
    "mlp.down_proj.weight": model_dtype,
}
MOE: dict[str, Transform] = {
    "block_sparse_moe.gate.weight": model_dtype,
    "block_sparse_moe.gate.e_score_correction_bias": float32,
}
LATENT: dict[str, Transform] = {
    "block_sparse_moe.routed_expert_down_proj.weight": model_dtype,
    "block_sparse_moe.routed_expert_up_proj.weight": model_dtype,
}
LATENT_NORM: dict[str, Transform] = {"block_sparse_moe.routed_expert_norm.weight": model_dtype}
SHARED: dict[str, Transform] = {
    "block_sparse_moe.shared_experts.gate_proj.weight": model_dtype,
    "block_sparse_moe.shared_experts.up_proj.weight": model_dtype,
    "block_sparse_moe.shared_experts.down_proj.weight": model_dtype,
}
EXPERTS: dict[str, dict[str, Transform]] = {
    "mxfp4": {
        f"block_sparse_moe.experts.{{expert}}.{part}.{name}": transform
        for part in ("w1", "w2", "w3")
        for name, transform in {"weight_packed": stacked_words, "weight_scale": stacked_bytes}.items()
    },
    "dense": {f"block_sparse_moe.experts.{{expert}}.{part}.weight": stacked for part in ("w1", "w2", "w3")},
}


class Entry(NamedTuple):
    """One row of the table: the checkpoint names it reads, the parameter they make, and how."""

    sources: tuple[str, ...]
    parameter: str
    transform: Transform


def layer_sections(text: TextConfig, layer: int, expert_format: ExpertFormat) -> Iterator[Mapping[str, Transform]]:
    """The parts of the table that the 0-based ``layer`` needs."""
    yield LAYER
    if text.attn_res_block_size:
        yield ATTN_RES
    if text.is_kda(layer):
        yield KDA
        yield FULL_RANK_GATE if text.linear_attn_config.use_full_rank_gate else LOW_RANK_GATE
    else:
        yield MLA
        yield LOW_RANK_QUERY if text.q_lora_rank else FULL_RANK_QUERY
        if text.mla_use_output_gate:
            yield MLA_GATE
    if not text.is_moe(layer):
        yield DENSE_MLP
        return
    yield MOE
    if text.routed_expert_hidden_size:
        yield LATENT
    if text.has_latent_norm:
        yield LATENT_NORM
    if text.shared_width:
        yield SHARED
    yield EXPERTS[expert_format]


def sections(text: TextConfig, expert_format: ExpertFormat) -> Iterator[tuple[str, Mapping[str, Transform]]]:
    """(prefix of the names, part of the table) for the whole model."""
    yield "language_model.", ROOT
    if text.attn_res_block_size:
        yield "language_model.", ROOT_ATTN_RES
    for layer in range(text.num_hidden_layers):
        for section in layer_sections(text, layer, expert_format):
            yield f"language_model.model.layers.{layer}.", section


def table(config: K3Config, expert_format: ExpertFormat) -> list[Entry]:
    """Every parameter of a model of ``config`` with its sources and transform."""
    experts = range(config.text_config.num_experts)
    entries = []
    for prefix, section in sections(config.text_config, expert_format):
        for name, transform in section.items():
            numbers = experts if "{expert}" in name else range(1)
            sources = tuple(prefix + name.format(expert=expert) for expert in numbers)
            entries.append(Entry(sources, prefix + name.replace(".{expert}", ""), transform))
    return entries


def expected_names(config: K3Config, expert_format: ExpertFormat) -> list[str]:
    """The checkpoint names that a model of this configuration reads."""
    return [source for entry in table(config, expert_format) for source in entry.sources]


def check_sources(wanted: Sequence[str], present: Sequence[str], where: object) -> None:
    """InputError unless the table reads exactly the tensors that are ``present``, each once."""
    present = [name for name in present if not name.startswith(ANOTHER_PART)]
    for name in sorted(set(wanted) - set(present)):
        raise InputError(where, name, "a tensor that the model needs", "nothing", "fetch the whole checkpoint")
    for name in sorted(set(present) - set(wanted)):
        raise InputError(where, name, "only tensors that the model reads", "this one too", "correct config.json")
    if len(set(wanted)) != len(wanted):
        twice = next(name for name in wanted if wanted.count(name) > 1)
        raise ValueError(f"the table reads {twice} twice")


class CheckpointReader:
    """A checkpoint folder whose tensors come out as MLX parameters; ``shards`` has checked its files."""

    def __init__(self, folder: str | Path) -> None:
        self.shards = Shards(folder)

    def read(self, entry: Entry, dtype: mx.Dtype) -> mx.array:
        """The parameter of ``entry`` for a model of ``dtype``; every conversion is exact.

        Raises InputError naming file and tensor if a value is not finite.
        """
        return entry.transform([self.shards.read(name) for name in entry.sources], dtype)


def set_parameters(model: K3Model, parameters: Mapping[str, mx.array]) -> None:
    """Give ``model`` all its parameters; ValueError unless they are exactly those it has, in their shapes."""
    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    given = {name: array.shape for name, array in parameters.items()}
    if shapes != given:
        wrong = sorted(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
        raise ValueError(f"{wrong[0]}: the model has shape {shapes.get(wrong[0])}, the table {given.get(wrong[0])}")
    model.update(tree_unflatten(list(parameters.items())))


def load_model(folder: str | Path, dtype: str = "float32") -> K3Model:
    """The model of a checkpoint folder, in eval mode, its modules named for taps; ``dtype`` "float32" or "bfloat16".

    Raises InputError, in one line naming file and tensor, for everything that is wrong with the folder.
    """
    if dtype not in DTYPES:
        raise InputError("load_model", "dtype", " or ".join(DTYPES), repr(dtype), "choose one of them")
    reader = CheckpointReader(folder)
    config, expert_format = reader.shards.config, reader.shards.expert_format
    entries = table(config, expert_format)
    check_sources([source for entry in entries for source in entry.sources], reader.shards.names, folder)
    model = K3Model(config, expert_format)
    set_parameters(model, {entry.parameter: reader.read(entry, DTYPES[dtype]) for entry in entries})
    model.eval()
    name_modules(model)
    return model
