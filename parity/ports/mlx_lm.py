"""mlx-lm's Kimi K3 (text only) as a port under test."""

from __future__ import annotations

import importlib
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parity.ports.mlx_text import MlxText, as_released, set_dtype
from parity.protocol import Unsupported


class MlxLm(MlxText):
    """Opened by mlx-lm's own loader; float32 casts what it loaded, bfloat16 is what it loads."""

    name, select = "mlx_lm", "_group_expert_select"
    language = cached_property(lambda self: importlib.import_module("mlx_lm.models.kimi_k3"))
    delta = cached_property(lambda self: importlib.import_module("mlx_lm.models.gated_delta"))
    caches = cached_property(lambda self: importlib.import_module("mlx_lm.models.cache"))

    def versions(self) -> dict[str, str]:
        return self.library.versions() | {"mlx-lm": version("mlx-lm")}

    def load(self, folder: Path, config: Any, dtype: str) -> Any:
        from mlx_lm.utils import load_model

        try:
            with as_released(folder) as complete:
                model, _ = load_model(complete)
        except ValueError as refusal:
            if str(refusal).startswith("Unsupported"):
                raise Unsupported(f"mlx-lm refuses this configuration: {refusal}") from None
            raise
        return set_dtype(model, dtype)

    def feed(self, model: Any, input_ids: Any, inputs_embeds: Any, cache: Any) -> None:
        if inputs_embeds is not None:
            raise Unsupported("mlx-lm takes token ids only")
        model(input_ids, cache)


PORT = MlxLm()
