"""Reading a tokenizer's files, and their agreement with ``config.json``."""

from __future__ import annotations

import json

import pytest

from reference.tests.vocabulary import (
    MINI_CONFIG,
    model_lines,
    raises_one_line,
    small_ranks,
    small_tokenizer,
    write_names,
    write_small,
)
from reference.tokenizer import Tokenizer

TOKENIZER = small_tokenizer()
RANKS = small_ranks()
BASE = len(RANKS)


# files


def test_a_folder_reads_back(tmp_path):
    read = Tokenizer.from_folder(write_small(tmp_path))
    assert (read.vocab_size, read.special_names) == (TOKENIZER.vocab_size, TOKENIZER.special_names)
    assert read.encode("I'll take 123 the") == TOKENIZER.encode("I'll take 123 the")


@pytest.mark.parametrize("file", ["tiktoken.model", "tokenizer_config.json"])
def test_a_missing_file_is_named(tmp_path, file):
    (write_small(tmp_path) / file).unlink()
    with raises_one_line(file):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "line", ["garbage", "YQ==", "YQ== x", "YQ== -1", "YQ== 1 2", "Y?== 5", "YQ= 5", " 5", "\x00\xff\x00 7", "YQ== ٣"]
)
def test_a_garbage_line_is_named_by_number(tmp_path, line):
    lines = model_lines(RANKS)
    lines[4] = line
    (write_small(tmp_path) / "tiktoken.model").write_text("\n".join(lines))
    with raises_one_line("tiktoken.model:5:", "base64 bytes, a space, a rank"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda lines: [*lines, "enp6 7"], "rank 7 twice"),
        (lambda lines: [*lines, "YQ== 271"], "b'a' again"),
        (lambda lines: lines[:-1] + ["enp6 999"], "no rank 270"),
        (lambda lines: [], "no byte 0"),
        (lambda lines: lines[1:], "no rank 0"),
        (lambda lines: ["enp6 0", *lines[1:]], "no byte 0"),
    ],
    ids=["duplicate rank", "duplicate token", "gap", "empty file", "no rank 0", "byte missing"],
)
def test_damaged_ranks_are_refused(tmp_path, change, fragment):
    (write_small(tmp_path) / "tiktoken.model").write_text("\n".join(change(model_lines(RANKS))))
    with raises_one_line(fragment):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "fragment"),
    [
        (None, "added_tokens_decoder"),
        ([], "added_tokens_decoder"),
        ({"x": {"content": "[X]"}}, "'x'"),
        ({str(BASE): {}}, "an id with"),
        ({str(BASE): {"content": ""}}, "an id with"),
        ({"5": {"content": "[X]"}}, "'[X]' at 5"),
        ({str(BASE + 256): {"content": "[X]"}}, f"'[X]' at {BASE + 256}"),
        ({str(BASE): {"content": "[X]"}, str(BASE + 1): {"content": "[X]"}}, "'[X]'"),
        ({str(BASE): {"content": f"<|reserved_token_{BASE + 3}|>"}}, "name for one id only"),
    ],
)
def test_bad_special_names_are_refused(tmp_path, decoder, fragment):
    write_names(write_small(tmp_path), decoder)
    with raises_one_line("tokenizer_config.json", fragment):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_configuration_that_is_no_object_is_refused(tmp_path):
    (write_small(tmp_path) / "tokenizer_config.json").write_text("[]")
    with raises_one_line("added_tokens_decoder"):
        Tokenizer.from_folder(tmp_path)


def test_an_empty_special_name_is_refused():
    with raises_one_line("nothing at"):
        Tokenizer(RANKS, {BASE: ""})


# agreement with config.json


def write_config(folder, vocab_size=BASE + 256, **ids):
    data = json.loads(json.dumps(MINI_CONFIG))
    text = data["text_config"]
    text["vocab_size"] = vocab_size
    text["bos_token_id"], text["eos_token_id"] = BASE, BASE + 2
    text["pad_token_id"] = data["pad_token_id"] = BASE + 255
    data["media_placeholder_token_id"] = BASE + 21
    data.update(ids)
    (folder / "config.json").write_text(json.dumps(data))


def test_a_configuration_that_agrees_is_accepted(tmp_path):
    write_config(write_small(tmp_path))
    assert Tokenizer.from_folder(tmp_path).vocab_size == BASE + 256


def test_a_placeholder_that_means_another_token_is_refused(tmp_path):
    write_config(write_small(tmp_path), media_placeholder_token_id=BASE + 20)
    with raises_one_line("<|media_pad|>", f"media_placeholder_token_id {BASE + 20}", "<|media_end|>"):
        Tokenizer.from_folder(tmp_path)


def test_a_placeholder_that_is_an_ordinary_token_is_refused(tmp_path):
    write_config(write_small(tmp_path), media_placeholder_token_id=5)
    with raises_one_line("media_placeholder_token_id 5", "no special token"):
        Tokenizer.from_folder(tmp_path)


def test_a_vocabulary_smaller_than_the_ranks_is_refused(tmp_path):
    (write_small(tmp_path) / "config.json").write_text(json.dumps(MINI_CONFIG))
    lines = [*model_lines(RANKS), *(f"{n:04d} {BASE + n}" for n in range(60))]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    with raises_one_line("tiktoken.model", "331 ranks for a vocab_size of 320"):
        Tokenizer.from_folder(tmp_path)


def test_a_smaller_configured_vocabulary_ends_the_special_ids(tmp_path):
    names = {BASE: "[BOS]", BASE + 2: "<|end_of_msg|>", BASE + 21: "<|media_pad|>", BASE + 30: "[PAD]"}
    write_names(write_small(tmp_path), {str(id): {"content": name} for id, name in names.items()})
    write_config(tmp_path, vocab_size=BASE + 31)
    data = json.loads((tmp_path / "config.json").read_text())
    data["pad_token_id"] = data["text_config"]["pad_token_id"] = BASE + 30
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert Tokenizer.from_folder(tmp_path).vocab_size == BASE + 31
