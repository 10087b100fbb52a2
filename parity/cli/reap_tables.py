"""What ``k3-parity reap`` shows: tables, and a bar while it calibrates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from parity.cli.common import stderr, stdout

if TYPE_CHECKING:
    from parity.reap.domains import Overlap
    from parity.reap.report import LayerSpread, Point
    from reference.saliency_result import Saliency


@contextmanager
def layers_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, in layers."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as shown:
        task = shown.add_task("layers", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def show_domains(measured: Saliency, as_json: bool) -> None:
    """Tokens and their shares, never bytes: one script needs several times the tokens of another for as many bytes."""
    total = int(measured.tokens.sum())
    never = (measured.counts == 0).sum((1, 2))
    if as_json:
        rows = [
            {"domain": name, "tokens": int(tokens), "share": tokens / total, "never_routed": int(unrouted)}
            for name, tokens, unrouted in zip(measured.domains, measured.tokens, never, strict=True)
        ]
        print(json.dumps({"format": 1, "tokens": total, "domains": rows}, indent=1))
        return
    from rich.table import Table

    layers, experts = measured.mass.shape[1:]
    table = Table("domain", "tokens", "share", f"experts never routed, of {layers * experts:,}")
    for name, tokens, unrouted in zip(measured.domains, measured.tokens, never, strict=True):
        table.add_row(name, f"{tokens:,}", f"{100 * tokens / total:.1f} %", f"{unrouted:,}")
    stdout().print(table)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def show_plan(document: dict[str, Any]) -> None:
    from rich.table import Table

    kept, console = document["retention"], stdout()
    (low, lowest), (high, highest) = kept["lowest"], kept["highest"]
    table = Table("kept", "")
    table.add_row("experts", f"{kept['kept']:,} of {kept['experts']:,}")
    table.add_row("saliency, mean over the layers", percent(kept["mass"]))
    table.add_row("  least", f"{percent(lowest)}, layer {low}")
    table.add_row("  most", f"{percent(highest)}, layer {high}")
    for name, mass in kept["mass_of"].items():
        table.add_row(
            f"  of domain {name}" + ("" if name in document["domains"] else " (not asked for)"), percent(mass)
        )
    table.add_row("routings that find their expert", percent(kept["routed"]))
    table.add_row(
        "experts that no token chose", f"{kept['never_routed']:,}, of which {kept['never_routed_kept']:,} stay"
    )
    for name, nbytes in kept["bytes"].items():
        table.add_row(f"size in tier {name}", f"{nbytes:,} bytes, {nbytes / 1e9:,.4g} GB")
    console.print(table)


def show_overlap(found: Overlap) -> None:
    from rich.table import Table

    console = stdout()
    chance = f"chance {percent(found.chance)}, give or take {percent(found.deviation)}"
    title = f"The {found.count} best of {found.experts} experts of a layer, in common; {chance}"
    for array, caption in ((found.shared, title), (found.kept, "Of the column's saliency, kept by the row's best")):
        console.print(caption, markup=False, highlight=False, soft_wrap=True)
        table = Table("", *found.domains)
        for name, row in zip(found.domains, array, strict=True):
            table.add_row(name, *(percent(share) for share in row))
        console.print(table)
    for name, unrouted in zip(found.domains, found.unrouted, strict=True):
        if unrouted:
            text = f"{name}: {unrouted:.1f} of the {found.count} best of a layer were never routed; a smaller --keep"
            console.print(f"{text} compares what is used", markup=False, highlight=False, soft_wrap=True)


def show_report(rows: list[LayerSpread], points: list[Point], recipe: str) -> None:
    from rich.table import Table

    from parity.reap.report import SHARES

    console = stdout()
    shares = [f"hold {100 * share:.0f} %" for share in SHARES]
    table = Table(
        "layer", *shares, "Gini", "largest", "never routed", title="Experts of a layer that hold the saliency"
    )
    for row in rows:
        held = [str(row.holders[share]) for share in SHARES]
        table.add_row(str(row.layer), *held, f"{row.gini:.3f}", percent(row.largest), str(row.never_routed))
    for name, pick in (("least", min), ("most", max)):
        held = [str(pick(row.holders[share] for row in rows)) for share in SHARES]
        ginis, largest = pick(row.gini for row in rows), pick(row.largest for row in rows)
        never = str(pick(row.never_routed for row in rows))
        table.add_row(name, *held, f"{ginis:.3f}", percent(largest), never, style="bold")
    console.print(table)
    table = Table("experts kept", "saliency kept", "bytes", "GB", "", title=f"Uniform plans in tier {recipe}")
    for point in points:
        mark = "" if point.memory_gb is None else f"the most that fits into {point.memory_gb:g} GB"
        style = "bold" if mark else None
        table.add_row(
            str(point.kept), percent(point.mass), f"{point.nbytes:,}", f"{point.nbytes / 1e9:,.4g}", mark, style=style
        )
    console.print(table)
