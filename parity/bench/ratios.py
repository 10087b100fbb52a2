"""``k3-parity bench ratios``: the speeds that a user waits for, each beside a bound or a peer.

What is compared takes turns in one process, so that a busy machine slows both: the ratios hold where seconds do not.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parity.bench.kda import NOT_INSTALLED, take_turns

SCHEMA = "k3-parity/bench-ratios/1"
LAYERS, PROMPT, STEPS = 4, 64, 16
CODES = 1 << 24
"""MXFP4 codes that are unpacked: about one expert of K3."""


class Ratio(NamedTuple):
    """``own`` and ``other`` are seconds, ``ratio`` the one over the other: below 1 is faster. None: nothing there."""

    what: str
    against: str
    own: float | None
    other: float | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.own / self.other if self.own is not None and self.other else None


def ratio(what: str, against: str, own: Callable[[], Any], other: Callable[[], Any], repeats: int) -> Ratio:
    """Both in turn, ``repeats`` times; the shortest times count."""
    seconds, _ = take_turns({"own": own, "other": other}, repeats)
    return Ratio(what, against, seconds["own"], seconds["other"])


def coverage_ratio(repeats: int, folder: Path) -> Ratio:
    """Every key of full K3 against the schema, beside parsing the same index as JSON."""
    from parity.coverage import index_coverage, load_config, load_index
    from reference.checkpoint import tensor_specs

    config, path = load_config("k3"), folder / "model.safetensors.index.json"
    specs = list(tensor_specs(config, "mxfp4"))
    weight_map = dict.fromkeys((spec.name for spec in specs), "model-00001-of-00001.safetensors")
    total = sum(spec.nbytes for spec in specs)
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))

    def covered() -> None:
        problems = index_coverage(config, load_index(path), path).problems
        assert not problems, problems[0]

    what = f"coverage of {len(specs):,} keys"
    return ratio(what, "parsing the index as JSON", covered, lambda: json.loads(path.read_text()), repeats)


def fixture_ratio(repeats: int, folder: Path) -> Ratio:
    """Building the largest fixture, drawing its values, beside writing the same bytes from memory."""
    from fixtures.build import build
    from fixtures.catalogue import entry

    source = build(entry("mini"), folder / "first")
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    (folder / "plain").mkdir()

    def plain() -> None:
        for name, data in files.items():
            (folder / "plain" / name).write_bytes(data)

    what = f"building a fixture of {sum(map(len, files.values())) / 1e6:.1f} MB"
    return ratio(
        what, "writing its bytes", lambda: build(entry("mini"), folder / "again", overwrite=True), plain, repeats
    )


def unpack_ratio(repeats: int, folder: Path) -> Ratio:
    """The reference's MXFP4 formula in float64, beside copying as many float64 numbers."""
    from reference.mxfp4 import unpack

    draw = np.random.default_rng(0)
    packed = draw.integers(0, 256, (CODES // 4096, 2048), np.uint8)
    scale = draw.integers(118, 124, (CODES // 4096, 128)).astype(np.uint8)
    numbers = unpack(packed, scale)
    return ratio("MXFP4 unpack", "copying its result", lambda: unpack(packed, scale), numbers.copy, repeats)


def copy_ratio(repeats: int, folder: Path) -> Ratio:
    """Tier mxfp4 of a mini-K3, beside copying its files."""
    from parity.bench.convert import copy
    from parity.bench.mini_k3 import write_source
    from port.convert import convert

    source, number = folder / "source", iter(range(10**6))
    nbytes = write_source(source, LAYERS)

    def converted() -> None:
        convert(source, folder / f"converted-{next(number)}", "mxfp4", sync=False)

    def copied() -> None:
        copy(str(source), str(folder / f"copied-{next(number)}"))

    return ratio(f"conversion of {nbytes / 1e9:.2f} GB, mxfp4", "copying the files", converted, copied, repeats)


def port_ratios(repeats: int, folder: Path) -> Iterator[Ratio]:
    """The port beside mlx-lm's model on one converted folder, bfloat16: a prompt, then single tokens."""
    from parity.bench.mini_k3 import write_source
    from port.convert import convert
    from port.weights import load_model

    names = (f"port, prompt of {PROMPT}", f"port, {STEPS} tokens one by one")
    try:
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model as load_theirs
    except ImportError:
        yield from (Ratio(name, "mlx-lm", None, None, NOT_INSTALLED) for name in names)
        return
    write_source(folder / "source", LAYERS)
    convert(folder / "source", folder / "out", "mxfp4", sync=False)
    ours, (theirs, _) = load_model(folder / "out", "bfloat16"), load_theirs(folder / "out")
    for name, pieces in zip(names, ([PROMPT], [1] * STEPS), strict=True):
        yield ratio(
            name,
            "mlx-lm",
            lambda pieces=pieces: fed(lambda ids, cache: ours(input_ids=ids, cache=cache), own_cache(ours), pieces),
            lambda pieces=pieces: fed(lambda ids, cache: theirs(ids, cache), make_prompt_cache(theirs), pieces),
            repeats,
        )


def own_cache(model: Any) -> Any:
    from port.cache import new_cache

    return new_cache(model.config.text_config, 1, "bfloat16")


def fed(model: Callable[[Any, Any], Any], cache: Any, pieces: list[int]) -> None:
    """Feed that many tokens after one another over one cache."""
    import mlx.core as mx

    for count in pieces:
        mx.eval(model(mx.arange(count)[None] % 97, cache))


MEASURES: tuple[Callable[[int, Path], Any], ...] = (
    coverage_ratio,
    fixture_ratio,
    unpack_ratio,
    copy_ratio,
    port_ratios,
)


def run(repeats: int = 3) -> list[Ratio]:
    """Every ratio, each in a folder of its own that is deleted afterwards."""
    rows: list[Ratio] = []
    for measure in MEASURES:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(repeats, Path(scratch))
            rows += [found] if isinstance(found, Ratio) else list(found)
    return rows


def report(rows: list[Ratio], as_json: bool = False) -> None:
    """A table, or one JSON document, on stdout."""
    if as_json:
        print(json.dumps({"schema": SCHEMA, "rows": [row._asdict() | {"ratio": row.ratio} for row in rows]}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "seconds", "against", "its seconds", "ratio")
    for row in rows:
        own, other, times = ("—" if x is None else f"{x:.3g}" for x in (row.own, row.other, row.ratio))
        table.add_row(row.what, own, f"{row.against}{', ' * bool(row.note)}{row.note}", other, times)
    Console().print(table)
