"""Ports by name: those of this project, those that other packages register, or any by ``package.module:ATTRIBUTE``."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from parity.protocol import Port
from reference.errors import InputError

NAMES = ("reference", "mlx", "mlx_lm", "mlx_vlm", "transformers", "fla")
"""Each is ``parity.ports.<name>:PORT``."""
GROUP = "k3_parity.ports"
"""The entry-point group by which an installed package offers its own ports."""
ASKED = ("name", "capabilities", "versions", "open", "call")


def load_port(name: str) -> Port:
    """The port called ``name``; raises InputError if there is none or it cannot be imported."""
    kind, separator, rest = name.partition(":")
    if kind == "traces":
        from parity.ports.traces import TracesPort

        return TracesPort(rest)
    if kind == "command":
        from parity.ports.command import CommandPort

        return CommandPort(rest)
    if kind == "pipeline" and separator:
        from parity.ports.split import SplitPort

        return SplitPort(rest)
    if kind == "ring" and separator:
        from parity.ports.ring import RingPort

        return RingPort(rest)
    registered = {entry.name: entry for entry in entry_points(group=GROUP)}
    others = "traces:DIR, command:LINE, pipeline:N, ring:N, or package.module:ATTRIBUTE"
    known = f"one of {', '.join([*NAMES, *registered])}, {others}"
    try:
        if name in NAMES:
            port = importlib.import_module(f"parity.ports.{name}").PORT
        elif name in registered:
            port = registered[name].load()
        elif separator:
            port = getattr(importlib.import_module(kind), rest)
        else:
            raise InputError("--port", name, known, name, "name a port")
    except (ImportError, AttributeError) as error:
        raise InputError("--port", name, known, error, "check the name, or install what it needs") from None
    for method in ASKED:
        if not hasattr(port, method):
            found = f"{type(port).__name__} without {method!r}"
            raise InputError("--port", name, "an object with what parity/protocol.py asks of a port", found, "add it")
    return port
