"""What the tests of tower, projector and merge share: the committed case's configuration, inputs, weights and trace."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from port.tests.models import MINI
from port.weights import to_mlx
from reference.config import K3Config
from reference.shards import Shards

CONFIG = K3Config.from_file(MINI).vision_config
INPUTS = mx.load(str(MINI / "inputs.safetensors"))


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


def share_differing(value: mx.array, truth: mx.array) -> float:
    return float((value != truth).mean())
