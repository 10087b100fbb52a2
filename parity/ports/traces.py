"""Traces as a port: what another machine computed, kept in files, put under the same comparison.

``traces:DIR`` holds ``trace-float32.safetensors`` and/or ``trace-bfloat16.safetensors`` (names as in golden/README.md).
Nothing is computed: the port can only be compared over whole passes, on the inputs the traces were made from.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from parity.protocol import Capabilities, Taps, Unsupported
from parity.trace import RUN_NAMES, load_trace
from reference.errors import InputError


class TracesPort:
    """The traces in one folder."""

    def __init__(self, folder: str) -> None:
        self.folder, self.name = Path(folder), f"traces:{folder}"
        self.files = {dtype: self.folder / f"trace-{dtype}.safetensors" for dtype in ("float32", "bfloat16")}
        if not any(path.is_file() for path in self.files.values()):
            found = "no such folder" if not self.folder.is_dir() else "neither file"
            raise InputError(
                self.folder,
                "traces",
                "trace-float32.safetensors or trace-bfloat16.safetensors",
                found,
                "write them with k3-parity trace",
            )

    def capabilities(self) -> Capabilities:
        dtypes = tuple(dtype for dtype, path in self.files.items() if path.is_file())
        return Capabilities(dtypes=dtypes, runs=RUN_NAMES, kinds=(), imposes_routing=False)

    def versions(self) -> dict[str, str]:
        return {"traces": str(self.folder)}

    def tensor_names(self, config, expert_format) -> set[str]:
        raise Unsupported("traces read no checkpoint")

    def open(self, checkpoint: Path, dtype: str):
        raise Unsupported("traces hold whole passes only; use --golden")

    def call(self, function: str, arrays, settings) -> tuple[np.ndarray, ...]:
        raise Unsupported("traces hold whole passes only")

    def trace(self, dtype: str) -> tuple[Taps, dict[str, str]]:
        """The stored taps and metadata of this dtype."""
        return load_trace(self.files[dtype])
