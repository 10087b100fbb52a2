"""The tokenizer: byte-pair encoding in tiktoken's form, with special ids after the ranks (K3.md §13).

Text and markup are kept apart by construction: the byte-pair encoder knows no special id at all, so nothing that a
user types can become one. Only ``encode_segments`` looks for special names, and only in segments that are markup.
No tensor library; the port shares this file.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tiktoken

from reference.config import K3Config, read_json
from reference.errors import InputError

MODEL_FILE, CONFIG_FILE = "tiktoken.model", "tokenizer_config.json"
SPECIAL_COUNT = 256
SLICE_CHARACTERS = 400_000
RUN_CHARACTERS = 25_000

UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_ALTERNATIVES = (
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTION}",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
SPLIT_PATTERN = "|".join(SPLIT_ALTERNATIVES)

CONFIG_NAMES = {
    "text_config.bos_token_id": "[BOS]",
    "text_config.eos_token_id": "<|end_of_msg|>",
    "text_config.pad_token_id": "[PAD]",
    "pad_token_id": "[PAD]",
    "media_placeholder_token_id": "<|media_pad|>",
}
"""Id fields of ``config.json`` and the special token that each must mean (K3.md §1, §13)."""


class Tokenizer:
    """Ids 0 … n−1 are the ranks of ``ranks`` (token bytes -> rank), the next ``special_count`` ids are special.

    ``special_names`` maps special ids to their names; an id without a name is ``<|reserved_token_{id}|>``.
    Raises InputError if the ranks are not exactly 0 … n−1, if one of the 256 single bytes has no rank, or if a name is
    empty, given twice, or belongs to an id that is not special.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        special_names: Mapping[int, str],
        special_count: int = SPECIAL_COUNT,
        source: object = "tokenizer",
    ) -> None:
        self.source = source
        self.base_count = len(ranks)
        self.vocab_size = self.base_count + special_count
        _check_ranks(ranks, source)
        self.special_names = _all_special_names(special_names, self.base_count, special_count, source)
        self.special_ids = {name: id for id, name in self.special_names.items()}
        if len(self.special_ids) != special_count:
            twice = next(name for id, name in self.special_names.items() if self.special_ids[name] != id)
            raise InputError(source, "special tokens", "a name for one id only", repr(twice), "rename one of them")
        self._tokens = {rank: token for token, rank in ranks.items()}
        self._encoding = tiktoken.Encoding("k3", pat_str=SPLIT_PATTERN, mergeable_ranks=dict(ranks), special_tokens={})
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        self._special_name = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tiktoken.model`` and ``tokenizer_config.json``.

        There are 256 special ids. A ``config.json`` beside them whose vocabulary ends earlier, as that of a synthetic
        checkpoint may, ends them there; its token ids must mean what the tokenizer calls them (``check_config``).
        Raises InputError naming the file, and the line of a damaged ``tiktoken.model``.
        """
        folder = Path(folder)
        ranks = read_ranks(folder / MODEL_FILE)
        names = read_special_names(folder / CONFIG_FILE)
        if not (folder / "config.json").exists():
            return cls(ranks, names, source=folder / CONFIG_FILE)
        config = K3Config.from_file(folder)
        room = config.text_config.vocab_size - len(ranks)
        if room < 1:
            found = f"{len(ranks)} ranks for a vocab_size of {config.text_config.vocab_size}"
            raise InputError(folder / MODEL_FILE, "ranks", "fewer than vocab_size", found, "take both from one release")
        tokenizer = cls(ranks, names, min(SPECIAL_COUNT, room), folder / CONFIG_FILE)
        tokenizer.check_config(config)
        return tokenizer

    def check_config(self, config: K3Config) -> None:
        """Raises InputError if an id of ``config.json`` is not the special token that it must mean."""
        for field, name in CONFIG_NAMES.items():
            value: Any = config
            for part in field.split("."):
                value = getattr(value, part)
            if self.special_names.get(value) != name:
                found = f"{field} {value}, which is {self.special_names.get(value, 'no special token')!r}"
                raise InputError(
                    self.source, name, "the id that config.json gives", found, "take both from one release"
                )

    def id_of(self, name: str) -> int:
        """The id of a special token; raises InputError for an unknown name."""
        if name not in self.special_ids:
            raise InputError(self.source, "special token", "a known name", repr(name), "check its spelling")
        return self.special_ids[name]

    def encode(self, text: str) -> list[int]:
        """The ids of ordinary text, none of them special, whatever the text says.

        ``decode(encode(text)) == text`` for every text. Raises InputError for a lone surrogate, which no UTF-8 can
        hold; it is not replaced by U+FFFD.
        """
        if not isinstance(text, str):
            raise InputError("text", "type", "str", type(text).__name__, "decode it first")
        _refuse_surrogates(text)
        return [id for piece in slices(text) for id in self._encoding.encode_ordinary(piece)]

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """The ids of ``(text, is_markup)`` segments, each encoded on its own; only markup yields special ids."""
        return [id for text, markup in segments for id in (self._encode_markup(text) if markup else self.encode(text))]

    def _encode_markup(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._special_name.split(text):
            ids += [self.special_ids[part]] if part in self.special_ids else self.encode(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, special ones by their names; bytes that are no whole UTF-8 become U+FFFD.

        Raises InputError for an id outside [0, vocab_size).
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token; a special token's are its name. Raises InputError for an unknown id."""
        if id in self._tokens:
            return self._tokens[id]
        if id in self.special_names:
            return self.special_names[id].encode()
        raise InputError(self.source, "token id", f"an id in 0..{self.vocab_size - 1}", id, "check where it comes from")


def slices(text: str) -> Iterator[str]:
    """Cut at every 400,000 characters, and within that wherever a run of only (non-)whitespace passes 25,000."""
    for begin in range(0, len(text), SLICE_CHARACTERS):
        part, last_cut = text[begin : begin + SLICE_CHARACTERS], 0
        for run in re.finditer(r"\s+|\S+", part):
            for cut in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS):
                yield part[last_cut:cut]
                last_cut = cut
        yield part[last_cut:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a ``tiktoken.model`` file: a line per token, its bytes in base64, a space, its rank."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(path, "file", "a tiktoken vocabulary", error.strerror, "check the path") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        token, rank = _parse_line(line, f"{path}:{number}")
        if token in ranks:
            raise InputError(f"{path}:{number}", "token", "each token once", f"{token!r} again", "fetch the file again")
        ranks[token] = rank
    return ranks


def _parse_line(line: bytes, where: str) -> tuple[bytes, int]:
    encoded, _, rank = line.partition(b" ")
    try:
        token = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        token = b""
    if not token or not (rank.isascii() and rank.isdigit()):
        raise InputError(where, "line", "base64 bytes, a space, a rank", repr(line[:60]), "fetch the file again")
    return token, int(rank)


def read_special_names(path: Path) -> dict[int, str]:
    """Special id -> name from ``added_tokens_decoder`` of ``tokenizer_config.json``."""
    document = read_json(path)
    decoder = document.get("added_tokens_decoder") if isinstance(document, dict) else None
    if not isinstance(decoder, dict):
        raise InputError(path, "added_tokens_decoder", "a JSON object", type(decoder).__name__, "fetch the file again")
    names: dict[int, str] = {}
    for id, entry in decoder.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (id.isascii() and id.isdigit()) or not isinstance(content, str) or not content:
            found = f"{id!r}: {entry!r}"[:80]
            raise InputError(path, "added_tokens_decoder", 'an id with {"content": name}', found, "correct the entry")
        names[int(id)] = content
    return names


def _check_ranks(ranks: Mapping[bytes, int], source: object) -> None:
    mend = "fetch the vocabulary again"
    seen = sorted(ranks.values())
    for expected, rank in enumerate(seen):
        if rank != expected:
            found = f"rank {rank} twice" if expected and rank == seen[expected - 1] else f"no rank {expected}"
            raise InputError(source, "ranks", f"each of 0..{len(seen) - 1} once", found, mend)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise InputError(source, "ranks", "all 256 single bytes among the tokens", f"no byte {missing[0]}", mend)


def _all_special_names(names: Mapping[int, str], first: int, count: int, source: object) -> dict[int, str]:
    for id, name in names.items():
        if not name:
            raise InputError(source, "special tokens", "a name", f"nothing at {id}", "name it or leave it out")
        if not first <= id < first + count:
            expected = f"ids {first}..{first + count - 1}"
            raise InputError(
                source, "special tokens", expected, f"{name!r} at {id}", "take both files from one release"
            )
    return {id: names.get(id, f"<|reserved_token_{id}|>") for id in range(first, first + count)}


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise InputError(
            "text", "characters", "no lone surrogate", found, "remove it or replace it by U+FFFD"
        ) from None
