"""What passes between the harness and the ranks that it has launched: a folder of files.

``request.json`` names checkpoint, dtype and splits; ``steps.safetensors`` holds the steps and the imposed choices. Each
rank writes for the split numbered n ``n.RANK.safetensors``, its taps by step, and ``n.RANK.json``, the tensors it has
read; or ``RANK.error``, one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parity.protocol import Step, Taps
from parity.trace import load_arrays, save_trace

PARTS = ("input_ids", "inputs_embeds", "mask")


@dataclass(frozen=True)
class Request:
    """The same steps, over a new cache each time, for a checkpoint that is split in several ways."""

    checkpoint: Path
    dtype: str
    splits: tuple[str, ...]
    steps: tuple[Step, ...]
    imposed: tuple[Mapping[str, np.ndarray], ...] = ()

    def write(self, folder: Path) -> None:
        told = {
            "checkpoint": str(self.checkpoint),
            "dtype": self.dtype,
            "splits": self.splits,
            "steps": len(self.steps),
        }
        (folder / "request.json").write_text(json.dumps(told))
        arrays = {}
        for number, step in enumerate(self.steps):
            given = {part: getattr(step, part) for part in PARTS if getattr(step, part) is not None}
            imposed = self.imposed[number] if self.imposed else {}
            arrays |= {f"{number}/{part}": value for part, value in given.items()}
            arrays |= {f"{number}/imposed/{name}": value for name, value in imposed.items()}
        save_trace(folder / "steps.safetensors", arrays, {})

    @classmethod
    def read(cls, folder: Path) -> Request:
        told = json.loads((folder / "request.json").read_text())
        by_step = grouped(load_arrays(folder / "steps.safetensors")[0], told["steps"])
        steps = tuple(Step(**{part: step.get(part) for part in PARTS}) for step in by_step)
        imposed = tuple(
            {name.removeprefix("imposed/"): value for name, value in step.items() if name not in PARTS}
            for step in by_step
        )
        return cls(Path(told["checkpoint"]), told["dtype"], tuple(told["splits"]), steps, imposed)


def grouped(arrays: Taps, steps: int) -> list[Taps]:
    """Arrays called ``STEP/NAME`` as one dictionary a step."""
    result: list[Taps] = [{} for _ in range(steps)]
    for name, array in arrays.items():
        number, _, rest = name.partition("/")
        result[int(number)][rest] = array
    return result


def write_answer(folder: Path, number: int, rank: int, answer: Sequence[Taps], read: Sequence[str]) -> None:
    """One rank's taps, step by step, and the names of the tensors it has read, for the split ``number``."""
    taps = {f"{step}/{name}": array for step, step_taps in enumerate(answer) for name, array in step_taps.items()}
    if taps:
        save_trace(folder / f"{number}.{rank}.safetensors", taps, {})
    (folder / f"{number}.{rank}.json").write_text(json.dumps(list(read)))


def read_answer(folder: Path, number: int, rank: int, steps: int) -> tuple[list[Taps], list[str]]:
    """The taps, step by step, and the tensors read. A rank without layers has no taps, and no file of them."""
    read = json.loads((folder / f"{number}.{rank}.json").read_text())
    file = folder / f"{number}.{rank}.safetensors"
    return grouped(load_arrays(file)[0] if file.exists() else {}, steps), read
