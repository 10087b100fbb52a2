"""Small models with random weights, for the tests of this package."""

from __future__ import annotations

import copy
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reference.config import K3Config, TextConfig
from reference.model import K3Model

MINI = Path(__file__).parents[2] / "fixtures" / "golden" / "mini"
MINI_CONFIG = json.loads((MINI / "config.json").read_text())
STORED_WIDE = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unbounded gate": ({"gate_lower_bound": None}, {}),
    "another bound": ({"gate_lower_bound": -2.0}, {}),
    "low-rank gate": ({"use_full_rank_gate": None}, {}),
    "kernel 1": ({"short_conv_kernel_size": 1}, {}),
    "kernel 6": ({"short_conv_kernel_size": 6}, {}),
    "other KDA heads": ({"num_heads": 6, "head_dim": 4}, {}),
    "only KDA": ({"kda_layers": [1, 2, 3, 4], "full_attn_layers": []}, {}),
    "only MLA": ({"kda_layers": [], "full_attn_layers": [1, 2, 3, 4]}, {}),
    "plain query": ({}, {"q_lora_rank": None}),
    "no output gate": ({}, {"mla_use_output_gate": None}),
    "other MLA widths": ({}, {"qk_nope_head_dim": 5, "qk_rope_head_dim": 3, "v_head_dim": 7}),
    "no latent": ({}, {"routed_expert_hidden_size": None}),
    "no latent norm": ({}, {"latent_moe_use_norm": False}),
    "no attention residuals": ({}, {"attn_res_block_size": None}),
    "block size 1": ({}, {"attn_res_block_size": 1}),
    "block size 100": ({}, {"attn_res_block_size": 100}),
    "expert groups": ({}, {"num_expert_group": 4, "topk_group": 2}),
    "softmax router": ({}, {"moe_router_activation_func": "softmax"}),
    "not renormalized": ({}, {"moe_renormalize": False, "latent_moe_use_norm": False}),
    "scaled routing": ({}, {"routed_scaling_factor": 2.5, "latent_moe_use_norm": False}),
    "one expert": ({}, {"num_experts_per_token": 1}),
    "no linear bound": ({}, {"activation_situ_linear_beta": None}),
    "another beta": ({}, {"activation_situ_beta": 1.0}),
    "silu": ({}, {"hidden_act": "silu"}),
    "no shared experts": ({}, {"num_shared_experts": None}),
    "three dense layers": ({}, {"first_k_dense_replace": 3}),
    "no dense layer": ({}, {"first_k_dense_replace": 0}),
    "every second layer MoE": ({}, {"moe_layer_freq": 2}),
    "another eps": ({}, {"rms_norm_eps": 0.1}),
}
"""Legal settings, Kimi-Linear's among them: changes of (linear_attn_config, text_config). Each changes the function."""


def mini_config(linear: dict[str, Any] | None = None, **text: Any) -> K3Config:
    """The committed mini configuration with some fields of the text tower changed."""
    data = copy.deepcopy(MINI_CONFIG)
    data["text_config"].update(text)
    data["text_config"]["linear_attn_config"].update(linear or {})
    return K3Config.from_dict(data)


def mini_text(linear: dict[str, Any] | None = None, **text: Any) -> TextConfig:
    return mini_config(linear, **text).text_config


def small_config(linear: dict[str, Any] | None = None, **text: Any) -> K3Config:
    """As ``mini_config``, with four layers, the last of them MLA."""
    layers = {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    return mini_config(layers | (linear or {}), **{"num_hidden_layers": 4} | text)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(module: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """``module`` with values that depend on each tensor's name and shape alone."""
    for name, tensor in module.state_dict().items():
        seed = zlib.crc32(name.encode())
        if tensor.dtype == torch.uint8:
            low, high = (122, 126) if name.endswith("scale") else (0, 256)
            value = torch.randint(low, high, tensor.shape, generator=torch.Generator().manual_seed(seed))
        elif tensor.dim() == 1:
            value = 0.3 * randn(*tensor.shape, seed=seed) + ("norm" in name)
        else:
            value = randn(*tensor.shape, seed=seed) / tensor.shape[-1] ** 0.5
        tensor.copy_(value)
    module.to(dtype).eval()
    for name, parameter in module.named_parameters():
        if dtype == torch.bfloat16 and name.endswith(STORED_WIDE):
            parameter.data = parameter.data.float()
    return module


def random_model(config: K3Config, dtype: torch.dtype = torch.float64) -> K3Model:
    return filled(K3Model(config), dtype)


def relative_rms(value: Tensor, truth: Tensor) -> float:
    value, truth = value.double(), truth.double()
    return float((value - truth).square().mean().sqrt() / truth.square().mean().sqrt())
