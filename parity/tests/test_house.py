"""The house keeps its own rules: what may be imported, what the README promises, what CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ('pip install -c constraints.txt -e ".[test]" && k3-parity check', "pytest -n auto")


def imported_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def modules(package: str) -> str:
    paths = [path for path in (ROOT / package).rglob("*.py") if "tests" not in path.parts and "suite" not in path.parts]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in sorted(paths)]
    return "import " + ", ".join(names)


@pytest.mark.parametrize("package", ["port", "parity", "fixtures"])
def test_torch_is_loaded_only_when_used(package: str):
    assert "torch" not in imported_after(modules(package))


@pytest.mark.parametrize("package", ["reference", "fixtures"])
def test_mlx_is_not_loaded(package: str):
    assert "mlx" not in imported_after(modules(package))


def test_coverage_loads_no_numerics():
    """Half a million names in under two seconds leave no time to load what is not needed."""
    assert not {"numpy", "torch", "mlx"} & imported_after("import parity.cli.main")


def test_the_readme_gives_the_two_commands_that_ci_runs():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in COMMANDS:
        assert command in readme and command in ci


def test_constraints_pin_what_the_project_needs():
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {name.lower().replace("_", "-") for name in pinned}
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r'"([a-z][\w-]+)(?:\[\w+\])?(?:[;>=]|")', project.split("[project.scripts]")[0])
    needed = {name for name in needed if name not in ("setuptools", "k3-parity")}
    core = {"mlx", "torch", "numpy", "safetensors", "pydantic", "typer", "rich", "hypothesis", "pytest", "tiktoken"}
    assert core <= needed | {"torch"} and core <= pinned


def test_mathematics_stays_short():
    """A module that does not fit on two screens is two modules."""
    for package in ("reference", "port"):
        for path in (ROOT / package).glob("*.py"):
            assert len(path.read_text().splitlines()) <= 300, path.name
