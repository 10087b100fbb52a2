"""``k3-parity reap``: which routed experts matter, for which texts, and which can go."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parity.cli.common import Json
from parity.cli.reap_tables import layers_bar, show_domains, show_overlap, show_plan, show_report
from reference.errors import InputError

if TYPE_CHECKING:
    from reference.saliency_result import Saliency

app = typer.Typer(no_args_is_help=True, help="Saliency of routed experts, plans that prune by it, and domains.")
TWINS = {"mlx": "port", "reference": "reference"}

Measured = Annotated[Path, typer.Argument(help="The .npz file that calibrate wrote.")]
Domains = Annotated[str | None, typer.Option("--domains", help="Names separated by commas; else all.")]
Keep = Annotated[float, typer.Option("--keep", min=0, help="Experts of every layer: a share below 1, or a number.")]
Balance = Annotated[bool, typer.Option("--balance", help="Every domain counts the same, whatever its tokens.")]
Picture = Annotated[Path | None, typer.Option("--picture", help="An SVG file to write.")]


@app.command()
def calibrate(
    checkpoint: Annotated[Path, typer.Option("--checkpoint", help="A checkpoint folder, as released.")],
    out: Annotated[Path, typer.Option("--out", help="The .npz file to write.")],
    tokens: Annotated[
        Path | None, typer.Option("--tokens", help='JSON: {"domain": [[id, …], …], …}, sequences of token ids.')
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="A text file, a domain by its name; may be repeated.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Its folder; else the checkpoint's.")] = None,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of one sequence of a text.")] = 2048,
    piece: Annotated[
        int, typer.Option("--piece-tokens", min=1, help="Tokens that pass through a layer's experts together.")
    ] = 1 << 16,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Measure the model that this plan leaves, not the whole one.")
    ] = None,
    implementation: Annotated[str, typer.Option("--with", help="mlx, or reference.")] = "mlx",
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    as_json: Json = False,
) -> None:
    """Measure every expert, holding one layer and one expert at a time.

    Memory is the activations (prefix sum and block vectors of all tokens), one layer without its experts, one expert.
    """
    from parity.reap.texts import read_texts, read_tokens
    from port.output_config import is_converted
    from port.prune import read_plan
    from reference.config import K3Config

    if (tokens is None) == (not text):
        given = "both" if text else "neither"
        raise InputError("calibrate", "--tokens and --text", "one of the two", given, "give exactly one")
    if implementation not in TWINS:
        raise InputError("--with", "implementation", "mlx or reference", implementation, "choose one of them")
    if is_converted(checkpoint):
        mend = "give the checkpoint that it was converted from"
        raise InputError(checkpoint, "--checkpoint", "a checkpoint as released", "a converted folder", mend)
    if not out.parent.is_dir():
        raise InputError(out, "--out", "a file in a folder that is there", "no such folder", "make the folder")
    domains = read_tokens(tokens) if tokens else read_texts(text, tokenizer or checkpoint, length)
    keep = None if plan is None else read_plan(plan, K3Config.from_file(checkpoint))
    run = importlib.import_module(f"{TWINS[implementation]}.saliency").calibrate
    with layers_bar() as progress:
        measured = run(checkpoint, domains, dtype, keep, piece, progress)
    measured.save(out)
    show_domains(measured, as_json)


@app.command()
def plan(
    saliency: Measured,
    keep: Keep,
    out: Annotated[Path, typer.Option("--out", help="The plan to write, for convert --plan.")],
    mode: Annotated[str, typer.Option("--mode", help="uniform: as many in every layer; global: the best of all.")] = (
        "uniform"
    ),
    floor: Annotated[
        int | None, typer.Option("--floor", min=1, help="Fewest of a layer in mode global; else 4 times top-k.")
    ] = None,
    domains: Domains = None,
    balance: Balance = False,
    as_json: Json = False,
) -> None:
    """Keep the most salient experts; show what is kept of saliency and routings, and the sizes that result."""
    from parity.reap.plans import made_plan, plan_document, retention
    from reference.saliency_result import load_saliency

    if mode not in ("uniform", "global"):
        raise InputError("--mode", "mode", "uniform or global", mode, "choose one of them")
    every = load_saliency(saliency)
    measured = chosen_domains(every, domains, saliency)
    made = made_plan(measured, keep, mode, balance, floor)
    document = plan_document(made, measured.domains, mode, balance, retention(made, measured, every, balance))
    write_json(out, document)
    if as_json:
        print(json.dumps(document, indent=1))
        return
    show_plan(document)


@app.command()
def overlap(
    saliency: Measured,
    keep: Keep = 0.27,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """How many of the best experts domains have in common, against chance, and what one's choice keeps of another."""
    from parity.reap.domains import overlap as overlap_of
    from parity.reap.picture import heat_map, write_picture
    from parity.reap.plans import keep_count
    from reference.saliency_result import load_saliency

    measured = load_saliency(saliency)
    found = overlap_of(measured, keep_count(keep, measured.config.text_config))
    if picture:
        write_picture(picture, heat_map(found))
    if as_json:
        arrays = {name: getattr(found, name).tolist() for name in ("shared", "by_layer", "kept", "unrouted")}
        plain = {name: getattr(found, name) for name in ("domains", "count", "experts", "chance", "deviation")}
        print(json.dumps({"format": 1} | plain | arrays, indent=1))
        return
    show_overlap(found)


@app.command()
def subset(
    saliency: Measured,
    domains: Annotated[str, typer.Option("--domains", help="Names separated by commas.")],
    out: Annotated[Path, typer.Option("--out", help="The .npz file to write.")],
    as_json: Json = False,
) -> None:
    """Write these domains alone, as if only they had been calibrated."""
    from reference.saliency_result import load_saliency

    measured = chosen_domains(load_saliency(saliency), domains, saliency)
    measured.save(out)
    show_domains(measured, as_json)


@app.command()
def report(
    saliency: Measured,
    domains: Domains = None,
    tier: Annotated[str, typer.Option("--tier", help="mxfp4, 3bit, mixed2 or 2bit, for the sizes.")] = "mxfp4",
    nonexpert_bits: Annotated[
        int | None, typer.Option("--nonexpert-bits", help="8: what mxfp4 and mixed2 leave in bf16, in 8 bits.")
    ] = None,
    memory: Annotated[
        list[float] | None, typer.Option("--memory", help="GB for the weights: mark where they are reached.")
    ] = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Concentration, the spread over the layers, and the share of saliency that every size keeps."""
    from dataclasses import asdict

    from parity.budget.sizes import Recipe
    from parity.reap.picture import curve, write_picture
    from parity.reap.report import retention_curve, spread
    from reference.saliency_result import load_saliency

    measured = chosen_domains(load_saliency(saliency), domains, saliency)
    recipe = Recipe(tier, nonexpert_bits)
    points, rows = retention_curve(measured, recipe, memory or []), spread(measured)
    if picture:
        write_picture(picture, curve(points, f"share of saliency kept, tier {recipe.name}"))
    if as_json:
        document = {"layers": [asdict(row) for row in rows], "curve": [asdict(point) for point in points]}
        print(json.dumps({"format": 1, "domains": measured.domains, "recipe": recipe.name} | document, indent=1))
        return
    show_report(rows, points, recipe.name)


def chosen_domains(measured: Saliency, domains: str | None, source: Path) -> Saliency:
    if domains is None:
        return measured
    names = [name.strip() for name in domains.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise InputError("--domains", "names", "different names separated by commas", domains, "name each once")
    return measured.only(names, source)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise InputError(path, "file", "a place to write to", error.strerror, "choose another file") from None
