"""The ways in which a function goes wrong: other arguments, another result, other weights, another configuration.

Everything here serves both twins: torch and MLX call most things by the same names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parity.faults import library

Patch = Callable[[Callable, str], Callable]


def given(**changes: Any) -> Patch:
    """The right function with other arguments: a value, or a function of the right argument."""

    def patch(original: Callable, package: str) -> Callable:
        signature = inspect.signature(original)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, change in changes.items():
                bound.arguments[name] = change(bound.arguments[name]) if callable(change) else change
            return original(*bound.args, **bound.kwargs)

        return wrong

    return patch


def result(change: Callable[[Any, str], Any]) -> Patch:
    """``change(result, package)`` in place of the right result."""
    return lambda original, package: lambda *args, **kwargs: change(original(*args, **kwargs), package)


def instead(function: Callable[..., Any]) -> Patch:
    """``function(package, *arguments)`` in place of the right one, which is not asked."""
    return around(lambda original, package, *args: function(package, *args))


def around(function: Callable[..., Any]) -> Patch:
    """``function(original, package, *arguments)`` in place of the right one; all arguments come by position."""

    def patch(original: Callable, package: str) -> Callable:
        signature = inspect.signature(original)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return function(original, package, *bound.args, **bound.kwargs)

        return wrong

    return patch


def configured(**update: Any) -> Patch:
    """A method that runs while ``self.text_config`` says something else."""

    def method(original: Callable, package: str, self: Any, *args: Any, **kwargs: Any) -> Any:
        right = self.text_config
        self.text_config = right.model_copy(update=update)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.text_config = right

    return around(method)


def stored(change: Callable[[str, np.ndarray], np.ndarray]) -> Mapping[str, Patch]:
    """Weights that were misread: ``change(name, array)`` of every tensor as it is stored."""
    return {"shards.Shards.read": around(lambda original, package, self, name: change(name, original(self, name)))}


def called(rename: Callable[[str], str]) -> Mapping[str, Patch]:
    """Weights that were taken for others: the tensor ``rename(name)`` where ``name`` is asked for, if it exists."""

    def read(original: Callable, package: str, self: Any, name: str) -> np.ndarray:
        other = rename(name)
        return original(self, other if other in self.specs else name)

    return {"shards.Shards.read": around(read)}


def exchanged(left: str, right: str) -> Mapping[str, Patch]:
    """The tensors with ``left`` in their names and those with ``right`` change places."""

    def rename(name: str) -> str:
        if left in name:
            return name.replace(left, right)
        return name.replace(right, left)

    return called(rename)


def rounded_to_bfloat16(x: Any, package: str) -> Any:
    """``x`` squeezed through bfloat16, back in its own dtype."""
    lib = library(package)
    return x.to(lib.bfloat16).to(x.dtype) if package == "reference" else x.astype(lib.bfloat16).astype(x.dtype)


def cast_like(x: Any, like: Any, package: str) -> Any:
    """``x`` in the dtype of ``like``."""
    return x.to(like.dtype) if package == "reference" else x.astype(like.dtype)


def stacked(parts: list[Any], axis: int) -> Any:
    """``stack`` of numpy, torch or MLX arrays."""
    if isinstance(parts[0], np.ndarray):
        return np.stack(parts, axis)
    package = "reference" if type(parts[0]).__module__.startswith("torch") else "port"
    return library(package).stack(parts, axis)
