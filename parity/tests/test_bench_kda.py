"""The benchmark's rows: complete, in order, with true errors, and whole without the peers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from parity.bench import kda
from reference.errors import InputError

FORMS = [kda.RECURRENCE, kda.CHUNKED, kda.BOUND, kda.FLA_RECURRENCE, kda.FLA_CHUNKED]
KEYS = {"length", "form", "seconds", "times_chunked", "error_output", "error_state", "times_own_error", "note"}
SETTING = {"heads", "head_dim", "threads", "torch"}


@pytest.fixture
def without_peers(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.kda.naive", None)


def test_rows_without_the_peers(without_peers):
    import torch

    before = torch.get_num_threads()
    rows = kda.run(lengths=(5, 70), heads=2, head_dim=8, threads=1, repeats=1)
    assert torch.get_num_threads() == before
    assert [(row["length"], row["form"]) for row in rows] == [(n, form) for n in (5, 70) for form in FORMS]
    for row in rows:
        assert set(row) == KEYS | SETTING
        measured = row["form"] in (kda.RECURRENCE, kda.CHUNKED)
        timed = measured or row["form"] == kda.BOUND
        assert (row["seconds"] is not None) == (row["times_chunked"] is not None) == timed
        assert row["note"] == ("" if timed else kda.NOT_INSTALLED)
        assert (row["error_output"] is not None) == (row["error_state"] is not None) == measured
        if measured:
            assert 0 < row["error_output"] < 1e-6 and 0 < row["error_state"] < 1e-6
        if row["form"] == kda.RECURRENCE:
            assert row["times_own_error"] == 1
        if row["form"] == kda.CHUNKED:
            assert row["times_chunked"] == 1


class Peer:
    """Stands for fla-core's module: takes its keywords only, and counts the calls."""

    calls: list[str] = []

    @staticmethod
    def naive_recurrent_kda(*, q, k, v, g, beta, scale, initial_state, output_final_state):
        from reference.kda import recurrent_kda

        assert output_final_state is True
        Peer.calls.append("recurrent")
        return recurrent_kda(q * scale, k, v, g, beta, initial_state)

    @staticmethod
    def naive_chunk_kda(*, chunk_size, **call):
        assert call["v"].shape[1] % chunk_size == 0
        Peer.calls.append("chunked")
        o, state = Peer.naive_recurrent_kda(**call)
        return 2 * o, state


def test_rows_with_the_peers(monkeypatch):
    for package in ("fla", "fla.ops", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, package, type(sys)(package))
    monkeypatch.setitem(sys.modules, "fla.ops.kda.naive", Peer)
    monkeypatch.setattr(Peer, "calls", [])
    rows = {(r["length"], r["form"]): r for r in kda.run(lengths=(64, 65), heads=2, head_dim=8, threads=1, repeats=1)}
    assert Peer.calls == ["recurrent", "chunked", "recurrent", "recurrent"]
    assert rows[64, kda.FLA_RECURRENCE]["times_own_error"] == pytest.approx(1)
    assert rows[64, kda.FLA_CHUNKED]["error_output"] == pytest.approx(1, rel=1e-5)
    assert rows[65, kda.FLA_CHUNKED]["seconds"] is None
    assert rows[65, kda.FLA_CHUNKED]["note"] == "whole chunks only"


def test_report_is_a_table_or_one_json_document(without_peers, capsys):
    rows = kda.run(lengths=(5,), heads=1, head_dim=4, threads=1, repeats=1)
    kda.report(rows)
    table = capsys.readouterr().out
    assert all(form in table for form in FORMS) and table.count(kda.NOT_INSTALLED) == 2
    kda.report(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"schema": kda.SCHEMA, "rows": rows}


@pytest.mark.parametrize("bad", [{"lengths": (64, 0)}, {"heads": 0}, {"head_dim": -1}, {"threads": 0}, {"repeats": 0}])
def test_a_number_below_one_is_refused(bad):
    with pytest.raises(InputError, match="at least 1"):
        kda.run(**({"lengths": (4,), "heads": 1, "head_dim": 4, "repeats": 1} | bad))


def test_importing_the_benchmark_does_not_load_torch():
    code = "import sys, parity.bench.kda; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
