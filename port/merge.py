"""The multimodal merge: every media placeholder becomes all feature rows of its image or video (K3.md §10).

Rows of the batch grow by different amounts, so they are padded again. The order inside a row never changes. The
released code breaks that for right-padded rows of different lengths; here it holds on both sides.
Ids and masks decide the shapes, so they are looked at on the host, by numpy; the embeddings stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from reference.errors import InputError


def check_merge(
    input_ids: np.ndarray,
    attention_mask: np.ndarray,
    features: mx.array,
    counts: list[int],
    text_embeds: mx.array,
    placeholder_id: int,
) -> None:
    """Raise InputError unless shapes agree, the mask is 0/1, and features, counts and placeholders fit one another."""
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise InputError("input_ids", "shape", "[B, T], not empty", list(input_ids.shape), "give one row per prompt")
    if attention_mask.shape != input_ids.shape or not ((attention_mask == 0) | (attention_mask == 1)).all():
        expected, found = (
            f"zeros and ones {list(input_ids.shape)}",
            f"{attention_mask.dtype} {list(attention_mask.shape)}",
        )
        raise InputError("attention_mask", "mask", expected, found, "give one flag per id")
    if text_embeds.ndim != 3 or tuple(text_embeds.shape[:2]) != input_ids.shape:
        expected, found = f"[{input_ids.shape[0]}, {input_ids.shape[1]}, hidden]", list(text_embeds.shape)
        raise InputError("text_embeds", "shape", expected, found, "embed the same ids")
    if features.ndim != 2 or features.shape[1] != text_embeds.shape[2]:
        expected, found = f"[rows, {text_embeds.shape[2]}]", list(features.shape)
        raise InputError("features", "shape", expected, found, "give the projector's output")
    placeholders = int((input_ids == placeholder_id).sum())
    if placeholders != len(counts):
        expected, found = f"one placeholder ({placeholder_id}) per item, {len(counts)}", f"{placeholders}"
        raise InputError("input_ids", "media placeholders", expected, found, "give each image or video one placeholder")
    for item, count in enumerate(counts):
        if count < 1:
            raise InputError("feature_counts", f"item {item}", "at least one feature row", count, "leave the item out")
    if sum(counts) != len(features):
        expected, found = f"{sum(counts)} rows, the sum of feature_counts", len(features)
        raise InputError("features", "rows", expected, found, "give every item all its rows, once")


def pads_right(input_ids: np.ndarray, pad_id: int) -> bool:
    """Whether the batch is padded on the right: some row's last id is the pad id (§10)."""
    return bool((input_ids[:, -1] == pad_id).any())


def expanded_row(
    ids: np.ndarray, mask: mx.array, embeds: mx.array, items: Iterator[mx.array], placeholder_id: int, pad_id: int
) -> tuple[mx.array, mx.array]:
    """One row with its placeholders replaced: ids, mask [T], embeds [T, hidden] -> embeds, mask of T' tokens (§10).

    Takes the next of ``items`` [n, hidden] per placeholder; their rows get mask 1. Embeddings of pad ids become 0.
    """
    embeds = mx.where(mx.array(ids == pad_id)[:, None], mx.zeros_like(embeds), embeds)
    pieces, masks, start = [], [], 0
    for place in np.flatnonzero(ids == placeholder_id).tolist():
        item = next(items)
        pieces += [embeds[start:place], item]
        masks += [mask[start:place], mx.ones(len(item), mask.dtype)]
        start = place + 1
    return mx.concatenate([*pieces, embeds[start:]]), mx.concatenate([*masks, mask[start:]])


def padded_row(row: mx.array, length: int, right: bool) -> mx.array:
    """``row`` [T', ...] filled up with zeros to [length, ...] on one side."""
    filling = mx.zeros((length - len(row), *row.shape[1:]), row.dtype)
    return mx.concatenate([row, filling] if right else [filling, row])


def position_ids(mask: mx.array) -> mx.array:
    """``cumsum(mask) - 1``, and 1 where masked: [B, T'] int32. The model does not use them (§16)."""
    return mx.where(mask == 0, 1, mask.cumsum(-1) - 1)


def merge(
    input_ids: mx.array,
    attention_mask: mx.array,
    features: mx.array,
    feature_counts: Sequence[int],
    text_embeds: mx.array,
    placeholder_id: int,
    pad_id: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """Put the feature rows into the text (§10).

    ``input_ids`` and ``attention_mask`` [B, T]; ``features`` [rows, hidden] of all items one after the other, in the
    order of their placeholders (row by row of the batch); ``feature_counts`` the rows of each item; ``text_embeds``
    [B, T, hidden] (whatever stands at a placeholder or a pad id is not used). Returns embeds [B, T', hidden] in
    ``text_embeds``' dtype, mask [B, T'] int32 and position ids [B, T'] int32; T' is the longest row.

    Raises InputError for shapes that do not agree and for every mismatch of placeholders, counts and features.
    """
    counts = [int(count) for count in feature_counts]
    input_ids, attention_mask = np.asarray(input_ids), np.asarray(attention_mask)
    check_merge(input_ids, attention_mask, features, counts, text_embeds, placeholder_id)
    items = iter(mx.split(features.astype(text_embeds.dtype), np.cumsum(counts)[:-1].tolist()))
    rows = zip(input_ids, mx.array(attention_mask.astype(np.int32)), text_embeds, strict=True)
    expanded = [expanded_row(ids, mask, embeds, items, placeholder_id, pad_id) for ids, mask, embeds in rows]
    length, right = max(len(mask) for _, mask in expanded), pads_right(input_ids, pad_id)
    embeds = mx.stack([padded_row(row, length, right) for row, _ in expanded])
    mask = mx.stack([padded_row(row, length, right) for _, row in expanded])
    return embeds, mask, position_ids(mask)
