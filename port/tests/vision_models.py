"""Small vision modules with known weights, for the tests of this package."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from port.weights import to_mlx
from reference.config import K3Config
from reference.shards import Shards

MINI = Path(__file__).parents[2] / "fixtures" / "golden" / "mini"
CONFIG = K3Config.from_file(MINI).vision_config
INPUTS = mx.load(str(MINI / "inputs.safetensors"))


def randn(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape), mx.float32)


def values(x: mx.array | np.ndarray) -> np.ndarray:
    """Any array as numpy float64."""
    return np.array(x.astype(mx.float32) if isinstance(x, mx.array) else x).astype(np.float64)


def relative_rms(value: mx.array | np.ndarray, truth: mx.array | np.ndarray) -> float:
    value, truth = values(value), values(truth)
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


def share_differing(value: mx.array, truth: mx.array) -> float:
    return float((value != truth).mean())


def filled(module: nn.Module) -> Any:
    """``module`` with values that depend on each tensor's name and shape alone."""
    state = []
    for name, tensor in tree_flatten(module.parameters()):
        value = randn(*tensor.shape, seed=zlib.crc32(name.encode()))
        state.append((name, 1 + 0.3 * value if tensor.ndim == 1 else value / tensor.shape[-1] ** 0.5))
    module.update(tree_unflatten(state))
    return module


def loaded(module: nn.Module, prefix: str, dtype: str) -> Any:
    """``module`` with the committed checkpoint's tensors below ``prefix``."""
    shards = Shards(MINI)
    names = [name for name, _ in tree_flatten(module.parameters())]
    module.load_weights([(name, to_mlx(shards.read(prefix + name)).astype(getattr(mx, dtype))) for name in names])
    return module


def golden(dtype: str, run: str = "vision/") -> dict[str, mx.array]:
    """What the authors' code computed in ``run``."""
    trace = mx.load(str(MINI / f"trace-{dtype}.safetensors"))
    return {name.removeprefix(run): value for name, value in trace.items() if name.startswith(run)}
