"""Readings that are known to be wrong, as executable patches of one function each.

Every fault was made by a real port. Applied to an implementation under test it must be caught, at the right module.
Targets are ``module.function`` or ``module.Class.method``; one patch fits both twins, since it only changes what goes
into the right function or what comes out of it, and so says what was misread and nothing else.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from parity.protocol import Port
from reference.errors import InputError

CALL = "__call__"
"""What MLX calls a module's ``forward``."""


@dataclass(frozen=True)
class Fault:
    """``patches`` maps a target to ``patch(original, package)``, which gives the wrong function; ``module`` is where it
    must be caught. A target that one twin does not have is left out there.

    ``numbers`` maps ``module.CONSTANT`` to a wrong value, for faults that are no more than that. ``also`` names modules
    that read what went wrong before ``module`` shows it; ``case`` is a catalogue case that can feel the fault;
    ``hidden`` is the reason why bfloat16 cannot show it, where that is so.
    """

    id: str
    module: str
    claim: str
    shows: str
    patches: Mapping[str, Callable[[Callable, str], Callable]] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    case: str = "mini"
    hidden: str = ""

    @contextmanager
    def applied(self, package: str) -> Iterator[None]:
        """Within the block ``package`` ("reference" or "port") has the fault, wherever the function was imported."""
        undo: list[tuple[Any, str, Any]] = []
        try:
            for name, value in self.numbers.items():
                module, constant = name.split(".")
                owner = "reference" if borrowed(package, module) else package
                undo += _set(importlib.import_module(f"{owner}.{module}"), constant, value)
            for target, patch in self.patches.items():
                undo += _patched(package, target, patch)
            yield
        finally:
            for owner, name, value in reversed(undo):
                setattr(owner, name, value)


def borrowed(package: str, module: str) -> bool:
    """Whether ``package`` has no such module of its own and uses the reference's."""
    return not importlib.util.find_spec(f"{package}.{module}") and bool(importlib.util.find_spec(f"reference.{module}"))


def _patched(package: str, target: str, patch: Callable[[Callable, str], Callable]) -> list[tuple[Any, str, Any]]:
    """Put ``patch`` in force; what the port borrows from the reference is patched there."""
    module, *path = target.split(".")
    if importlib.util.find_spec(f"{package}.{module}") is None:
        if not borrowed(package, module):
            return []
        package = "reference"
    owner: Any = importlib.import_module(f"{package}.{module}")
    for part in path[:-1]:
        owner = getattr(owner, part)
    name = CALL if inspect.isclass(owner) and path[-1] == "forward" and not hasattr(owner, "forward") else path[-1]
    original = getattr(owner, name, None)
    if original is None:
        return []
    wrong = wraps(original)(patch(original, package))
    if inspect.isclass(owner):
        return _set(owner, name, wrong)
    undo = []
    for holder in _modules(package):
        for name, value in list(vars(holder).items()):
            if value is original:
                undo += _set(holder, name, wrong)
    return undo


def _set(owner: Any, name: str, value: Any) -> list[tuple[Any, str, Any]]:
    previous = getattr(owner, name)
    setattr(owner, name, value)
    return [(owner, name, previous)]


def _modules(package: str) -> list[Any]:
    """All modules of a package, imported: a function is patched in each that holds it."""
    folder = Path(importlib.import_module(package).__file__).parent
    return [
        importlib.import_module(f"{package}.{path.stem}")
        for path in sorted(folder.glob("*.py"))
        if path.stem != "__init__"
    ]


def library(package: str) -> Any:
    """The tensor library of a twin: both call clip, exp, log, where and concatenate by the same names."""
    return importlib.import_module({"reference": "torch", "port": "mlx.core"}[package])


class FaultyPort:
    """A twin with faults: they are in force whenever the port is asked something, and never for the truth."""

    def __init__(self, port: Port, package: str, faults: Sequence[Fault]) -> None:
        self.inner, self.package, self.faults = port, package, tuple(faults)
        self.name = "+".join([port.name, *(fault.id for fault in faults)])

    def capabilities(self):
        return self.inner.capabilities()

    def versions(self) -> dict[str, str]:
        return self.inner.versions() | {"faults": ", ".join(fault.claim for fault in self.faults)}

    def tensor_names(self, config, expert_format) -> set[str]:
        with self._in_force():
            return self.inner.tensor_names(config, expert_format)

    def open(self, checkpoint, dtype):
        with self._in_force():
            return FaultySession(self.inner.open(checkpoint, dtype), self._in_force)

    def call(self, function, arrays, settings):
        with self._in_force():
            return self.inner.call(function, arrays, settings)

    def picture(self, file, settings):
        with self._in_force():
            return self.inner.picture(file, settings)

    def chat(self, call):
        with self._in_force():
            return self.inner.chat(call)

    def tokenize(self, folder, segments):
        with self._in_force():
            return self.inner.tokenize(folder, segments)

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        if not self.faults:
            yield
            return
        first, rest = self.faults[0], FaultyPort(self.inner, self.package, self.faults[1:])
        with first.applied(self.package), rest._in_force():
            yield


class FaultySession:
    def __init__(self, session, in_force) -> None:
        self._session, self._in_force = session, in_force

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._session, name)

        @wraps(method)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            with self._in_force():
                return method(*args, **kwargs)

        return faulty


def fault(id: str) -> Fault:
    """The catalogued fault; raises InputError if there is none."""
    from parity.fault_catalogue import FAULTS

    known = {item.id: item for item in FAULTS}
    if id not in known:
        raise InputError("fault", id, f"one of {', '.join(known)}", id, "see k3-parity faults list")
    return known[id]
