"""``k3-parity diagnose``: which known fault a wrong module looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parity.cli.check import diagnosed, planned, progress
from parity.cli.common import Json, Page, PortName, Seed, save_page, stderr, stdout, wanted_page
from reference.errors import InputError


def diagnose(
    found: Annotated[Path | None, typer.Argument(help="A trace under test; without it a port is asked.")] = None,
    golden: Annotated[Path | None, typer.Argument(help="The trace that is right, in its golden folder.")] = None,
    port: PortName = "mlx",
    case: Annotated[list[str] | None, typer.Option("--case", help="A case of the catalogue, or all.")] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="float32 or bfloat16.")] = None,
    checks: Annotated[list[str] | None, typer.Option("--check", help="One kind of check; may be given again.")] = None,
    part: Annotated[str, typer.Option("--part", help="text, vision, multimodal, processor, chat or all.")] = "all",
    seed: Seed = 0,
    as_json: Json = False,
    page: Page = None,
) -> None:
    """Rank the known faults by how well the reference, with each of them in it, gives the port's own wrong answers.

    Exit codes: 0 nothing is wrong, 1 something is and is diagnosed, 2 bad input, 3 the port crashed.
    """
    wanted_page(page)
    report = from_trace(found, golden) if found else from_port(port, case, dtype, checks, part, seed)
    if as_json:
        print(report.model_copy(update={"findings": tuple(report.sources)}).model_dump_json(indent=1))
    elif not report.failures:
        stdout().print(f"{report.port}: nothing is wrong", style="bold green")
    for item in report.diagnoses:
        stdout().print(f"{item.module} {item.text}", style="bold", markup=False, highlight=False, soft_wrap=True)
        for guess in item.guesses if not as_json else ():
            text = f"  {guess.residual:8.2g}  {' + '.join(guess.faults):14} {'; '.join(guess.claims)}"
            stdout().print(text, markup=False, highlight=False, soft_wrap=True)
    save_page(report, page)
    raise typer.Exit(report.exit_code)


def from_port(port, case, dtype, checks, part, seed):
    from parity.runner import run_checks

    plan, chosen = planned(port, case, dtype, checks, part, None, seed)
    return diagnosed(plan, run_checks(plan, chosen, None, progress))


def from_trace(found: Path, golden: Path | None):
    """The report of a trace against a golden one, diagnosed by the checkpoint in the golden trace's folder."""
    from parity.cli.compare import compared
    from parity.diagnosis import diagnose_trace
    from parity.trace import load_trace
    from parity.tracing import load_inputs

    if golden is None:
        raise InputError("diagnose", "GOLDEN", "the golden trace after the trace under test", "nothing", "name it")
    for name in ("config.json", "inputs.safetensors"):
        if not (golden.parent / name).is_file():
            mend = "keep the golden trace in its folder, beside checkpoint and inputs"
            raise InputError(golden.parent, name, "a file of a golden case", "nothing there", mend)
    report, dtype = compared(found, golden)
    if not report.failures:
        return report
    stderr.print("… diagnosis", style="dim")
    inputs = load_inputs(golden.parent / "inputs.safetensors")
    diagnoses = diagnose_trace(report, load_trace(found)[0], golden.parent, inputs, dtype)
    return report.model_copy(update={"diagnoses": diagnoses})
