"""How ranks reach each other: what a split model asks for, and MLX's own distributed backend behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx


class Transport(Protocol):
    """One rank's end. Messages between two ranks arrive in the order in which they were sent."""

    rank: int
    size: int

    def send(self, array: mx.array, to: int) -> None:
        """Send the bytes of ``array``; nothing tells the receiver of shape or dtype."""

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, sender: int) -> mx.array:
        """The next bytes from ``sender``, read as this shape and dtype."""

    def all_sum(self, array: mx.array) -> mx.array:
        """The sum of all ranks' arrays, the same bits on every rank."""


class Distributed:
    """The ranks of ``mlx.launch``. The ring backend sends to neighbours only, which a pipeline never leaves.

    Everything is done when a call returns: MLX is lazy, and messages must leave in the order in which they are read.
    """

    def __init__(self, backend: str = "ring") -> None:
        self.group = mx.distributed.init(strict=True, backend=backend)
        self.rank, self.size = self.group.rank(), self.group.size()

    def send(self, array: mx.array, to: int) -> None:
        mx.eval(mx.distributed.send(array, to, group=self.group, stream=mx.cpu))

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, sender: int) -> mx.array:
        array = mx.distributed.recv(tuple(shape), dtype, sender, group=self.group, stream=mx.cpu)
        mx.eval(array)
        return array

    def all_sum(self, array: mx.array) -> mx.array:
        total = mx.distributed.all_sum(array, group=self.group, stream=mx.cpu)
        mx.eval(total)
        return total
