"""``k3-parity``: the entry point."""

from __future__ import annotations

import os
import sys

import typer

from parity.cli import audit, bench, chat, check, compare, convert, coverage, fixture, image, trace, verify, width
from parity.cli.common import stderr
from parity.exits import EXIT_USAGE
from reference.errors import InputError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Is a port of Kimi K3 right, and if not, which module is wrong?",
)
app.command("check")(check.check)
app.command("trace")(trace.trace)
app.command("compare")(compare.compare)
app.command("coverage")(coverage.coverage)
app.command("convert")(convert.convert)
app.command("verify")(verify.verify)
app.command("chat")(chat.chat)
app.command("image")(image.image)
app.command("audit")(audit.audit)
app.add_typer(fixture.app, name="fixture")
app.add_typer(bench.app, name="bench")
app.add_typer(width.app, name="width")


def run() -> None:
    """Bad input ends in one line and exit 2; a mistake of this program shows its traceback.

    Mini models are too small to share a product between threads: where another program is busy, two threads that wait
    for each other made a check a hundred times slower. OMP_NUM_THREADS, if set, wins.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        app()
    except InputError as error:
        stderr.print(f"k3-parity: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(EXIT_USAGE)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    run()
