"""Text that is awkward to split into tokens, and a vocabulary in which every cut at another place shows (K3.md §13).

In that vocabulary every two bytes that stand side by side in the corpus are a token, those across its cuts too.
"""

from __future__ import annotations

import base64
import itertools
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from fixtures import tokenizer_files
from parity.protocol import Segments

VOCABULARY, SPECIAL = 2048, 256
MARKERS = "<|open|>message<|sep|> <|media_pad|> <|kimi_image_placeholder|> [BOS][EOS] <|reserved_token_1800|>"
TEXTS = {
    "empty": "",
    "contractions": "I'll I'LL don't DON'T we'Ve 'Tis they'd've l'été the's123's",
    "cases": "thTHThtH ABCabcABC McDonald iPhoneX ßenẞEN ǅungla ʰaʰA éÉ e\u0301E\u0301",
    "han": "你好ABC's你们the模型。日本語あカタ漢字한국 你 好 the你",
    "long-han": "语言模型的中文" * 12 + "你好",
    "digits": "1 12 123 1234 1234567 0.100 x1y22z3333 ¹²³ Ⅷ ٣٤٥٦ 2024-01-07",
    "punctuation": '="x"> {"a":[1]}; ...---===->//*\n\n  ) !\r\n?',
    "dashes": "-" * 300,
    "emoji": "🙂🎉👍🏽 👨\u200d👩\u200d👧🇯🇵 a🙂b",
    "scripts": "привет мир αβγ عرب हिन्दी ñüö\u3000ｆｕｌｌ　東京",
    "spaces": " a  b   c    \td \n e\n\n\nf  \r\n g\u00a0h\u2003i   ",
    "newlines": "\n\n \n\n the\n  the\r\n\r\n\tthe \n",
    "controls": "\x00\x01\x7f\u200b\ufeff\ufffd\U0010ffff",
    "markers": MARKERS,
    "spaces-60000": "x" + " " * 60_000 + "x",
    "letters-100000": "the" * 33_333 + "t",
    "han-over-a-slice": "a" + "你好" * 15_000,
}  # fmt: skip
SEGMENTS: dict[str, Segments] = {
    "markup": [(MARKERS, True), (MARKERS, False), ("<|open|", True), (">", False)],
    "seams": [
        ("<|open|>", True), ("user", False), (' role', False), ('="', False), ("th", False), ("e", False),
        ('"', False), (">", False), ("<|sep|>", True), ("12", False), ("3", False), ("你", False), ("好", False),
        (" ", False), (" ", False), ("", False),
    ],
}  # fmt: skip
SURROGATE = "a\ud800b"
SEEN = 1000
"""Characters of a text whose pairs are tokens: the long ones repeat themselves."""


@cache
def _lasting() -> TemporaryDirectory:
    """Deleted when the process ends."""
    return TemporaryDirectory(prefix="k3-parity-corpus-")


@cache
def corpus_folder() -> Path:
    """The files of ``write_files``, written once per process: a question about them can be asked again."""
    folder = Path(_lasting().name)
    write_files(folder)
    return folder


def write_files(folder: Path) -> None:
    """``tiktoken.model``, ``tokenizer_config.json`` and what else a released folder has."""
    tokenizer_files.write(folder, VOCABULARY)
    ranks = itertools.islice(_tokens(), VOCABULARY - SPECIAL)
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))


def _tokens() -> list[bytes]:
    """The 256 bytes, the corpus's pairs of neighbours by first appearance, then any pairs."""
    texts = [*TEXTS.values(), *("".join(text for text, _ in segments) for segments in SEGMENTS.values())]
    neighbours = (bytes(pair) for text in texts for pair in itertools.pairwise(text[:SEEN].encode()))
    filling = (bytes(pair) for pair in itertools.product(range(256), repeat=2))
    return list(dict.fromkeys([*(bytes([byte]) for byte in range(256)), *neighbours, *filling]))
