"""Conversions that are killed, run out of disk or lose their source: resumed to the same bytes, or one clear line."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import port.convert
import port.source
from fixtures.build import cached, digests
from fixtures.catalogue import entry
from fixtures.widened import widened
from port.convert import convert
from reference.errors import InputError

SHARD_BYTES = 1 << 16
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
"""What Python reports before it touches the file system: a process is killed between any two of these."""
RANDOM_KILLS, QUICK_STRIDE = 50, 14


@pytest.fixture(scope="module")
def source() -> Path:
    return cached(widened(entry("mini")))


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Tier -> digests of every file of a conversion that nothing disturbed."""
    root = tmp_path_factory.mktemp("undisturbed")
    for tier in ("mxfp4", "2bit"):
        convert(source, root / tier, tier, shard_bytes=SHARD_BYTES, sync=False)
    return {tier: digests(root / tier) for tier in ("mxfp4", "2bit")}


@pytest.fixture(scope="module")
def processes():
    """Forked from a server that has imported the converter, so that a kill falls into the conversion."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["port.convert"])
    return context


def convert_until(event: int | None, near: str, arguments: dict) -> None:
    """Convert, and be killed before the file system is touched for the ``event``-th time near the target."""
    seen = 0

    def hook(name: str, details: tuple) -> None:
        nonlocal seen
        if name in FILE_EVENTS and any(near in str(detail) for detail in details[:2]):
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    if event is not None:
        sys.addaudithook(hook)
    convert(shard_bytes=SHARD_BYTES, **arguments)


def run_killed(processes, arguments: dict, event: int | None = None, after: float | None = None) -> bool:
    """Whether the process was killed, before the ``event``-th touch or ``after`` seconds."""
    near = str(Path(arguments["target"]).parent)
    process = processes.Process(target=convert_until, args=(event, near, arguments))
    process.start()
    if after is not None:
        time.sleep(after)
        process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def assert_whole(target: Path, expected: dict[str, str]) -> None:
    """The target is the undisturbed one, and stands alone."""
    assert digests(target) == expected
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def kill_everywhere(processes, arguments: dict, fresh, legal: list[dict[str, str] | None], stride: int) -> int:
    """Kill at every ``stride``-th touch, resume, compare with the last of ``legal``: what the target may be when the
    process has died (None: absent). Returns how many kills there were."""
    target, kills, event = Path(arguments["target"]), 0, 0
    while True:
        fresh()
        if not run_killed(processes, arguments, event):
            assert_whole(target, legal[-1])
            return kills
        kills += 1
        assert (digests(target) if target.exists() else None) in legal, f"killed before touch {event}"
        convert(**arguments | {"resume": True}, shard_bytes=SHARD_BYTES)
        assert_whole(target, legal[-1])
        event += stride


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), QUICK_STRIDE])
@pytest.mark.parametrize("tier", ["mxfp4", "2bit"])
def test_killed_between_any_two_touches_of_the_disk(
    tier: str, stride: int, source: Path, undisturbed, processes, tmp_path: Path
):
    arguments = {"source": source, "target": tmp_path / "out", "tier": tier, "sync": False}

    def fresh() -> None:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)

    kills = kill_everywhere(processes, arguments, fresh, [None, undisturbed[tier]], stride)
    assert kills * stride > 60


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 3 * QUICK_STRIDE])
def test_killed_while_a_target_is_replaced(stride: int, source: Path, undisturbed, processes, tmp_path: Path):
    """The old target stands until the new one takes its place; only between two renames is there none."""
    old = tmp_path / "old"
    convert(source, old, "mxfp4", shard_bytes=SHARD_BYTES, sync=False)
    (tmp_path / "work").mkdir()
    target = tmp_path / "work" / "out"
    arguments = {"source": source, "target": target, "tier": "2bit", "sync": False, "overwrite": True}

    def fresh() -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(old, target)

    kill_everywhere(processes, arguments, fresh, [None, undisturbed["mxfp4"], undisturbed["2bit"]], stride)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_moments(workers: int, source: Path, undisturbed, processes, tmp_path: Path):
    """50 kills, spread over twice the time that a conversion takes; with two workers only their parent is killed."""
    target = tmp_path / "out"
    arguments = {"source": source, "target": target, "tier": "2bit", "workers": workers}
    start = time.monotonic()
    assert not run_killed(processes, arguments)
    whole, kills, moment = time.monotonic() - start, 0, random.Random(workers)
    while kills < RANDOM_KILLS:
        shutil.rmtree(target, ignore_errors=True)
        while run_killed(processes, arguments | {"resume": True}, after=moment.uniform(0.02, whole)):
            kills += 1
            assert not target.exists() or digests(target) == undisturbed["2bit"]
        assert_whole(target, undisturbed["2bit"])


def test_an_interrupted_conversion_is_not_started_over_unasked(source: Path, processes, undisturbed, tmp_path: Path):
    target = tmp_path / "out"
    arguments = {"source": source, "target": target, "tier": "2bit", "sync": False}
    assert run_killed(processes, arguments, event=40)
    with pytest.raises(InputError, match="interrupted conversion; pass --resume"):
        convert(source, target, "2bit", shard_bytes=SHARD_BYTES)
    with pytest.raises(InputError, match="another one"):
        convert(source, target, "mxfp4", resume=True, shard_bytes=SHARD_BYTES)
    convert(source, target, "mxfp4", overwrite=True, sync=False, shard_bytes=SHARD_BYTES)
    assert_whole(target, undisturbed["mxfp4"])


def test_whole_shards_are_kept(source: Path, processes, tmp_path: Path):
    arguments = {"source": source, "target": tmp_path / "out", "tier": "2bit", "sync": False}
    assert run_killed(processes, arguments, event=40)
    result = convert(**arguments, resume=True, shard_bytes=SHARD_BYTES)
    assert 3 <= result.kept < result.shards
    assert convert(**arguments, resume=True, shard_bytes=SHARD_BYTES).kept == result.shards


def test_a_target_that_is_not_empty_is_refused(source: Path, undisturbed, tmp_path: Path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious.txt").write_text("mine")
    with pytest.raises(InputError, match="an empty folder, found 1 files; .*--overwrite"):
        convert(source, target, "2bit")
    with pytest.raises(InputError, match="only a checkpoint is overwritten"):
        convert(source, target, "2bit", overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious.txt"]
    (target / "precious.txt").unlink()
    convert(source, target, "mxfp4", shard_bytes=SHARD_BYTES, sync=False)
    with pytest.raises(InputError, match="--overwrite"):
        convert(source, target, "2bit", shard_bytes=SHARD_BYTES)
    convert(source, target, "2bit", overwrite=True, shard_bytes=SHARD_BYTES, sync=False)
    assert_whole(target, undisturbed["2bit"])


@pytest.mark.parametrize("where", ["", "inner"])
def test_source_and_target_may_not_overlap(where: str, source: Path, tmp_path: Path):
    shutil.copytree(source, tmp_path / "src")
    with pytest.raises(InputError, match="overlaps"):
        convert(tmp_path / "src", tmp_path / "src" / where, "2bit", overwrite=True)


def nothing_finished(target: Path) -> None:
    """No target, and no unfinished file beside whole shards."""
    assert not target.exists()
    parts = target.parent / f".{target.name}.partial" / "parts"
    assert not parts.exists() or not list(parts.iterdir())


@pytest.mark.parametrize("tier", ["mxfp4", "2bit"])
def test_a_disk_that_fills_up(tier: str, source: Path, undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Half-way through every write fails; with room again the conversion goes on."""
    target, written = tmp_path / "out", 0

    def filling(write, size):
        def wrapped(*arguments):
            nonlocal written
            written += size(*arguments)
            if written > 300_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*arguments)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(port.source.os, "pwrite", filling(os.pwrite, lambda fd, data, offset: len(data)))
        kernel_copy = filling(os.copy_file_range, lambda one, other, count, *offsets: count)
        patch.setattr(port.source.os, "copy_file_range", kernel_copy)
        with pytest.raises(InputError, match="room to write it, found No space left on device; free disk") as caught:
            convert(source, target, tier, shard_bytes=SHARD_BYTES, sync=False)
    assert "\n" not in str(caught.value) and "language_model." in str(caught.value)
    nothing_finished(target)
    assert convert(source, target, tier, resume=True, shard_bytes=SHARD_BYTES, sync=False).kept > 0
    assert_whole(target, undisturbed[tier])


def test_a_disk_that_is_too_small_is_seen_before_the_first_shard(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(port.convert.shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(InputError, match="bytes of free disk space, found 1,000"):
        convert(source, tmp_path / "out", "2bit")
    nothing_finished(tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("loss", ["vanished", "truncated"])
def test_a_source_that_is_lost_on_the_way(
    loss: str, workers: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A shard that goes, or becomes shorter, after the headers have been read."""
    copy, target = tmp_path / "src", tmp_path / "out"
    shutil.copytree(source, copy)
    victim = sorted(copy.glob("model-*.safetensors"))[-2]
    write_shards = port.convert.write_shards

    def losing(*arguments):
        victim.unlink() if loss == "vanished" else os.truncate(victim, victim.stat().st_size - 5000)
        write_shards(*arguments)

    monkeypatch.setattr(port.convert, "write_shards", losing)
    found = "found nothing there" if loss == "vanished" else "found a shard that has become shorter"
    with pytest.raises(InputError, match=found) as caught:
        convert(copy, target, "2bit", workers=workers, shard_bytes=SHARD_BYTES, sync=False)
    assert victim.name in str(caught.value) and "\n" not in str(caught.value)
    nothing_finished(target)


def test_values_that_are_not_finite_are_refused(source: Path, tmp_path: Path):
    """A NaN anywhere, or a scale byte of 255, ends the conversion with the tensor's name."""
    import json

    names = {
        "norm.weight": b"\xc0\x7f", "self_attn.A_log": b"\0\0\x80\x7f", "gate.weight": b"\xc0\x7f",
        "experts.2.w1.weight_scale": b"\xff",
    }  # fmt: skip
    for number, (ending, value) in enumerate(names.items()):
        copy = tmp_path / f"src{number}"
        shutil.copytree(source, copy)
        index = json.loads((copy / "model.safetensors.index.json").read_text())
        name = next(name for name in index["weight_map"] if name.endswith(ending))
        with (copy / index["weight_map"][name]).open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            begin = json.loads(file.read(length))[name]["data_offsets"][0]
            file.seek(8 + length + begin)
            file.write(value)
        for tier in ("mxfp4", "2bit"):
            with pytest.raises(InputError, match="NaN|finite") as caught:
                convert(copy, tmp_path / "out", tier, overwrite=True)
            assert name.replace("weight_scale", "") in str(caught.value)
            nothing_finished(tmp_path / "out")
