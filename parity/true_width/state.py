"""Where a chained run stands, in one file that is replaced whole after each layer."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parity.findings import Finding
from parity.true_width.session import Position
from reference.errors import InputError

FORMAT = 1
NAME = "chain.safetensors"


@dataclass
class State:
    """``about`` is everything that the numbers depend on; ``positions`` holds, by side, one position per piece of the
    sequence, before the 0-based ``layer``; ``ids`` [1, T] are the tokens. ``folder`` None keeps nothing on disk."""

    about: dict[str, Any]
    ids: np.ndarray
    folder: Path | None = None
    layer: int = 0
    findings: list[Finding] = field(default_factory=list)
    positions: dict[str, list[Position]] = field(default_factory=dict)

    def write(self) -> None:
        """Replace the file; whoever stops the run at any moment leaves the old one or the new one."""
        if self.folder is None:
            return
        from safetensors.numpy import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        arrays = {"ids": self.ids}
        for side, pieces in self.positions.items():
            for number, position in enumerate(pieces):
                for what, array in position._asdict().items():
                    arrays[f"{side}.{number}.{what}"] = np.ascontiguousarray(array)
        told = {"format": FORMAT, "about": self.about, "layer": self.layer}
        told["findings"] = [json.loads(finding.model_dump_json()) for finding in self.findings]
        unfinished = self.folder / f".{NAME}-{os.getpid()}"
        save_file(arrays, unfinished, metadata={"chain": json.dumps(told)})
        unfinished.replace(self.folder / NAME)


def open_state(about: dict[str, Any], ids: np.ndarray, folder: Path | None, resume: bool) -> State:
    """A fresh state, or the one in ``folder``; raises InputError if it is of another run, damaged, or not asked for."""
    state = State(about, ids, folder)
    if folder is None or not (folder / NAME).exists():
        return state
    file = folder / NAME
    if not resume:
        mend = "add --resume to go on, or choose another folder"
        raise InputError(file, "--state", "a folder without a chain", "one that was begun", mend)
    told, arrays = _read(file)
    if told["about"] != about:
        differs = next(key for key in about | told["about"] if about.get(key) != told["about"].get(key))
        found, mend = told["about"].get(differs), "resume with the same options, or choose another folder"
        raise InputError(file, differs, f"{about.get(differs)}, as asked now", found, mend)
    state.layer = told["layer"]
    state.findings = [Finding.model_validate_json(json.dumps(finding)) for finding in told["findings"]]
    for side in {name.partition(".")[0] for name in arrays if "." in name}:
        pieces = sorted(int(name.split(".")[1]) for name in arrays if name.startswith(f"{side}.") and "prefix" in name)
        state.positions[side] = [
            Position(arrays[f"{side}.{number}.prefix_sum"], arrays[f"{side}.{number}.blocks"]) for number in pieces
        ]
    return state


def _read(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            told = json.loads((opened.metadata() or {})["chain"])
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if told["format"] != FORMAT:
            raise KeyError("format")
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        mend = "remove it and begin anew"
        raise InputError(file, "content", "a chain that this program wrote", type(error).__name__, mend) from None
    return told, arrays
