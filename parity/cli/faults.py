"""``k3-parity faults``: the known faults, and the matrix that shows that each is caught."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track
from rich.table import Table

from parity.cli.common import Json, Seed, stderr, stdout
from parity.exits import EXIT_AGREE, EXIT_DISAGREE
from reference.errors import InputError

if TYPE_CHECKING:
    from parity.kill_matrix import Kill

app = typer.Typer(no_args_is_help=True, help="Readings that are known to be wrong, and whether each is caught.")
Modules = Annotated[list[str] | None, typer.Option("--module", help="Only this module's faults; may be given again.")]
SHOWN = {"caught": "green", "misnamed": "yellow", "unseen": "red"}


def chosen(ids: list[str] | None, modules: list[str] | None) -> list:
    """The faults that were asked for, all of them without a word; raises InputError on an unknown id or module."""
    from parity.fault_catalogue import FAULTS
    from parity.faults import fault

    known = sorted({item.module for item in FAULTS})
    for module in modules or ():
        if module not in known:
            raise InputError("--module", module, f"one of {', '.join(known)}", module, "name a module")
    items = [fault(id) for id in ids] if ids else list(FAULTS)
    return [item for item in items if not modules or item.module in modules]


@app.command("list")
def list_faults(module: Modules = None, as_json: Json = False) -> None:
    """Every known fault: its id, the module where it must be caught, and what it claims."""
    items = chosen(None, module)
    if as_json:
        print(json.dumps([described(item) for item in items], indent=1, ensure_ascii=False))
        return
    table = Table(title=f"{len(items)} known faults", title_justify="left")
    for name in ("id", "module", "claims that", "shows as"):
        table.add_column(name, no_wrap=name in ("id", "module"))
    for item in items:
        table.add_row(item.id, item.module, item.claim, item.shows)
    stdout().print(table)


@app.command("show")
def show(id: Annotated[str, typer.Argument(help="A fault's id, e.g. F01.")], as_json: Json = False) -> None:
    """One fault: its claim, how it shows, where it is caught, and which functions it replaces."""
    item = described(chosen([id], None)[0])
    if as_json:
        print(json.dumps(item, indent=1, ensure_ascii=False))
        return
    for key, value in item.items():
        if value:
            stdout().print(
                f"{key:9} {', '.join(value) if isinstance(value, list) else value}", markup=False, highlight=False
            )


def described(item) -> dict:
    return {
        "id": item.id,
        "claims": item.claim,
        "shows as": item.shows,
        "module": item.module,
        "also": list(item.also),
        "case": item.case,
        "replaces": [*item.patches, *(f"{name} = {value!r}" for name, value in item.numbers.items())],
        "hidden": item.hidden,
    }


@app.command("run")
def run(
    ids: Annotated[list[str] | None, typer.Argument(help="Faults to run, e.g. F01 F02; all unless given.")] = None,
    port: Annotated[list[str] | None, typer.Option("--port", help="mlx or reference; both unless given.")] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="float32 or bfloat16; both unless given.")] = None,
    module: Modules = None,
    workers: Annotated[int, typer.Option("--workers", envvar="K3_PARITY_WORKERS", min=1, help="Processes.")] = 2,
    diagnosed: Annotated[
        bool, typer.Option("--diagnose", help="Also: does the diagnosis put the fault first? Slower.")
    ] = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Put each fault into a twin and run the checks: is it caught, at its own module?

    Exit codes: 0 every fault is caught, or cannot show in bfloat16 for a stated reason; 1 one is not; 2 bad input.
    """
    from parity.kill_matrix import PACKAGES, matrix

    items = chosen(ids, module)
    ports = known("--port", port, tuple(PACKAGES))
    dtypes = known("--dtype", dtype, ("float32", "bfloat16"))
    kills = list(
        track(
            matrix(items, ports, dtypes, seed, workers, diagnosed),
            "faults",
            len(items) * len(ports) * len(dtypes),
            console=stderr,
            transient=True,
        )
    )
    if as_json:
        print(json.dumps([record(kill) for kill in kills], indent=1, ensure_ascii=False))
    else:
        stdout().print(kill_table(kills))
    for line in summary(kills):
        stderr.print(line, highlight=False)
    raise typer.Exit(EXIT_AGREE if all(kill.accounted for kill in kills) else EXIT_DISAGREE)


def known(option: str, given: list[str] | None, able: tuple[str, ...]) -> tuple[str, ...]:
    for name in given or ():
        if name not in able:
            raise InputError(option, name, f"one of {', '.join(able)}", name, "choose one of them")
    return tuple(given or able)


def record(kill: Kill) -> dict:
    return kill._asdict() | {"hidden": kill.hidden}


def kill_table(kills: list[Kill]) -> Table:
    table = Table(title="known faults against the checks", title_justify="left")
    for name in ("fault", "module", "port", "dtype", "", "by", "error", "allowed", "cosine", "named"):
        table.add_column(name, justify="right" if name in ("error", "allowed", "cosine") else "left")
    for kill in kills:
        numbers = ("", "", "")
        if kill.status != "unseen":
            cosine = "" if kill.cosine is None else f"{kill.cosine:.5f}"
            numbers = (f"{kill.error:.1e}", f"{kill.allowed:.1e}", cosine)
        table.add_row(
            kill.fault,
            kill.module,
            kill.port,
            kill.dtype,
            f"[{SHOWN[kill.status]}]{kill.status}",
            kill.check,
            *numbers,
            ", ".join(kill.named[:3]),
        )
    return table


def summary(kills: list[Kill]):
    """One line a port and dtype, then every fault that was not caught with the reason."""
    groups: dict[tuple[str, str], list[Kill]] = {}
    for kill in kills:
        groups.setdefault((kill.port, kill.dtype), []).append(kill)
    for (port, dtype), members in groups.items():
        caught = sum(kill.status == "caught" for kill in members)
        named = sum(kill.named_first for kill in members)
        first = f", {named} named first by the diagnosis" if any(kill.looks_like for kill in members) else ""
        yield f"{port} {dtype}: {caught} of {len(members)} caught at their module{first}"
    for kill in kills:
        if kill.status != "caught":
            reason = kill.hidden or "no reason is known"
            yield f"  {kill.fault} {kill.port} {kill.dtype}: {kill.status}; {reason}"
        elif kill.looks_like and not kill.named_first:
            yield f"  {kill.fault} {kill.port} {kill.dtype}: caught, and looks like {' + '.join(kill.looks_like)}"
