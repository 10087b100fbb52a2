"""Faults of the vision tower, the projector and the merge (K3.md §9, §10)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from parity.fault_catalogue.patches import around, exchanged, given, instead, result, stacked, stored
from parity.faults import Fault, library
from reference.taps import tap


def pairs_exchanged(angles: Any, package: str) -> Any:
    pairs = angles.reshape(angles.shape[0], -1, 2)
    return stacked([pairs[..., 1], pairs[..., 0]], -1).reshape(angles.shape)


def halves_paired(original: Callable, package: str, x, turns) -> Any:
    """Channel j turns with channel j + D/2."""
    half = x.shape[-1] // 2
    turned = original(stacked([x[..., :half], x[..., half:]], -1).reshape(x.shape), turns)
    pairs = turned.reshape(*x.shape[:-1], half, 2)
    return library(package).concatenate([pairs[..., 0], pairs[..., 1]], -1)


def erf_form(package: str, x) -> Any:
    return x * 0.5 * (1 + library(package).erf(x * 0.5**0.5))


def tanh_form(package: str, x) -> Any:
    return 0.5 * x * (1 + library(package).tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def resized_with(weights: Callable[[int, int], np.ndarray]) -> Callable:
    """The position grid resized by matrices [new, old]; untouched at its own size."""

    def resized_positions(original: Callable, package: str, table, h, w) -> Any:
        rows, columns, _ = table.shape
        if (h, w) == (rows, columns):
            return original(table, h, w)
        lib = library(package)
        down, across = (
            lib.tensor(m) if package == "reference" else lib.array(m.astype(np.float32))
            for m in (weights(rows, h), weights(columns, w))
        )
        if package == "reference":
            wide = lib.promote_types(table.dtype, lib.float32)
            return lib.einsum("hr,wc,rcd->hwd", down.to(wide), across.to(wide), table.to(wide)).to(table.dtype)
        return lib.einsum("hr,wc,rcd->hwd", down, across, table.astype(lib.float32)).astype(table.dtype)

    return around(resized_positions)


def bicubic(size: int, new_size: int) -> np.ndarray:
    """Cubic convolution with a = −0.5, half-pixel centres, end points repeated."""
    a, weights = -0.5, np.zeros((new_size, size))
    for i, position in enumerate((np.arange(new_size) + 0.5) * size / new_size - 0.5):
        for j in range(int(np.floor(position)) - 1, int(np.floor(position)) + 3):
            d = abs(position - j)
            near, far = (a + 2) * d**3 - (a + 3) * d**2 + 1, a * (d**3 - 5 * d**2 + 8 * d - 4)
            weights[i, min(max(j, 0), size - 1)] += near if d <= 1 else far if d < 2 else 0
    return weights


def corners_aligned(size: int, new_size: int) -> np.ndarray:
    weights = np.zeros((new_size, size))
    for i in range(new_size):
        position = i * (size - 1) / max(new_size - 1, 1)
        low = int(position)
        weights[i, low] += 1 - (position - low)
        weights[i, min(low + 1, size - 1)] += position - low
    return weights


def sine_and_cosine_exchanged(embedding: Any, package: str) -> Any:
    half = embedding.shape[-1] // 2
    join = np.concatenate if isinstance(embedding, np.ndarray) else library(package).concatenate
    return join([embedding[..., half:], embedding[..., :half]], -1)


def time_for_single_frames(original: Callable, package: str, table, grids) -> Any:
    """A single picture is a video of one frame: cos(0) = 1 is added to half of its channels."""
    position, pieces, start = original(table, grids), [], 0
    half = table.shape[-1] // 2
    for t, h, w in grids:
        piece = position[start : start + t * h * w]
        if t == 1:
            piece = library(package).concatenate([piece[:, :half], piece[:, half:] + 1], -1)
        pieces.append(piece)
        start += t * h * w
    return library(package).concatenate(pieces, 0)


def column_major(original: Callable, package: str, x, kernel) -> Any:
    windows = original(x, kernel)
    rows, columns = kernel
    return windows.reshape(len(windows), rows, columns, -1).swapaxes(1, 2).reshape(windows.shape)


def without_final_norm(package: str, self, x, grids) -> Any:
    merge_patches = importlib.import_module(f"{package}.vision").merge_patches
    return tap(self, "output", merge_patches(x, grids, self.config.merge_kernel_size))


def packed_by_head(name: str, array: np.ndarray) -> np.ndarray:
    """q, k and v of each head side by side where [3, heads, D] is stored; for two heads."""
    if not name.endswith("wqkv.weight"):
        return array
    heads = 2
    return array.reshape(heads, 3, -1, array.shape[1]).swapaxes(0, 1).reshape(array.shape)


def kernel_transposed(name: str, array: np.ndarray) -> np.ndarray:
    return array.swapaxes(-1, -2) if name.endswith("patch_embed.proj.weight") else array


def blue_first(name: str, array: np.ndarray) -> np.ndarray:
    return array[:, ::-1] if name.endswith("patch_embed.proj.weight") else array


def tower_not_loaded(name: str, array: np.ndarray) -> np.ndarray:
    return array * 0 if name.startswith("vision_tower.") else array


def one_feature_each(
    package: str, input_ids, attention_mask, features, feature_counts, text_embeds, placeholder_id, pad_id
) -> Any:
    """A scatter into a sequence of the same length: one feature per placeholder, the rest are lost."""
    lib, rows, feature = library(package), [], 0
    for ids, embeds in zip(np.array(input_ids), text_embeds, strict=True):
        pieces = []
        for place, number in enumerate(ids):
            taken = number == placeholder_id
            pieces.append(features[feature] if taken else embeds[place] * float(number != pad_id))
            feature += int(taken)
        rows.append(lib.stack(pieces, 0))
    mask = (attention_mask != 0) * 1
    positions = importlib.import_module(f"{package}.merge").position_ids(mask)
    return lib.stack(rows, 0), mask, positions


def items_reversed(original: Callable, package: str, input_ids, attention_mask, features, feature_counts, *rest) -> Any:
    ends = np.cumsum(list(feature_counts))
    parts = [features[int(end) - int(count) : int(end)] for count, end in zip(feature_counts, ends, strict=True)]
    counts = list(feature_counts)[::-1]
    features = library(package).concatenate(parts[::-1], 0)
    return original(input_ids, attention_mask, features, counts, *rest)


def counted_from_the_left(original: Callable, package: str, mask) -> Any:
    right = original(mask)
    return 0 * right + library(package).arange(mask.shape[-1])


FAULTS: tuple[Fault, ...] = (
    Fault(
        "F100",
        "vision.block",
        "a norm without an epsilon has that of its dtype, 2^-7",
        "rows of small size come out several times too small",
        {"vision.norm_rounded_once": given(eps=2.0**-7)},
        also=("vision.attention", "vision.merge"),
    ),
    Fault(
        "F92",
        "vision.attention",
        "even pairs turn by the row, odd ones by the column",
        "pictures read as if transposed; square ones suffer least",
        {"vision_position.rope_angles": result(pairs_exchanged)},
    ),
    Fault(
        "F92b",
        "vision.attention",
        "channels turn in halves, as in language models",
        "positions are noise",
        {"vision_position.apply_rope": around(halves_paired)},
    ),
    Fault(
        "F92c",
        "vision.block",
        "the tower's GELU is exact",
        "at most 4.7e-4 per activation",
        {"vision.gelu_tanh": instead(erf_form)},
        hidden="4.7e-4 is less than a bfloat16 rounding",
    ),
    Fault(
        "F92d",
        "projector",
        "the projector's GELU is the tanh form",
        "at most 4.7e-4 per activation",
        {"projector.gelu_erf": instead(tanh_form)},
        hidden="4.7e-4 is less than a bfloat16 rounding",
    ),
    Fault(
        "F99",
        "vision.patch_embed",
        "the position grid is resized bicubically",
        "only grids other than the native one",
        {"vision_position.resized_positions": resized_with(bicubic)},
    ),
    Fault(
        "F99b",
        "vision.patch_embed",
        "the corners of the position grid stay where they are",
        "only grids other than the native one",
        {"vision_position.resized_positions": resized_with(corners_aligned)},
    ),
    Fault(
        "F101",
        "vision.patch_embed",
        "frames have no time embedding",
        "a video is a stack of equal places",
        {"vision_position.time_embedding": result(lambda embedding, package: 0 * embedding)},
    ),
    Fault(
        "F101b",
        "vision.patch_embed",
        "cosines stand before sines in the time embedding",
        "videos only",
        {"vision_position.time_embedding": result(sine_and_cosine_exchanged)},
    ),
    Fault(
        "F101c",
        "vision.patch_embed",
        "a picture is a video of one frame and gets its time embedding",
        "every picture; videos are right",
        {"vision_position.position_embedding": around(time_for_single_frames)},
    ),
    Fault(
        "F101d",
        "vision.merge",
        "the last frame stands for the video",
        "videos only",
        {"vision.temporal_mean": given(x=lambda x: x[-1:])},
    ),
    Fault(
        "F101e",
        "vision.merge",
        "windows are read column by column",
        "what lies right and what lies below change places",
        {"vision.merge_window": around(column_major)},
    ),
    Fault(
        "F101f",
        "vision.merge",
        "the tower ends with its last block",
        "features of another size; the projector's norm hides part",
        {"vision.VisionTower.finish": instead(without_final_norm)},
    ),
    Fault(
        "F101g",
        "vision.attention",
        "q, k and v are packed head by head",
        "heads read each other's parts",
        stored(packed_by_head),
    ),
    Fault(
        "F101h",
        "vision.attention",
        "all pictures of a call see each other",
        "one picture right, two wrong",
        {"vision.attention": given(grids=lambda grids: [(1, 1, sum(t * h * w for t, h, w in grids))])},
    ),
    Fault(
        "F101i",
        "vision.attention",
        "scores are not scaled",
        "attention far too sharp",
        {"vision.item_attention": given(q=lambda q: q * q.shape[-1] ** 0.5)},
    ),
    Fault(
        "F101j",
        "vision.patch_embed",
        "the patch kernel is stored column first",
        "every patch transposed",
        stored(kernel_transposed),
    ),
    Fault("F101k", "vision.patch_embed", "channels come blue first", "colours exchanged", stored(blue_first)),
    Fault(
        "F101l",
        "vision.block",
        "norm1 stands before attention",
        "small where both weights are near 1",
        exchanged(".norm0.", ".norm1."),
        also=("vision.attention",),
    ),
    Fault(
        "F102",
        "vision.patch_embed",
        "a tower that is not found may stay as it was initialised",
        "every picture gives the same features; text goes on",
        stored(tower_not_loaded),
    ),
    Fault(
        "F94",
        "merge",
        "a picture has one row per placeholder",
        "the model describes a picture of which it saw a fraction",
        {"merge.merge": instead(one_feature_each)},
    ),
    Fault(
        "F95",
        "merge",
        "features may come in any order",
        "pictures change places",
        {"merge.merge": around(items_reversed)},
    ),
    Fault(
        "F97",
        "merge",
        "padding always stands on the left",
        "right-padded rows of a batch shifted",
        {"merge.pads_right": result(lambda right, package: False)},
    ),
    Fault(
        "F97b",
        "merge",
        "positions count padding too",
        "position ids of padded rows",
        {"merge.position_ids": around(counted_from_the_left)},
    ),
)
