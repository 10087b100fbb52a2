"""Bad pictures and bad calls on the command line: one line, exit 2, nothing written."""

from __future__ import annotations

import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from parity.cases.pictures import file_of, noise
from parity.cli import main
from parity.tests.test_cli import k3_parity


def run(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``k3-parity`` in this process."""
    monkeypatch.setattr(sys, "argv", ["k3-parity", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main.run()
    return stopped.value.code, *capsys.readouterr()


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that says it is this large and holds next to nothing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


WHOLE = file_of(Image.fromarray(noise(50, 40)))
BAD_PICTURES = {
    "truncated.png": (WHOLE[: len(WHOLE) // 2], "truncated"),
    "damaged.png": (WHOLE[:60] + b"\xff" * 10 + WHOLE[70:], "a whole picture"),
    "text.png": (b"hello", "a known picture format"),
    "empty.png": (b"", "0 bytes"),
    "bomb.png": (png(50_000, 50_000), "at most 89478485 pixels"),
    "large.png": (png(12_000, 12_000), "12000x12000"),
    "no-width.png": (png(0, 5), "a known picture format"),
    "missing.png": (None, "No such file"),
    "floats.tiff": (Image.new("F", (5, 5)), "colour mode"),
}


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_a_bad_picture_is_one_line_and_nothing_is_written(name: str, tmp_path: Path, monkeypatch, capsys):
    content, words = BAD_PICTURES[name]
    if isinstance(content, Image.Image):
        content.save(tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "good.png").write_bytes(WHOLE)
    before = sorted(tmp_path.iterdir())
    code, out, error = run(
        monkeypatch, capsys, "image", tmp_path / "good.png", tmp_path / name, "--out", tmp_path / "o.safetensors"
    )
    assert code == 2 and out == "" and len(error.splitlines()) == 1
    assert name in error and words in error
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_is_no_picture_and_no_place_to_write(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "good.png").write_bytes(WHOLE)
    for picture, out_file in ((tmp_path, tmp_path / "o.safetensors"), (tmp_path / "good.png", tmp_path)):
        code, out, error = run(monkeypatch, capsys, "image", picture, "--out", out_file)
        assert code == 2 and out == "" and len(error.splitlines()) == 1 and "Is a directory" in error
    assert [path.name for path in tmp_path.iterdir()] == ["good.png"]


def test_of_an_animation_the_first_frame_counts(tmp_path: Path, monkeypatch, capsys):
    frames = [Image.fromarray(np.full((10, 20), level, np.uint8)) for level in (0, 128, 255)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    code, out, _ = run(monkeypatch, capsys, "image", tmp_path / "a.gif", "--out", tmp_path / "o.safetensors")
    (row,) = json.loads(out)["pictures"]
    assert code == 0 and row["grid_thw"] == [1, 2, 2] and row["size"] == [20, 10]


DEEP = '{"a": {"messages": ' + "[" * 100_000 + "]" * 100_000 + "}}"
BAD_CALLS = {
    "not JSON": ("{", "JSON"),
    "nothing": ("", "JSON"),
    "not UTF-8": (b"\xff\xfe\x00", "UTF-8"),
    "a list": ("[]", "an object of name"),
    "a number": ("3", "an object of name"),
    "no call": ('{"a": "x"}', "a: expected a call with messages"),
    "no messages": ('{"a": {"x": 1}}', "a: expected a call with messages"),
    "far too deep": (DEEP, "recursion"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_file_of_calls_is_one_line(name: str, tmp_path: Path, monkeypatch, capsys):
    content, words = BAD_CALLS[name]
    path = tmp_path / "calls.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, error = run(monkeypatch, capsys, "chat", path)
    assert code == 2 and out == "" and len(error.splitlines()) == 1
    assert "calls.json" in error and words in error


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"messages": None}, "a list of objects"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages[0]: role"),
        ({"messages": [], "colour": 1}, "colour: expected one of messages, tools, thinking"),
        ({"messages": [], "thinking": "yes"}, "thinking: expected true or false"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]: type"),
    ],
)
def test_a_bad_call_among_good_ones_is_named(call: dict, words: str, tmp_path: Path, monkeypatch, capsys):
    path = tmp_path / "calls.json"
    path.write_text(json.dumps({"good": {"messages": []}, "bad": call}))
    code, out, error = run(monkeypatch, capsys, "chat", path)
    assert code == 2 and len(error.splitlines()) == 1
    assert error.startswith("bad: ") and words in error
    cases = json.loads(out)["cases"]
    assert cases["good"]["segments"] and words in cases["bad"]["error"]


def test_any_terminal_can_show_any_text(tmp_path: Path):
    """Segments that hold a lone surrogate, on a terminal that knows ASCII alone."""
    path = tmp_path / "calls.json"
    path.write_text(json.dumps({"a": {"messages": [{"role": "user", "content": "你\ud800"}]}}))
    done = k3_parity("chat", path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert ["你\ud800", False] in json.loads(done.stdout)["cases"]["a"]["segments"]
