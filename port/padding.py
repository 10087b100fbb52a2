"""Padded batches: which tokens are real, and how a recurrence sees only those (K3.md §11)."""

from __future__ import annotations

import mlx.core as mx

from reference.errors import InputError


def as_token_mask(attention_mask: mx.array) -> mx.array:
    """[B, T] of bool or 0/1 -> [B, T] bool, true at real tokens; raises InputError on any other value."""
    if not mx.all((attention_mask == 0) | (attention_mask == 1)).item():
        mend = "give 1 at real tokens and 0 at padding"
        raise InputError("attention_mask", "value", "only 0 and 1", "another value", mend)
    return attention_mask == 1


def real_first(token_mask: mx.array) -> tuple[mx.array, mx.array]:
    """How to bring each row's real tokens to the front, keeping their order.

    token_mask [B, T] bool, in any pattern -> order [B, T], where ``order[b, j]`` is the place from which the token at
    j comes, and lengths [B] int32, the real tokens of each row.
    """
    tokens = token_mask.shape[1]
    # Distinct keys, so that the order does not depend on whether the device's sort is stable.
    keys = mx.arange(tokens) + mx.where(token_mask, 0, tokens)
    return mx.argsort(keys, axis=1), mx.sum(token_mask.astype(mx.int32), axis=1)


def to_front(x: mx.array, order: mx.array) -> mx.array:
    """x [B, T, ...] with every row permuted by ``order`` [B, T]."""
    return mx.take_along_axis(x, _along(order, x), axis=1)


def back_in_place(x: mx.array, order: mx.array) -> mx.array:
    """The inverse of ``to_front``."""
    return mx.take_along_axis(x, _along(mx.argsort(order, axis=1), x), axis=1)


def zero_padding(x: mx.array, token_mask: mx.array) -> mx.array:
    """x [B, T, ...] with 0 at padded tokens. Chosen, not multiplied: padding may hold NaN, and NaN · 0 is NaN."""
    return mx.where(_along(token_mask, x), x, mx.zeros((), x.dtype))


def _along(per_token: mx.array, x: mx.array) -> mx.array:
    return per_token.reshape(*per_token.shape, *[1] * (x.ndim - 2))
