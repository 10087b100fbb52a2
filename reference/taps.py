"""Taps: the places where a module shows a named quantity, and where a harness may impose one.

A module says ``tap(self, "log_decay", g)`` where the specification names a quantity. Without a recorder this costs
one comparison. A tap's full name is the module's path in the checkpoint, a dot, and the quantity's name. This file
knows no tensor library, so that the reference and the port share the names and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Value = TypeVar("Value")


class Recorder:
    """Collects tapped values by full name; ``imposed`` maps a full name to the value a module must use instead."""

    def __init__(self, imposed: Mapping[str, Any] | None = None) -> None:
        self.values: dict[str, Any] = {}
        self.imposed = dict(imposed or {})


# of this thread alone: two models may compute at once
_active: ContextVar[Recorder | None] = ContextVar("active", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Within the block every tap of this thread reports to ``recorder``; blocks nest, the innermost one listens."""
    previous = _active.set(recorder)
    try:
        yield recorder
    finally:
        _active.reset(previous)


def name_modules(root: Any) -> None:
    """Give every module below ``root`` its path (both torch and MLX modules offer ``named_modules``)."""
    for path, module in root.named_modules():
        module.tap_path = path


def tap_name(module: Any, what: str) -> str:
    """The full name of the quantity ``what`` of ``module``; a module that stands alone has no path."""
    path = getattr(module, "tap_path", "")
    return f"{path}.{what}" if path else what


def listening() -> bool:
    """Whether a recorder is active; a value that is made for a tap alone need not be made otherwise."""
    return _active.get() is not None


def tap(module: Any, what: str, value: Value) -> Value:
    """Show ``value`` under the name ``what`` and hand it back unchanged."""
    if (recorder := _active.get()) is not None:
        recorder.values[tap_name(module, what)] = value
    return value


def imposed(module: Any, what: str) -> Any | None:
    """The value that the harness wants ``module`` to use for ``what``, or None (the ordinary case)."""
    recorder = _active.get()
    return None if recorder is None else recorder.imposed.get(tap_name(module, what))
