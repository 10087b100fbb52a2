"""Every test run: one thread per worker, no TF32, this clone's own code, and the options of the parity suite."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch or mlx is imported anywhere: these are read once.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MLX_ENABLE_TF32"] = "0"

pytest_plugins = ["parity.plugin"]


def pytest_configure(config):
    """An installed copy of the packages would test old code."""
    import parity

    here = Path(__file__).parent
    if Path(parity.__file__).parent.parent != here:
        raise SystemExit(
            f"parity is imported from {parity.__file__}, not from {here}; install this clone with pip install -e"
        )
