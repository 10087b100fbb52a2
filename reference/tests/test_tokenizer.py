from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import tokenizer as module
from reference.tests.vocabulary import (
    DISTANCES,
    MINI_CONFIG,
    model_lines,
    raises_one_line,
    small_names,
    small_ranks,
    small_tokenizer,
    write_names,
    write_small,
)
from reference.tokenizer import SPLIT_ALTERNATIVES, SPLIT_PATTERN, Tokenizer, slices

TOKENIZER = small_tokenizer()
RANKS = small_ranks()
BASE = len(RANKS)
MARKERS = "".join(DISTANCES) + "<|kimi_image_placeholder|><|reserved_token_300|>"
SPLIT = regex.compile(SPLIT_PATTERN, regex.VERSION1)
TRICKY = st.text(alphabet="aB1 \n\r\t'sSlLdDé你好々〆한あ🙂-<|\u0301ǅʰ٣Ⅷ½\u3000\u200b\u0085", max_size=30)


def by_definition(piece: bytes) -> list[int]:
    """Byte-pair encoding, slowly: join the adjacent pair of lowest rank until none is left."""
    parts = [bytes([byte]) for byte in piece]
    while pairs := [(RANKS[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in RANKS]:
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [RANKS[part] for part in parts]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("I'll 你好ABC's", ["I'll", " ", "你好", "ABC's"]),
        ("don't DON'T d'accord", ["don't", " DON'T", " d", "'accord"]),
        ("12345 1234", ["123", "45", " ", "123", "4"]),
        ("a  b   \n\n c", ["a", " ", " b", "   \n\n", " c"]),
        ("end   ", ["end", "   "]),
        ("x = {\n\n};\r\ny", ["x", " =", " {\n\n", "};\r\n", "y"]),
        ("camelCase HTTPServer ÉtéÜber", ["camel", "Case", " HTTPServer", " Été", "Über"]),
        ("漢字かな混じり文", ["漢字", "かな", "混", "じり", "文"]),
        ('role="user"<|open|>', ["role", '="', "user", '"<|', "open", "|>"]),
    ],
)
def test_the_split_pattern_cuts_these_texts_so(text, pieces):
    assert [match.group() for match in SPLIT.finditer(text)] == pieces


def test_no_alternative_is_empty_or_matches_nothing():
    assert all(SPLIT_ALTERNATIVES) and len(SPLIT_ALTERNATIVES) == 8
    assert not any(regex.fullmatch(alternative, "", regex.VERSION1) for alternative in SPLIT_ALTERNATIVES)


@given(TRICKY | st.text(max_size=30))
@settings(deadline=None)
def test_ids_are_the_definition_applied_to_each_piece(text):
    expected = [id for match in SPLIT.finditer(text) for id in by_definition(match.group().encode())]
    assert TOKENIZER.encode(text) == expected


@given(TRICKY | st.text())
@settings(deadline=None)
def test_decoding_undoes_encoding_and_no_id_is_special(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(id < BASE for id in ids)


@pytest.mark.parametrize(
    "text",
    ["", "你" * 86, "-" * 300, " " * 30_000, " " * 60_000, "a" * 100_000, MARKERS, "🙂" * 30_000, ("ab " * 150_000)],
    ids=[
        "empty",
        "86 Han",
        "300 dashes",
        "30,000 spaces",
        "60,000 spaces",
        "100,000 letters",
        "markers",
        "emoji",
        "long",
    ],
)
def test_long_and_odd_texts_come_back(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(id < BASE for id in ids)


@pytest.mark.parametrize("text", ["a\ud800b", "\udc00", "\ud83d\ude42"])
def test_a_lone_surrogate_is_refused(text):
    with raises_one_line("lone surrogate", "U+D", "replace it by U+FFFD"):
        TOKENIZER.encode(text)


def test_what_is_no_text_is_refused():
    with raises_one_line("expected str, found bytes"):
        TOKENIZER.encode(b"a")


# slices


def slices_by_definition(text: str, longest: int, longest_run: int) -> list[str]:
    pieces = []
    for begin in range(0, len(text), longest):
        piece, run = "", 0
        for character in text[begin : begin + longest]:
            run = run + 1 if piece and piece[-1].isspace() == character.isspace() else 1
            if run > longest_run:
                pieces.append(piece)
                piece, run = "", 1
            piece += character
        pieces.append(piece)
    return pieces


@given(st.text(alphabet="ab \n\x85\x1c\u200b\u3000", max_size=60), st.integers(1, 20), st.integers(1, 6))
def test_slices_cut_where_the_definition_says(text, longest, longest_run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_CHARACTERS", longest)
        patch.setattr(module, "RUN_CHARACTERS", longest_run)
        assert list(slices(text)) == slices_by_definition(text, longest, longest_run)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("", []),
        ("a" * 25_000, [25_000]),
        ("a" * 25_001, [25_000, 1]),
        (" " * 60_000, [25_000, 25_000, 10_000]),
        ("a" * 100_000, [25_000] * 4),
        ("x" + " " * 25_000 + "y", [25_002]),
        ("a " * 200_001, [400_000, 2]),
    ],
)
def test_slice_lengths(text, lengths):
    assert [len(piece) for piece in slices(text)] == lengths


def test_a_cut_run_is_encoded_in_parts(monkeypatch):
    monkeypatch.setattr(module, "RUN_CHARACTERS", 3)
    assert TOKENIZER.encode("-----") == [RANKS[b"--"], RANKS[b"-"], RANKS[b"--"]]


# special ids


def test_special_ids_follow_the_ranks_and_unnamed_ones_are_reserved():
    assert TOKENIZER.vocab_size == BASE + 256
    assert {name: TOKENIZER.id_of(name) - BASE for name in DISTANCES} == DISTANCES
    assert TOKENIZER.id_of(f"<|reserved_token_{BASE + 100}|>") == BASE + 100
    assert sorted(TOKENIZER.special_names) == list(range(BASE, BASE + 256))
    with raises_one_line("'<|nothing|>'"):
        TOKENIZER.id_of("<|nothing|>")


def test_only_markup_segments_yield_special_ids():
    begin, content = TOKENIZER.id_of("<|media_begin|>"), TOKENIZER.id_of("<|media_content|>")
    segment = "<|media_begin|>image 1x2<|media_content|>"
    assert TOKENIZER.encode_segments([(segment, True)]) == [begin, *TOKENIZER.encode("image 1x2"), content]
    assert TOKENIZER.encode_segments([(segment, False)]) == TOKENIZER.encode(segment)
    reserved = BASE + 77
    ids = TOKENIZER.encode_segments([(f"<|reserved_token_{reserved}|>", True), (MARKERS, False), ("[PAD]", True)])
    assert ids == [reserved, *TOKENIZER.encode(MARKERS), BASE + 255]


def test_decoding_names_special_ids():
    ids = [TOKENIZER.id_of("<|open|>"), *TOKENIZER.encode("the"), BASE + 100]
    assert TOKENIZER.decode(ids) == f"<|open|>the<|reserved_token_{BASE + 100}|>"


def test_half_a_character_decodes_to_the_replacement_character():
    assert TOKENIZER.decode(TOKENIZER.encode("é")[:1]) == "\ufffd"


@pytest.mark.parametrize("id", [-1, BASE + 256, 10**9])
def test_an_unknown_id_is_refused(id):
    with raises_one_line("token id", str(id)):
        TOKENIZER.decode([0, id])


def test_segments_one_by_one_are_not_their_concatenation():
    segments = [("t", False), ("he", False)]
    assert TOKENIZER.encode_segments(segments) == [RANKS[b"t"], RANKS[b"h"], RANKS[b"e"]]
    assert TOKENIZER.encode("the") == [RANKS[b"the"]]


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


def test_tokenizer_chat_and_image_processor_load_no_tensor_library():
    code = "import sys, reference.tokenizer, reference.chat, reference.image_processor"
    code += "; print({'torch', 'mlx'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_small_names_are_the_released_distances():
    assert small_names(163_584)[163_605] == "<|media_pad|>"
