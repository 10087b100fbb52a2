"""Every tensor of a checkpoint, from the configuration alone: name, shape, dtype (K3.md §2, §16).

The tables below are K3.md §2 made executable. They hold no numbers of one model: each shape is an expression over the
configuration, so a mini checkpoint and the released one (497,220 tensors) come from the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from math import prod
from typing import Literal, NamedTuple

from reference.config import MXFP4_GROUP, K3Config, TextConfig, VisionConfig
from reference.errors import InputError

ExpertFormat = Literal["mxfp4", "dense"]

TEXT, LAYERS = "language_model.", "language_model.model.layers."
BYTES = {"BF16": 2, "F32": 4, "U8": 1}


class TensorSpec(NamedTuple):
    """One tensor of the checkpoint; ``dtype`` is the safetensors name: BF16, F32 or U8."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


Row = tuple[str, tuple[int, ...], str]


def attn_res_rows(text: TextConfig, prefixes: Iterable[str]) -> Iterator[Row]:
    if text.attn_res_block_size:
        for prefix in prefixes:
            yield f"{prefix}_res_norm.weight", (text.hidden_size,), "BF16"
            yield f"{prefix}_res_proj.weight", (1, text.hidden_size), "BF16"


def kda_rows(text: TextConfig) -> Iterator[Row]:
    linear, hidden = text.linear_attn_config, text.hidden_size
    heads, head_dim, width = linear.num_heads, linear.head_dim, linear.width
    for part in "qkv":
        yield f"self_attn.{part}_proj.weight", (width, hidden), "BF16"
        yield f"self_attn.{part}_conv1d.weight", (width, 1, linear.short_conv_kernel_size), "F32"
    yield "self_attn.f_a_proj.weight", (head_dim, hidden), "BF16"
    yield "self_attn.f_b_proj.weight", (width, head_dim), "BF16"
    yield "self_attn.b_proj.weight", (heads, hidden), "BF16"
    yield "self_attn.A_log", (linear.a_log_length,), "F32"
    yield "self_attn.dt_bias", (width,), "F32"
    if linear.use_full_rank_gate:
        yield "self_attn.g_proj.weight", (width, hidden), "BF16"
    else:
        yield "self_attn.g_a_proj.weight", (head_dim, hidden), "BF16"
        yield "self_attn.g_b_proj.weight", (width, head_dim), "BF16"
    yield "self_attn.o_norm.weight", (head_dim,), "F32"
    yield "self_attn.o_proj.weight", (hidden, width), "BF16"


def mla_rows(text: TextConfig) -> Iterator[Row]:
    hidden, heads, rank = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
    query_width, value_width = heads * text.query_head_dim, heads * text.v_head_dim
    if text.q_lora_rank:
        yield "self_attn.q_a_proj.weight", (text.q_lora_rank, hidden), "BF16"
        yield "self_attn.q_a_layernorm.weight", (text.q_lora_rank,), "BF16"
        yield "self_attn.q_b_proj.weight", (query_width, text.q_lora_rank), "BF16"
    else:
        yield "self_attn.q_proj.weight", (query_width, hidden), "BF16"
    yield "self_attn.kv_a_proj_with_mqa.weight", (rank + text.qk_rope_head_dim, hidden), "BF16"
    yield "self_attn.kv_a_layernorm.weight", (rank,), "BF16"
    yield "self_attn.kv_b_proj.weight", (heads * (text.qk_nope_head_dim + text.v_head_dim), rank), "BF16"
    if text.mla_use_output_gate:
        yield "self_attn.g_proj.weight", (value_width, hidden), "BF16"
    yield "self_attn.o_proj.weight", (hidden, value_width), "BF16"


def mlp_rows(prefix: str, hidden: int, width: int) -> Iterator[Row]:
    yield f"{prefix}.gate_proj.weight", (width, hidden), "BF16"
    yield f"{prefix}.up_proj.weight", (width, hidden), "BF16"
    yield f"{prefix}.down_proj.weight", (hidden, width), "BF16"


def expert_rows(text: TextConfig, expert_format: ExpertFormat) -> list[Row]:
    """The rows of one routed expert, names relative to it; w1 is the gate, w3 the up, w2 the down projection."""
    latent, width = text.latent_size, text.moe_intermediate_size
    rows: list[Row] = []
    for part, (out, inner) in {"w1": (width, latent), "w2": (latent, width), "w3": (width, latent)}.items():
        if expert_format == "mxfp4":
            rows.append((f"{part}.weight_packed", (out, inner // 2), "U8"))
            rows.append((f"{part}.weight_scale", (out, inner // MXFP4_GROUP), "U8"))
        else:
            rows.append((f"{part}.weight", (out, inner), "BF16"))
    return rows


def moe_rows(text: TextConfig) -> Iterator[Row]:
    """Router, latent projections and shared experts; the routed experts are ``expert_rows`` each."""
    moe, hidden = "block_sparse_moe", text.hidden_size
    yield f"{moe}.gate.weight", (text.num_experts, hidden), "BF16"
    yield f"{moe}.gate.e_score_correction_bias", (text.num_experts,), "F32"
    if text.routed_expert_hidden_size:
        yield f"{moe}.routed_expert_down_proj.weight", (text.latent_size, hidden), "BF16"
        yield f"{moe}.routed_expert_up_proj.weight", (hidden, text.latent_size), "BF16"
    if text.has_latent_norm:
        yield f"{moe}.routed_expert_norm.weight", (text.latent_size,), "BF16"
    if text.shared_width:
        yield from mlp_rows(f"{moe}.shared_experts", hidden, text.shared_width)


def layer_rows(text: TextConfig, layer: int) -> Iterator[Row]:
    """The rows of the 0-based ``layer`` without its routed experts, names relative to the layer."""
    yield "input_layernorm.weight", (text.hidden_size,), "BF16"
    yield "post_attention_layernorm.weight", (text.hidden_size,), "BF16"
    yield from attn_res_rows(text, ("self_attention", "mlp"))
    yield from kda_rows(text) if text.is_kda(layer) else mla_rows(text)
    if text.is_moe(layer):
        yield from moe_rows(text)
    else:
        yield from mlp_rows("mlp", text.hidden_size, text.intermediate_size)


def text_top_rows(text: TextConfig) -> Iterator[Row]:
    yield "lm_head.weight", (text.vocab_size, text.hidden_size), "BF16"
    yield "model.embed_tokens.weight", (text.vocab_size, text.hidden_size), "BF16"
    yield "model.norm.weight", (text.hidden_size,), "BF16"
    yield from attn_res_rows(text, ("model.output_attn",))


def vision_rows(vision: VisionConfig) -> Iterator[Row]:
    dim, qkv, inner, patch = (
        vision.vt_hidden_size,
        vision.qkv_hidden_size,
        vision.vt_intermediate_size,
        vision.patch_size,
    )
    yield "vision_tower.patch_embed.proj.weight", (dim, 3, patch, patch), "BF16"
    yield (
        "vision_tower.patch_embed.pos_emb.weight",
        (vision.init_pos_emb_height, vision.init_pos_emb_width, dim),
        "BF16",
    )
    for block in range(vision.vt_num_hidden_layers):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield prefix + "norm0.weight", (dim,), "BF16"
        yield prefix + "norm1.weight", (dim,), "BF16"
        yield prefix + "wqkv.weight", (3 * qkv, dim), "BF16"
        yield prefix + "wo.weight", (dim, qkv), "BF16"
        yield prefix + "mlp.fc0.weight", (inner, dim), "BF16"
        yield prefix + "mlp.fc1.weight", (dim, inner), "BF16"
    yield "vision_tower.encoder.final_layernorm.weight", (dim,), "BF16"
    merged = vision.merged_width
    yield "mm_projector.proj.0.weight", (merged, merged), "BF16"
    yield "mm_projector.proj.2.weight", (vision.text_hidden_size, merged), "BF16"
    yield "mm_projector.post_norm.weight", (vision.text_hidden_size,), "BF16"


def tensor_specs(
    config: K3Config, expert_format: ExpertFormat = "mxfp4", source: object = "config"
) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint, in a fixed order.

    ``expert_format`` is "mxfp4" as released, or "dense" for bf16 experts. Raises InputError where MXFP4 cannot hold
    the experts, because a row's inputs do not fill whole groups of 32.
    """
    check_mxfp4_widths(config.text_config, expert_format, source)
    for prefixes, rows in tensor_rows(config, expert_format):
        for prefix in prefixes:
            for name, shape, dtype in rows:
                yield TensorSpec(prefix + name, shape, dtype)


def tensor_rows(config: K3Config, expert_format: ExpertFormat) -> Iterator[tuple[list[str], list[Row]]]:
    """(prefixes, rows) of every part of the checkpoint: under each of the prefixes stand the same rows."""
    text = config.text_config
    yield [TEXT], list(text_top_rows(text))
    experts = expert_rows(text, expert_format)
    for layer in range(text.num_hidden_layers):
        prefix = f"{LAYERS}{layer}."
        yield [prefix], list(layer_rows(text, layer))
        if text.is_moe(layer):
            yield [f"{prefix}block_sparse_moe.experts.{expert}." for expert in range(text.num_experts)], experts
    yield [""], list(vision_rows(config.vision_config))


def expert_format_of(names: Iterable[str]) -> ExpertFormat:
    """How a checkpoint with these tensor names stores its routed experts; "mxfp4" where it has none."""
    for name in names:
        if ".block_sparse_moe.experts." in name:
            return "dense" if name.endswith(".weight") else "mxfp4"
    return "mxfp4"


def names_digest(names: Iterable[str]) -> str:
    """sha256 of the sorted names joined by newlines (§2)."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def logical_parameters(config: K3Config) -> int:
    """Weights that the checkpoint means: two per packed byte, no scales (§2)."""
    return sum(prod(spec.shape) for spec in tensor_specs(config, "dense"))


def check_mxfp4_widths(text: TextConfig, expert_format: ExpertFormat, source: object) -> None:
    """Raise InputError where MXFP4 cannot hold the experts, whose rows must be whole groups of 32 inputs."""
    if expert_format != "mxfp4" or not any(text.is_moe(layer) for layer in range(text.num_hidden_layers)):
        return
    latent = "routed_expert_hidden_size" if text.routed_expert_hidden_size else "hidden_size"
    for field, width in ((latent, text.latent_size), ("moe_intermediate_size", text.moe_intermediate_size)):
        if width % MXFP4_GROUP:
            expected = f"a multiple of {MXFP4_GROUP}, the group of an MXFP4 scale"
            raise InputError(source, f"text_config.{field}", expected, width, "change the width or store dense experts")
