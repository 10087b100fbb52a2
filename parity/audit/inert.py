"""Which fields of config.json change anything (K3.md §1)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from fixtures.build import write_json
from fixtures.catalogue import Entry
from fixtures.inputs import multimodal_inputs
from fixtures.liveliness import FLIPS, INERT, Flip, flipped, movement
from parity.audit.entry import AuditEntry
from parity.audit.subject import Subject
from reference.config import K3Config
from reference.errors import InputError

SMALL = 64 * 2**20
"""Bytes of a checkpoint that may be run once per field."""
SUGGESTIVE = (
    "max_position_embeddings", "rope_theta", "rope_scaling", "topk_method", "use_grouped_topk", "num_experts_per_tok",
    "num_nextn_predict_layers", "initializer_range", "model_max_length", "tokenizer_class", "use_cache", "dtype",
    "quantization_config", "_attn_implementation", "image_placeholder", "ignore_index", "head_dim", "max_length",
)  # fmt: skip
"""Fields that sound as if an equation read them, and none does."""
INERT_FLIPS = tuple(Flip(field, 7) for field in INERT)


def audit_inert(subject: Subject) -> Iterator[AuditEntry]:
    """Fields that no equation reads; and, on a small checkpoint, what changing each of the others moves."""
    unread = sorted(unread_fields(subject.document, K3Config))
    suggestive = [field for field in unread if field.rpartition(".")[2] in SUGGESTIVE]
    evidence = [
        f"{len(unread)} fields of config.json are read by no equation of K3.md; among them such as suggest otherwise: "
        + (", ".join(suggestive) or "none"),
        *(f"{field} is read and without effect: {reason}" for field, reason in INERT.items()),
    ]
    measured, apart = runnable(subject), {}
    if measured:
        apart = dict(flips_of(subject))
        refused = [field for field, moved in apart.items() if not np.isfinite(moved)]
        dead = [field for field, moved in apart.items() if moved == 0]
        surprising = sorted(set(dead) - set(INERT))
        evidence.append(
            f"changed one by one on this checkpoint: {len(refused)} fields are refused in another value, "
            f"{len(apart) - len(refused) - len(dead)} move the logits"
        )
        evidence.append("without any effect on this checkpoint: " + (", ".join(sorted(dead)) or "none"))
        verdict = f"inert here: {', '.join(sorted(INERT))}" + (
            f"; on this checkpoint also {', '.join(surprising)}" if surprising else "; every other field acts"
        )
    else:
        verdict = f"inert: {', '.join(sorted(INERT))}; what the others move needs a checkpoint of at most 64 MiB"
    yield AuditEntry(
        name="inert-fields",
        question="Which fields of config.json change nothing, so that reading them wrongly cannot be seen?",
        readings={
            "acts": "another value moves the output, or the checkpoint no longer fits",
            "inert": "another value changes nothing",
        },
        evidence=tuple(evidence),
        verdict=verdict,
        section="§1",
        status="decided" if measured else "needs data",
        apart={field: moved for field, moved in apart.items() if np.isfinite(moved)},
    )


def unread_fields(document: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of what stands in the file and is no field of the configuration that the reference reads."""
    for name, value in document.items():
        info = model.model_fields.get(name)
        if info is None:
            yield prefix + name
        elif isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel) and isinstance(value, dict):
            yield from unread_fields(value, info.annotation, f"{prefix}{name}.")


def runnable(subject: Subject) -> bool:
    return subject.shards is not None and subject.shards.total_size <= SMALL


def flips_of(subject: Subject) -> Iterator[tuple[str, float]]:
    """(field, how far the multimodal logits move), infinite where the changed configuration is refused."""
    inputs = multimodal_inputs(Entry("audit", dict(subject.document)))
    used = int(inputs["input_ids"][0, 0])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for path in subject.shards.folder.resolve().iterdir():
            if path.suffix == ".safetensors" or path.name.endswith(".index.json"):
                (folder / path.name).symlink_to(path)
        before = logits(folder, subject.document, inputs)
        for flip in (*FLIPS, *INERT_FLIPS):
            if (value := another_value(subject.document, flip, used)) is None:
                continue
            changed = flipped(subject.document, flip._replace(value=value[0]))
            try:
                yield flip.field, movement(before, logits(folder, changed, inputs))
            except InputError:
                yield flip.field, float("inf")


def another_value(document: Mapping[str, Any], flip: Flip, used: int) -> tuple[Any] | None:
    """The flip's value, or another one where the file has that already; None where there is nothing else to try.

    ``used`` is an id of the prompt itself: as the pad id it zeroes that embedding.
    """
    if flip.field == "pad_token_id":
        return (used,)
    present: Any = document
    for part in flip.field.split("."):
        present = present.get(part) if isinstance(present, Mapping) else None
    if present != flip.value:
        return (flip.value,)
    if isinstance(present, bool) or not isinstance(present, (int, float)):
        return None
    return (present + 1,) if isinstance(present, int) else (2 * present,)


def logits(folder: Path, document: Mapping[str, Any], inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The multimodal logits of the weights in ``folder`` under ``document``."""
    import torch

    from reference.weights import load_model

    write_json(folder / "config.json", document)
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    with torch.inference_mode():
        return load_model(folder)(**tensors).numpy()
