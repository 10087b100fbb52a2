"""Padded batches: which tokens are real, and how a recurrence sees only those (K3.md §11)."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.errors import InputError


def as_token_mask(attention_mask: Tensor) -> Tensor:
    """[B, T] of bool or 0/1 -> [B, T] bool, true at real tokens; raises InputError on any other value."""
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        mend = "give 1 at real tokens and 0 at padding"
        raise InputError("attention_mask", "value", "only 0 and 1", "another value", mend)
    return attention_mask == 1


def real_first(token_mask: Tensor) -> tuple[Tensor, Tensor]:
    """How to bring each row's real tokens to the front, keeping their order.

    token_mask [B, T] bool, in any pattern -> order [B, T] int64, where ``order[b, j]`` is the place from which the
    token at j comes, and lengths [B] int64, the real tokens of each row.
    """
    order = torch.argsort((~token_mask).to(torch.uint8), dim=1, stable=True)
    return order, token_mask.sum(1)


def to_front(x: Tensor, order: Tensor) -> Tensor:
    """x [B, T, ...] with every row permuted by ``order`` [B, T]."""
    return x.gather(1, _along(order, x))


def back_in_place(x: Tensor, order: Tensor) -> Tensor:
    """The inverse of ``to_front``."""
    return torch.empty_like(x).scatter(1, _along(order, x), x)


def zero_padding(x: Tensor, token_mask: Tensor) -> Tensor:
    """x [B, T, ...] with 0 at padded tokens. Chosen, not multiplied: padding may hold NaN, and NaN · 0 is NaN."""
    return torch.where(_along(token_mask, x), x, torch.zeros((), dtype=x.dtype))


def _along(per_token: Tensor, x: Tensor) -> Tensor:
    return per_token.reshape(*per_token.shape, *[1] * (x.dim() - 2)).expand(x.shape)
