"""Baselines: worse than committed is a failure, better is not; updating fails; what is stale is told in one line."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from parity import baseline
from parity.baseline import FACTOR, Baselines, Line, as_text, folded, is_worse, place_of, worst
from parity.baseline_files import EXPECTED, problems
from parity.checks import CHECKS, Plan
from parity.cli.main import app
from parity.compare import Place
from parity.ports import load_port
from parity.quantities import Quantity
from parity.report import failure_text
from parity.runner import run_checks
from parity.tolerance import ISOLATED
from reference.errors import InputError

TAP = "language_model.model.layers.3.self_attn.core"
WHAT = Quantity("kda.recurrence", "§4.5")


class Drifting:
    """The MLX port whose single functions are a little off: inside every tolerance, further than they used to be."""

    def __init__(self, drift=0.0, name="mlx", device=None):
        self.inner, self.drift, self.name, self.device = load_port("mlx"), drift, name, device

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def versions(self):
        return self.inner.versions() | ({"device": self.device} if self.device else {})

    def call(self, *args):
        return tuple(result * (1 + self.drift) for result in self.inner.call(*args))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the committed baselines of the MLX port, which a test may spoil."""
    shutil.copytree(baseline.FOLDER / "mlx", tmp_path / "mlx")
    monkeypatch.setattr(baseline, "FOLDER", tmp_path)
    return tmp_path / "mlx"


def finding(error, case="mini", check="layers", dtype="float32", seed=0, noise=1e-6):
    allowed = ISOLATED[WHAT.module].factor[dtype] * noise
    place = Place(check, case, dtype, seed=seed)
    status = "pass" if error <= allowed else "fail"
    return place.finding(WHAT, TAP, status, error=error, allowed=allowed, noise=noise, inputs_agree=True)


def committed(folder, error, times):
    document = {"float32": {"layers": {folded(TAP): Line(error, times)}}}
    (folder / "mini.json").write_text(as_text(load_port("mlx").versions()["device"], document))
    return Baselines(Drifting())


def test_layers_are_folded():
    assert folded(TAP) == "layers.self_attn.core"
    assert folded("encoder.blocks.2.output") == "encoder.blocks.output"


def test_the_worst_counts():
    lines = worst([finding(1e-6), finding(3e-6), finding(2e-6, noise=0.5e-6)])["mini"]["float32"]["layers"]
    assert lines[folded(TAP)] == pytest.approx((3e-6, 4.0))


@pytest.mark.parametrize(
    "error, noise, status",
    [
        (2.9e-6, 1e-6, "pass"),
        (3.1e-6, 1e-6, "fail"),
        (1e-9, 1e-6, "pass"),  # better is fine
        (3.1e-6, 4e-6, "pass"),  # further off, but below what this machine's own rounding costs
        (5.9e-6, 2e-6, "pass"),  # the noise has doubled too: another machine, not another port
    ],
)
def test_the_gate_has_one_side(folder, error, noise, status):
    result = committed(folder, 1e-6, 1.0).judged(finding(error, noise=noise))
    assert result.status == status and result.baseline == 1e-6


def test_a_failure_names_error_allowed_and_baseline(folder):
    result = committed(folder, 1e-6, 1.0).judged(finding(3.5e-6))
    text = failure_text("mlx", result)
    assert "error 3.5e-06, allowed 6e-06" in text and "baseline 1e-06" in text
    assert "worse than its baseline (3.5 times)" in text
    beyond = committed(folder, 1e-6, 1.0).judged(finding(1.0))
    assert beyond.status == "fail" and beyond.baseline == 1e-6 and not beyond.note, "the tolerance says it already"


@pytest.mark.parametrize("changes", [{"seed": 1}, {"case": "long"}, {"check": "golden"}])
def test_what_has_no_baseline_is_left_alone(folder, changes):
    result = committed(folder, 1e-9, 1e-3).judged(finding(3e-6, **changes))
    assert result.status == "pass" and result.baseline is None


def test_another_device_is_not_judged(folder):
    committed(folder, 1e-9, 1e-3)
    baselines = Baselines(Drifting(device="Device(other, 0)"))
    assert baselines.judged(finding(3e-6)).status == "pass"
    assert baselines.state(0).startswith("not applied: made on Device(")


def test_a_port_without_baselines_is_not_judged():
    for name in ("mine", "mlx+F01", "../mlx", "package.module:PORT"):
        baselines = Baselines(Drifting(name=name))
        assert not baselines.files and baselines.state(0) == "none for this port"
        assert baselines.judged(finding(3e-6)).status == "pass"
        assert list(problems(baselines)) == []


def test_a_tap_without_a_line_fails(folder):
    document = {"float32": {"layers": {}}}
    (folder / "mini.json").write_text(as_text(load_port("mlx").versions()["device"], document))
    result = Baselines(Drifting()).judged(finding(1e-6))
    assert result.status == "fail" and "mini.json: no baseline of layers layers.self_attn.core" in result.note
    assert "k3-parity baseline update --port mlx" in result.note


def test_the_factors_leave_the_tolerance_to_be_felt():
    """A factor that reaches the tolerance of a port as good as the reference would never speak first."""
    for (dtype, chained), factor in FACTOR.items():
        tolerance = baseline.CHAINED if chained else ISOLATED["kda.gate"]
        assert 1 < factor < tolerance.factor[dtype]


def test_a_drift_inside_the_tolerance_is_caught_by_the_committed_baselines():
    if device := Baselines(Drifting()).other_device:
        pytest.skip(f"the committed baselines were made on {device}")
    good = run_checks(Plan(Drifting(), dtypes=("float32",)), ("modules",))
    assert good.exit_code == 0 and good.header["baselines"] == f"{len(EXPECTED)} files"
    assert sum(found.baseline is not None for found in good.findings) > 60
    port = Drifting(6e-7)
    within = [found.status == "pass" for found in CHECKS["modules"](Plan(port, dtypes=("float32",)))]
    report = run_checks(Plan(port, dtypes=("float32",)), ("modules",))
    caught = ["worse than its baseline" in found.note for found in report.findings]
    assert report.exit_code == 1 and sum(caught) > 30
    assert all(inside for inside, worse in zip(within, caught, strict=True) if worse)


def test_another_seed_is_not_judged():
    report = run_checks(Plan(Drifting(), dtypes=("float32",), seed=1), ("baselines",))
    assert report.header["baselines"] == "not applied: they hold for seed 0"


class TestFiles:
    def test_the_committed_ones_are_all_there_and_none_is_stale(self):
        assert list(problems(Baselines(load_port("mlx")))) == []
        assert set(Baselines(load_port("mlx")).files) == set(EXPECTED)

    def test_they_are_sorted_and_small(self):
        baselines = Baselines(load_port("mlx"))
        for path in baselines.files.values():
            text = path.read_text()
            assert text == as_text(*baselines.read(path)) and len(text) < 10_000
            assert json.loads(text)["errors"].keys() == {"bfloat16", "float32"}

    def one_problem(self, *words):
        (problem,) = problems(Baselines(load_port("mlx")))
        assert "\n" not in problem and "k3-parity baseline update" in problem
        for word in words:
            assert word in problem
        (found,) = CHECKS["baselines"](Plan(load_port("mlx")))
        assert found.status == "fail" and found.note == problem

    def test_a_missing_file(self, folder):
        (folder / "groups.json").unlink()
        self.one_problem("groups.json", "found none")

    def test_a_case_that_is_gone(self, folder):
        shutil.copy(folder / "mini.json", folder / "gone.json")
        self.one_problem("gone.json", "no core case is called gone")

    @pytest.mark.parametrize(
        "old, new, words",
        [
            ('"layers.self_attn.core"', '"layers.self_attn.kernel"', ["has no tap layers.self_attn.kernel"]),
            ('"passes"', '"passages"', ["nothing called passages"]),
            ('"bfloat16"', '"float16"', ["the port has no float16"]),
        ],
    )
    def test_what_is_stale_within_a_file(self, folder, old, new, words):
        text = (folder / "mini.json").read_text()
        (folder / "mini.json").write_text(text.replace(old, new, 1))
        self.one_problem("mini.json", *words)

    @pytest.mark.parametrize("text", ["", "{}", '{"device": "cpu", "errors": {"float32": {"layers": {"a": [1]}}}}'])
    def test_a_damaged_file(self, folder, text):
        (folder / "mini.json").write_text(text)
        with pytest.raises(InputError, match="mini.json: content: expected a baseline file"):
            Baselines(load_port("mlx")).judged(finding(1e-6))
        done = CliRunner().invoke(app, ["baseline", "show"])
        assert isinstance(done.exception, InputError)


class TestCommands:
    def run(self, *arguments):
        return CliRunner().invoke(app, ["baseline", *arguments])

    def test_show(self):
        done = self.run("show", "--case", "mini", "--dtype", "float32", "--json")
        rows = json.loads(done.stdout)["baselines"]
        assert done.exit_code == 0 and {row["case"] for row in rows} == {"mini"} and len(rows) > 40

    def test_a_run_that_rewrites_fails_and_the_next_one_does_not(self, folder):
        arguments = ("update", "--case", "functions", "--dtype", "float32")
        device, document = Baselines(load_port("mlx")).read(folder / "functions.json")
        document["float32"]["norm.rms_norm"]["output"] = Line(0.5, 9.0)
        (folder / "functions.json").write_text(as_text(device, document))
        done = self.run(*arguments)
        assert done.exit_code == 1 and "fails on purpose" in done.stderr and "functions.json" in done.stderr
        assert self.run(*arguments).exit_code == 0
        _, after = Baselines(load_port("mlx")).read(folder / "functions.json")
        assert after["float32"]["norm.rms_norm"]["output"].error < 1e-6
        assert after["bfloat16"] == document["bfloat16"], "the other dtype is left alone"

    def test_a_port_that_disagrees_is_not_recorded(self, folder, tmp_path, monkeypatch):
        (tmp_path / "wrong.py").write_text(
            "from parity.tests.test_baseline import Drifting\nPORT = Drifting(1e-2, name='wrong')\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        done = self.run("update", "--port", "wrong:PORT", "--case", "functions", "--dtype", "float32")
        assert isinstance(done.exception, InputError) and "a port that agrees" in str(done.exception)
        assert not (tmp_path / "wrong").exists()

    @pytest.mark.parametrize(
        "arguments, words",
        [
            (["show", "--port", "reference"], ["reference", "baseline update"]),
            (["show", "--case", "nonesuch"], ["--case", "nonesuch"]),
            (["show", "--dtype", "int8"], ["int8"]),
            (["update", "--case", "nonesuch"], ["--case", "nonesuch"]),
        ],
    )
    def test_bad_usage(self, arguments, words):
        done = self.run(*arguments)
        assert isinstance(done.exception, InputError)
        assert all(word in str(done.exception) for word in words)


def test_places():
    assert place_of(finding(1e-6)) == ("mini", "float32", "layers", "layers.self_attn.core")
    assert place_of(finding(1e-6, check="decode")).section == "passes"
    assert place_of(finding(1e-6, check="modules", case="kda.log_decay")).file == "functions"
    assert is_worse(finding(3.5e-6), Line(1e-6, 1.0), chained=False)
    assert not is_worse(finding(3.5e-6), Line(1e-6, 1.0), chained=True)
