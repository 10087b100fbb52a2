"""The vision tower: patches of images and videos in, merged tokens out (K3.md §9).

L is the number of patches of all items together, p the patch size, dim ``vt_hidden_size``. Positions are in
``vision_position.py``. Nothing here has a bias.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from port.linear import Linear, unset, wide
from port.vision_position import Grid, apply_rope, checked_grids, position_embedding, rope_turns
from reference.config import VisionConfig
from reference.errors import InputError
from reference.taps import tap

# The norms are built without an eps. The authors' run takes float32's machine epsilon in float32 and bfloat16 alike.
VISION_NORM_EPS = 1.1920929e-7
# Rows of queries that are scored at once. It bounds memory on large pictures and changes nothing else; few rows stay in
# the processor's cache.
QUERY_ROWS = 128
LOG2_E = math.log2(math.e)


def norm_rounded_once(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """``x · rsqrt(mean(x²) + eps) · weight`` [..., dim], all in wide precision, rounded once to x's dtype.

    The tower and the projector use PyTorch's own norm, which multiplies by the weight before it rounds; the text
    tower's (§3) rounds first. In bfloat16 the two differ in one value out of four; in float32 they are the same.
    """
    values = wide(x)
    mean_square = row_sum(values.square()) / x.shape[-1]
    return (values * mx.rsqrt(mean_square + eps) * wide(weight)).astype(x.dtype)


def row_sum(x: mx.array) -> mx.array:
    """Sum over the last axis, which stays: [..., n] -> [..., 1], as a product with ones.

    On Linux ``mx.sum`` and ``mx.softmax`` add up one after the other, 1e-6 off over a thousand terms; a good matrix
    product does not.
    """
    return x @ mx.ones((x.shape[-1], 1), x.dtype)


def gelu_tanh(x: mx.array) -> mx.array:
    """GELU in its tanh form: ``x/2 · (1 + tanh(y))``, ``y = √(2/π) · (x + 0.044715 x³)`` (§9).

    Computed as ``x / (1 + e^(−2y))``, which is the same function.
    """
    values = wide(x)
    inner = math.sqrt(2 / math.pi) * (values + 0.044715 * values * values * values)
    return (values / (1 + exponential(-2 * inner))).astype(x.dtype)


def exponential(x: mx.array) -> mx.array:
    """``e^x`` as a power of two: on Linux MLX takes 5 ns for an element's power, 13 for its exp and 16 for its tanh."""
    return mx.power(2.0, x * LOG2_E)


def softmax(scores: mx.array) -> mx.array:
    """Softmax over the last axis in wide precision, rounded once to ``scores``' dtype."""
    values = wide(scores)
    powers = exponential(values - values.max(-1, keepdims=True))
    return (powers / row_sum(powers)).astype(scores.dtype)


def patch_embedding(patches: mx.array, weight: mx.array) -> mx.array:
    """``patches`` [L, 3, p, p] times ``weight`` [dim, 3, p, p] over (channel, row, column): [L, dim] (§9)."""
    return patches.flatten(1) @ weight.flatten(1).T


def item_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Attention of one image or video, all its frames together: [n, heads, D] each -> [n, heads·D] (§9).

    Not causal, scale ``D^-1/2``, softmax in wide precision; scores and weights are in x's dtype. Evaluated piece by
    piece, so that one piece's scores are gone before the next one's are made.
    """
    scale = q.shape[-1] ** -0.5
    # contiguous, or every product would copy k and v again
    q, k, v = (mx.contiguous(heads.swapaxes(0, 1)) for heads in (q, k, v))
    outputs = []
    for rows in mx.split(q, range(QUERY_ROWS, q.shape[1], QUERY_ROWS), axis=1):
        scores = rows @ k.swapaxes(1, 2) * scale
        outputs.append(softmax(scores) @ v)
        mx.eval(outputs[-1])
    return mx.concatenate(outputs, axis=1).swapaxes(0, 1).flatten(1)


def attention(q: mx.array, k: mx.array, v: mx.array, grids: list[Grid]) -> mx.array:
    """Attention within each image or video: q, k, v [L, heads, D] -> [L, heads·D] (§9)."""
    ends = np.cumsum([t * h * w for t, h, w in grids])[:-1].tolist()
    items = zip(mx.split(q, ends), mx.split(k, ends), mx.split(v, ends), strict=True)
    return mx.concatenate([item_attention(*item) for item in items])


def temporal_mean(x: mx.array) -> mx.array:
    """Mean over the frames, in wide precision: [t, h, w, dim] -> [h, w, dim] (§9)."""
    return wide(x).mean(0).astype(x.dtype)


def merge_window(x: mx.array, kernel: tuple[int, int]) -> mx.array:
    """Put the patches of each window side by side, row-major: [h, w, dim] -> [h/kh·w/kw, kh·kw, dim] (§9)."""
    (h, w, dim), (kh, kw) = x.shape, kernel
    return x.reshape(h // kh, kh, w // kw, kw, dim).swapaxes(1, 2).reshape(-1, kh * kw, dim)


def feature_count(grid: Grid, kernel: tuple[int, int]) -> int:
    """How many tokens an image or video of ``grid`` (t, h, w) becomes: (h/kh)·(w/kw); its frames share them (§9)."""
    (_, h, w), (kh, kw) = grid, kernel
    return (h // kh) * (w // kw)


def merge_patches(x: mx.array, grids: list[Grid], kernel: tuple[int, int]) -> mx.array:
    """[L, dim] -> [tokens, kh·kw, dim]: per item the mean over frames, then the windows (§9)."""
    items = mx.split(x, np.cumsum([t * h * w for t, h, w in grids])[:-1].tolist())
    merged = [
        merge_window(temporal_mean(item.reshape(*grid, -1)), kernel) for item, grid in zip(items, grids, strict=True)
    ]
    return mx.concatenate(merged)


class Weight(nn.Module):
    """One stored tensor under the name ``weight``."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = unset(*shape)


class VisionNorm(nn.Module):
    """RMSNorm with ``weight`` [dim], rounded once."""

    def __init__(self, dim: int, eps: float = VISION_NORM_EPS) -> None:
        super().__init__()
        self.weight = unset(dim)
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return norm_rounded_once(x, self.weight, self.eps)


class VisionMLP(nn.Module):
    """``fc1 · gelu_tanh(fc0 · x)``, [L, dim] -> [L, dim] (§9)."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.fc0 = Linear(dim, width)
        self.fc1 = Linear(width, dim)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc1(gelu_tanh(self.fc0(x)))


class VisionBlock(nn.Module):
    """``x + wo·attn(norm0(x))``, then ``x + mlp(norm1(x))``, [L, dim] -> [L, dim] (§9). Taps: attention, output."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        dim, self.heads = config.vt_hidden_size, config.vt_num_attention_heads
        self.norm0 = VisionNorm(dim)
        self.norm1 = VisionNorm(dim)
        self.wqkv = Linear(dim, 3 * config.qkv_hidden_size)
        self.wo = Linear(config.qkv_hidden_size, dim)
        self.mlp = VisionMLP(dim, config.vt_intermediate_size)

    def __call__(self, x: mx.array, grids: list[Grid], turns: mx.array) -> mx.array:
        qkv = mx.unflatten(self.wqkv(self.norm0(x)), -1, (3, self.heads, -1))
        q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
        attended = tap(self, "attention", attention(apply_rope(q, turns), apply_rope(k, turns), v, grids))
        x = x + self.wo(attended)
        return tap(self, "output", x + self.mlp(self.norm1(x)))


class PatchEmbed(nn.Module):
    """Patch embedding plus position embedding: [L, 3, p, p] -> [L, dim] (§9). Tap: output."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        dim, patch = config.vt_hidden_size, config.patch_size
        self.proj = Weight(dim, 3, patch, patch)
        self.pos_emb = Weight(config.init_pos_emb_height, config.init_pos_emb_width, dim)

    def __call__(self, patches: mx.array, grids: list[Grid]) -> mx.array:
        x = patch_embedding(patches.astype(self.proj.weight.dtype), self.proj.weight)
        return tap(self, "output", x + position_embedding(self.pos_emb.weight, grids))


class Encoder(nn.Module):
    """All blocks: [L, dim] -> [L, dim] (§9). ``final_layernorm`` is applied by ``VisionTower.finish``.

    Evaluated block by block, to bound memory.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.blocks = [VisionBlock(config) for _ in range(config.vt_num_hidden_layers)]
        self.final_layernorm = VisionNorm(config.vt_hidden_size)

    def turns(self, x: mx.array, grids: list[Grid]) -> mx.array:
        """The rope's turns that every block on ``x`` uses: [L, head_dim/2, 2], float32 whatever x is."""
        return rope_turns(grids, self.head_dim)

    def __call__(self, x: mx.array, grids: list[Grid]) -> mx.array:
        turns = self.turns(x, grids)
        for block in self.blocks:
            x = block(x, grids, turns)
            mx.eval(x)
        return x


class VisionTower(nn.Module):
    """The whole tower. Parameters are named as in the checkpoint, below ``vision_tower.`` (§2). Tap: output."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)

    def finish(self, x: mx.array, grids: list[Grid]) -> mx.array:
        """The final norm, then the merge: [L, dim] of the last block -> [tokens, kh·kw, dim] (§9, §16)."""
        return tap(self, "output", merge_patches(self.encoder.final_layernorm(x), grids, self.config.merge_kernel_size))

    def __call__(self, pixel_values: mx.array, grid_thws: mx.array) -> mx.array:
        """``pixel_values`` [L, 3, p, p] and ``grid_thws`` [N, 3] of all items -> [tokens, kh·kw, dim], model dtype.

        Raises InputError for patches of another shape and for grids that ``checked_grids`` refuses.
        """
        patch = self.config.patch_size
        if pixel_values.ndim != 4 or tuple(pixel_values.shape[1:]) != (3, patch, patch):
            expected, found = f"[L, 3, {patch}, {patch}]", list(pixel_values.shape)
            raise InputError("pixel_values", "shape", expected, found, "give patches of the image processor")
        grids = checked_grids(grid_thws, len(pixel_values), self.config)
        return self.finish(self.encoder(self.patch_embed(pixel_values, grids), grids), grids)
