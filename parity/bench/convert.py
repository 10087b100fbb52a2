"""``k3-parity bench convert``: how fast conversions are beside the least that could be done, and what memory they take.

The source is a mini-K3 with tensors of real size (``mini_k3.py``). The *restack bound* is what no converter can avoid:
every byte of the source, memory-mapped, written once in the order of the output. Everything runs in a process of its
own and takes turns, best of several: a busy machine slows all alike, and the ratios hold where the seconds do not; what
a core does in a second of its own time holds there too. Nothing waits for the disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from parity.bench.mini_k3 import write_source
from reference.errors import InputError

SCHEMA = "k3-parity/bench-convert/1"
BOUND, IDLE, COPY = "restack bound", "idle interpreter", "plain copy"
TIERS = ("mxfp4", "3bit", "mixed2", "2bit")
POLL_SECONDS = 0.01
PACKED, SCALE = ".weight_packed", ".weight_scale"

Row = dict[str, Any]


def restack(source: str, target: str) -> None:
    """Every byte once, memory-mapped, as the mxfp4 tier orders them: of each stack all codes, then all scales."""
    import numpy as np

    from port.convert import pieces_of
    from port.source import Source
    from port.tiers import outputs, tier_named

    checkpoint, maps = Source(source), {}
    Path(target).mkdir()
    with (Path(target) / "restacked").open("wb", buffering=0) as file:
        for output in outputs(checkpoint.config, checkpoint.expert_format, tier_named("mxfp4")):
            pieces = list(pieces_of(output, checkpoint))
            for piece in pieces[::2] + pieces[1::2]:
                if piece.file not in maps:
                    maps[piece.file] = np.memmap(piece.file, np.uint8, "r")
                file.write(memoryview(maps[piece.file])[piece.begin : piece.end])


def copy(source: str, target: str) -> None:
    shutil.copytree(source, target)


def idle(source: str, target: str) -> None:
    """What an interpreter takes that has loaded the converter's libraries and made one small array."""
    import numpy as np

    import port.convert  # noqa: F401
    from port.requantize import quantize
    from port.tiers import AFFINE2

    quantize(np.zeros((1, 64), np.float32), AFFINE2)


def conversion(source: str, target: str, tier: str, workers: int) -> None:
    from port.convert import convert

    convert(source, target, tier, workers=workers, sync=False)


def timed(connection, task: Callable[..., None], arguments: tuple) -> None:
    """What the measured process runs: libraries first, then the clock."""
    import port.convert  # noqa: F401

    start, busy = time.perf_counter(), processor_time()
    task(*arguments)
    connection.send((time.perf_counter() - start, processor_time() - busy))
    connection.recv()


def processor_time() -> float:
    """Seconds that cores have spent on this process and on its workers that have ended."""
    return sum(os.times()[:4])


class Measured(NamedTuple):
    """``seconds`` of wall time, ``core_seconds`` of all processes' own time, ``resident`` their peak sizes, added."""

    seconds: float
    core_seconds: float
    resident: int | None

    def better(self, other: Measured) -> Measured:
        """The shorter times and the larger size."""
        sizes = [size for size in (self.resident, other.resident) if size is not None]
        times = min(self.seconds, other.seconds), min(self.core_seconds, other.core_seconds)
        return Measured(*times, max(sizes, default=None))


def measure(task: Callable[..., None], arguments: tuple) -> Measured:
    """Run the task in a process of its own; RuntimeError if it fails."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=timed, args=(there, task, arguments))
    process.start()
    there.close()
    peaks: dict[int, int] = {}
    while not here.poll(POLL_SECONDS):
        peaks |= peak_sizes(process.pid)
    peaks |= peak_sizes(process.pid)
    try:
        seconds, core_seconds = here.recv()
    except EOFError:
        raise RuntimeError(f"{task.__name__} failed") from None
    here.send(None)
    process.join()
    return Measured(seconds, core_seconds, sum(peaks.values()) or None)


def peak_sizes(pid: int) -> dict[int, int]:
    """Process -> its peak resident size in bytes, of ``pid`` and all below it; empty where there is no /proc."""
    sizes = {}
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), None)
        if peak is not None:
            sizes[pid] = 1024 * int(peak)
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                sizes |= peak_sizes(int(child))
    except OSError:
        pass
    return sizes


def expert_weights(source: Path) -> int:
    """How many weights the routed experts have."""
    index = json.loads((source / "model.safetensors.index.json").read_text())
    from reference.checkpoint import expert_rows
    from reference.config import K3Config

    text = K3Config.from_file(source).text_config
    each = sum(shape[0] * shape[1] for _, shape, _ in expert_rows(text, "dense"))
    return each * sum(name.endswith(".w1" + PACKED) for name in index["weight_map"])


def run(layers: int = 19, workers: int = 2, repeats: int = 3, folder: str | None = None, tiers=TIERS) -> list[Row]:
    """One row per thing measured: name, workers, seconds; bytes_per_second and times_bound (its speed over the bound's)
    or weights_per_second and weights_per_core_second; resident (bytes), above_idle (beyond as many idle interpreters).
    """
    for name, value in (("--layers", layers), ("--workers", workers), ("--repeats", repeats)):
        if value < 1:
            raise InputError(name, "number", "at least 1", value, "pass a positive number")
    with tempfile.TemporaryDirectory(dir=folder, prefix="k3-bench-") as scratch:
        source, target = Path(scratch, "source"), Path(scratch, "target")
        nbytes = write_source(source, layers)
        tasks = {(IDLE, 1): (idle, ()), (BOUND, 1): (restack, ()), (COPY, 1): (copy, ())}
        for tier in tiers:
            for count in (1,) if tier == "mxfp4" or workers == 1 else (1, workers):
                tasks[tier, count] = (conversion, (tier, count))
        best: dict[tuple[str, int], Measured] = {}
        for _ in range(repeats):
            for key, (task, more) in tasks.items():
                found = measure(task, (str(source), str(target), *more))
                shutil.rmtree(target, ignore_errors=True)
                best[key] = best.get(key, found).better(found)
        return [row(key, best, nbytes, expert_weights(source), layers) for key in tasks]


def row(key: tuple[str, int], best: dict[tuple[str, int], Measured], nbytes: int, weights: int, layers: int) -> Row:
    name, workers = key
    measured, bound, idle_size = best[key], best[BOUND, 1], best[IDLE, 1].resident
    lossless, lossy = name in (BOUND, COPY, "mxfp4"), name in TIERS[1:]
    processes = 1 if workers == 1 else workers + 1
    above_idle = None if None in (measured.resident, idle_size) else measured.resident - processes * idle_size
    return {
        "name": name,
        "layers": layers,
        "source_bytes": nbytes,
        "workers": workers,
        "seconds": round(measured.seconds, 3),
        "bytes_per_second": round(nbytes / measured.seconds) if lossless else None,
        "weights_per_second": round(weights / measured.seconds) if lossy else None,
        "weights_per_core_second": round(weights / measured.core_seconds) if lossy else None,
        "times_bound": round(bound.seconds / measured.seconds, 3) if lossless else None,
        "resident": measured.resident,
        "above_idle": above_idle,
    }


def report(rows: list[Row], as_json: bool = False) -> None:
    """A table, or one JSON document, on stdout."""
    if as_json:
        print(json.dumps({"schema": SCHEMA, "rows": rows}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    columns = ("what", "workers", "s", "GB/s", "of bound", "M weights/s", "per core s", "MB", "above idle")
    table = Table(*columns)
    for row in rows:
        speed, weights, own, sizes = (
            [None if row[key] is None else row[key] / unit for key in keys]
            for keys, unit in (
                (("bytes_per_second",), 1e9),
                (("weights_per_second",), 1e6),
                (("weights_per_core_second",), 1e6),
                (("resident", "above_idle"), 1e6),
            )
        )
        cells = [(*speed, ".2f"), (row["times_bound"], ".2f")]
        cells += [(value, ".0f") for value in (*weights, *own, *sizes)]
        table.add_row(row["name"], str(row["workers"]), f"{row['seconds']:.2f}", *(shown(*cell) for cell in cells))
    Console().print(table)


def shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
