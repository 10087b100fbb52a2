"""A small vocabulary with the released special names, and what the tests around it share."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from reference.errors import InputError
from reference.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
MINI_CONFIG = json.loads((GOLDEN / "mini" / "config.json").read_text())

DISTANCES = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": 254,
    "[PAD]": 255,
}
MERGES = ("'s", "ll", "'ll", "th", "the", "12", "123", "45", "AB", "ABC", "  ", "--", '>"', "us", "user")


def small_ranks(*merges: str) -> dict[bytes, int]:
    """The 256 single bytes, then ``merges`` (by default MERGES)."""
    tokens = [bytes([byte]) for byte in range(256)] + [merge.encode() for merge in merges or MERGES]
    return {token: rank for rank, token in enumerate(tokens)}


def small_names(base_count: int) -> dict[int, str]:
    return {base_count + distance: name for name, distance in DISTANCES.items()}


def small_tokenizer() -> Tokenizer:
    ranks = small_ranks()
    return Tokenizer(ranks, small_names(len(ranks)))


def model_lines(ranks: dict[bytes, int]) -> list[str]:
    return [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]


def write_small(folder: Path) -> Path:
    """The small vocabulary as files; returns ``folder``."""
    ranks = small_ranks()
    (folder / "tiktoken.model").write_text("\n".join(model_lines(ranks)) + "\n")
    write_names(folder, {str(id): {"content": name} for id, name in small_names(len(ranks)).items()})
    return folder


def write_names(folder: Path, decoder: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))


def raises_one_line(*fragments: str):
    """Expects an InputError whose message is one line that holds every fragment."""
    ahead = "".join(f"(?=.*{re.escape(fragment)})" for fragment in fragments)
    return pytest.raises(InputError, match=rf"\A{ahead}[^\n]*\Z")
