"""Pad, placeholder and the other special ids: the configuration's against the tokenizer's (K3.md §1, §13)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fixtures.tokenizer_files import RELEASED_DISTANCES
from parity.audit.entry import AuditEntry, Status
from parity.audit.subject import Subject
from reference.config import K3Config
from reference.tokenizer import CONFIG_FILE, CONFIG_NAMES, read_special_names

RELEASED_VOCABULARY, RELEASED_FIRST = 163_840, 163_584
NEIGHBOURS = {"[EOS]": "<|end_of_msg|>"}
"""Names that a reader may take for others: generation ends at <|end_of_msg|>, not at the token called [EOS]."""


def audit_ids(subject: Subject) -> Iterator[AuditEntry]:
    """Every id field of ``config.json`` and what the tokenizer calls that id."""
    names, source = special_names(subject)
    evidence, wrong = [], []
    for field, name in CONFIG_NAMES.items():
        id = value_of(subject.config, field)
        called = names.get(id, "no special token") if names else None
        evidence.append(f"{field} is {id}, which must be {name}" + (f"; {source} calls it {called}" if names else ""))
        wrong += [f"{field} {id} is {called}, not {name}"] if names and called != name else []
    by_name = {name: id for id, name in names.items()}
    for other, meant in NEIGHBOURS.items():
        if other in by_name and meant in by_name:
            evidence.append(f"{other} is {by_name[other]}: eos_token_id is not the token of that name, but {meant}")
    verdict, status = judge(names, source, wrong)
    yield AuditEntry(
        name="token-ids",
        question="Do pad, placeholder, bos and eos ids mean the same to the configuration and to the tokenizer?",
        readings={
            "one id each": "config.json and tokenizer agree, and either may be asked",
            "two ids": "features are never inserted, or padding is read as text, depending on whom a program asks",
        },
        evidence=tuple(evidence),
        verdict=verdict,
        section="§13",
        status=status,
    )


def special_names(subject: Subject) -> tuple[dict[int, str], str]:
    """Special id -> name, and whose they are; the release's own where a configuration has its vocabulary."""
    folder = subject.shards.folder if subject.shards else Path(subject.source)
    if (folder / CONFIG_FILE).is_file():
        return read_special_names(folder / CONFIG_FILE), CONFIG_FILE
    if subject.config.text_config.vocab_size == RELEASED_VOCABULARY:
        return {RELEASED_FIRST + distance: name for name, distance in RELEASED_DISTANCES.items()}, "K3.md §13"
    return {}, ""


def judge(names: dict[int, str], source: str, wrong: list[str]) -> tuple[str, Status]:
    if not names:
        return f"cannot be decided: no {CONFIG_FILE} beside the configuration", "needs data"
    if wrong:
        return f"against K3.md: {'; '.join(wrong)}", "contradicted"
    return f"all {len(CONFIG_NAMES)} ids are the tokens that they must be, by {source}", "decided"


def value_of(config: K3Config, field: str) -> int:
    value: Any = config
    for part in field.split("."):
        value = getattr(value, part)
    return value
