"""Small models with random weights, for the tests of this package."""

from __future__ import annotations

import copy
import json
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from port.cache import DTYPES
from port.model import K3Model
from reference.config import K3Config, TextConfig

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


def randn(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def filled(module: nn.Module, dtype: str = "float32") -> Any:
    """``module`` with values that depend on each parameter's name and shape alone."""
    values = {}
    for name, old in tree_flatten(module.parameters()):
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if old.dtype == mx.uint8:
            values[name] = mx.array(rng.integers(122, 126, old.shape, dtype=np.uint8))
        elif old.dtype == mx.uint32:
            values[name] = mx.array(rng.integers(0, 2**32, old.shape, dtype=np.uint32))
        else:
            matrix = old.ndim > 1 and not name.endswith("conv1d.weight")
            value = rng.standard_normal(old.shape) * (old.shape[-1] ** -0.5 if matrix else 0.3) + ("norm" in name)
            stored = mx.float32 if name.endswith(STORED_WIDE) else DTYPES[dtype]
            values[name] = mx.array(value.astype(np.float32)).astype(stored)
    module.update(tree_unflatten(list(values.items())))
    return module


def random_model(config: K3Config, expert_format: str = "mxfp4", dtype: str = "float32") -> K3Model:
    return filled(K3Model(config, expert_format), dtype)


def f64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def relative_rms(value: mx.array | np.ndarray, truth: mx.array | np.ndarray) -> float:
    value, truth = (f64(x) if isinstance(x, mx.array) else np.asarray(x, np.float64) for x in (value, truth))
    return float(np.sqrt(np.square(value - truth).mean() / np.square(truth).mean()))


def same_bits(left: mx.array, right: mx.array) -> bool:
    return left.dtype == right.dtype and bool(mx.array_equal(left, right, equal_nan=True).item())
