"""The benchmark of the converter: its source is a checkpoint, its rows are complete, memory is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parity.bench import convert as bench
from parity.bench.mini_k3 import write_source
from port.convert import convert
from reference.errors import InputError
from reference.shards import Shards

BOUND_MB, SPREAD = 400, 0.15


@pytest.mark.slow
def test_the_source_is_a_checkpoint_and_the_bound_moves_every_byte(tmp_path: Path):
    nbytes = write_source(tmp_path / "source", 2)
    checkpoint = Shards(tmp_path / "source")
    assert checkpoint.total_size == nbytes
    text = checkpoint.config.text_config
    assert (text.hidden_size, text.latent_size, text.num_experts) == (1024, 512, 256)
    bench.restack(str(tmp_path / "source"), str(tmp_path / "target"))
    assert (tmp_path / "target" / "restacked").stat().st_size == nbytes
    assert bench.expert_weights(tmp_path / "source") == 256 * 3 * 512 * 512
    assert convert(tmp_path / "source", tmp_path / "mxfp4", "mxfp4", sync=False).nbytes == nbytes


@pytest.mark.slow
def test_rows_and_report(tmp_path: Path, capsys: pytest.CaptureFixture):
    rows = bench.run(layers=1, workers=1, repeats=1, folder=str(tmp_path), tiers=("mxfp4", "2bit"))
    assert [row["name"] for row in rows] == [bench.IDLE, bench.BOUND, bench.COPY, "mxfp4", "2bit"]
    assert not list(tmp_path.iterdir())
    for row in rows:
        assert row["seconds"] >= 0 and row["layers"] == 1
        assert (row["times_bound"] is not None) == (row["name"] in (bench.BOUND, bench.COPY, "mxfp4"))
        assert (row["weights_per_second"] is not None) == (row["name"] == "2bit")
    bench.report(rows)
    table = capsys.readouterr().out
    assert all(row["name"].split()[0] in table for row in rows)
    bench.report(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"schema": bench.SCHEMA, "rows": rows}


def fail(source: str, target: str) -> None:
    raise SystemExit(3)


def test_a_task_that_fails_is_no_row():
    with pytest.raises(RuntimeError, match="fail failed"):
        bench.measure(fail, ("", ""))


@pytest.mark.parametrize("bad", [{"layers": 0}, {"workers": 0}, {"repeats": 0}])
def test_a_number_below_one_is_refused(bad: dict):
    with pytest.raises(InputError, match="at least 1"):
        bench.run(**bad)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["mxfp4", "2bit"])
def test_memory_depends_on_one_expert_not_on_the_model(tier: str, tmp_path: Path):
    """Three times the layers of the same size take the same memory, at most 400 MB more than an idle interpreter."""
    if not bench.peak_sizes(1):
        pytest.skip("peak resident sizes are read from /proc")
    idle, sizes = bench.measure(bench.idle, ("", "")).resident, []
    for layers in (4, 12):
        source, target = tmp_path / f"source{layers}", tmp_path / f"target{layers}"
        write_source(source, layers)
        sizes.append(bench.measure(bench.conversion, (str(source), str(target), tier, 1)).resident)
    assert max(sizes) - idle < BOUND_MB * 1e6
    assert abs(sizes[1] - sizes[0]) <= SPREAD * sizes[0]
