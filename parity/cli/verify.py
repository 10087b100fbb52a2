"""``k3-parity verify``: a converted folder against its source, without a model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from parity.cli.common import Json, Seed, stderr, stdout

if TYPE_CHECKING:
    from parity.verify.findings import Verdict

SHOWN = 40


def verify(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The converted folder.")],
    source: Annotated[Path, typer.Option("--source", help="The checkpoint that it was converted from.")],
    sample: Annotated[
        int | None, typer.Option("--sample", min=1, help="Experts of each layer to compare; all of them unless given.")
    ] = None,
    part: Annotated[str, typer.Option("--part", help="all, experts, or rest: everything but the experts.")] = "all",
    tier: Annotated[
        str | None, typer.Option("--tier", help="The tier that was asked for, if it is to be held.")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="The plan that was asked for, likewise.")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", help="tcp://host:port of a dask scheduler, in place of --workers.")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare every tensor of OUT with its source: names, dtypes, shapes, and each expert's weights.

    Exit codes: 0 agree, 1 disagree, 2 bad input (a damaged source, a folder that is no conversion), 5 nothing was
    compared.
    """
    from parity.cli.convert import progress_bar
    from parity.verify.run import verify as verify_folder
    from port.prune import read_plan
    from reference.config import K3Config

    asked = None if plan is None else read_plan(plan, K3Config.from_file(source))
    with progress_bar("verify") as progress:
        result = verify_folder(folder, source, sample, part, seed, tier, asked, workers, scheduler, progress)
    if as_json:
        print(json.dumps(result.document()))
    show(stderr if as_json else stdout(), result)
    raise typer.Exit(result.exit_code)


def show(console: Console, result: Verdict) -> None:
    """Problems, then cosine and error by layer and projection, then the verdict."""

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    for problem in result.problems[:SHOWN]:
        line(problem.line(), "red")
    if len(result.problems) > SHOWN:
        kinds = Counter(problem.kind for problem in result.problems)
        line(f"… {len(result.problems)} problems: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()), "red")
    if result.experts:
        show_experts(console, result)
    rate = result.weights / max(result.seconds, 1e-9) / 1e6
    line(
        f"{len(result.experts):,} of {result.total_experts:,} experts' projections and {len(result.tensors):,} other "
        f"tensors compared, {result.seconds:.1f} s, {rate:,.0f} M expert weights/s"
    )
    verdicts = {0: ("the folder is its source's conversion", "bold green"), 5: ("nothing was compared", "bold red")}
    line(*verdicts.get(result.exit_code, ("the folder is not its source's conversion", "bold red")))


def show_experts(console: Console, result: Verdict) -> None:
    """One row a projection: the least cosine, mean and largest relative error over all layers, and where it is."""
    from rich.table import Table

    table = Table("projection", "experts", "least cosine", "mean error", "largest error", "layer", "expert", box=None)
    for projection in ("w1", "w2", "w3"):
        items = [item for item in result.experts if item.projection == projection]
        if items:
            worst = max(items, key=lambda item: item.error)
            mean = sum(item.error for item in items) / len(items)
            table.add_row(
                projection,
                f"{len(items):,}",
                f"{min(item.cosine for item in items):.6f}",
                f"{mean:.4f}",
                f"{worst.error:.4f}",
                str(worst.layer),
                str(worst.expert),
            )
    console.print(table)
