"""The page as a file: rendered whole, then put in its place, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from reference.errors import InputError

if TYPE_CHECKING:
    from parity.findings import Report


def known_page(path: Path) -> None:
    """Raise InputError unless a page can be put at ``path``: asked before a long run, not after it."""
    if path.is_dir():
        raise InputError(path, "--report", "a file to write", "a directory", "name a file in it, like report.html")
    if not path.parent.is_dir():
        raise InputError(path, "--report", "a folder that exists", f"no {path.parent}", "make the folder first")
    if not os.access(path.parent, os.W_OK):
        raise InputError(path, "--report", "a folder that can be written to", "a protected one", "choose another path")


def write_page(path: Path, report: Report) -> None:
    """Write the page of ``report``; raises InputError if the place cannot be written to, and leaves nothing there."""
    from parity.page.render import page

    known_page(path)
    data = page(report).encode()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise InputError(
            path, "--report", "a place that can be written", error.strerror, "choose another path"
        ) from None
