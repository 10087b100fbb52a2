"""Who writes the shards does not change a byte: one process, several, or a dask cluster (K3.md §15)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.build import cached, digests
from fixtures.catalogue import entry
from port.convert import convert
from port.executors import HereExecutor, run_all
from port.tiers import TIERS
from reference.errors import InputError

ROOT = Path(__file__).parents[2]
SHARD_BYTES = 1 << 17
SECONDS = 60


@pytest.fixture(scope="module")
def source() -> Path:
    return cached(entry("quantizable"))


def assert_same_bytes(source: Path, tier: str, folder: Path, **more) -> None:
    convert(source, folder / "one", tier, shard_bytes=SHARD_BYTES, sync=False)
    result = convert(source, folder / "many", tier, shard_bytes=SHARD_BYTES, sync=False, **more)
    assert result.shards > 4
    assert digests(folder / "one") == digests(folder / "many")


@pytest.mark.parametrize(
    "tier", ["mxfp4", "2bit", *(pytest.param(t, marks=pytest.mark.slow) for t in ("3bit", "mixed2"))]
)
def test_two_workers_write_the_same_bytes(tier: str, source: Path, tmp_path: Path):
    assert_same_bytes(source, tier, tmp_path, workers=2)


def started(arguments: list[str], pattern: str, log: Path) -> tuple[subprocess.Popen, re.Match]:
    """A process of the dask command line, once its log shows ``pattern``."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        command = [sys.executable, "-m", "dask", *arguments]
        process = subprocess.Popen(command, cwd=log.parent, env=environment, stdout=file, stderr=file)
    end = time.monotonic() + SECONDS
    while not (match := re.search(pattern, log.read_text())):
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    return process, match


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dask scheduler and two workers on the loopback address."""
    pytest.importorskip("distributed")
    folder, processes = tmp_path_factory.mktemp("dask"), []
    try:
        quiet = ["--no-dashboard", "--host", "127.0.0.1"]
        process, match = started(
            ["scheduler", "--port", "0", *quiet], r"Scheduler at:\s+(tcp://127\.0\.0\.1:\d+)", folder / "scheduler.log"
        )
        processes.append(process)
        for number in (1, 2):
            own = ["worker", match[1], "--nworkers", "1", "--nthreads", "1", "--local-directory", str(folder), *quiet]
            process, _ = started(own, r"Registered to:\s+tcp://", folder / f"worker{number}.log")
            processes.append(process)
        yield match[1]
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_a_dask_cluster_writes_the_same_bytes(tier: str, scheduler: str, source: Path, tmp_path: Path):
    assert_same_bytes(source, tier, tmp_path, scheduler=scheduler)


@pytest.mark.slow
def test_an_error_on_a_dask_worker_is_one_line_too(
    scheduler: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import shutil

    import port.convert

    shutil.copytree(source, tmp_path / "src")
    write_shards = port.convert.write_shards

    def losing(*arguments):
        (tmp_path / "src" / "model-00003-of-00005.safetensors").unlink()
        write_shards(*arguments)

    monkeypatch.setattr(port.convert, "write_shards", losing)
    with pytest.raises(InputError, match="model-00003.*found nothing there; bring the shard back and resume"):
        convert(tmp_path / "src", tmp_path / "out", "2bit", scheduler=scheduler, shard_bytes=SHARD_BYTES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense"])
def test_no_scheduler_is_one_line(address: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("distributed")
    import port.executors

    monkeypatch.setattr(port.executors, "CONNECT_SECONDS", 1)
    with pytest.raises(InputError, match="a dask scheduler") as caught:
        convert(source, tmp_path / "out", "2bit", scheduler=address)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def die(_: object) -> None:
    os._exit(1)


def test_a_worker_that_dies_is_one_line():
    from port.executors import executor

    with (
        pytest.raises(InputError, match="processes that live, found one that died"),
        executor(2, None) as (pool, ahead),
    ):
        list(run_all(pool, ahead, die, range(3)))


def test_tasks_are_made_when_they_are_needed():
    """Half a million tensors' places are never in memory at once."""
    made = []

    def tasks() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    results = run_all(HereExecutor(), 2, lambda number: number * number, tasks())
    first = next(results)
    assert len(made) == 2
    assert sorted([first, *results]) == [number * number for number in range(10)]
