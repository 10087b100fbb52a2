"""What the reference's text and picture parts gave when they were last proved right, kept in ``records.json``.

Chat encoding, tokenizer and image processor have no float64 to be measured by, and both twins share them: a mistake
made there would be made by the truth as well. Where they depart from these records every report says so first.
``python -m parity.records`` writes them anew; the conversations equal another port's encoding, segment by segment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from parity.cases.corpus import SEGMENTS, TEXTS, write_files
from parity.cases.pictures import PICTURES, RELEASED, draw
from reference.chat import encode_conversation
from reference.image_processor import ImageProcessor, MediaConfig
from reference.tokenizer import Tokenizer

FILE = Path(__file__).with_name("records.json")
CONVERSATIONS = Path(__file__).parent / "cases" / "conversations.json"
PROBES = 48
"""Pixel values kept of each picture, spread evenly."""
CLOSE = 0.02
"""Two of Pillow's versions may round a resized pixel differently, by one level of 256: 2/255."""

Record = dict[str, Any]


def computed() -> Iterator[tuple[str, str, Record]]:
    """(module, name, record) of everything that is recorded, as the reference gives it now."""
    for name, call in json.loads(CONVERSATIONS.read_text(encoding="utf-8")).items():
        segments = [list(segment) for segment in encode_conversation(**call)]
        yield "chat", name, {"segments": len(segments), "sha256": digest(segments)}
    with TemporaryDirectory() as folder:
        write_files(Path(folder))
        tokenizer = Tokenizer.from_folder(Path(folder))
        texts = {name: [(text, False)] for name, text in TEXTS.items()} | SEGMENTS
        for name, segments in texts.items():
            ids = [int(id) for id in tokenizer.encode_segments(segments)]
            yield "tokenizer", name, {"ids": len(ids), "sha256": digest(ids)}
    for name, drawn in PICTURES.items():
        file, processor = draw(drawn), ImageProcessor(MediaConfig.from_dict(RELEASED | drawn.settings))
        values = np.asarray(processor.pixel_values(file), np.float64)
        at = np.linspace(0, values.size - 1, PROBES).astype(int)
        probes = [round(float(value), 4) for value in values.reshape(-1)[at]]
        tokens = processor.resize_plan(*drawn.size).token_count
        yield "image_processor", name, {"tokens": tokens, "shape": list(values.shape), "probes": probes}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def stored() -> dict[str, dict[str, Record]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def agree(left: Record, right: Record) -> bool:
    """Exactly, but for pixel values, which may be a level apart."""
    if left.keys() != right.keys() or any(left[key] != right[key] for key in left if key != "probes"):
        return False
    return "probes" not in left or bool(np.abs(np.subtract(left["probes"], right["probes"])).max() <= CLOSE)


def write() -> None:
    document: dict[str, dict[str, Record]] = {}
    for module, name, record in computed():
        document.setdefault(module, {})[name] = record
    FILE.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
