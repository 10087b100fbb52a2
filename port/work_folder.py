"""Where a conversion grows until it is whole: a hidden folder beside the target (K3.md §15).

``.TARGET.partial`` holds ``journal.json``, which says what is being made, ``parts`` with unfinished files, ``folder``,
which becomes the target, and for a moment, where a target is overwritten, ``replaced``. A shard enters ``folder`` by a
rename when it is whole, ``folder`` becomes the target by a rename when all are, and the rest is deleted after that: so
whatever moment a conversion dies at, nothing unfinished stands under a final name, and ``--resume`` can go on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from port.output_config import read_conversion
from reference.config import read_json
from reference.errors import InputError

RESUME = "pass --resume to go on, or --overwrite to start anew"


class WorkFolder:
    """The hidden folder of one target. ``digest`` stands for everything that the result depends on."""

    def __init__(self, target: str | Path, digest: str) -> None:
        self.target, self.digest = Path(target).absolute(), digest
        self.root = self.target.with_name(f".{self.target.name}.partial")
        self.folder, self.parts, self.replaced = self.root / "folder", self.root / "parts", self.root / "replaced"
        self.journal = self.root / "journal.json"

    def is_done(self) -> bool:
        """Whether the target is this very conversion's result, by its record; what is left beside it is removed."""
        try:
            done = read_conversion(self.target).digest == self.digest
        except InputError:
            return False
        if done and not self.folder.exists():
            shutil.rmtree(self.root, ignore_errors=True)
        return done

    def refuse(self, resume: bool, overwrite: bool) -> None:
        """Raise InputError where the target, or an interrupted conversion to it, may not be touched."""
        target = self.target
        if target.exists() and not target.is_dir():
            raise InputError(target, "target", "a folder or nothing", "a file", "choose another target")
        present = sorted(target.iterdir()) if target.is_dir() else []
        if present and not overwrite:
            mend = "choose another target or pass --overwrite"
            raise InputError(target, "target", "an empty folder", f"{len(present)} files", mend)
        if present and (not (target / "config.json").is_file() or any(path.is_dir() for path in present)):
            raise InputError(
                target, "target", "a checkpoint folder", "other things", "only a checkpoint is overwritten"
            )
        if not self.root.exists() or overwrite and not resume:
            return
        if not resume:
            raise InputError(self.root, "target", "nothing half-done", "an interrupted conversion", RESUME)
        if self.journal.exists() and self._journal_digest() != self.digest:
            expected, found = "an interrupted conversion of this source, tier and plan", "another one"
            raise InputError(self.root, "journal", expected, found, "pass --overwrite alone to start anew")

    def _journal_digest(self) -> object:
        document = read_json(self.journal)
        return document.get("digest") if isinstance(document, dict) else None

    @contextlib.contextmanager
    def open(self, resume: bool) -> Iterator[None]:
        """The folder, locked against a second conversion; with ``resume`` the shards that are whole already stay."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self.root.mkdir(exist_ok=True)
        with self._locked():
            if not (resume and self.journal.exists()):
                self._restore_replaced()
                shutil.rmtree(self.folder, ignore_errors=True)
            shutil.rmtree(self.parts, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
            self.parts.mkdir()
            self.write(self.journal, json.dumps({"digest": self.digest}).encode())
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock is the process's: it goes with it, however it ends."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            mend = "wait for it, or stop it"
            raise InputError(self.root, "target", "no other conversion to it", "one that is running", mend) from None
        finally:
            os.close(descriptor)

    def _restore_replaced(self) -> None:
        """Put back the old target where a conversion died between moving it away and taking its place."""
        if self.replaced.exists() and not self.target.exists():
            self.replaced.rename(self.target)
        shutil.rmtree(self.replaced, ignore_errors=True)

    def whole(self, sizes: Mapping[str, int]) -> set[str]:
        """Which of these shards stand in ``folder``; one of another size is removed."""
        found = set()
        for name, size in sizes.items():
            path = self.folder / name
            if path.is_file() and path.stat().st_size == size:
                found.add(name)
            else:
                path.unlink(missing_ok=True)
        return found

    def write(self, path: Path, content: bytes) -> None:
        """A small file, which appears whole or not at all."""
        part = self.root / f"{path.name}.new"
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)

    def finish(self, names: set[str]) -> None:
        """Make ``folder``, which holds files of these names, the target."""
        for path in self.folder.iterdir():
            if path.name not in names:
                path.unlink()
        sync_folder(self.folder)
        if self.target.exists():
            shutil.rmtree(self.replaced, ignore_errors=True)
            self.target.rename(self.replaced)
        self.folder.rename(self.target)
        sync_folder(self.target.parent)
        shutil.rmtree(self.root)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
