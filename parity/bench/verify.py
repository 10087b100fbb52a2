"""``k3-parity bench verify``: how fast a conversion is verified beside the restack bound and the plain way.

The source is a mini-K3 with tensors of real size (``mini_k3.py``), converted once per tier. The *restack bound* reads
and writes every byte of the source once; verify reads source and conversion and writes nothing. The *plain way* unpacks
each expert whole in float64 and takes cosine and error of it: it is slow, and it is the truth for the cosine. All run
in processes of their own and take turns, best of several; what a core does in a second of its own time holds where a
busy machine's seconds do not.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from parity.bench.convert import BOUND, Measured, expert_weights, measure, restack, shown
from parity.bench.mini_k3 import write_source
from reference.errors import InputError

SCHEMA = "k3-parity/bench-verify/1"
TIERS = ("mxfp4", "3bit", "2bit")
PLAIN, PLAIN_EXPERTS = "plain way", 24

Row = dict[str, Any]


def verification(source: str, folder: str, part: str, workers: int) -> None:
    """RuntimeError, which ends the benchmark, if verify finds anything wrong."""
    from parity.verify.run import verify

    if verify(folder, source, part=part, workers=workers).exit_code:
        raise RuntimeError(f"{folder} is not its source's conversion")


def plain(source: str, folder: str, count: int = PLAIN_EXPERTS) -> list[tuple[str, float, float]]:
    """Name, cosine and relative error of ``count`` experts' projections, float64, whole matrices."""
    from parity.dequantized import Folder
    from parity.metrics import cosine, relative_rms
    from reference.mxfp4 import unpack
    from reference.shards import Shards

    before, after, result = Shards(source), Folder(Path(folder)), []
    packed = [name for name in before.names if name.endswith(".weight_packed")]
    for name in packed[:: max(1, len(packed) // count)][:count]:
        truth = unpack(before.read(name), before.read(name.replace("weight_packed", "weight_scale")))
        name = name.removesuffix(".weight_packed")
        found = after.source_matrix(f"{name}.weight")
        result.append((name, cosine(found, truth), relative_rms(found, truth)))
    return result


def plain_way(source: str, folder: str) -> None:
    plain(source, folder)


def cosine_error(source: Path, folder: Path) -> float:
    """The largest difference of verify's cosine from the plain way's."""
    from parity.verify.run import verify

    truth = {name: cosine for name, cosine, _ in plain(str(source), str(folder))}
    compared = verify(folder, source, part="experts").experts
    return max(abs(item.cosine - truth[item.name]) for item in compared if item.name in truth)


def run(layers: int = 4, workers: int = 2, repeats: int = 3, folder: str | None = None, tiers=TIERS) -> list[Row]:
    """One row per thing measured: name, workers, seconds; bytes_per_second and times_bound (lossless), or
    weights_per_second, weights_per_core_second and cosine_error (lossy)."""
    for name, value in (("--layers", layers), ("--workers", workers), ("--repeats", repeats)):
        if value < 1:
            raise InputError(name, "number", "at least 1", value, "pass a positive number")
    from port.convert import convert

    with tempfile.TemporaryDirectory(dir=folder, prefix="k3-bench-") as scratch:
        source = Path(scratch, "source")
        nbytes = write_source(source, layers)
        tasks: dict[tuple[str, int], tuple] = {(BOUND, 1): (restack, (str(source), str(Path(scratch, "restacked"))))}
        for tier in tiers:
            target = str(Path(scratch, tier))
            convert(source, target, tier, workers=workers, sync=False)
            part = "all" if tier == "mxfp4" else "experts"
            for count in sorted({1, workers}):
                tasks[tier, count] = (verification, (str(source), target, part, count))
            if tier != "mxfp4":
                tasks[f"{PLAIN}, {tier}", 1] = (plain_way, (str(source), target))
        best: dict[tuple[str, int], Measured] = {}
        for _ in range(repeats):
            for key, (task, arguments) in tasks.items():
                found = measure(task, arguments)
                shutil.rmtree(Path(scratch, "restacked"), ignore_errors=True)
                best[key] = best.get(key, found).better(found)
        weights = expert_weights(source)
        errors = {tier: cosine_error(source, Path(scratch, tier)) for tier in tiers if tier != "mxfp4"}
        return [row(key, best, nbytes, weights, layers, errors) for key in tasks]


def row(
    key: tuple[str, int],
    best: dict[tuple[str, int], Measured],
    nbytes: int,
    weights: int,
    layers: int,
    errors: dict[str, float],
) -> Row:
    name, workers = key
    measured, lossless = best[key], key[0] in (BOUND, "mxfp4")
    if name.startswith(PLAIN):
        weights = PLAIN_EXPERTS * weights // experts_in(layers)
    return {
        "name": name,
        "layers": layers,
        "source_bytes": nbytes,
        "workers": workers,
        "seconds": round(measured.seconds, 3),
        "bytes_per_second": round(nbytes / measured.seconds) if lossless else None,
        "times_bound": round(best[BOUND, 1].seconds / measured.seconds, 3) if lossless else None,
        "weights_per_second": None if lossless else round(weights / measured.seconds),
        "weights_per_core_second": None if lossless else round(weights / measured.core_seconds),
        "cosine_error": errors.get(name),
        "resident": measured.resident,
    }


def experts_in(layers: int) -> int:
    """How many projections of experts the mini-K3 has."""
    from parity.bench.mini_k3 import document
    from reference.config import K3Config

    text = K3Config.from_dict(document(layers)).text_config
    return 3 * text.num_experts * sum(text.is_moe(layer) for layer in range(layers))


def report(rows: list[Row], as_json: bool = False) -> None:
    """A table, or one JSON document, on stdout."""
    if as_json:
        print(json.dumps({"schema": SCHEMA, "rows": rows}, indent=1))
        return
    from rich.table import Table

    from parity.cli.common import stdout

    table = Table("what", "workers", "s", "GB/s", "of bound", "M weights/s", "per core s", "cosine off", "MB")
    for row in rows:
        units = {"weights_per_second": 1e6, "weights_per_core_second": 1e6, "resident": 1e6, "bytes_per_second": 1e9}
        scaled = {key: None if row[key] is None else row[key] / unit for key, unit in units.items()}
        table.add_row(
            row["name"],
            str(row["workers"]),
            f"{row['seconds']:.2f}",
            shown(scaled["bytes_per_second"], ".2f"),
            shown(row["times_bound"], ".2f"),
            shown(scaled["weights_per_second"], ".0f"),
            shown(scaled["weights_per_core_second"], ".0f"),
            shown(row["cosine_error"], ".1e"),
            shown(scaled["resident"], ".0f"),
        )
    stdout().print(table)
