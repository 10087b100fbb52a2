"""A converted folder against its source: what is compared, by whom, and what came out (K3.md §15)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

from parity.verify.compare import Task, compare
from parity.verify.declared import Entry, entries
from parity.verify.diagnose import Diagnosis
from parity.verify.findings import Compared, Problem, Verdict
from parity.verify.folder import Places, coverage_problems, read_folder
from parity.verify.record import Plan, config_problems, read_record
from port.executors import executor, run_all
from port.source import Piece, Source
from reference.errors import InputError

TASK_WEIGHTS = 1 << 25
"""Weights of one task: a fraction of a second."""
PARTS = ("all", "experts", "rest")
CARRIED = (".json", ".model", ".tiktoken", ".py", ".txt", ".jinja", ".md")
NOT_CARRIED = ("config.json", "model.safetensors.index.json", "hf_quant_config.json")

Progress = Callable[[int, int], None]
"""(weights compared, weights in all)."""


def verify(
    folder: str | Path,
    source: str | Path,
    sample: int | None = None,
    part: str = "all",
    seed: int = 0,
    tier: str | None = None,
    plan: Plan | None = None,
    workers: int = 1,
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Everything that the folder holds, or of each layer's experts a ``sample``, against the checkpoint in ``source``.

    ``tier`` and ``plan``, if given, are what the conversion was asked for: the folder's record must say the same.
    Raises InputError for a source that is wrong in itself and for a folder that is no conversion at all.
    """
    start = time.perf_counter()
    folder = Path(folder)
    check_options(sample, part, workers)
    checkpoint = Source(source)
    record, document = read_record(folder, checkpoint.config)
    declared = list(entries(checkpoint.config, checkpoint.expert_format, record.promise, record.plan))
    stored, problems = read_folder(folder)
    verdict = Verdict(str(folder), str(source), record.tier, record.nonexpert_bits, record.plan is not None)
    verdict.problems += problems
    verdict.problems += asked_problems(record.tier, record.plan, tier, plan)
    verdict.problems += config_problems(document, checkpoint.document, checkpoint.config, record, declared)
    verdict.problems += coverage_problems(stored, declared)
    verdict.problems += carried_problems(folder, checkpoint.folder)
    verdict.total_experts = sum(len(entry.experts) for entry in declared if entry.kind == "experts")
    chosen = [entry for entry in declared if part == "all" or (entry.kind == "experts") == (part == "experts")]
    whole = [entry for entry in chosen if is_whole(entry, stored)]
    total = sum(weights_of(entry, sampled(entry, sample, seed)) for entry in whole)
    tasks = tasks_of(whole, checkpoint, stored, sample, seed)
    diagnosis = Diagnosis(checkpoint, stored, declared)
    for item, wrong in compared(tasks, total, workers, scheduler, progress):
        (verdict.experts if item.projection else verdict.tensors).append(item)
        if wrong:
            diagnosis.add(item, wrong)
    verdict.problems += diagnosis.problems()
    verdict.experts.sort(key=lambda item: (item.layer, item.projection, item.expert))
    verdict.tensors.sort(key=lambda item: item.name)
    verdict.seconds = time.perf_counter() - start
    return verdict


def check_options(sample: int | None, part: str, workers: int) -> None:
    if part not in PARTS:
        raise InputError("--part", "part", f"one of {', '.join(PARTS)}", repr(part), "choose one of them")
    for name, value in (("--sample", sample), ("--workers", workers)):
        if value is not None and value < 1:
            raise InputError(name, "number", "at least 1", value, "pass a positive number")


def asked_problems(found_tier: str, found_plan: Plan | None, tier: str | None, plan: Plan | None) -> Iterator[Problem]:
    """Where the record is not of the conversion that was asked for."""
    if tier is not None and tier != found_tier:
        yield Problem("config", "config.json", f"tier {found_tier}, {tier} was asked for")
    for layer, kept in (plan or {}).items():
        found = (found_plan or {}).get(layer)
        if found is None or tuple(found) != tuple(kept):
            yield Problem("config", "config.json", "another plan than the one that was asked for", layer)


def carried_problems(folder: Path, source: Path) -> Iterator[Problem]:
    """Tokenizer, processor and other small files come along unchanged."""
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.suffix not in CARRIED or path.name in NOT_CARRIED:
            continue
        copy = folder / path.name
        if not copy.is_file():
            yield Problem("file", path.name, "the source has it, the folder does not")
        elif copy.read_bytes() != path.read_bytes():
            yield Problem("file", path.name, "not the source's")


def is_whole(entry: Entry, stored: Places) -> bool:
    """Whether all its tensors are there in dtype and shape; if not, that has been said."""
    return all(
        name in stored and (stored[name].dtype, stored[name].shape) == promised
        for name, promised in entry.tensors().items()
    )


def tasks_of(
    declared: Iterable[Entry], source: Source, stored: Places, sample: int | None, seed: int
) -> Iterator[Task]:
    """One task a tensor, some for a stack; of stacks the same experts in all projections of a layer.

    Made when they are asked for: the places of half a million tensors are many.
    """
    packed = source.expert_format == "mxfp4"
    endings = ("weight_packed", "weight_scale") if packed else ("weight",)
    for entry in declared:
        target = {name: piece_of(name, stored) for name in entry.tensors()}
        if entry.kind != "experts":
            yield Task(entry, (source.piece(entry.source),), target)
            continue
        slots = sampled(entry, sample, seed)
        step = max(1, TASK_WEIGHTS // prod(entry.shape))
        for first in range(0, len(slots), step):
            some = slots[first : first + step]
            names = (f"{entry.source.format(expert=entry.experts[slot])}.{end}" for slot in some for end in endings)
            yield Task(entry, tuple(map(source.piece, names)), target, some, packed)


def piece_of(name: str, stored: Places) -> Piece:
    place = stored[name]
    return Piece(name, str(place.file.absolute()), place.begin, place.end)


def sampled(entry: Entry, sample: int | None, seed: int) -> tuple[int, ...]:
    """Slots of a stack, all or ``sample`` of them, drawn by layer and seed alone."""
    if entry.kind != "experts":
        return ()
    slots = range(len(entry.experts))
    if sample is None or sample >= len(slots):
        return tuple(slots)

    def draw(slot: int) -> bytes:
        return hashlib.sha256(f"{seed} {entry.layer} {slot}".encode()).digest()

    return tuple(sorted(sorted(slots, key=draw)[:sample]))


def weights_of(entry: Entry, slots: Sequence[int]) -> int:
    return prod(entry.shape) * (len(slots) if entry.kind == "experts" else 1)


def compared(
    tasks: Iterable[Task], total: int, workers: int, scheduler: str | None, progress: Progress | None
) -> Iterator[tuple[Compared, str]]:
    """What the tasks give, in any order; InputError for a damaged source, or a worker that died."""
    done = 0
    if progress:
        progress(done, total)
    if not total:
        return
    with executor(workers, scheduler) as (pool, ahead):
        for answer in run_all(pool, ahead, compare, tasks):
            if answer.failure is not None:
                raise InputError(*answer.failure)
            yield from answer.compared
            done += weights_of(answer.task.entry, answer.task.slots)
            if progress:
                progress(done, total)
