"""``k3-parity check``: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parity.cli import width
from parity.cli.common import Json, Page, PortName, Seed, finish, stderr, wanted_page
from reference.errors import InputError

if TYPE_CHECKING:
    from parity.checks import Plan
    from parity.findings import Report


def check(
    port: PortName = "mlx",
    case: Annotated[
        list[str] | None, typer.Option("--case", help="A case of the catalogue, or all; may be given again.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="float32 or bfloat16; may be given again. Both unless given.")
    ] = None,
    checks: Annotated[
        list[str] | None, typer.Option("--check", help="One kind of check, e.g. layers; may be given again.")
    ] = None,
    part: Annotated[
        str, typer.Option("--part", help="text, vision, multimodal, processor, chat, converter or all.")
    ] = "all",
    golden: Annotated[
        Path | None,
        typer.Option(
            "--golden", help="Compare with this folder of the authors' own results; alone unless --check is given."
        ),
    ] = None,
    regime: Annotated[str | None, typer.Option("--regime", help="Keep only this input regime.")] = None,
    layers: width.Layers = None,
    tokens: width.Tokens = 8,
    decode: width.Decode = 2,
    truth_layers: width.TruthLayers = 4,
    checkpoint: width.Checkpoint = None,
    state: width.StateFolder = None,
    resume: width.Resume = False,
    lend_blas: width.LendBlas = width.LENT,
    threads: width.Threads = 2,
    seed: Seed = 0,
    workers: width.Workers = None,
    scheduler: width.Scheduler = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose/--no-diagnose", help="Say which known fault a wrong module looks like.")
    ] = True,
    as_json: Json = False,
    page: Page = None,
) -> None:
    """Compare a port with the reference, module by module and end to end.

    Exit codes: 0 agree, 1 disagree, 2 bad input, 3 the port could not load or crashed, 5 nothing was compared.
    """
    if layers is not None or checkpoint is not None:
        streamed = (tokens, decode, truth_layers, checkpoint, state, resume, lend_blas, threads, seed, as_json)
        streamed += (workers, scheduler)
        width.text(layers or "all", one_streamed(port, case, dtype), *streamed)
    from parity.parallel import in_workers, jobs_of, workers_for
    from parity.runner import run_checks

    wanted_page(page)
    plan, chosen = planned(port, case, dtype, checks, part, golden, seed)
    processes = workers or workers_for(port)
    several = scheduler or (processes > 1 and len(jobs_of(port, plan, chosen)) > 1)
    found = in_workers(port, plan, chosen, processes, progress, scheduler) if several else None
    report = run_checks(plan, chosen, regime, progress, found)
    finish(diagnosed(plan, report) if diagnose else report, as_json, page)


def one_streamed(port: str, case: list[str] | None, dtype: list[str] | None) -> str:
    """The case of a run with --layers; raises InputError for what cannot be streamed layer by layer."""
    mend = "leave it out with --layers"
    if port != "mlx":
        raise InputError("--port", "--layers", "mlx, the twin that is built layer by layer", port, mend)
    if dtype not in (None, ["float32"]):
        raise InputError("--dtype", "--layers", "float32", ", ".join(dtype), mend)
    if case is not None and len(case) != 1:
        raise InputError("--case", "--layers", "one case", ", ".join(case), "run them one by one")
    return case[0] if case else "k3"


def planned(port, case, dtype, checks, part, golden, seed) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a run and the names of its checks; raises InputError for an option that cannot be."""
    from fixtures.catalogue import CATALOGUE
    from parity.checks import Plan
    from parity.checks.plan import case_named
    from parity.ports import load_port
    from parity.runner import CORE_CASES, EVERY_CASE, checks_of, known_checks

    under_test = load_port(port)
    able = under_test.capabilities()
    names = tuple(case or CORE_CASES)
    cases = tuple(case_named(name, seed) for name in (CATALOGUE if EVERY_CASE in names else names))
    if (golden is not None or not able.kinds) and not checks:
        checks = ["modules"] if able.functions and golden is None else ["golden"]
    if golden is not None:
        known_golden(golden)
    chosen = known_checks(checks or checks_of(part))
    return Plan(under_test, cases, known_dtypes(dtype, able.dtypes), seed, golden), chosen


def diagnosed(plan: Plan, report: Report) -> Report:
    """The report with what its culprits look like, if it has any."""
    from parity.diagnosis import diagnose

    if not report.failures:
        return report
    return report.model_copy(update={"diagnoses": diagnose(plan, report, progress)})


def progress(name: str) -> None:
    stderr.print(f"… {name}", style="dim", highlight=False)


def known_dtypes(given: list[str] | None, able: tuple[str, ...]) -> tuple[str, ...]:
    """The dtypes to run: those asked for, or float32 and bfloat16 as far as the port has them."""
    comparable = tuple(name for name in ("float32", "bfloat16") if name in able)
    for name in given or ():
        if name not in comparable:
            raise InputError("--dtype", name, f"one of {', '.join(comparable)}", name, "choose a dtype this port has")
    return tuple(given or comparable)


def known_golden(folder: Path) -> None:
    """Raise InputError unless ``folder`` holds a golden case."""
    for name in ("config.json", "inputs.safetensors", "trace-float32.safetensors"):
        if not (folder / name).is_file():
            raise InputError(
                folder, name, "a file of a golden case", "nothing there", "give a folder like fixtures/golden/mini"
            )
