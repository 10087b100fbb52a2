"""The root of the model: what the checkpoint's names start from (K3.md §2)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.cache import Cache
from port.padding import as_token_mask
from port.text import LanguageModel
from reference.checkpoint import ExpertFormat
from reference.config import K3Config
from reference.taps import name_modules, tap


class K3Model(nn.Module):
    """Kimi K3. Attribute names below this module are the checkpoint's names; all parameters are NaN until loaded."""

    def __init__(self, config: K3Config, expert_format: ExpertFormat = "mxfp4") -> None:
        super().__init__()
        self.config = config
        self.language_model = LanguageModel(config.text_config, expert_format)
        name_modules(self)

    def __call__(
        self,
        input_ids: mx.array | None = None,
        inputs_embeds: mx.array | None = None,
        attention_mask: mx.array | None = None,
        cache: Cache | None = None,
    ) -> mx.array:
        """input_ids [B, T] or inputs_embeds [B, T, hidden] -> logits [B, T, vocab] in the model dtype.

        attention_mask [B, T] of the new tokens, bool or 0/1, None where all are real; ``cache`` is brought up to date.
        Raises InputError as LanguageModel does, and for a mask that holds anything but 0 and 1.
        """
        token_mask = None if attention_mask is None else as_token_mask(attention_mask)
        return tap(self, "logits", self.language_model(input_ids, inputs_embeds, token_mask, cache))
