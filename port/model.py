"""The root of the model: what the checkpoint's names start from (K3.md §2), and where pictures meet text (§10)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from port.cache import Cache
from port.merge import merge
from port.padding import as_token_mask
from port.projector import Projector
from port.text import LanguageModel
from port.vision import VisionTower, feature_count
from reference.checkpoint import ExpertFormat
from reference.config import K3Config
from reference.errors import InputError
from reference.taps import name_modules, tap


class K3Model(nn.Module):
    """Kimi K3. Attribute names below this module are the checkpoint's names; all parameters are NaN until loaded.

    Taps: logits; with pictures also merged_embeds, attention_mask and position_ids, after the merge.
    """

    def __init__(self, config: K3Config, expert_format: ExpertFormat = "mxfp4") -> None:
        super().__init__()
        self.config = config
        self.language_model = LanguageModel(config.text_config, expert_format)
        self.vision_tower = VisionTower(config.vision_config)
        self.mm_projector = Projector(config.vision_config)
        name_modules(self)

    def image_features(self, pixel_values: mx.array, grid_thws: mx.array) -> tuple[mx.array, list[int]]:
        """``pixel_values`` [L, 3, p, p] and ``grid_thws`` [N, 3] of all images and videos -> their feature rows.

        Returns features [rows, hidden] in the model dtype, item after item, and the rows of each of the N items (§9).
        Raises InputError as VisionTower does.
        """
        features = self.mm_projector(self.vision_tower(pixel_values, grid_thws))
        kernel = self.config.vision_config.merge_kernel_size
        return features, [feature_count(grid, kernel) for grid in np.asarray(grid_thws).tolist()]

    def merged_inputs(
        self, input_ids: mx.array, attention_mask: mx.array | None, pixel_values: mx.array, grid_thws: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The text with every media placeholder replaced by its item's features (§10).

        input_ids and attention_mask [B, T] -> embeddings [B, T', hidden] and mask [B, T'] of 0/1. The ids are checked
        before anything is computed. Raises InputError as TextModel.embed, VisionTower and merge do.
        """
        text_embeds = self.language_model.model.embed(input_ids)
        mask = mx.ones_like(input_ids) if attention_mask is None else attention_mask
        features, counts = self.image_features(pixel_values, grid_thws)
        placeholder, pad = self.config.media_placeholder_token_id, self.config.pad_token_id
        embeds, mask, positions = merge(input_ids, mask, features, counts, text_embeds, placeholder, pad)
        tap(self, "position_ids", positions)
        return tap(self, "merged_embeds", embeds), tap(self, "attention_mask", mask)

    def __call__(
        self,
        input_ids: mx.array | None = None,
        inputs_embeds: mx.array | None = None,
        attention_mask: mx.array | None = None,
        cache: Cache | None = None,
        pixel_values: mx.array | None = None,
        grid_thws: mx.array | None = None,
    ) -> mx.array:
        """input_ids [B, T] or inputs_embeds [B, T, hidden] -> logits [B, T, vocab] in the model dtype.

        attention_mask [B, T] of the new tokens, bool or 0/1, None where all are real; ``cache`` is brought up to date.
        With ``pixel_values`` [L, 3, p, p] and ``grid_thws`` [N, 3], input_ids hold one media placeholder per item, and
        the logits are [B, T', vocab]: each placeholder has become all of its item's rows (§10). Pictures belong to
        the ids of the same call, so a prompt may come in pieces; the cache counts T' tokens.

        Raises InputError as LanguageModel and merged_inputs do, for a mask that holds anything but 0 and 1, for
        pictures without ids or without grids.
        """
        check_pictures(input_ids, inputs_embeds, pixel_values, grid_thws)
        if pixel_values is not None:
            inputs_embeds, attention_mask = self.merged_inputs(input_ids, attention_mask, pixel_values, grid_thws)
            input_ids = None
        token_mask = None if attention_mask is None else as_token_mask(attention_mask)
        return tap(self, "logits", self.language_model(input_ids, inputs_embeds, token_mask, cache))


def check_pictures(
    input_ids: mx.array | None,
    inputs_embeds: mx.array | None,
    pixel_values: mx.array | None,
    grid_thws: mx.array | None,
) -> None:
    """Raise InputError unless pictures come with their grids and with ids to stand in.

    Without pictures the placeholder's id is one like any other: text and decoding may hold it.
    """
    if (pixel_values is None) != (grid_thws is None):
        given = "pixel_values" if grid_thws is None else "grid_thws"
        raise InputError("inputs", "pixel_values and grid_thws", "both or neither", f"{given} alone", "give both")
    if pixel_values is not None and (input_ids is None or inputs_embeds is not None):
        mend = "give the ids with their placeholders, or embeddings into which the features are already merged"
        raise InputError("inputs", "pixel_values", "input_ids and no inputs_embeds", "embeddings or nothing", mend)
