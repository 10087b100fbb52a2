from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import tokenizer as module
from reference.tests.vocabulary import (
    DISTANCES,
    raises_one_line,
    small_ranks,
    small_tokenizer,
)
from reference.tokenizer import SPLIT_ALTERNATIVES, SPLIT_PATTERN, slices

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


def test_tokenizer_chat_and_image_processor_load_no_tensor_library():
    code = "import sys, reference.tokenizer, reference.chat, reference.image_processor"
    code += "; print({'torch', 'mlx'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
