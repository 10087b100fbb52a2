"""Ranks as threads of one process: the same code as on several machines, and nothing but bytes between them.

One rank computes at a time; it makes room for the others while it waits. So runs are the same every time, and ranks
that wait for what nobody will send are told so at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from parity.ports.mlx import Mlx

Result = TypeVar("Result")


class Stopped(RuntimeError):
    """Another rank failed, or every rank waits or has finished: what this one waits for will not come."""


class Switch:
    """What connects the ranks: the bytes on their way, the partial sums, and the turn to compute."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.turn = ranks, threading.Condition()
        self.reset()

    def reset(self) -> None:
        self.bytes: dict[tuple[int, int], bytearray] = defaultdict(bytearray)
        self.terms: dict[int, dict[int, np.ndarray]] = defaultdict(dict)
        self.sums = [0] * self.ranks
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.finished, self.failed = 0, False

    def wait(self, rank: int, ready: Callable[[], bool]) -> None:
        """Let others compute until ``ready``; the caller has the turn, before and after. Raises Stopped."""
        self.waiting[rank] = ready
        try:
            while not ready():
                if self.failed or self.stuck():
                    self.fail()
                    raise Stopped(f"what rank {rank} waits for will not come")
                self.turn.wait()
        finally:
            del self.waiting[rank]

    def stuck(self) -> bool:
        everyone = len(self.waiting) + self.finished == self.ranks
        return everyone and not any(ready() for ready in self.waiting.values())

    def fail(self) -> None:
        self.failed = True
        self.turn.notify_all()

    def compute(self, function: Callable[[], Result]) -> Result:
        """``function`` with the turn, for one rank."""
        with self.turn:
            try:
                return function()
            except BaseException:
                self.fail()
                raise
            finally:
                self.finished += 1
                self.turn.notify_all()


class Loopback:
    """One rank's end (port/transport.py). As on a wire, a receiver takes as many bytes as it has asked for."""

    def __init__(self, switch: Switch, rank: int) -> None:
        self.switch, self.rank, self.size, self.library = switch, rank, switch.ranks, Mlx()

    def send(self, array: Any, to: int) -> None:
        self.switch.bytes[self.rank, to] += self.library.to_numpy(array).astype(numpy_dtype(array.dtype)).tobytes()
        self.switch.turn.notify_all()

    def receive(self, shape: Sequence[int], dtype: Any, sender: int) -> Any:
        kind, stream = numpy_dtype(dtype), self.switch.bytes[sender, self.rank]
        size = int(np.prod(shape)) * kind.itemsize
        self.switch.wait(self.rank, lambda: len(stream) >= size)
        data = bytes(stream[:size])
        del stream[:size]
        return self.library.to_array(np.frombuffer(data, kind).reshape(shape))

    def all_sum(self, array: Any) -> Any:
        number = self.switch.sums[self.rank]
        self.switch.sums[self.rank] += 1
        terms = self.switch.terms[number]
        terms[self.rank] = self.library.to_numpy(array)
        self.switch.turn.notify_all()
        self.switch.wait(self.rank, lambda: len(terms) == self.size)
        total = terms[0]
        for rank in range(1, self.size):
            total = total + terms[rank]
        return self.library.to_array(total)


def numpy_dtype(dtype: Any) -> np.dtype:
    """The numpy dtype of an MLX dtype."""
    name = str(dtype).removeprefix("mlx.core.")
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class Ranks:
    """One thread per rank, each with all that its rank has made: MLX's arrays belong to the thread that makes them."""

    def __init__(self, ranks: int) -> None:
        self.switch = Switch(ranks)
        self.ends = [Loopback(self.switch, rank) for rank in range(ranks)]
        self._threads = [ThreadPoolExecutor(1) for _ in range(ranks)]

    def each(self, function: Callable[[int], Result]) -> list[Result]:
        """``function(rank)`` on every rank at once; the first failure that is not another's consequence is raised."""
        self.switch.reset()
        futures = [
            thread.submit(self.switch.compute, lambda rank=rank: function(rank))
            for rank, thread in enumerate(self._threads)
        ]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
            raise error
        return [future.result() for future in futures]
