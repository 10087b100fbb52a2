"""What verify must see in a converted folder, and what it must not (K3.md §8, §15)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from parity.cli.main import app
from parity.tests.tampering import LAYERS, PLAN, Folder, converted, source, stack
from parity.verify.findings import Problem
from parity.verify.looks import packed, unpacked
from parity.verify.run import verify
from reference.errors import InputError

BIAS = "block_sparse_moe.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tier, or tier and ``-pruned``, -> a folder as the converter writes it."""
    root, made = tmp_path_factory.mktemp("converted"), {}

    def folder(name: str) -> Path:
        if name not in made:
            plan = PLAN if name.endswith("-pruned") else None
            made[name] = converted(root / name, name.split("-")[0], plan=plan)
        return made[name]

    return folder


def parts(folder: Folder, layer: int, projection: str) -> list[np.ndarray]:
    """Codes, scales and, where affine, biases of a stack."""
    names = [stack(layer, projection, part) for part in ("weight", "scales", "biases")]
    return [folder.array(name) for name in names if name in folder.map]


def swapped_experts(folder: Folder) -> None:
    for projection in ("w1", "w2", "w3"):
        for array in parts(folder, 2, projection):
            array[[3, 5]] = array[[5, 3]]


def transposed_w2(folder: Folder) -> None:
    """Codes and scales, as a converter would that took w2 for [in, out]."""
    words, *groups = parts(folder, 3, "w2")
    bits = 32 * words.shape[-1] // 128
    codes = unpacked(words[4].view(np.uint8), bits)
    words[4] = packed(codes.T.copy().reshape(codes.shape), bits).view("<u4")
    for array in groups:
        array[4] = array[4].T.copy().reshape(array[4].shape)


def nibbles(folder: Folder) -> None:
    words = folder.array(stack(1, "w3"))[6].view(np.uint8)
    words[:] = words << 4 | words >> 4


def one_scale(folder: Folder) -> None:
    scales = folder.array(stack(4, "w2", "scales"))
    scales[7, 60, scales.shape[-1] - 1] += 1


def w1_for_w3(folder: Folder) -> None:
    for gate, up in zip(parts(folder, 2, "w1"), parts(folder, 2, "w3"), strict=True):
        kept = gate[1].copy()
        gate[1], up[1] = up[1], kept


def to_f32(folder: Folder) -> None:
    name = f"{LAYERS}3.input_layernorm.weight"

    def widen(tensors: dict) -> None:
        _, shape, data = tensors[name]
        tensors[name] = ("F32", shape, np.frombuffer(data, ml_dtypes.bfloat16).astype("<f4").tobytes())

    folder.write_again(name, widen)


def without_bias(folder: Folder) -> None:
    name = f"{LAYERS}2.{BIAS}"
    folder.write_again(name, lambda tensors: tensors.pop(name))


def truncated(folder: Folder) -> None:
    shard = folder.path / folder.map[stack(4, "w3", "scales")]
    shard.write_bytes(shard.read_bytes()[:-100])


def half_copied(folder: Folder) -> None:
    for array in parts(folder, 4, "w1"):
        array[0, 64:] = 0


TAMPERS = {
    "swapped experts": (swapped_experts, 2, (3, 5), "w1", "is the source's expert 5"),
    "transposed w2": (transposed_w2, 3, (4,), "w2", "transposed"),
    "nibbles swapped": (nibbles, 1, (6,), "w3", "nibbles swapped"),
    "one scale off by one": (one_scale, 4, (7,), "w2", "the right "),
    "w1 and w3 exchanged": (w1_for_w3, 2, (1,), "w1", "w1 and w3 exchanged"),
    "one tensor bf16 to f32": (to_f32, 3, (), None, ""),
    "no bias of the router": (without_bias, 2, (), None, ""),
    "half copied": (half_copied, 4, (0,), "w1", "copied in part: rows 64 to 127 of 128 are zero"),
}
"""What is done, in which layer, to which experts, a projection, and what that looks like."""


@pytest.mark.parametrize("tier", ["mxfp4", "3bit", "2bit"])
@pytest.mark.parametrize("name", TAMPERS)
def test_a_tampered_folder_is_found_and_the_place_is_named(
    name: str, tier: str, folders: Callable[[str], Path], tmp_path: Path
):
    tamper, layer, experts, projection, looks_like = TAMPERS[name]
    folder = Folder(folders(tier), tmp_path / "tampered")
    tamper(folder)
    verdict = verify(folder.path, source())
    assert verdict.exit_code == 1
    assert {problem.layer for problem in verdict.problems} == {layer}
    assert {problem.expert for problem in verdict.problems} == (set(experts) or {None})
    if projection:
        first = next(problem for problem in verdict.problems if problem.projection == projection)
        assert looks_like in first.looks_like


def test_a_single_scale_is_found_by_row_and_group(folders: Callable[[str], Path], tmp_path: Path):
    folder = Folder(folders("mxfp4"), tmp_path / "tampered")
    one_scale(folder)
    (problem,) = verify(folder.path, source()).problems
    assert (problem.layer, problem.expert, problem.projection) == (4, 7, "w2")
    assert problem.what == "0 of 4096 packed bytes and 1 of 256 scale bytes differ"
    assert problem.looks_like == "the right codes, 1 scale off by one, first in row 60, group 3"


def test_a_shard_of_another_tier_is_found(folders: Callable[[str], Path], tmp_path: Path):
    """Its tensors have the right names and other widths of codes."""
    folder, other = Folder(folders("3bit"), tmp_path / "tampered"), Folder(folders("2bit"), tmp_path / "other")
    names = [stack(2, "w1", part) for part in ("weight", "scales", "biases")]
    theirs = {name: other.array(name) for name in names}

    def exchange(tensors: dict) -> None:
        for name in names:
            dtype, _, _ = tensors[name]
            tensors[name] = (dtype, theirs[name].shape, theirs[name].tobytes())

    folder.write_again(names[0], exchange)
    problems = verify(folder.path, source()).problems
    assert [(problem.kind, problem.layer, problem.projection) for problem in problems] == [("shape", 2, "w1")]
    assert problems[0].looks_like == "codes of 2 bits where the tier has 3"


def test_a_whole_shard_of_another_tier_is_found(folders: Callable[[str], Path], tmp_path: Path):
    folder, other = Folder(folders("3bit"), tmp_path / "tampered"), Folder(folders("2bit"), tmp_path / "other")
    theirs = other.path / other.map[stack(2, "w1")]
    (folder.path / folder.map[stack(2, "w1")]).write_bytes(theirs.read_bytes())
    problems = verify(folder.path, source()).problems
    assert {"index", "shape"} <= {problem.kind for problem in problems}
    assert {1, 2, 3, 4} & {problem.layer for problem in problems if problem.projection}


@pytest.mark.parametrize("sizes", ["equal", "full"])
def test_a_plan_that_one_layer_ignores_is_found(sizes: str, folders: Callable[[str], Path], tmp_path: Path):
    """The layer keeps its first experts in their old order, or all of them."""
    folder, full = Folder(folders("mxfp4-pruned"), tmp_path / "tampered"), Folder(folders("mxfp4"), tmp_path / "full")
    names = [name for name in folder.map if name.startswith(f"{LAYERS}3.") and "switch_mlp" in name or BIAS in name]
    names = [name for name in names if name.startswith(f"{LAYERS}3.")] + [f"{LAYERS}3.block_sparse_moe.gate.weight"]
    if sizes == "equal":
        for name in names:
            folder.array(name)[:] = full.array(name)[: len(PLAN[3])]
    else:
        for name in names:
            whole = full.array(name)

            def exchange(tensors: dict, name: str = name, whole: np.ndarray = whole) -> None:
                tensors[name] = (tensors[name][0], whole.shape, whole.tobytes())

            folder.write_again(name, exchange)
    problems = verify(folder.path, source()).problems
    assert {problem.layer for problem in problems} == {3}
    if sizes == "full":
        assert all("the plan was not followed" in problem.looks_like for problem in problems)
        assert {problem.projection for problem in problems} == {"w1", "w2", "w3", None}
        return
    told = {(problem.expert, problem.projection): problem.looks_like for problem in problems}
    assert told[2, "w1"] == "is the source's expert 2, which the plan drops, as if there were no plan"
    assert told[0, "w3"] == "is the source's expert 0, whose place is 1, as if there were no plan"
    assert {told[None, None]} == {"its rows were not renumbered by the plan"}


def test_a_truncated_last_shard_is_found_with_the_tensors_that_it_lost(folders: Callable[[str], Path], tmp_path: Path):
    folder = Folder(folders("2bit"), tmp_path / "tampered")
    last = folder.path / max(folder.map.values())
    last.write_bytes(last.read_bytes()[:-100])
    problems = verify(folder.path, source()).problems
    assert [problem.kind for problem in problems] == ["shard", "tensor"]
    assert "truncated" in problems[0].what and problems[1].looks_like == "cut off"


def test_a_shard_that_is_cut_within_the_experts_names_them(folders: Callable[[str], Path], tmp_path: Path):
    folder = Folder(folders("mxfp4"), tmp_path / "tampered")
    name = stack(4, "w3", "scales")
    shard = folder.path / folder.map[name]
    header, start = folder.header(shard)
    begin, _ = header[name]["data_offsets"]
    with shard.open("r+b") as file:
        file.truncate(start + begin + 5 * 128 * 2 + 7)
    problems = [problem for problem in verify(folder.path, source()).problems if problem.projection == "w3"]
    assert [(problem.layer, problem.expert) for problem in problems] == [(4, 5), (4, 6), (4, 7)]
    assert {problem.looks_like for problem in problems} == {"cut off"}


def bf16(array: np.ndarray) -> np.ndarray:
    return array.view(ml_dtypes.bfloat16)


def layers_of(folder: Folder, ending: str) -> list[str]:
    return [name for name in folder.map if name.endswith(ending)]


def all_experts(folder: Folder, part: str) -> list[np.ndarray]:
    return [folder.array(stack(layer, projection, part)) for layer in PLAN for projection in ("w1", "w2", "w3")]


def scales_zeroed(folder: Folder) -> None:
    for projection in ("w1", "w2", "w3"):
        folder.array(stack(1, projection, "scales"))[4] = 0


def router_rolled(folder: Folder) -> None:
    for part in ("weight", "scales", "biases"):
        array = folder.array(f"{LAYERS}3.block_sparse_moe.gate.{part}")
        array[:] = np.roll(array, 1, axis=0)


def bias_negated(folder: Folder) -> None:
    folder.array(f"{LAYERS}2.{BIAS}")[:] *= -1


def decays_zeroed(folder: Folder) -> None:
    for name in layers_of(folder, "A_log"):
        folder.array(name)[:] = 0


def queries_doubled(folder: Folder) -> None:
    for name in layers_of(folder, "q_conv1d.weight"):
        for part in ("scales", "biases"):
            bf16(folder.array(name.replace("conv1d.weight", f"proj.{part}")))[:] *= 2


def norms_zeroed(folder: Folder) -> None:
    for name in layers_of(folder, "layernorm.weight"):
        folder.array(name)[:] = 0


def embedding_zeroed(folder: Folder) -> None:
    folder.array("language_model.model.embed_tokens.scales")[:] = 0


def kernels_reversed(folder: Folder) -> None:
    for name in layers_of(folder, "conv1d.weight"):
        array = folder.array(name)
        array[:] = array[..., ::-1].copy()


def experts_grown(folder: Folder) -> None:
    for part in ("scales", "biases"):
        for array in all_experts(folder, part):
            bf16(array)[:] = (bf16(array).astype(np.float32) * 1.5).astype(ml_dtypes.bfloat16)


def experts_rolled(folder: Folder) -> None:
    for projection in ("w1", "w2", "w3"):
        for array in parts(folder, 4, projection):
            array[:] = np.roll(array, 1, axis=0)


EYES = {
    "two experts swapped": (swapped_experts, 6, "is the source's expert 5"),
    "one expert's scales zeroed": (scales_zeroed, 3, "scales zeroed"),
    "router rows rolled by one": (router_rolled, 1, "rows rolled by 1"),
    "correction bias negated": (bias_negated, 1, "its negative"),
    "A_log zeroed": (decays_zeroed, 3, "zero throughout"),
    "q_proj doubled in all KDA layers": (queries_doubled, 3, "2 times its size, scale exponents off by +1"),
    "all layer norms zeroed": (norms_zeroed, None, "zero throughout"),
    "embedding scales zeroed": (embedding_zeroed, 1, "scales zeroed"),
    "convolution kernels reversed in time": (kernels_reversed, 9, "each row backwards"),
    "all experts times 1.5": (experts_grown, 96, "1.5 times its size"),
    "all experts of a layer rolled": (experts_rolled, 24, "is the source's expert"),
}
"""Done to a folder of tier 2bit: what, how many experts' projections or tensors, and what they look like."""


@pytest.mark.parametrize("name", EYES)
def test_faults_that_a_published_verifier_passed_are_found(name: str, folders: Callable[[str], Path], tmp_path: Path):
    tamper, count, looks_like = EYES[name]
    folder = Folder(folders("2bit"), tmp_path / "tampered")
    tamper(folder)
    verdict = verify(folder.path, source())
    assert verdict.exit_code == 1
    assert count in (None, len(verdict.problems))
    others = [problem for problem in verdict.problems if looks_like not in problem.looks_like]
    if name == "two experts swapped":
        others = [problem for problem in others if "is the source's expert 3" not in problem.looks_like]
    assert not others, others[0].line()


def test_one_code_one_scale_and_one_bias_among_all_are_found(folders: Callable[[str], Path], tmp_path: Path):
    """Which no error of a whole expert shows."""
    for tier in ("2bit", "3bit"):
        folder = Folder(folders(tier), tmp_path / tier)
        folder.array(stack(1, "w1"))[2, 7, 0] ^= 2
        folder.array(stack(2, "w2", "scales"))[3, 9, 1] += 1
        folder.array(stack(3, "w3", "biases"))[5, 11, 0] -= 1
        problems = verify(folder.path, source()).problems
        assert [(problem.layer, problem.expert, problem.projection) for problem in problems] == [
            (1, 2, "w1"),
            (2, 3, "w2"),
            (3, 5, "w3"),
        ]
        assert "first at [7, 0]" in problems[0].what
        assert "first in row 9, group 1" in problems[1].what and "first in row 11, group 0" in problems[2].what
        assert all("the right expert but for a few values" in problem.looks_like for problem in problems)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document["quantization"].update(bits=3), "quantization and quantization_config differ"),
        (lambda document: document["text_config"].update(num_experts=7), "text_config.num_experts"),
        (lambda document: document.update(torch_dtype="float16"), "torch_dtype"),
    ],
)
def test_a_changed_configuration_is_found(
    change: Callable, message: str, folders: Callable[[str], Path], tmp_path: Path
):
    folder = Folder(folders("2bit"), tmp_path / "tampered")
    path = folder.path / "config.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    problems = verify(folder.path, source()).problems
    assert {problem.kind for problem in problems} == {"config"}
    assert any(message in problem.what for problem in problems)


def test_a_lost_or_changed_tokenizer_is_found(folders: Callable[[str], Path], tmp_path: Path):
    folder = Folder(folders("2bit"), tmp_path / "tampered").path
    (folder / "tiktoken.model").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    problems = verify(folder, source()).problems
    assert [(problem.kind, problem.where) for problem in problems] == [
        ("file", "tiktoken.model"),
        ("file", "tokenizer_config.json"),
    ]


def test_what_was_asked_for_is_held_against_the_record(folders: Callable[[str], Path]):
    assert not verify(folders("mxfp4-pruned"), source(), tier="mxfp4", plan=PLAN).problems
    other = PLAN | {2: (0, 1, 2, 3, 4, 5)}
    problems = verify(folders("mxfp4-pruned"), source(), tier="2bit", plan=other).problems
    assert [(problem.kind, problem.layer) for problem in problems] == [("config", None), ("config", 2)]


def test_cosine_and_error_are_those_of_float64(folders: Callable[[str], Path]):
    from parity.dequantized import Folder as SecondReader
    from parity.metrics import cosine, relative_rms
    from reference.mxfp4 import unpack
    from reference.shards import Shards

    before = Shards(source())
    for tier in ("2bit", "3bit"):
        after, compared = SecondReader(folders(tier)), verify(folders(tier), source()).experts
        assert len(compared) == 96
        for item in compared[::7]:
            truth = unpack(before.read(f"{item.name}.weight_packed"), before.read(f"{item.name}.weight_scale"))
            found = after.source_matrix(f"{item.name}.weight")
            assert abs(item.cosine - cosine(found, truth)) < 1e-9
            assert abs(item.error - relative_rms(found, truth)) < 1e-9


def test_a_sample_takes_the_same_experts_in_all_projections(folders: Callable[[str], Path]):
    verdict = verify(folders("2bit"), source(), sample=2, part="experts")
    assert (len(verdict.experts), verdict.total_experts, verdict.tensors) == (24, 96, [])
    for layer in PLAN:
        chosen = [{i.expert for i in verdict.experts if (i.layer, i.projection) == (layer, f"w{n}")} for n in (1, 2, 3)]
        assert chosen[0] == chosen[1] == chosen[2] and len(chosen[0]) == 2
    other = verify(folders("2bit"), source(), sample=2, part="experts", seed=1)
    assert {i.name for i in other.experts} != {i.name for i in verdict.experts}


def test_exit_codes_and_output(folders: Callable[[str], Path], tmp_path: Path):
    run = CliRunner().invoke
    good = run(app, ["verify", str(folders("2bit")), "--source", str(source()), "--json"])
    document = json.loads(good.stdout)
    assert (good.exit_code, document["exit_code"], document["problems"]) == (0, 0, [])
    assert len(document["experts"]) == 96 and {item["bits"] for item in document["experts"]} == {2}
    folder = Folder(folders("mxfp4"), tmp_path / "tampered")
    one_scale(folder)
    bad = run(app, ["verify", str(folder.path), "--source", str(source())])
    assert bad.exit_code == 1
    line = "layer 4, expert 7, w2: language_model.model.layers.4.block_sparse_moe.experts.7.w2: "
    assert line + "0 of 4096 packed bytes and 1 of 256 scale bytes differ" in bad.stdout


def test_input_that_is_none_is_refused_in_one_line(folders: Callable[[str], Path], tmp_path: Path):
    for folder, before, message in (
        (source(), source(), "expected the record of a conversion"),
        (tmp_path, source(), "expected a JSON file"),
        (folders("2bit"), tmp_path / "none", "expected a checkpoint folder"),
    ):
        with pytest.raises(InputError, match=message):
            verify(folder, before)
    with pytest.raises(InputError, match="--part: part"):
        verify(folders("2bit"), source(), part="some")


def test_a_damaged_source_is_bad_input(folders: Callable[[str], Path], tmp_path: Path):
    """A scale of 255 is NaN: nobody can say what the folder should hold."""
    damaged = Folder(source(), tmp_path / "source")
    damaged.array(f"{LAYERS}1.block_sparse_moe.experts.2.w1.weight_scale")[3, 0] = 255
    for tier in ("mxfp4", "2bit"):
        with pytest.raises(InputError, match="experts.2.w1.weight_scale: expected E8M0 scales below 255"):
            verify(folders(tier), damaged.path)


def test_nothing_compared_is_no_agreement(tmp_path: Path):
    """A model without routed experts, of which only experts are asked for."""
    from fixtures.base import merged
    from fixtures.build import cached
    from fixtures.catalogue import Entry, entry
    from port.convert import convert

    base = entry("mini")
    dense = merged(base.config, {"text_config": {"first_k_dense_replace": 99}})
    before = cached(Entry("no-experts", dense, "mxfp4", base.reason, base.shard_bytes))
    convert(before, tmp_path / "out", "2bit", sync=False)
    assert verify(tmp_path / "out", before).exit_code == 0
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "out"), "--source", str(before), "--part", "experts"])
    assert result.exit_code == 5 and "nothing was compared" in result.stdout


def test_a_problem_reads_as_one_line():
    problem = Problem("expert", "a", "b", 1, 2, 5, "w1", "c")
    assert problem.line() == "expert: layer 1, expert 2, w1 (the source's expert 5): a: b; looks like: c"
