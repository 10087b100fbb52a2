"""The MLX port split over real processes, which ``mlx.launch`` starts on this machine: ``--port ring:2``.

Whole runs only. Each is a launch of its own, which costs seconds; ``answers`` takes several splits in one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import parity
from parity.ports.ring_files import Request, read_answer
from parity.ports.split import RUNS, SplitPort, merged
from parity.protocol import Capabilities, ModuleCall, Step, Taps, Unsupported
from reference.errors import InputError

SECONDS = 600
"""A launch that takes longer hangs."""
CARRIED = ("MLX_ENABLE_TF32", "OMP_NUM_THREADS")


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive free ports."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        if first + count < 1 << 16 and all(is_free(first + number) for number in range(count)):
            return first
    raise InputError("ring", "ports", f"{count} free ports in a row", "none", "end programs that use them")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def launch(folder: Path, ranks: int, seconds: float = SECONDS) -> None:
    """Run the ranks on the request in ``folder``; RuntimeError says which rank failed, and how."""
    root = Path(parity.__file__).parents[1]
    command = [str(Path(sys.executable).parent / "mlx.launch"), "-n", str(ranks), "--backend", "ring"]
    command += ["-p", str(free_ports(ranks)), "--cwd", str(root), "--env", f"PYTHONPATH={root}"]
    command += [word for name in CARRIED if name in os.environ for word in ("--env", f"{name}={os.environ[name]}")]
    command += ["--", sys.executable, "-m", "parity.ports.ring_rank", str(folder)]
    with (folder / "log").open("wb") as log:
        # It looks at its own input all the time: an open pipe keeps it from spinning.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, cwd=root
        )
        try:
            process.wait(seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise RuntimeError(f"mlx.launch did not end within {seconds:.0f} seconds") from None
        finally:
            process.stdin.close()
    failed = sorted(folder.glob("*.error"))
    if failed:
        raise RuntimeError("; ".join(f"rank {path.stem}: {path.read_text()}" for path in failed))


def answers(request: Request, ranks: int) -> list[tuple[list[list[Taps]], list[list[str]]]]:
    """For every split of the request the taps of each rank, step by step, and the tensors that each has read."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        request.write(folder)
        launch(folder, ranks)
        if not all((folder / f"{len(request.splits) - 1}.{rank}.json").exists() for rank in range(ranks)):
            words = (folder / "log").read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise RuntimeError(f"mlx.launch ended without an answer; it said: {words[-1]}")
        results = []
        for number in range(len(request.splits)):
            parts = [read_answer(folder, number, rank, len(request.steps)) for rank in range(ranks)]
            results.append(([taps for taps, _ in parts], [read for _, read in parts]))
        return results


class RingSession:
    """A checkpoint that every launch loads anew."""

    def __init__(self, port: RingPort, checkpoint: Path, dtype: str) -> None:
        self.port, self.checkpoint, self.dtype = port, checkpoint, dtype

    def run(self, steps: Sequence[Step], imposed: Sequence[Mapping[str, np.ndarray]] | None = None) -> list[Taps]:
        split = self.port.split
        request = Request(self.checkpoint, self.dtype, (str(split),), tuple(steps), tuple(imposed or ()))
        [(taps, _)] = answers(request, split.ranks)
        return merged(split, taps)

    def module(self, call: ModuleCall) -> Taps:
        raise Unsupported("whole runs only; pipeline:… also answers for one module")

    def vision(self, *given: Any, **more: Any) -> Taps:
        raise Unsupported("the text tower alone is split")

    multimodal = use_form = vision


class RingPort(SplitPort):
    """The MLX port on several processes."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "ring")
        if self.split.ranks < 2:
            raise InputError("--port", "ring", "at least 2 ranks", self.split.ranks, "use pipeline:1")

    def capabilities(self) -> Capabilities:
        return Capabilities(self.dtypes, RUNS, ())

    def open(self, checkpoint: Path, dtype: str) -> RingSession:
        self.split.check(checkpoint)
        return RingSession(self, Path(checkpoint).resolve(), dtype)
