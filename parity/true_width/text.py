"""The text tower at true width: which layers, from which weights, and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fixtures.catalogue import Entry, entry
from fixtures.inputs import token_ids
from parity.findings import Finding, Report
from parity.ports.mlx import PORT as MLX
from parity.ports.reference import PORT as REFERENCE
from parity.runner import header
from parity.true_width.chain import Chain, Plan
from parity.true_width.cost import peak_rss
from parity.true_width.isolated import layer_findings
from parity.true_width.sides import Run
from parity.true_width.source import ShardSource, Source, SyntheticSource
from parity.true_width.spread import shares
from parity.true_width.state import open_state
from parity.true_width.vision import PRESET
from parity.true_width.weights import Reader
from reference.config import read_json
from reference.errors import InputError

ALL = "all"
K3 = "k3"


@dataclass(frozen=True)
class Options:
    """``layers`` is "all" or 0-based numbers, "0,1,3"; ``checkpoint`` a folder that takes the place of ``case``."""

    case: str = K3
    layers: str = ALL
    tokens: int = 8
    decode: int = 2
    truth_layers: int = 4
    checkpoint: Path | None = None
    state: Path | None = None
    resume: bool = False
    seed: int = 0
    threads: int = 2


def run_text(
    options: Options,
    note: Callable[[str], None] = lambda line: None,
    in_force: Callable[[], AbstractContextManager] = nullcontext,
    workers: int = 1,
    scheduler: str | None = None,
) -> Report:
    """The findings of a run as a report; ``note`` hears a line per layer. Raises InputError for bad options.

    Single layers may be taken by ``workers`` processes, or by the workers of a dask ``scheduler``; a chain is one work.
    """
    started, run = time.monotonic(), opened(options)
    layers = chosen_layers(options.layers, run.text.num_hidden_layers)
    run.note, run.in_force = note, in_force
    if workers > 1 or scheduler:
        if layers is None:
            found = "all, a chain in which each layer needs the one before"
            raise InputError("--workers", "--layers", "single layers, as in 0,1,3", found, "leave --workers out")
        given = shares(options, layers, workers, scheduler, note)
        findings = [finding for share in given for finding in share.findings]
        needed, read = sum(share.needed for share in given), sum(share.read for share in given)
        peak = max(share.peak for share in given)
    else:
        findings = list(chained(run, options) if layers is None else isolated(run, layers))
        needed, read, peak = sum(run.reader.needed.values()), run.reader.source.read_bytes, peak_rss()
    run.reader.close()
    return Report(
        port=MLX.name,
        header=header(MLX, ("float32",), options.seed) | REFERENCE.versions() | facts(options, needed, read, peak),
        findings=tuple(finding.model_copy(update={"command": repeat(options, finding)}) for finding in findings),
        seconds=round(time.monotonic() - started, 2),
    )


def opened(options: Options) -> Run:
    """The run of these options, nothing read yet but headers."""
    source = source_of(options)
    name = options.case if options.checkpoint is None else source.name
    return Run(Reader(source, options.threads), name, options.tokens, options.seed)


def source_of(options: Options) -> Source:
    if options.checkpoint is not None:
        return ShardSource(options.checkpoint)
    known = Entry(K3, document(options)) if options.case == K3 else entry(options.case)
    return SyntheticSource(options.case, known.parsed, known.expert_format, options.seed)


def chosen_layers(layers: str, count: int) -> list[int] | None:
    """The layers of an option, or None for all of them in a chain; raises InputError for what is no list of layers."""
    if layers == ALL:
        return None
    numbers = [int(part) if part.strip().isdecimal() else -1 for part in layers.split(",")]
    if any(not 0 <= number < count for number in numbers):
        expected = f"all, or numbers from 0 to {count - 1}, as in 0,1,3"
        raise InputError("--layers", "layers", expected, layers, "count layers from 0")
    return list(dict.fromkeys(numbers))


def isolated(run: Run, layers: list[int]) -> Iterator[Finding]:
    """Every module of these layers alone."""
    for layer in layers:
        began, worst = time.monotonic(), 0.0
        for finding in layer_findings(run, layer):
            worst = max(worst, finding.error or 0.0)
            yield finding
        run.note(f"layer {layer} ({kind_of(run, layer)}): worst error {worst:.1e}, {cost(began)}")


def chained(run: Run, options: Options) -> Iterator[Finding]:
    """All layers, one after the other."""
    ids = token_ids(Entry("width", document(options)), "chain", (1, options.tokens + options.decode), options.seed)
    about = {"source": run.reader.source.name, "seed": options.seed, "tokens": options.tokens}
    about |= {"decode": options.decode, "truth_layers": options.truth_layers}
    about |= {"matrix product": MLX.versions()["matrix product"]}
    state = open_state(about, ids, options.state, options.resume)
    if state.layer:
        run.note(f"resumed before layer {state.layer}")
    yield from Chain(run, Plan(options.decode, options.truth_layers), state).findings()


def document(options: Options) -> dict[str, Any]:
    """The ``config.json`` of the run."""
    if options.checkpoint is not None:
        return read_json(options.checkpoint / "config.json")
    return read_json(PRESET) if options.case == K3 else entry(options.case).config


def kind_of(run: Run, layer: int) -> str:
    attention = "KDA" if run.text.is_kda(layer) else "MLA"
    return f"{attention}, {run.experts.get(layer, 0)} experts" if run.text.is_moe(layer) else f"{attention}, dense"


def cost(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s, {peak_rss() / 1e9:.1f} GB at most so far"


def facts(options: Options, needed: int, read: int, peak: int) -> dict[str, str]:
    """What a reader of the report must know beside the versions: bytes needed and read, peak bytes of a process."""
    told = {"layers": options.layers, "tokens": str(options.tokens), "peak memory": f"{peak / 1e9:.1f} GB"}
    if options.layers == ALL:
        told["decode steps"] = str(options.decode)
    told["float64"] = f"the first {options.truth_layers} layers" if options.layers == ALL else "every layer"
    told["bytes needed"] = str(needed)
    return told | ({"bytes read": str(read)} if options.checkpoint else {})


def repeat(options: Options, finding: Finding) -> str:
    """The one command that runs exactly this comparison again."""
    layer = finding.tap.partition(".layers.")[2].partition(".")[0]
    layers = layer if options.layers != ALL and layer else options.layers
    origin = f"--checkpoint {options.checkpoint}" if options.checkpoint else f"--case {options.case}"
    return f"k3-parity check {origin} --layers {layers} --tokens {options.tokens} --seed {options.seed}"
