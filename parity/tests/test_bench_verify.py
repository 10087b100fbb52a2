"""The benchmark of verify: its rows are complete, its cosine is the plain way's (K3.md §8)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures.build import cached
from fixtures.catalogue import entry
from parity.bench import verify as bench
from parity.bench.convert import BOUND
from port.convert import convert
from reference.errors import InputError


@pytest.mark.slow
def test_rows_and_report(tmp_path: Path, capsys: pytest.CaptureFixture):
    rows = bench.run(layers=2, workers=1, repeats=1, folder=str(tmp_path), tiers=("mxfp4", "2bit"))
    assert [row["name"] for row in rows] == [BOUND, "mxfp4", "2bit", "plain way, 2bit"]
    assert not list(tmp_path.iterdir())
    assert [row["cosine_error"] is not None for row in rows] == [False, False, True, False]
    assert rows[2]["cosine_error"] < 1e-6
    assert rows[2]["weights_per_core_second"] > rows[3]["weights_per_core_second"]
    bench.report(rows)
    table = capsys.readouterr().out
    assert all(word in table for word in ("mxfp4", "2bit", "of bound", "plain way"))
    bench.report(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"schema": bench.SCHEMA, "rows": rows}


def test_the_cosine_is_the_plain_ways(tmp_path: Path):
    source = cached(entry("quantizable"))
    convert(source, tmp_path / "out", "3bit", sync=False)
    assert len(bench.plain(str(source), str(tmp_path / "out"))) == bench.PLAIN_EXPERTS
    assert bench.cosine_error(source, tmp_path / "out") < 1e-6


def test_a_folder_that_does_not_agree_ends_the_benchmark(tmp_path: Path):
    source = cached(entry("quantizable"))
    convert(source, tmp_path / "out", "mxfp4", sync=False)
    (tmp_path / "out" / "tiktoken.model").unlink()
    with pytest.raises(RuntimeError, match="not its source's conversion"):
        bench.verification(str(source), str(tmp_path / "out"), "all", 1)


@pytest.mark.parametrize("bad", [{"layers": 0}, {"workers": 0}, {"repeats": 0}])
def test_a_number_below_one_is_refused(bad: dict):
    with pytest.raises(InputError, match="at least 1"):
        bench.run(**bad)
