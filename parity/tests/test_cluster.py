"""A dask worker that is killed in the middle changes no result: its work is done elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.build import cached
from fixtures.catalogue import CATALOGUE, entry
from parity.checks import Plan
from parity.checks.plan import case_named
from parity.coverage import folder_coverage, load_config
from parity.parallel import in_workers
from parity.ports import load_port
from parity.runner import run_checks
from parity.tests.test_convert_workers import SECONDS, started
from parity.tests.test_parallel import written
from parity.true_width.text import Options, run_text
from parity.verify.run import verify
from port.convert import convert

pytestmark = pytest.mark.slow


class Cluster:
    """A scheduler and two workers on the loopback address; ``kill`` ends the second worker at once."""

    def __init__(self, folder: Path) -> None:
        quiet = ["--no-dashboard", "--host", "127.0.0.1"]
        scheduler, match = started(
            ["scheduler", "--port", "0", *quiet], r"Scheduler at:\s+(tcp://127\.0\.0\.1:\d+)", folder / "scheduler.log"
        )
        self.address, self.processes = match[1], [scheduler]
        for number in (1, 2):
            own = ["worker", self.address, "--nworkers", "1", "--nthreads", "1", "--no-nanny"]
            own += ["--local-directory", str(folder), *quiet]
            process, _ = started(own, r"Registered to:\s+tcp://", folder / f"worker{number}.log")
            self.processes.append(process)

    def kill(self) -> None:
        self.processes[-1].kill()

    def end(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait(SECONDS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("distributed")
    result = Cluster(tmp_path)
    yield result
    result.end()


def test_check_with_a_killed_worker(cluster: Cluster):
    names = ("mini", "groups", "kimi-linear", "conv-5", "unbounded", "low-rank-gate")
    plan, checks = Plan(load_port("mlx"), tuple(map(case_named, names)), ("float32",)), ("modules", "layers", "decode")
    alone, ended = run_checks(plan, checks), []

    def progress(text: str) -> None:
        if not ended:
            cluster.kill()
        ended.append(text)

    found = in_workers("mlx", plan, checks, 1, progress, cluster.address)
    assert written(run_checks(plan, checks, found=found)) == written(alone)
    assert len(ended) == len(names) + 1 and cluster.processes[-1].wait(SECONDS) != 0


def test_verify_with_a_killed_worker(cluster: Cluster, tmp_path: Path):
    source = cached(entry("quantizable"))
    convert(source, tmp_path / "out", "2bit", sync=False)
    alone, seen = verify(tmp_path / "out", source), []

    def progress(done: int, total: int) -> None:
        if len(seen) == 1:
            cluster.kill()
        seen.append(done)

    many = verify(tmp_path / "out", source, scheduler=cluster.address, progress=progress)
    assert len(seen) > 2 and cluster.processes[-1].wait(SECONDS) != 0
    assert (many.experts, many.tensors, many.problems) == (alone.experts, alone.tensors, alone.problems)


def test_convert_with_a_killed_worker(cluster: Cluster, tmp_path: Path):
    from fixtures.build import digests

    source, shard_bytes = cached(entry("quantizable")), 1 << 15
    convert(source, tmp_path / "one", "2bit", shard_bytes=shard_bytes, sync=False)
    killing = threading.Timer(0.5, cluster.kill)
    killing.start()
    convert(source, tmp_path / "many", "2bit", shard_bytes=shard_bytes, sync=False, scheduler=cluster.address)
    killing.join()
    assert digests(tmp_path / "one") == digests(tmp_path / "many")


def test_single_layers_by_a_cluster(cluster: Cluster):
    options = Options(case="mini", layers="0,1,2,3", threads=1)
    assert written(run_text(options, scheduler=cluster.address)) == written(run_text(options))


def test_coverage_by_a_cluster(cluster: Cluster):
    for name in list(CATALOGUE)[:3]:
        folder = cached(entry(name))
        config = load_config(str(folder))
        one, many = folder_coverage(config, folder), folder_coverage(config, folder, scheduler=cluster.address)
        assert (one.digest, one.matched, one.problems) == (many.digest, many.matched, many.problems)
        assert folder_coverage(config, folder, workers=2).problems == one.problems
