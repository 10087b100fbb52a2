"""From a report to the text of the page."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from parity.findings import Report
from parity.page import growth
from parity.page.culprits import failure_groups, module_tables, unsupported, wrong_modules
from parity.page.heat import function_rows, tap_map
from parity.page.numbers import amount, count, number, share, share_text
from parity.report import WORDS, closeness, short

VERDICTS = {
    0: "agrees with the reference",
    1: "disagrees with the reference",
    3: "could not load or crashed",
    5: "was not compared at all",
}
SHOWN_CULPRITS = 3
"""Those that are diagnosed; more are folded away."""
OPEN_GROUPS = 3
"""With more commands than this, only the first one's failures are unfolded."""
DRAWING = {"width": growth.WIDTH, "height": growth.HEIGHT, "left": growth.LEFT, "right": growth.WIDTH - growth.RIGHT,
           "top": growth.TOP, "bottom": growth.HEIGHT - growth.BOTTOM}  # fmt: skip


def page(report: Report) -> str:
    """The whole page; the same report gives the same text."""
    compared = [finding for finding in report.findings if finding.status == "pass" and finding.error is not None]
    return environment().get_template("page.html.j2").render(
        report=report,
        dtypes=list(dict.fromkeys(f.dtype for f in report.findings if f.dtype != "any")),
        verdict=VERDICTS[report.exit_code],
        counts=[(status, report.counts[status], word) for status, word in WORDS.items()],
        ties=sum(finding.ties for finding in report.findings),
        culprits=wrong_modules(report),
        shown_culprits=SHOWN_CULPRITS,
        anchor_broken=any(finding.check == "anchor" for finding in report.sources),
        nearest=max(compared, key=closeness, default=None),
        tables=module_tables(report),
        panels=growth.panels(report),
        drawing=DRAWING,
        functions=function_rows(report),
        heat_maps=[tap_map(report, isolated) for isolated in (True, False)],
        groups=failure_groups(report),
        open_groups=OPEN_GROUPS,
        unsupported=list(unsupported(report)),
    )  # fmt: skip


def environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {
        "amount": amount, "count": count, "number": number, "short": short, "share": share, "share_text": share_text,
    }  # fmt: skip
    made.globals["zipped"] = lambda guess: zip(guess.faults, guess.claims, strict=True)
    return made
