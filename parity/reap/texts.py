"""Calibration sets: files of text or of token ids, one domain each (K3.md §13, §15)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from reference.config import read_json
from reference.errors import InputError

if TYPE_CHECKING:
    from reference.saliency_result import Domains

FORM = 'write {"domain": [[id, id, …], …], …}'


def read_tokens(path: Path) -> Domains:
    """A JSON file ``{"domain": [[id, …], …]}``: per domain its sequences. Raises InputError naming file and domain."""
    document = read_json(path)
    if not isinstance(document, dict) or not document:
        raise InputError(path, "content", "domain -> sequences of token ids", type(document).__name__, FORM)
    domains = {}
    for name, sequences in document.items():
        if not isinstance(sequences, list) or not all(isinstance(row, list) for row in sequences):
            raise InputError(path, f"domain {name}", "a list of sequences", type(sequences).__name__, FORM)
        for row in sequences:
            wrong = next((value for value in row if type(value) is not int), None)
            if wrong is not None:
                raise InputError(path, f"domain {name}", "whole numbers, token ids", repr(wrong)[:40], FORM)
        domains[name] = [np.array(row, np.int64) for row in sequences]
    return domains


def read_texts(paths: Sequence[Path], tokenizer_folder: Path, length: int) -> Domains:
    """Text files, each a domain by the name of its file, in sequences of ``length`` tokens.

    Nothing is put before or after the text; the last sequence is shorter. Raises InputError naming the file.
    """
    from reference.tokenizer import Tokenizer

    tokenizer, domains = Tokenizer.from_folder(tokenizer_folder), {}
    for path in paths:
        if path.stem in domains:
            mend = "give every domain a file of its own name"
            raise InputError(path, "domain", "a name that no other text has", path.stem, mend)
        ids = np.array(tokenizer.encode(read_text(path)), np.int64)
        domains[path.stem] = [ids[start : start + length] for start in range(0, len(ids), length)]
    return domains


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(path, "file", "a text", "nothing there", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, "file", "readable UTF-8 text", type(error).__name__, "check the file") from None
