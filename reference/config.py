"""The configuration of a K3 checkpoint, read from its ``config.json`` (K3.md §1, §16).

Every field that the architecture needs is required: absent or null, it is an error that names it, never a silent
default. The fields with a default here are exactly those that §16 lists as "absent means off", and four names of the
vision tower that have one legal value. Fields that no equation uses are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reference.config_rules import as_input_error, contradiction, text_contradictions
from reference.errors import InputError

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]

MXFP4_GROUP = 32


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class LinearAttnConfig(_Section):
    """Settings of Kimi Delta Attention (K3.md §1, §4). The layer lists are 1-based."""

    num_heads: Count
    head_dim: Count
    short_conv_kernel_size: Count
    kda_layers: tuple[int, ...] = Field(strict=False)
    full_attn_layers: tuple[int, ...] = Field(strict=False)
    gate_lower_bound: Annotated[float, Field(lt=0, allow_inf_nan=False)] | None = None
    use_full_rank_gate: bool | None = None

    @property
    def width(self) -> int:
        """H·D, the width of q, k, v and of the output gate."""
        return self.num_heads * self.head_dim

    @property
    def a_log_length(self) -> int:
        """Length of the stored ``A_log``: one value per head, zero-padded to the head size (§2, §16).

        With more heads than the head size there is nothing to pad and every head keeps its value.
        """
        return max(self.head_dim, self.num_heads)


class TextConfig(_Section):
    """Settings of the text tower (K3.md §1)."""

    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    intermediate_size: Count
    rms_norm_eps: Positive
    hidden_act: Literal["situ", "silu"]
    activation_situ_beta: Positive | None = None
    activation_situ_linear_beta: Positive | None = None
    attn_res_block_size: Count | None = None
    tie_word_embeddings: Literal[False]

    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    mla_use_nope: Literal[True]
    mla_use_output_gate: bool | None = None

    num_experts: Count
    num_experts_per_token: Count
    num_shared_experts: Annotated[int, Field(ge=0)] | None = None
    moe_intermediate_size: Count
    routed_expert_hidden_size: Count | None = None
    latent_moe_use_norm: bool | None = None
    moe_renormalize: bool
    moe_router_activation_func: Literal["sigmoid", "softmax"]
    routed_scaling_factor: Positive
    first_k_dense_replace: Annotated[int, Field(ge=0)]
    moe_layer_freq: Count
    num_expert_group: Count | None = None
    topk_group: Count | None = None

    bos_token_id: TokenId
    eos_token_id: TokenId
    pad_token_id: TokenId
    linear_attn_config: LinearAttnConfig

    @property
    def expert_groups(self) -> int:
        return self.num_expert_group or 1

    @property
    def chosen_groups(self) -> int:
        """How many groups may take part; without ``topk_group`` all of them."""
        return self.topk_group or self.expert_groups

    @property
    def latent_size(self) -> int:
        """Width of the routed experts' input and output: the latent, or the hidden size without a latent MoE."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def has_latent_norm(self) -> bool:
        return bool(self.routed_expert_hidden_size and self.latent_moe_use_norm)

    @property
    def shared_width(self) -> int:
        """Width of the one MLP that is all shared experts together (§7); 0 means none."""
        return (self.num_shared_experts or 0) * self.moe_intermediate_size

    @property
    def query_head_dim(self) -> int:
        """Size of one MLA query or key head, the unrotated "rope" part included."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_kda(self, layer: int) -> bool:
        """Whether the 0-based ``layer`` is a KDA layer; the configured lists count from 1."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether the 0-based ``layer`` has routed experts (§16)."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @model_validator(mode="after")
    def _coherent(self) -> TextConfig:
        for field, expected, found in text_contradictions(self):
            raise contradiction(field, expected, found)
        return self


class VisionConfig(_Section):
    """Settings of the vision tower and the projector (K3.md §1, §9)."""

    patch_size: Count
    vt_num_hidden_layers: Count
    vt_hidden_size: Count
    qkv_hidden_size: Count
    vt_num_attention_heads: Count
    vt_intermediate_size: Count
    init_pos_emb_height: Count
    init_pos_emb_width: Count
    init_pos_emb_time: Count
    pos_emb_interpolation_mode: Literal["bilinear"]
    norm_type: Literal["rmsnorm"]
    attn_bias: Literal[False]
    linear_bias: Literal[False]
    patch_embed_proj_bias: Literal[False]
    merge_kernel_size: tuple[Count, Count] = Field(strict=False)
    merge_type: Literal["sd2_tpool"]
    mm_hidden_size: Count
    mm_projector_type: Literal["patchmergerv2"]
    projector_ln_eps: Positive
    text_hidden_size: Count
    activation_func: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    projector_hidden_act: Literal["gelu"] = "gelu"
    mlp_type: Literal["mlp2"] = "mlp2"
    pos_emb_type: Literal["divided_fixed"] = "divided_fixed"

    @property
    def head_dim(self) -> int:
        return self.qkv_hidden_size // self.vt_num_attention_heads

    @property
    def merged_width(self) -> int:
        """Features of one merged token: the merge window's patches side by side."""
        return self.merge_kernel_size[0] * self.merge_kernel_size[1] * self.mm_hidden_size

    @model_validator(mode="after")
    def _coherent(self) -> VisionConfig:
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            expected = "a multiple of 4·vt_num_attention_heads, since 2-D rope turns pairs on two axes"
            raise contradiction("qkv_hidden_size", expected, self.qkv_hidden_size)
        if self.vt_hidden_size % 2:
            expected = "an even number, since the time embedding is [sin | cos]"
            raise contradiction("vt_hidden_size", expected, self.vt_hidden_size)
        if self.mm_hidden_size != self.vt_hidden_size:
            raise contradiction("mm_hidden_size", f"vt_hidden_size ({self.vt_hidden_size})", self.mm_hidden_size)
        return self


class K3Config(_Section):
    """The whole ``config.json``: text tower, vision tower, and the ids that join the two."""

    text_config: TextConfig
    vision_config: VisionConfig
    media_placeholder_token_id: TokenId
    pad_token_id: TokenId

    @model_validator(mode="after")
    def _coherent(self) -> K3Config:
        hidden = self.text_config.hidden_size
        if self.vision_config.text_hidden_size != hidden:
            found = self.vision_config.text_hidden_size
            raise contradiction("vision_config.text_hidden_size", f"text_config.hidden_size ({hidden})", found)
        vocab = self.text_config.vocab_size
        for field in ("media_placeholder_token_id", "pad_token_id"):
            if getattr(self, field) >= vocab:
                raise contradiction(field, f"an id below vocab_size ({vocab})", getattr(self, field))
        return self

    @classmethod
    def from_dict(cls, data: Any, source: object = "config") -> K3Config:
        """Validate ``data``; raises InputError naming ``source`` and the first field that is wrong."""
        if not isinstance(data, dict):
            raise InputError(
                source, "top level", "a JSON object", type(data).__name__, "give the checkpoint's config.json"
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise as_input_error(error, data, source) from None

    @classmethod
    def from_file(cls, path: str | Path) -> K3Config:
        """Read ``config.json`` (or the folder that holds it); raises InputError naming file and field."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        return cls.from_dict(read_json(path), path)


def read_json(path: Path) -> Any:
    """Parse a JSON file; raises InputError naming the file if it is missing, unreadable or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(path, "file", "a JSON file", "nothing there", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, "file", "readable UTF-8 text", type(error).__name__, "check the file") from None
    except (ValueError, RecursionError) as error:
        raise InputError(path, "content", "JSON", error, "fetch the file again") from None
