"""Ports by name: the reference, the MLX port beside it, or any other by ``package.module:ATTRIBUTE``."""

from __future__ import annotations

import importlib

from parity.protocol import Port
from reference.errors import InputError

BUILT_IN = {
    "reference": "parity.ports.reference:PORT",
    "mlx": "parity.ports.mlx:PORT",
    "mlx_lm": "parity.ports.mlx_lm:PORT",
    "mlx_vlm": "parity.ports.mlx_vlm:PORT",
    "transformers": "parity.ports.transformers:PORT",
    "fla": "parity.ports.fla:PORT",
}


def load_port(name: str) -> Port:
    """The port called ``name``; raises InputError if there is none or it cannot be imported."""
    target = BUILT_IN.get(name, name)
    module, separator, attribute = target.partition(":")
    known = f"one of {', '.join(BUILT_IN)}, traces:DIR, or package.module:ATTRIBUTE"
    if module == "traces":
        from parity.ports.traces import TracesPort

        return TracesPort(attribute)
    if not separator:
        raise InputError("--port", name, known, name, "name a port")
    try:
        port = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError("--port", name, known, error, "check the name, or install what it needs") from None
    for method in ("name", "capabilities", "versions", "open", "call"):
        if not hasattr(port, method):
            found = f"{type(port).__name__} without {method!r}"
            raise InputError("--port", name, "an object with what parity/protocol.py asks of a port", found, "add it")
    return port
