"""Padding: the real tokens of every row moved to the front, and back (K3.md §11)."""

from __future__ import annotations

import mlx.core as mx


def real_first(token_mask: mx.array) -> tuple[mx.array, mx.array]:
    """(order [B, T], lengths [B]) of ``token_mask`` [B, T] bool: per row the real tokens first, each kind in order."""
    tokens = token_mask.shape[1]
    # Distinct keys, so that the order does not depend on whether the device's sort is stable.
    keys = mx.arange(tokens) + mx.where(token_mask, 0, tokens)
    return mx.argsort(keys, axis=1), mx.sum(token_mask.astype(mx.int32), axis=1)


def to_front(x: mx.array, order: mx.array) -> mx.array:
    """x [B, T, ...] with its tokens in ``order`` [B, T]."""
    return mx.take_along_axis(x, _beside(order, x), axis=1)


def back_in_place(x: mx.array, order: mx.array) -> mx.array:
    """The inverse of ``to_front``: x [B, T, ...] whose tokens stand in ``order`` -> the original places."""
    return mx.take_along_axis(x, _beside(mx.argsort(order, axis=1), x), axis=1)


def zero_padding(x: mx.array, token_mask: mx.array) -> mx.array:
    """x [B, T, ...] with 0 where ``token_mask`` [B, T] is False; chosen, not multiplied: padding may hold NaN."""
    return mx.where(_beside(token_mask, x), x, mx.zeros((), x.dtype))


def _beside(per_token: mx.array, x: mx.array) -> mx.array:
    """[B, T] with as many axes of size 1 behind as x [B, T, ...] has, to broadcast against it."""
    return per_token.reshape(*per_token.shape, *([1] * (x.ndim - 2)))
