"""The pytest side: options, the port under test, known failures, the header, Hypothesis profiles, what was compared."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, max_examples=20)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("nightly", deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

OWN = ("mlx", "reference")
SUITE = "parity/suite"
COMPARED, LISTED = "k3-parity compared", "k3-parity listed"
WORDS = {"pass": "agree", "fail": "disagree", "error": "crashed", "unsupported": "unsupported"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("k3-parity")
    default = os.environ.get("K3_PARITY_PORT", "mlx")
    ports = "mlx, reference, mlx_lm, mlx_vlm, transformers, fla, traces:DIR, command:LINE, pipeline:RANKS, ring:RANKS"
    ports += " or package.module:ATTRIBUTE"
    group.addoption("--port", default=default, help=f"port under test: {ports}; another than mlx runs {SUITE} alone")
    seed = int(os.environ.get("K3_PARITY_SEED", "0"))
    group.addoption("--parity-seed", default=seed, type=int, help="seed of weights and inputs")
    group.addoption("--xfails", type=Path, help="the port's known failures (parity/known.py), strict both ways")
    group.addoption("--parity-json", type=Path, help="write what was compared, and how it came out, to this file")


def pytest_configure(config: pytest.Config) -> None:
    from parity import known
    from parity.ports import load_port
    from reference.errors import InputError

    name = config.getoption("port")
    if name not in OWN and config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        config.args[:] = [SUITE]
    if config.getoption("xfails"):
        settings.load_profile("ci")
        try:
            known.active = known.Known.from_file(config.getoption("xfails"), load_port(name))
        except InputError as error:
            raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(Compared(config), "k3-parity compared")


def pytest_report_header(config: pytest.Config) -> list[str]:
    from parity.ports import load_port
    from parity.runner import header

    port = load_port(config.getoption("port"))
    shown = header(port, port.capabilities().dtypes, config.getoption("parity_seed"))
    return ["k3-parity: " + ", ".join(f"{key} {value}" for key, value in shown.items())]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Hand over what the test compared; between processes only plain values travel."""
    from parity import known
    from parity.suite.judge import reports

    if call.when == "call" and reports:
        counts = Counter((f.check, f.dtype, f.module, f.status) for report in reports for f in report.findings)
        listed = [list(key) for report in reports for key in known.active.verdict(report).listed]
        item.user_properties.append((COMPARED, [[*key, number] for key, number in counts.items()]))
        item.user_properties.append((LISTED, listed))
        reports.clear()
    yield


class Compared:
    """How many comparisons came out which way, over all tests and workers; known failures that nothing looked at."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.counts, self.listed = config, Counter(), set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == COMPARED:
                self.counts.update({tuple(row[:4]): row[4] for row in value})
            elif name == LISTED:
                self.listed.update(map(tuple, value))

    @property
    def totals(self) -> Counter:
        """By outcome; what is compared of the reference itself is not the port's."""
        from parity.findings import OF_THE_REFERENCE

        totals: Counter = Counter()
        for (check, *_, status), number in self.counts.items():
            totals[status] += number if check not in OF_THE_REFERENCE else 0
        return totals

    def stale(self) -> list[tuple]:
        """Entries that a whole run of the suite never came to; nothing can be said of a part of it, nor of the larger
        golden cases, which are not everywhere."""
        from parity import known
        from parity.checks.plan import GOLDEN_IN_REPO

        config = self.config
        option = config.option
        whole = config.args == [SUITE] and not (option.keyword or option.deselect or option.maxfail)
        here = {key for key in known.active.entries if key.check != "golden" or key.case == GOLDEN_IN_REPO.name}
        return sorted(here - self.listed) if whole and self.listed else []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workerinput") or not self.counts:
            return
        if self.stale() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if path := self.config.getoption("parity_json"):
            path.write_text(json.dumps(self.document(), indent=1) + "\n")

    def document(self) -> dict:
        rows = [dict(zip(("check", "dtype", "module", "status"), key, strict=True)) for key in sorted(self.counts)]
        for row, key in zip(rows, sorted(self.counts), strict=True):
            row["comparisons"] = self.counts[key]
        totals = {word: self.totals[status] for status, word in WORDS.items()}
        stale = [list(key) for key in self.stale()]
        return {"format": 1, "port": self.config.getoption("port"), "totals": totals, "stale": stale, "rows": rows}

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if not self.counts:
            return
        shown = ", ".join(f"{self.totals[status]} {word}" for status, word in WORDS.items() if self.totals[status])
        terminalreporter.write_line(f"k3-parity: of {sum(self.totals.values())} comparisons {shown}")
        for key in self.stale():
            terminalreporter.write_line(f"k3-parity: no test came to the known failure {' '.join(key)}", red=True)


@pytest.fixture(scope="session")
def port(request: pytest.FixtureRequest):
    """The port under test."""
    from parity.ports import load_port

    return load_port(request.config.getoption("port"))


@pytest.fixture(scope="session")
def parity_seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("parity_seed")


@pytest.fixture(scope="session")
def opened() -> dict:
    """Sessions that are open already; checks of one worker share them."""
    return {}
