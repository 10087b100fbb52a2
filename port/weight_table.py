"""Which checkpoint names make which parameters of this port, and how: a declared table (K3.md §2).

A parameter has the name of its source, except that the experts of a layer are stacked: the sources
``experts.{expert}.w1.weight`` for all experts make the parameter ``experts.w1.weight``. Every source is used once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx

from port.mxfp4 import words
from reference.checkpoint import ExpertFormat
from reference.config import K3Config, TextConfig

Transform = Callable[[Sequence[mx.array], mx.Dtype], mx.array]
"""(the tensors of all sources as stored, the model's dtype) -> the parameter."""


def model_dtype(arrays: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
    """One tensor, stored in bfloat16, in the dtype of the model."""
    return arrays[0].astype(dtype)


def float32(arrays: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
    """One tensor that is float32 in every model: convolutions, A_log, dt_bias, o_norm, the correction bias."""
    return arrays[0].astype(mx.float32)


def stacked(arrays: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
    """One matrix per expert in the dtype of the model: [E, out, in]."""
    return mx.stack(arrays).astype(dtype)


def stacked_words(arrays: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
    """The experts' packed codes, byte for byte, as 32-bit words: uint32 [E, out, in/8]."""
    return words(mx.stack(arrays))


def stacked_bytes(arrays: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
    """The experts' scale bytes as they are: uint8 [E, out, in/32]."""
    return mx.stack(arrays)


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
LOW_RANK_GATE: dict[str, Transform] = {
    "self_attn.g_a_proj.weight": model_dtype,
    "self_attn.g_b_proj.weight": model_dtype,
}
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


VISION: dict[str, Transform] = {
    "vision_tower.patch_embed.proj.weight": model_dtype,
    "vision_tower.patch_embed.pos_emb.weight": model_dtype,
    "vision_tower.encoder.final_layernorm.weight": model_dtype,
    "mm_projector.proj.0.weight": model_dtype,
    "mm_projector.proj.2.weight": model_dtype,
    "mm_projector.post_norm.weight": model_dtype,
}
VISION_BLOCK: dict[str, Transform] = {
    "norm0.weight": model_dtype,
    "norm1.weight": model_dtype,
    "wqkv.weight": model_dtype,
    "wo.weight": model_dtype,
    "mlp.fc0.weight": model_dtype,
    "mlp.fc1.weight": model_dtype,
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


def sections(config: K3Config, expert_format: ExpertFormat) -> Iterator[tuple[str, Mapping[str, Transform]]]:
    """(prefix of the names, part of the table) for the whole model."""
    text = config.text_config
    yield "language_model.", ROOT
    if text.attn_res_block_size:
        yield "language_model.", ROOT_ATTN_RES
    for layer in range(text.num_hidden_layers):
        for section in layer_sections(text, layer, expert_format):
            yield f"language_model.model.layers.{layer}.", section
    yield "", VISION
    for block in range(config.vision_config.vt_num_hidden_layers):
        yield f"vision_tower.encoder.blocks.{block}.", VISION_BLOCK


def table(config: K3Config, expert_format: ExpertFormat) -> list[Entry]:
    """Every parameter of a model of ``config`` with its sources and transform."""
    experts = range(config.text_config.num_experts)
    entries = []
    for prefix, section in sections(config, expert_format):
        for name, transform in section.items():
            numbers = experts if "{expert}" in name else range(1)
            sources = tuple(prefix + name.format(expert=expert) for expert in numbers)
            entries.append(Entry(sources, prefix + name.replace(".{expert}", ""), transform))
    return entries
