"""``k3-parity budget``: what fits where, from a configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from parity.cli.common import Json, stdout
from reference.errors import InputError

if TYPE_CHECKING:
    from parity.budget.document import Budget

GB, MILLION = 10**9, 1 << 20


def budget(
    config: Annotated[str, typer.Argument(help="config.json, its folder, or the preset k3.")] = "k3",
    machines_file: Annotated[
        Path | None, typer.Option("--machines", help="TOML or JSON: machines of your own, as in machines.toml.")
    ] = None,
    machine: Annotated[list[str] | None, typer.Option("--machine", help="Only this machine; may be repeated.")] = None,
    context: Annotated[int, typer.Option("--context", min=0, help="Tokens in the caches of one sequence.")] = MILLION,
    keep: Annotated[int | None, typer.Option("--keep", min=1, help="Experts kept in every layer; else all.")] = None,
    memory: Annotated[float, typer.Option("--memory", min=0, help="GB, for the bits per weight that it allows.")] = 512,
    bandwidth: Annotated[float, typer.Option("--bandwidth", min=0, help="GB/s, for the decode ceiling.")] = 819,
    workspace: Annotated[
        float, typer.Option("--workspace-gb", min=0, help="Kept free per node for activations and buffers.")
    ] = 4,
    as_json: Json = False,
) -> None:
    """Parameters, bytes, bits, reads per token, caches, and whether and how it fits machines.

    No checkpoint is needed. Exit codes: 0 shown, 2 bad input.
    """
    from parity.budget.document import Settings, as_document
    from parity.budget.document import budget as budget_of
    from parity.budget.machines import machines
    from parity.coverage import load_config

    known = machines(machines_file)
    for name in machine or ():
        if name not in known:
            raise InputError(
                "--machine", "name", f"one of {', '.join(known)}", name, "choose one, or add it: --machines"
            )
    chosen = [known[name] for name in machine] if machine else list(known.values())
    result = budget_of(load_config(config), Settings(context, keep, memory, bandwidth, workspace), chosen)
    if as_json:
        print(json.dumps(as_document(result), indent=1))
        return
    show(stdout(), result)


def show(console: Console, result: Budget) -> None:
    """All tables, the assumptions last."""
    from parity.budget.document import assumptions

    for table in (parameter_table, recipe_table, read_table, bit_table, cache_table, machine_table):
        console.print(table(result))
    for name, rows in result.nodes.items():
        console.print(step_table(name, rows))
    if result.published:
        console.print(published_table(result))
    console.print("Assumptions", style="bold")
    for line in assumptions(result.settings):
        console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)
    for name, why in result.refused.items():
        console.print(f"{name}: {why}", markup=False, highlight=False, soft_wrap=True)


def gb(nbytes: float) -> str:
    """Bytes in GB with three digits or more, small amounts too."""
    return f"{nbytes / GB:,.{1 if abs(nbytes) >= 10 * GB else 2 if abs(nbytes) >= GB / 10 else 6}f}"


def rate(tokens: float | None) -> str:
    return "" if tokens is None else f"{tokens:,.1f}"


def parameter_table(result: Budget) -> Table:
    table, total = Table("component", "parameters", "share", title="Parameters"), sum(result.counts.values())
    for name, count in result.counts.items():
        table.add_row(name, f"{count:,}", f"{100 * count / total:.2f} %")
    table.add_row("in all", f"{total:,}", f"{total / 1e9:,.1f} B", style="bold")
    return table


def recipe_table(result: Budget) -> Table:
    from parity.budget.document import ceiling
    from parity.budget.reads import read_per_token

    kept = result.recipes[0].kept if result.recipes else 0
    at = f"tokens/s at {result.settings.bandwidth_gb_s:g} GB/s"
    title = f"Sizes with {kept} experts in every layer, and the decode ceiling with {result.held.context:,} tokens held"
    table = Table("tier", "routed GB", "rest GB", "TB", "read per token, GB", at, title=title)
    for whole in result.recipes:
        read = sum(read_per_token(whole, result.config).values())
        numbers = gb(whole.routed), gb(whole.rest), f"{whole.nbytes / 1e12:.4f}", gb(read), rate(ceiling(result, whole))
        table.add_row(whole.recipe.name, *numbers)
    return table


def read_table(result: Budget) -> Table:
    """Component by component: what a token reads of it."""
    from parity.budget.reads import read_per_token, state_traffic

    table = Table("component", *(whole.recipe.name for whole in result.recipes), title="Read per token, GB")
    reads = [read_per_token(whole, result.config) for whole in result.recipes]
    for name in reads[0] if reads else ():
        table.add_row(name, *(gb(read[name]) for read in reads))
    table.add_row("weights in all", *(gb(sum(read.values())) for read in reads), style="bold")
    table.add_row("and moved in the caches", *(gb(state_traffic(result.held)) for _ in reads))
    return table


def bit_table(result: Budget) -> Table:
    from parity.budget.document import needed_bits

    table = Table("weights", "bits per weight", title=f"What {result.settings.memory_gb:g} GB allow, nothing else held")
    for what, bits in needed_bits(result).items():
        table.add_row(what, f"{bits:.3f}" if bits > 0 else "none: the rest alone is larger")
    return table


def cache_table(result: Budget) -> Table:
    from parity.budget.reads import hop_bytes

    held = result.held
    table = Table("what", "GB", title=f"One sequence of {held.context:,} tokens")
    table.add_row("KDA states, whatever the length", gb(held.kda_state))
    table.add_row("KDA convolution states", gb(held.conv_state))
    table.add_row("MLA cache, compressed", gb(held.mla))
    table.add_row("in all", gb(held.nbytes), style="bold")
    table.add_row("(MLA cache as full keys and values)", gb(held.mla_expanded))
    table.add_row("(passed from layer to layer per token)", gb(hop_bytes(result.config.text_config)))
    return table


def machine_table(result: Budget) -> Table:
    columns = ("usable GB", "tier", "needed GB", "fits", "experts kept that fit", "nodes: bytes / layers")
    ceilings = ("tokens/s one after another", "all at once")
    table = Table("machine", *columns, *ceilings, title="Machines: weights and the caches of one sequence")
    all_experts = result.config.text_config.num_experts
    for row in result.fits:
        keep = "not a token's choice" if row.keep is None else f"{row.keep} of {all_experts}"
        nodes = f"{row.by_bytes} / {row.by_layers or 'layer too large'}"
        machine = row.machine
        beyond = machine.supported_nodes is not None and machine.nodes > machine.supported_nodes
        name = f"{machine.name} (beyond the {machine.supported_nodes} supported)" if beyond else machine.name
        fits = "[green]yes[/]" if row.fits else "[red]no[/]"
        speeds = rate(row.one_after_another), rate(row.all_at_once) if machine.nodes > 1 else ""
        table.add_row(name, gb(row.usable), row.recipe, gb(row.needed), fits, keep, nodes, *speeds)
    return table


def step_table(name: str, rows: list) -> Table:
    table = Table("counted", "needed GB", "a node has GB", "nodes", title=f"How many nodes like {name}'s, step by step")
    for step in rows:
        table.add_row(step.what, gb(step.needed), gb(step.node), str(step.nodes or "none is enough"))
    return table


def published_table(result: Budget) -> Table:
    table = Table(
        "figure", "published", "computed", "", "why they differ", title="Published figures and the arithmetic"
    )
    for claim in result.published:
        mark = "[green]same[/]" if claim.agrees else "[yellow]differs[/]"
        table.add_row(claim.figure, claim.published, claim.computed, mark, claim.reason)
    return table
