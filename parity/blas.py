"""One matrix product for both sides: torch's BLAS lent to MLX, for runs at K3's own size on Linux.

MLX's Linux wheel brings the plain reference BLAS: about 1 GFLOP/s, and a float32 sum of 4096 products taken in order is
1.1e-6 off where a blocked one is 2.6e-7 off. Both libraries name their product alike, and the dynamic linker gives MLX
the first one that is loaded for everybody.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

from reference.errors import InputError

LEND = "K3_PARITY_LEND_BLAS"
"""Environment variable: "1" lends torch's BLAS to MLX before ``parity.ports.mlx`` first imports it."""

_lent: list[ctypes.CDLL] = []


def lend_torch_blas() -> None:
    """Let MLX compute its float32 matrix products with torch's BLAS, without importing torch; twice is once.

    Both sides then share one matrix product, so that a fault in it would be invisible: never the only check of a port.
    Raises InputError off Linux, where torch is not installed, and where mlx.core is imported already: too late then,
    since it has found its own product.
    """
    if _lent:
        return
    if not sys.platform.startswith("linux"):
        raise InputError(LEND, "platform", "linux", sys.platform, "leave it unset: MLX has a good product there")
    if "mlx.core" in sys.modules:
        raise InputError(LEND, "mlx.core", "not imported yet", "imported", "lend before anything imports mlx")
    library = _torch_library()
    try:
        _lent.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
    except OSError as error:
        raise InputError(
            library, "library", "one that can be loaded", error, "reinstall torch, or do not lend"
        ) from None


def lender() -> str:
    """Whose matrix product MLX uses, for the header of a run."""
    return "BLAS lent from torch" if _lent else "MLX's own"


def _torch_library() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise InputError(LEND, "torch", "an installed torch", "none", "install torch, or do not lend")
    return Path(found.origin).parent / "lib" / "libtorch_cpu.so"
