"""Known failures are strict both ways: a new one fails, one that is gone fails, one that got worse fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parity.findings import Finding, Report
from parity.known import Entry, Key, Known, as_toml
from parity.ports import load_port
from reference.errors import InputError

ROOT = Path(__file__).parents[2]
PUBLISHED = sorted((ROOT / "parity" / "published").glob("*.toml"))
ROUTER = Key("layers", "bfloat16", "router", "mini")


def report(*modules: str, error: float = 2e-3, dtype: str = "bfloat16") -> Report:
    """A layers report of the case mini in which these modules failed and the norm agreed."""
    fields = {"check": "layers", "case": "mini", "dtype": dtype, "tap": "t", "section": "§7"}
    found = [Finding(module=name, status="fail", error=error, inputs_agree=True, **fields) for name in modules]
    return Report(
        port="p", header={}, seconds=0.0, findings=(*found, Finding(module="norm", status="pass", error=0.0, **fields))
    )


def known(**more) -> Known:
    return Known({ROUTER: Entry(reason="rounded logits", failures={}, worst=2e-3, **more)})


def test_what_is_known_is_expected():
    verdict = known().verdict(report("router"))
    assert not verdict.new and not verdict.gone and verdict.reasons == ("rounded logits",)
    assert verdict.listed == (ROUTER,)


def test_what_is_not_known_fails():
    assert [finding.module for finding in known().verdict(report("router", "mlp")).new] == ["mlp"]
    assert [finding.module for finding in Known({}).verdict(report("router")).new] == ["router"]


def test_what_is_repaired_fails():
    assert known().verdict(report()).gone == [ROUTER]
    assert known(sometimes=True).verdict(report()).gone == []


def test_what_got_much_worse_fails():
    assert not known().verdict(report("router", error=3.9e-3)).new
    assert len(known().verdict(report("router", error=4.1e-3)).new) == 1


def test_what_a_run_does_not_touch_is_left_alone():
    assert known().verdict(report(dtype="float32")) == ([], [], (), ())


def written(folder: Path, text: str) -> Path:
    path = folder / "known.toml"
    path.write_text(text)
    return path


GOOD = as_toml("reference", {}, [Entry(reason="r", failures={"layers float32 mlp": ["mini", "long"]}, worst=1e-3)])


def test_a_file_is_read_as_it_was_written(tmp_path: Path):
    entries = Known.from_file(written(tmp_path, GOOD), load_port("reference")).entries
    assert set(entries) == {Key("layers", "float32", "mlp", case) for case in ("mini", "long")}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('"reference"', '"mlx"', "expected mlx"),
        ("versions = {}", 'versions = {"torch" = "0.1"}', "0.1"),
        ("reason", "because", "reason"),
        ("layers float32 mlp", "layers mlp", "three words"),
        ('"long"', '"mini"', "every case once"),
        ("[[known]]", "[[known", "known failures with reasons"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, found: str):
    assert old in GOOD
    with pytest.raises(InputError, match=found) as caught:
        Known.from_file(written(tmp_path, GOOD.replace(old, new)), load_port("reference"))
    assert len(str(caught.value).splitlines()) == 1


PORT = """
from parity.ports.reference import ReferencePort, Torch
class Doubled(ReferencePort):
    def call(self, function, arrays, settings):
        results = super().call(function, arrays, settings)
        return tuple(2 * result for result in results) if function == "activation.situ_glu" else results
PORT = Doubled("doubled", "reference", Torch())
"""


def test_pytest_goes_by_the_file(tmp_path: Path):
    """Whole: the wrong function is expected, the right ones are not touched, and the outcome is counted."""
    (tmp_path / "doubled.py").write_text(PORT)
    failures = {f"modules {dtype} activation": ["activation.situ_glu"] for dtype in ("float32", "bfloat16")}
    file = written(tmp_path, as_toml("doubled", {}, [Entry(reason="twice too large", failures=failures, worst=1.0)]))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "parity/suite/test_modules.py",
        "-k",
        "glu",
    ]
    command += ["--port", "doubled:PORT", "--xfails", str(file), "--parity-json", str(tmp_path / "out.json")]
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout and "2 xfailed" in done.stdout and "disagree" in done.stdout
    totals = json.loads((tmp_path / "out.json").read_text())["totals"]
    assert totals == {"agree": 8, "disagree": 10, "crashed": 0, "unsupported": 0}


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_every_published_reason_has_its_page(path: Path):
    """A reason ends with the heading of the page beside it that explains it."""
    import tomllib

    page = path.with_suffix(".md").read_text(encoding="utf-8")
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["known"]:
        assert f"## {entry['reason']}" in page, entry["reason"]


def test_ports_were_published():
    assert {"mlx_lm", "mlx_vlm", "transformers"} <= {path.stem for path in PUBLISHED}
