"""The root of the module tree; attribute paths are checkpoint paths (K3.md §2)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.cache import Cache
from port.text import LanguageModel
from reference.checkpoint import ExpertFormat
from reference.config import K3Config
from reference.taps import tap


class K3Model(nn.Module):
    """A whole K3 model; its parameters are NaN until weights are loaded."""

    def __init__(self, config: K3Config, expert_format: ExpertFormat) -> None:
        super().__init__()
        self.config, self.expert_format = config, expert_format
        self.language_model = LanguageModel(config.text_config, expert_format)

    def __call__(
        self,
        input_ids: mx.array | None = None,
        inputs_embeds: mx.array | None = None,
        attention_mask: mx.array | None = None,
        cache: Cache | None = None,
    ) -> mx.array:
        """Logits [B, T, vocab]; ``attention_mask`` [B, T] is 1 (or True) at real new tokens. See ``LanguageModel``."""
        token_mask = None if attention_mask is None else attention_mask.astype(mx.bool_)
        return tap(self, "logits", self.language_model(input_ids, inputs_embeds, token_mask, cache))
