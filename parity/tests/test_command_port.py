"""Programs under test by files alone, and ports that other packages offer."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from parity.checks import CHECKS, Plan
from parity.checks.plan import case_named
from parity.findings import Report
from parity.functions import all_function_findings
from parity.ports import GROUP, load_port
from parity.ports.command import IMPOSED, CommandPort
from parity.protocol import ModuleCall, Step
from parity.sides import reference_session
from parity.trace import load_arrays, save_trace
from reference.errors import InputError

ROOT = Path(__file__).parents[2]
TOY = Path(__file__).parent / "engines" / "toy.py"
PER_CHANNEL = ("A_log[:heads, None]", "A_log[:width]")
UNBOUNDED = ("lower_bound * sigmoid(rate * z)", "np.maximum(lower_bound, -rate * np.logaddexp(0, z))")
NO_LINEAR_BOUND = ("linear_beta * np.tanh(up / linear_beta)", "up")


def command(script: Path) -> str:
    return f"command:{shlex.quote(sys.executable)} {shlex.quote(str(script))} {{case}} {{out}}"


def engine(folder: Path, text: str) -> CommandPort:
    script = folder / "engine.py"
    script.write_text(text)
    return load_port(command(script))


def functions_of(port: CommandPort) -> Report:
    findings = tuple(all_function_findings(port, port.capabilities().dtypes, 0))
    return Report(port=port.name, header={}, findings=findings, seconds=0.0)


def test_the_example_engine_is_short_and_agrees():
    assert len(TOY.read_text().splitlines()) <= 40
    report = functions_of(load_port(command(TOY)))
    assert not report.failures and report.counts["pass"] >= 10 and report.counts["unsupported"] >= 10


@pytest.mark.parametrize(
    ("changes", "module"),
    [((PER_CHANNEL, UNBOUNDED), "kda.gate"), ((UNBOUNDED,), "kda.gate"), ((NO_LINEAR_BOUND,), "activation")],
    ids=["per channel, clamped", "clamped", "no linear bound"],
)
def test_a_wrong_engine_fails_at_its_module(tmp_path: Path, changes, module: str):
    text = TOY.read_text()
    for right, wrong in changes:
        assert right in text
        text = text.replace(right, wrong)
    assert {finding.module for finding in functions_of(engine(tmp_path, text)).sources} == {module}


@pytest.mark.parametrize(
    ("answer", "found"),
    [("print('no memory'); sys.exit(3)", "exit status 3: no memory"), ("pass", "it wrote no answer")],
)
def test_an_engine_that_gives_no_answer_crashed(tmp_path: Path, answer: str, found: str):
    able = json.dumps({"dtypes": ["float32"], "functions": ["norm.rms_norm"]})
    text = (
        "import json, sys, pathlib\ncase, out = map(pathlib.Path, sys.argv[1:])\n"
        "if json.loads((case / 'question.json').read_text())['question'] == 'capabilities':\n"
        f"    out.write_text({able!r})\nelse:\n    {answer}\n"
    )
    report = functions_of(engine(tmp_path, text))
    errors = [finding for finding in report.findings if finding.status == "error"]
    assert errors and all(found in finding.note for finding in errors) and not report.counts["pass"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("./engine {case}", "a command with {case} and {out}"),
        ("./no-such-engine {case} {out}", "a program that can be started"),
        (f"{sys.executable} -c 'raise SystemExit(1)' {{case}} {{out}}", "what the program can do"),
        (
            f'{sys.executable} -c \'import sys; open(sys.argv[2], "w").write("{{\\"tap\\": []}}")\' {{case}} {{out}}',
            "fields of dtypes",
        ),
    ],
)
def test_a_command_that_cannot_work_is_bad_input(line: str, found: str):
    with pytest.raises(InputError, match=found):
        load_port(f"command:{line}").capabilities()


class ByFiles(CommandPort):
    """The reference behind the files: what a complete engine would do, without a process for every question."""

    def __init__(self) -> None:
        super().__init__("engine {case} {out}")
        self.asked: set[str] = set()

    def _run(self, folder: Path, out: Path) -> None:
        question = json.loads((folder / "question.json").read_text())
        self.asked.add(question["question"])
        if question["question"] == "capabilities":
            everything = {
                "kinds": Plan(load_port("reference")).port.capabilities().kinds,
                "runs": ["decode", "vision", "mm"],
            }
            out.write_text(json.dumps({"dtypes": ["float32"], "picture": True, "chat": True, **everything}))
            return
        if question["question"] == "chat":
            try:
                segments = load_port("reference").chat(question["call"])
            except InputError:
                raise RuntimeError("refused") from None
            out.write_text(json.dumps(segments))
            return
        arrays, _ = load_arrays(folder / "inputs.safetensors")
        save_trace(out, dict(self.answered(question, arrays)), {})

    def answered(self, question: dict, arrays: Mapping[str, np.ndarray]):
        if question["question"] == "picture":
            done = load_port("reference").picture(arrays["file"].tobytes(), question["settings"])
            yield "pixel_values", done["pixel_values"]
            yield "tokens", np.array([done["tokens"]])
            yield "prompt", np.frombuffer(done["prompt"].encode(), np.uint8)
            return
        session = reference_session(Path(question["checkpoint"]), question["dtype"])
        if question["question"] == "module":
            inputs = {name: array for name, array in arrays.items() if name != "imposed"}
            yield from session.module(
                ModuleCall(question["kind"], question["layer"], inputs, arrays.get("imposed"))
            ).items()
        elif question["question"] == "run":
            steps, imposed = [], []
            for number in range(question["steps"]):
                own = {name.partition("/")[2]: a for name, a in arrays.items() if name.startswith(f"{number}/")}
                imposed.append({k.removeprefix(IMPOSED): a for k, a in own.items() if k.startswith(IMPOSED)})
                steps.append(Step(**{name: array for name, array in own.items() if not name.startswith(IMPOSED)}))
            for number, taps in enumerate(session.run(steps, imposed)):
                yield from ((f"{number}/{name}", array) for name, array in taps.items())
        elif question["question"] == "vision":
            yield from session.vision(**arrays).items()
        else:
            imposed = {k.removeprefix(IMPOSED): a for k, a in arrays.items() if k.startswith(IMPOSED)}
            given = {name: array for name, array in arrays.items() if not name.startswith(IMPOSED)}
            yield from session.multimodal(**given, imposed=imposed).items()


@pytest.mark.parametrize("check", ["layers", "decode", "padding", "vision", "multimodal"])
def test_a_whole_model_is_asked_by_files(check: str):
    port = ByFiles()
    plan = Plan(port, (case_named("vision-window"),), ("float32",))
    report = Report(port=port.name, header={}, findings=tuple(CHECKS[check](plan)), seconds=0.0)
    assert not report.failures and report.counts["pass"] > 5 and not report.counts["unsupported"]
    assert port.asked == {"capabilities"} | {"layers": {"module"}, "vision": {"module", "vision"}}.get(
        check, {"multimodal"} if check == "multimodal" else {"run"}
    )


@pytest.mark.parametrize(("check", "asked"), [("processor", "picture"), ("chat", "chat")])
def test_pictures_and_conversations_are_asked_by_files(check: str, asked: str):
    port = ByFiles()
    findings = tuple(CHECKS[check](Plan(port, (), ("float32",))))
    assert {finding.status for finding in findings} == {"pass"} and len(findings) > 30
    assert port.asked == {"capabilities", asked}


def test_an_installed_package_offers_its_own_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "their_port.py").write_text(
        "from parity.ports.command import CommandPort\nPORT = CommandPort('x {case} {out}')\n"
    )
    about = tmp_path / "their_port-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-port\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\ntheirs = their_port:PORT\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_port("theirs").name == load_port("their_port:PORT").name == "command:x {case} {out}"
    with pytest.raises(InputError, match="theirs"):
        load_port("nobodys")


def test_the_pages_show_what_is_there():
    """The port of docs/ports.md runs as it stands there; the pages name only files that exist."""
    page = (ROOT / "docs" / "ports.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(page.split("```python\n# mine.py\n")[1].split("```")[0], names)
    report = functions_of(names["PORT"])
    assert not report.failures and report.counts["pass"] == 5
    for name in ("ports.md", "engine.md", "failures.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        for path in re.findall(r"`((?:parity|fixtures|reference)/[\w/.-]+)`", text):
            assert (ROOT / path).exists(), f"{name}: {path}"
