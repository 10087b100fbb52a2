"""From a released checkpoint to a folder that stock MLX loaders read, tier by tier, never holding a model (K3.md §15).

What is written, and under which names: ``port/tiers.py``. Source shards are read through their byte ranges; output
shards are written header first, then tensor by tensor. Memory depends on one expert and on a block of another tensor,
beside the names of all tensors, not on the model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from port.executors import executor, run_all
from port.output_config import converted_config
from port.output_shards import (
    DISK_MEND,
    Task,
    cut,
    default_shard_bytes,
    shard_name,
    shard_size,
    tensors_of,
    write_shard,
)
from port.prune import checked_plan
from port.source import Piece, Source
from port.tiers import Output, Plan, Tier, outputs, tier_named
from port.work_folder import WorkFolder
from reference.config import K3Config
from reference.errors import InputError
from reference.headers import INDEX

CARRIED = {".json", ".model", ".tiktoken", ".py", ".txt", ".jinja", ".md"}
"""Endings of the files that come along: tokenizer, processor, generation settings, chat template, licence."""
NOT_CARRIED = {"config.json", INDEX, "hf_quant_config.json"}
LAYOUT = 1
"""Counts up when the same conversion would give other bytes."""

Progress = Callable[[int, int], None]
"""(bytes written, bytes in all), called after every shard."""


@dataclass(frozen=True)
class Result:
    """What a conversion wrote: ``nbytes`` of tensors in ``shards`` files, of which ``kept`` had been there before."""

    folder: Path
    tier: str
    tensors: int
    nbytes: int
    shards: int
    kept: int


@dataclass(frozen=True)
class Job:
    """A conversion before it starts: everything is decided and checked, nothing is written."""

    source: Source
    tier: Tier
    plan: Plan | None
    shards: dict[str, tuple[Output, ...]]
    digest: str

    @property
    def written(self) -> list[Output]:
        return [output for shard in self.shards.values() for output in shard]

    def config(self) -> dict:
        source = self.source
        return converted_config(
            source.document, source.config, source.expert_format, self.tier, self.plan, self.written, self.digest
        )


def prepare(
    source: str | Path,
    tier: str,
    nonexpert_bits: int | None = None,
    plan: Plan | None = None,
    shard_bytes: int | None = None,
) -> Job:
    """Check everything that can be checked before a byte is written; raises InputError."""
    chosen, checkpoint = tier_named(tier, nonexpert_bits), Source(source)
    plan = None if plan is None else checked_plan(dict(plan), checkpoint.config)
    where = checkpoint.folder / "config.json"
    written = list(outputs(checkpoint.config, checkpoint.expert_format, chosen, plan, where))
    limit = shard_bytes or default_shard_bytes(sum(output.nbytes for output in written))
    if limit < 1:
        raise InputError("--shard-bytes", "size", "a positive number", limit, "leave it out")
    cuts = cut(written, limit)
    shards = {shard_name(number, len(cuts)): shard for number, shard in enumerate(cuts, 1)}
    job = Job(checkpoint, chosen, plan, shards, digest_of(checkpoint, chosen, plan, limit))
    K3Config.from_dict(job.config(), f"{where}, pruned" if plan else where)
    return job


def digest_of(source: Source, tier: Tier, plan: Plan | None, shard_bytes: int) -> str:
    """sha256 over all that the result's bytes depend on: settings, source files by size, configuration, index, MLX."""
    document = {
        "layout": LAYOUT,
        "tier": asdict(tier),
        "plan": None if plan is None else sorted((layer, list(experts)) for layer, experts in plan.items()),
        "shard_bytes": shard_bytes,
        "config": source.document,
        "index": None if source.listing in source.files else file_digest(source.listing),
        "files": [(file.name, file.stat().st_size) for file in source.files],
        "carried": [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in carried_files(source)],
        "mlx": mx.__version__,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def carried_files(source: Source) -> list[Path]:
    """The source's files that the result needs as they are."""
    files = [path for path in sorted(source.folder.iterdir()) if path.is_file() and path.name not in NOT_CARRIED]
    return [path for path in files if path.suffix in CARRIED or path.name.upper().startswith(("LICENSE", "NOTICE"))]


def convert(
    source: str | Path,
    target: str | Path,
    tier: str,
    nonexpert_bits: int | None = None,
    plan: Plan | None = None,
    workers: int = 1,
    scheduler: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    shard_bytes: int | None = None,
    sync: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Write the checkpoint in ``source`` to the folder ``target``, as the tier says.

    ``workers`` processes, or the workers of a dask ``scheduler``, write a shard each; the bytes do not depend on them.
    ``target`` appears when it is whole. ``resume`` goes on with an interrupted conversion of the same kind, and is
    content with a finished one. ``overwrite`` replaces a checkpoint. Without ``sync`` nothing waits for the disk: a
    power cut, though not a killed process, may then cost data.

    Raises InputError, in one line, for bad input, a target that may not be written, a full disk or a lost source file;
    nothing unfinished stands under the final name.
    """
    if workers < 1:
        raise InputError("--workers", "number", "at least 1", workers, "pass a positive number")
    job = prepare(source, tier, nonexpert_bits, plan, shard_bytes)
    refuse_overlap(Path(source), Path(target))
    work = WorkFolder(target, job.digest)
    if resume and work.is_done():
        return result(job, work, len(job.shards))
    work.refuse(resume, overwrite)
    try:
        with work.open(resume):
            kept = work.whole({name: shard_size(shard) for name, shard in job.shards.items()})
            check_room(job, kept, work.root)
            write_shards(job, work, kept, workers, scheduler, sync, progress)
            write_the_rest(job, work)
            return result(job, work, len(kept))
    except OSError as error:
        where = error.filename or work.root
        raise InputError(where, "target", "a place to write to", error.strerror or error, DISK_MEND) from None


def result(job: Job, work: WorkFolder, kept: int) -> Result:
    tensors = tensors_of(job.written)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return Result(work.target, job.tier.name, len(tensors), nbytes, len(job.shards), kept)


def refuse_overlap(source: Path, target: Path) -> None:
    """Raise InputError where one of the two folders is the other, or lies in it."""
    source, target = source.resolve(), target.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise InputError(target, "target", "a folder apart from the source", "one that overlaps", "choose another")


def check_room(job: Job, kept: set[str], folder: Path) -> None:
    """Raise InputError if the disk has no room for the shards that are still to be written."""
    needed = sum(shard_size(shard) for name, shard in job.shards.items() if name not in kept)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(folder, "target", f"{needed:,} bytes of free disk space", f"{free:,}", DISK_MEND)


def write_shards(
    job: Job,
    work: WorkFolder,
    kept: set[str],
    workers: int,
    scheduler: str | None,
    sync: bool,
    progress: Progress | None,
) -> None:
    """All shards that are not there yet. The first failure stops the rest; raises InputError."""
    total = sum(output.nbytes for output in job.written)
    missing = [name for name in job.shards if name not in kept]
    done = total - sum(output.nbytes for name in missing for output in job.shards[name])
    if progress:
        progress(done, total)
    if not missing:
        return
    with executor(workers, scheduler) as (pool, ahead):
        for name, failure in run_all(pool, ahead, write_named_shard, tasks(job, work, missing, sync)):
            if failure is not None:
                raise InputError(*failure)
            done += sum(output.nbytes for output in job.shards[name])
            if progress:
                progress(done, total)


def write_named_shard(task: Task) -> tuple[str, tuple[str, ...] | None]:
    """(the shard's name, what stopped it): what a worker returns."""
    return task.name, write_shard(task)


def tasks(job: Job, work: WorkFolder, names: Sequence[str], sync: bool) -> Iterator[Task]:
    """One task a shard, made when it is asked for: the places of half a million tensors are many."""
    for name in names:
        shard = job.shards[name]
        pieces = tuple(tuple(pieces_of(output, job.source)) for output in shard)
        yield Task(name, shard, pieces, job.source.expert_format, str(work.folder), str(work.parts), sync)


def pieces_of(output: Output, source: Source) -> Iterator[Piece]:
    """Where the source tensors of one output lie."""
    if output.kind not in ("stack", "quantize_experts"):
        yield source.piece(output.source)
        return
    endings = ("weight_packed", "weight_scale") if source.expert_format == "mxfp4" else ("weight",)
    for expert in output.experts:
        for ending in endings:
            yield source.piece(f"{output.source.format(expert=expert)}.{ending}")


def write_the_rest(job: Job, work: WorkFolder) -> None:
    """Index, configuration and carried files; then the folder takes its final name."""
    weight_map = {tensor.name: name for name, shard in job.shards.items() for tensor in tensors_of(shard)}
    total = sum(output.nbytes for output in job.written)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    carried = carried_files(job.source)
    for path in carried:
        work.write(work.folder / path.name, path.read_bytes())
    work.write(work.folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")
    config = json.dumps(job.config(), indent=2, ensure_ascii=False)
    work.write(work.folder / "config.json", config.encode() + b"\n")
    work.finish({"config.json", INDEX, *job.shards, *(path.name for path in carried)})
