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


def mini_config(linear: dict[str, Any] | None = None, **text: Any) -> K3Config:
    """The committed mini configuration with some fields of the text tower changed."""
    data = copy.deepcopy(MINI_CONFIG)
    data["text_config"].update(text)
    data["text_config"]["linear_attn_config"].update(linear or {})
    return K3Config.from_dict(data)


def mini_text(linear: dict[str, Any] | None = None, **text: Any) -> TextConfig:
    return mini_config(linear, **text).text_config


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(module: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """``module`` with values that depend on each tensor's name and shape alone, without gradients."""
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
    module.to(dtype).requires_grad_(False).eval()
    for name, parameter in module.named_parameters():
        if dtype == torch.bfloat16 and name.endswith(STORED_WIDE):
            parameter.data = parameter.data.float()
    return module


def random_model(config: K3Config, dtype: torch.dtype = torch.float64) -> K3Model:
    return filled(K3Model(config), dtype)


def relative_rms(value: Tensor, truth: Tensor) -> float:
    value, truth = value.double(), truth.double()
    return float((value - truth).square().mean().sqrt() / truth.square().mean().sqrt())
