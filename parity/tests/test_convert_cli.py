"""``k3-parity convert`` at the command line: what it prints, and how it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fixtures.build import cached
from fixtures.catalogue import entry
from parity.dry_run import sizes
from parity.tests.test_cli import assert_one_line, k3_parity
from port.convert import convert
from reference.headers import INDEX

FULL_K3 = {"mxfp4": 1_560_860_324_864, "3bit": 1_224_352_128_000, "mixed2": 965_260_768_256, "2bit": 884_009_524_224}


@pytest.fixture(scope="module")
def source() -> Path:
    return cached(entry("quantizable"))


def test_dry_run_of_full_k3_from_its_configuration_alone():
    done = k3_parity("convert", "k3", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {row["tier"]: row["bytes"] for row in document["tiers"]} == FULL_K3
    assert document["bytes"] == sum(FULL_K3.values())


def test_a_dry_run_needs_no_shard_and_says_what_is_written(source: Path, tmp_path: Path):
    for name in ("config.json", INDEX):
        shutil.copy(source / name, tmp_path)
    for planned in sizes(str(tmp_path), None, None, None):
        result = convert(source, tmp_path / planned.tier, planned.tier, sync=False)
        assert (result.nbytes, result.tensors, result.shards) == (planned.nbytes, planned.tensors, planned.shards)
        index = json.loads((tmp_path / planned.tier / INDEX).read_text())
        assert index["metadata"]["total_size"] == planned.nbytes


def test_a_dry_run_says_which_tier_cannot_be(tmp_path: Path):
    rows = {row.tier: row for row in sizes(str(cached(entry("mini"))), None, None, None)}
    assert rows["mxfp4"].refusal is None and rows["mxfp4"].nbytes
    assert "text_config.moe_intermediate_size" in rows["2bit"].refusal


def test_a_plan_is_read_and_recorded(source: Path, tmp_path: Path):
    """By the command line, whose document says what was written."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"keep": {str(layer): [6, 1, 4, 2] for layer in (1, 2, 3, 4)}}))
    done = k3_parity("convert", source, tmp_path / "out", "--tier", "mixed2", "--plan", plan, "--no-sync", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"]["num_experts"] == 4
    assert config["k3_parity_conversion"]["plan"]["3"] == [6, 1, 4, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{source}", "{out}", "--tier", "4bit"], ["--tier", "mxfp4, 3bit, mixed2, 2bit"]),
        (["{source}", "{out}"], ["--tier"]),
        (["{source}", "--tier", "2bit"], ["OUT"]),
        (["/nonesuch", "{out}", "--tier", "2bit"], ["/nonesuch"]),
        (["{source}", "/proc/nonesuch/out", "--tier", "2bit"], ["/proc/nonesuch"]),
    ],
)
def test_what_cannot_be_meant_is_one_line(arguments: list[str], words: list[str], source: Path, tmp_path: Path):
    arguments = [word.format(source=source, out=tmp_path / "out") for word in arguments]
    assert_one_line(k3_parity("convert", *arguments), *words)
    assert not list(tmp_path.iterdir())
