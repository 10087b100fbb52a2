"""Seeing what someone else's modules compute, without changing them.

While a ``Watch`` is active, calls of the chosen modules and functions pass through it: it keeps results as taps, and it
may answer in a module's place, so that one module can be run inside the port's own code on an input of our choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

Look = Callable[[tuple, Any], None]
Around = Callable[[Callable, tuple, dict], Any]


class Watch:
    """What is seen of one computation: ``taps`` by full name, in the port's own arrays."""

    def __init__(self, imposed: Mapping[str, Any] | None = None) -> None:
        self.taps: dict[str, Any] = {}
        self.unseen: set[str] = set()
        """Taps, by name within their layer, that this computation does not let see; they count as unsupported."""
        self.imposed = dict(imposed or {})
        self.layer = ""
        self._looks: dict[int, list[Look]] = {}
        self._instead: dict[int, Around] = {}
        self._modules: dict[int, Any] = {}
        self._layers: dict[int, str] = {}
        self._functions: list[tuple[Any, str, Around]] = []

    def inside(self, module: Any, layer: str) -> None:
        """While ``module`` runs, ``self.layer`` is ``layer``: functions that it calls know where they are."""
        self._modules[id(module)], self._layers[id(module)] = module, layer

    def result(self, module: Any, tap: str, view: Callable[[Any], Any] = lambda result: result) -> None:
        """Keep what ``module`` gives, seen through ``view``."""
        self._look(module, lambda arguments, result: self.keep(tap, view(result)))

    def given(self, module: Any, tap: str, view: Callable[[Any], Any] = lambda argument: argument) -> None:
        """Keep the first argument of ``module``."""
        self._look(module, lambda arguments, result: self.keep(tap, view(arguments[0])))

    def parts(self, module: Any, tap: str, of_input: bool = False) -> None:
        """Keep what ``module`` gives, or is given, joined over all its calls: a tower that takes items one by one."""
        self._look(
            module, lambda arguments, result: self.taps.setdefault(tap, []).append(arguments[0] if of_input else result)
        )

    def function(self, namespace: Any, name: str, around: Around) -> None:
        """Calls of ``namespace.name`` become ``around(original, positional arguments, keywords)``."""
        self._functions.append((namespace, name, around))

    def instead(self, module: Any, around: Around) -> None:
        """Calls of ``module`` become ``around(call, positional arguments, keywords)``."""
        self._modules[id(module)], self._instead[id(module)] = module, around

    def answer(self, module: Any, value: Any) -> None:
        """``module`` gives ``value`` and does not run."""
        self.instead(module, lambda call, arguments, keywords: value)

    def skip(self, module: Any) -> None:
        """``module`` gives its first argument back and does not run."""
        self.instead(module, lambda call, arguments, keywords: arguments[0])

    def keep(self, tap: str, value: Any) -> None:
        self.taps[tap] = value

    def _look(self, module: Any, look: Look) -> None:
        self._modules[id(module)] = module
        self._looks.setdefault(id(module), []).append(look)

    @contextmanager
    def active(self) -> Iterator[Watch]:
        """Python looks ``__call__`` up in the class, so the classes are changed, for the time of this block."""
        classes = {type(module) for module in self._modules.values()}
        originals = {kind: (kind.__dict__.get("__call__"), kind.__call__) for kind in classes}
        functions = [(namespace, name, getattr(namespace, name)) for namespace, name, _ in self._functions]
        try:
            for kind, (_, call) in originals.items():
                kind.__call__ = self._seen(call)
            for namespace, name, around in self._functions:
                setattr(namespace, name, _wrapped(getattr(namespace, name), around))
            yield self
        finally:
            for kind, (own, _) in originals.items():
                if own is None:
                    del kind.__call__
                else:
                    kind.__call__ = own
            for namespace, name, original in functions:
                setattr(namespace, name, original)

    def _seen(self, call: Callable) -> Callable:
        def seen(module, *arguments, **keywords):
            key = id(module)
            if key not in self._modules:
                return call(module, *arguments, **keywords)
            before = self.layer
            self.layer = self._layers.get(key, before)
            try:
                if key in self._instead:
                    own = partial(call, module)
                    result = self._instead[key](own, arguments, keywords)
                else:
                    result = call(module, *arguments, **keywords)
            finally:
                self.layer = before
            for look in self._looks.get(key, ()):
                look(arguments or tuple(keywords.values()), result)
            return result

        return seen


def _wrapped(original: Callable, around: Around) -> Callable:
    def wrapped(*arguments, **keywords):
        return around(original, arguments, keywords)

    return wrapped
