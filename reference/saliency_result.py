"""What a calibration measures, and the file that keeps it (K3.md §15). numpy only, no tensor library."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reference.checkpoint import ExpertFormat
from reference.config import K3Config
from reference.errors import InputError

FORMAT = 1
AGAIN = "calibrate again"
Domains = Mapping[str, Sequence[np.ndarray]]
"""Name of a domain -> its sequences of token ids, integers [T] each."""


@dataclass(frozen=True)
class Saliency:
    """Per domain, layer and expert. ``tokens`` int64 [D]; ``layers`` 0-based MoE layers int64 [L];
    ``mass`` float64 [D, L, E] is Σ weight · ‖expert(x)‖₂ over the domain's tokens; ``counts`` int64 [D, L, E] of tokens
    routed there. ``document`` is the checkpoint's ``config.json``, ``expert_format`` how its experts are stored."""

    domains: tuple[str, ...]
    tokens: np.ndarray
    layers: np.ndarray
    mass: np.ndarray
    counts: np.ndarray
    document: dict[str, Any]
    expert_format: ExpertFormat = "mxfp4"

    @property
    def config(self) -> K3Config:
        return K3Config.from_dict(self.document, "saliency")

    def per_domain(self) -> np.ndarray:
        """S of each domain alone: [D, L, E]."""
        return self.mass / self.tokens[:, None, None]

    def saliency(self) -> np.ndarray:
        """``S_j = (1/|C|) Σ weight_j · ‖expert_j‖``, C the tokens of all domains together: [L, E]."""
        return self.mass.sum(0) / self.tokens.sum()

    def balanced(self) -> np.ndarray:
        """The mean of the domains' own saliencies, each counting the same whatever its number of tokens: [L, E]."""
        return self.per_domain().mean(0)

    def only(self, names: Sequence[str], source: object = "saliency") -> Saliency:
        """These domains alone, in this order; raises InputError for a name that is not there."""
        for name in names:
            if name not in self.domains:
                expected = f"one of {', '.join(self.domains)}"
                raise InputError(source, "domain", expected, repr(name), "choose among them, or calibrate with it")
        rows = [self.domains.index(name) for name in names]
        tokens, mass, counts = self.tokens[rows], self.mass[rows], self.counts[rows]
        return Saliency(tuple(names), tokens, self.layers, mass, counts, self.document, self.expert_format)

    def save(self, path: str | Path) -> None:
        """One .npz file, whole or not at all; raises InputError where it cannot be written."""
        path = Path(path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        arrays = {"tokens": self.tokens, "layers": self.layers, "mass": self.mass, "counts": self.counts}
        texts = {"format": np.array(FORMAT), "domains": np.array(self.domains), "config": json.dumps(self.document)}
        texts["expert_format"] = np.array(self.expert_format)
        try:
            with unfinished.open("wb") as file:
                np.savez(file, **arrays, **texts)
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise InputError(path, "file", "a place to write to", error.strerror, "choose another file") from None


def token_count(sequences: Sequence[np.ndarray]) -> int:
    """|C|: tokens, which are what an expert is asked for; not bytes, of which one script needs more than another."""
    return sum(len(sequence) for sequence in sequences)


def load_saliency(path: str | Path) -> Saliency:
    """The result in a file; raises InputError naming file and field for whatever is wrong with it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            fields = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise InputError(path, "file", "the result of a calibration", "nothing there", AGAIN) from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, TypeError, AttributeError) as error:
        raise InputError(path, "content", "an .npz file of a calibration", type(error).__name__, AGAIN) from None
    for name in ("format", "domains", "tokens", "layers", "mass", "counts", "config", "expert_format"):
        if name not in fields:
            raise InputError(path, name, "a field of the file", "nothing", AGAIN)
    if fields["format"] != FORMAT:
        raise InputError(path, "format", FORMAT, fields["format"], AGAIN)
    return checked(path, fields)


def checked(path: str | Path, fields: Mapping[str, np.ndarray]) -> Saliency:
    """The fields as a result; InputError unless shapes, dtypes and values fit each other and the configuration."""
    try:
        document = json.loads(str(fields["config"]))
    except ValueError:
        raise InputError(path, "config", "the checkpoint's config.json", "no JSON", AGAIN) from None
    text = K3Config.from_dict(document, f"{path}: config").text_config
    layers = [layer for layer in range(text.num_hidden_layers) if text.is_moe(layer)]
    domains = tuple(str(name) for name in np.atleast_1d(fields["domains"]))
    shape = (len(domains), len(layers), text.num_experts)
    expected = {"tokens": shape[:1], "layers": shape[1:2], "mass": shape, "counts": shape}
    for name, size in expected.items():
        array, kind = fields[name], np.floating if name == "mass" else np.integer
        if array.shape != size or not np.issubdtype(array.dtype, kind):
            raise InputError(path, name, f"{kind.__name__} {list(size)}", f"{array.dtype} {list(array.shape)}", AGAIN)
        if not np.isfinite(array).all() or (array < 0).any():
            raise InputError(path, name, "finite numbers from 0", "others", AGAIN)
    if fields["layers"].tolist() != layers:
        raise InputError(path, "layers", f"the MoE layers {layers}"[:60], f"{fields['layers'].tolist()}"[:60], AGAIN)
    if not (fields["tokens"] > 0).all() or len(set(domains)) != len(domains):
        raise InputError(path, "domains", "different names, each with tokens", ", ".join(domains), AGAIN)
    expert_format = str(fields["expert_format"])
    if expert_format not in ("mxfp4", "dense"):
        raise InputError(path, "expert_format", "mxfp4 or dense", expert_format, AGAIN)
    arrays = (fields[name] for name in ("tokens", "layers", "mass", "counts"))
    return Saliency(domains, *arrays, document, expert_format)


class Tally:
    """Sums while a calibration runs: a row per domain and MoE layer."""

    def __init__(
        self, domains: Domains, config: K3Config, document: dict[str, Any], expert_format: ExpertFormat = "mxfp4"
    ) -> None:
        text, self.expert_format = config.text_config, expert_format
        self.domains, self.document = tuple(domains), document
        self.tokens = np.array([token_count(sequences) for sequences in domains.values()], np.int64)
        for name, tokens in zip(self.domains, self.tokens, strict=True):
            if not tokens:
                raise InputError("calibration", f"domain {name}", "at least one token", "none", "give it text")
        if not self.domains:
            raise InputError("calibration", "domains", "at least one", "none", "give texts or tokens")
        moe = [layer for layer in range(text.num_hidden_layers) if text.is_moe(layer)]
        if not moe:
            raise InputError("calibration", "layers", "layers with routed experts", "none", "there is nothing to prune")
        self.layers = np.array(moe, np.int64)
        self._row = {layer: row for row, layer in enumerate(moe)}
        self.mass = np.zeros((len(self.domains), len(moe), text.num_experts))
        self.counts = np.zeros(self.mass.shape, np.int64)

    def add(self, layer: int, domain: int, sums: np.ndarray, counts: np.ndarray) -> None:
        """``sums`` and ``counts`` [E] of some tokens of one domain."""
        self.mass[domain, self._row[layer]] += sums
        self.counts[domain, self._row[layer]] += counts

    def result(self) -> Saliency:
        arrays = (self.tokens, self.layers, self.mass, self.counts)
        return Saliency(self.domains, *arrays, self.document, self.expert_format)


def in_order(domains: Domains) -> list[tuple[int, np.ndarray]]:
    """(number of the domain, ids [T]) of every sequence that has tokens, domain after domain."""
    return [
        (number, np.asarray(ids, np.int64))
        for number, sequences in enumerate(domains.values())
        for ids in sequences
        if len(ids)
    ]


def pieces(lengths: Sequence[int], most: int) -> list[slice]:
    """Consecutive sequences of together at most ``most`` tokens; a longer one stands alone."""
    found, first, tokens = [], 0, 0
    for number, length in enumerate(lengths):
        if number > first and tokens + length > most:
            found.append(slice(first, number))
            first, tokens = number, 0
        tokens += length
    return [*found, slice(first, len(lengths))] if lengths else []
