"""Plans, domains and reports of saliency (K3.md §15)."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fixtures.build import cached
from fixtures.catalogue import entry
from parity.budget.sizes import GB, Recipe, weights
from parity.cli.main import app
from parity.coverage import PRESETS
from parity.reap.domains import chance_deviation, chance_share, overlap, shared_share, top_sets
from parity.reap.plans import best, global_plan, keep_count, kept_share, made_plan, plan_bytes, retention, uniform_plan
from parity.reap.report import gini, holders, retention_curve, spread
from parity.reap.texts import read_texts, read_tokens
from port.prune import read_plan
from reference.errors import InputError
from reference.saliency_result import Saliency

SALIENCY = np.array([[4.0, 1, 3, 0, 2, 0], [9, 9, 1, 1, 8, 7]])
LAYERS = np.array([1, 3])


def measured(name: str = "mini", domains: int = 2, seed: int = 0) -> Saliency:
    """Random saliency for a catalogue entry; expert 2 of the first layer is never routed."""
    item, draw = entry(name), np.random.default_rng(seed)
    text = item.parsed.text_config
    layers = np.array([layer for layer in range(text.num_hidden_layers) if text.is_moe(layer)])
    mass = draw.exponential(size=(domains, len(layers), text.num_experts))
    counts = draw.integers(1, 50, mass.shape)
    mass[:, 0, 2], counts[:, 0, 2] = 0, 0
    names = tuple(f"d{number}" for number in range(domains))
    return Saliency(names, np.arange(1, domains + 1) * 100, layers, mass, counts, item.config, item.expert_format)


def k3_saliency() -> Saliency:
    document = json.loads((PRESETS / "k3.json").read_text())
    draw = np.random.default_rng(0)
    shape = (2, 92, 896)
    return Saliency(
        ("a", "b"), np.array([10, 10]), np.arange(1, 93), draw.exponential(size=shape), np.ones(shape, int), document
    )


def test_the_best_of_a_layer():
    assert best(SALIENCY[0], 3) == [0, 2, 4]
    assert best(np.zeros(4), 2) == [0, 1]
    assert best(SALIENCY[1], 4, groups=2) == [0, 1, 4, 5]
    assert uniform_plan(SALIENCY, LAYERS, 2) == {1: [0, 2], 3: [0, 1]}


def test_a_global_plan_by_hand():
    """Six places: the two best of each layer, then the two best of the rest, 8 and 7."""
    assert global_plan(SALIENCY, LAYERS, 6, 2) == {1: [0, 2], 3: [0, 1, 4, 5]}
    assert global_plan(SALIENCY, LAYERS, 6, 3) == {1: [0, 2, 4], 3: [0, 1, 4]}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 12), floor=st.integers(1, 4))
def test_a_global_plan_keeps_the_most_that_its_floor_allows(seed: int, count: int, floor: int):
    saliency = np.random.default_rng(seed).exponential(size=(5, 12))
    floor = min(floor, count)
    plan = global_plan(saliency, np.arange(5), 5 * count, floor)
    assert sum(map(len, plan.values())) == 5 * count and min(map(len, plan.values())) >= floor
    kept = sum(saliency[layer, experts].sum() for layer, experts in plan.items())
    uniform = uniform_plan(saliency, np.arange(5), count)
    assert kept >= sum(saliency[layer, experts].sum() for layer, experts in uniform.items()) - 1e-9


@pytest.mark.parametrize(("keep", "count"), [(0.27, 242), (0.2, 179), (242, 242), (896, 896), (0.9999, 896)])
def test_keep_as_share_and_as_number(keep: float, count: int):
    assert keep_count(keep, k3_saliency().config.text_config) == count


@pytest.mark.parametrize("keep", [0, 0.01, 15, 897, 20.5])
def test_numbers_that_no_layer_can_keep(keep: float):
    with pytest.raises(InputError, match="--keep"):
        keep_count(keep, k3_saliency().config.text_config)


def test_expert_groups_are_kept_evenly():
    found = measured("groups")
    assert all(len(keep) == 12 for keep in made_plan(found, 0.75).values())
    with pytest.raises(InputError, match="a multiple of the 4 expert groups"):
        made_plan(found, 10)
    with pytest.raises(InputError, match="no expert groups"):
        made_plan(found, 12, "global")
    with pytest.raises(InputError, match="all experts of a softmax router"):
        made_plan(measured("softmax-router"), 5)


def test_the_floor_of_a_global_plan_is_four_times_top_k():
    found = k3_saliency()
    found.mass[:, 5] *= 1e-9
    plan = made_plan(found, 0.27, "global")
    assert len(plan[6]) == 64 and sum(map(len, plan.values())) == 92 * 242
    with pytest.raises(InputError, match="--floor"):
        made_plan(found, 32, "global")
    assert min(map(len, made_plan(found, 32, "global", floor=16).values())) == 16


def test_what_a_plan_keeps():
    found = measured()
    every = {layer: tuple(range(8)) for layer in (1, 2, 3, 4)}
    whole = retention(every, found, found)
    assert whole.mass == whole.routed == 1 and whole.mass_of == {"d0": 1, "d1": 1}
    assert (whole.never_routed, whole.never_routed_kept, whole.kept, whole.experts) == (1, 1, 32, 32)
    plan = made_plan(found, 5)
    kept = retention(plan, found, found)
    by_hand = np.mean(
        [found.saliency()[row, list(plan[row + 1])].sum() / found.saliency()[row].sum() for row in range(4)]
    )
    assert kept.mass == pytest.approx(by_hand) and kept.never_routed_kept == 0
    assert kept.lowest[1] <= kept.mass <= kept.highest[1]
    own = made_plan(found.only(["d1"]), 5)
    assert retention(own, found.only(["d1"]), found).mass_of["d1"] >= kept.mass_of["d1"]
    assert kept_share(np.zeros((1, 4)), np.zeros((1, 4), bool)).tolist() == [1]


def test_the_sizes_of_a_plan_for_k3():
    """451 GB with 8-bit other weights; an uneven plan of as many experts differs by no byte."""
    found = k3_saliency()
    sizes = plan_bytes(made_plan(found, 0.27), found)
    assert round(sizes["mxfp4+8bit"] / GB) == 451
    assert sizes["mxfp4+8bit"] == weights(found.config, Recipe("mxfp4", 8), 242).nbytes
    assert plan_bytes(made_plan(found, 0.27, "global"), found)["2bit"] == sizes["2bit"]


def test_a_dense_checkpoint_has_no_size_in_tier_mxfp4():
    sizes = plan_bytes(made_plan(measured("dense-experts"), 5), measured("dense-experts"))
    assert "mxfp4" not in sizes


def test_pooled_and_balanced():
    """100 and 200 tokens: pooled, the second domain counts twice."""
    found = measured()
    first, second = found.per_domain()
    np.testing.assert_allclose(found.saliency(), (first + 2 * second) / 3)
    np.testing.assert_allclose(found.balanced(), (first + second) / 2)


def test_two_random_picks_of_242_from_896_overlap_27_percent():
    draw, count, experts, layers = np.random.default_rng(0), 242, 896, 92
    sets = top_sets(draw.uniform(size=(8, layers, experts)), count)
    shared = shared_share(sets).mean(0)[np.triu_indices(8, 1)]
    chance, deviation = chance_share(count, experts), chance_deviation(count, experts, layers)
    assert chance == pytest.approx(0.27, abs=5e-4)
    assert abs(shared.mean() - chance) < 4 * deviation / np.sqrt(len(shared))
    assert np.abs(shared - chance).max() < 5 * deviation
    assert 0.5 < shared.std() / deviation < 1.5


def test_overlap_by_hand():
    sets = np.array([[[1, 1, 0, 0]], [[0, 1, 1, 0]], [[1, 1, 0, 0]]], bool)
    assert shared_share(sets).tolist() == [[[1, 0.5, 1], [0.5, 1, 0.5], [1, 0.5, 1]]]
    found = overlap(measured(), 4)
    assert np.allclose(found.shared, found.shared.T) and np.diag(found.shared).tolist() == [1, 1]
    assert found.unrouted.tolist() == [0, 0] and overlap(measured(), 8).unrouted.tolist() == [0.25, 0.25]
    assert (found.kept.max(0) == np.diag(found.kept)).all()


def test_concentration_by_hand():
    assert [holders(np.array([5.0, 1, 3, 1]), share) for share in (0.5, 0.8, 0.9, 1)] == [1, 2, 3, 4]
    assert holders(np.zeros(4), 0.5) == 0
    assert gini(np.ones(7)) == pytest.approx(0) and gini(np.eye(8)[0]) == pytest.approx(7 / 8)
    pair = np.array([5.0, 1, 3, 1])
    assert gini(pair) == pytest.approx(np.abs(pair[:, None] - pair).sum() / (2 * 4 * pair.sum()))
    rows = spread(measured())
    assert [row.layer for row in rows] == [1, 2, 3, 4] and rows[0].never_routed == 1


def test_the_curve_rises_to_everything_and_marks_memory(monkeypatch: pytest.MonkeyPatch):
    found = k3_saliency()
    monkeypatch.setattr("parity.reap.report.POINTS", 5)
    points = retention_curve(found, Recipe("mxfp4", 8), [512, 350])
    masses, sizes = [point.mass for point in points], [point.nbytes for point in points]
    assert masses == sorted(masses) and sizes == sorted(sizes) and masses[-1] == pytest.approx(1)
    marked = {point.memory_gb: point for point in points if point.memory_gb}
    for memory, point in marked.items():
        more = weights(found.config, Recipe("mxfp4", 8), point.kept + 1).nbytes
        assert point.nbytes <= memory * GB < more
    assert set(marked) == {512, 350} and marked[350].kept == 179
    with pytest.raises(InputError, match="--memory"):
        retention_curve(found, Recipe("mxfp4", 8), [10])


def test_texts_are_counted_in_tokens(tmp_path: Path):
    """As many bytes of Han as of English are another number of tokens; what is stored is the tokenizer's own count."""
    from reference.tokenizer import Tokenizer

    folder = cached(entry("mini"))
    texts = {"zh": "东京漢字你好" * 40, "en": "the message index " * 40}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    assert len(texts["zh"].encode()) == len(texts["en"].encode()) == 720
    domains = read_texts([tmp_path / "zh.txt", tmp_path / "en.txt"], folder, 50)
    counts = {name: sum(map(len, rows)) for name, rows in domains.items()}
    assert counts == {name: len(Tokenizer.from_folder(folder).encode(text)) for name, text in texts.items()}
    assert counts["zh"] > 1.5 * counts["en"]
    assert all(len(row) == 50 for row in domains["zh"][:-1])
    with pytest.raises(InputError, match="a name that no other text has"):
        read_texts([tmp_path / "zh.txt"] * 2, folder, 50)


@pytest.mark.parametrize("content", ["[]", "{}", '{"a": 3}', '{"a": [3]}', '{"a": [[1, 2.5]]}', "{", '{"a": [[true]]}'])
def test_token_files_that_are_none(content: str, tmp_path: Path):
    file = tmp_path / "tokens.json"
    file.write_text(content)
    with pytest.raises(InputError, match="tokens.json"):
        read_tokens(file)


def run(*arguments: object):
    return CliRunner().invoke(app, ["reap", *map(str, arguments)], env={"COLUMNS": "160"})


def test_the_commands(tmp_path: Path):
    file, found = tmp_path / "s.npz", measured(domains=3)
    found.save(file)
    shown = run("plan", file, "--keep", 0.6, "--domains", "d1,d0", "--out", tmp_path / "plan.json")
    assert (
        shown.exit_code == 0 and "experts that no token chose" in shown.stdout and "d2 (not asked for)" in shown.stdout
    )
    assert "size in tier mxfp4" in shown.stdout
    plan = read_plan(tmp_path / "plan.json", found.config)
    assert plan == made_plan(found.only(["d1", "d0"]), 0.6)
    shown = run("overlap", file, "--keep", 4, "--picture", tmp_path / "map.svg")
    assert shown.exit_code == 0 and "chance 50.0 %" in shown.stdout
    shown = run("report", file, "--memory", 0.001, "--picture", tmp_path / "curve.svg")
    assert shown.exit_code == 0 and "the most that fits into 0.001 GB" in shown.stdout
    for name, words in {"map.svg": ("chance 50.0 %", "d2"), "curve.svg": ("0.001 GB", "share of saliency")}.items():
        text = "".join(ET.parse(tmp_path / name).getroot().itertext())
        assert all(word in text for word in words), (name, text)
    assert run("subset", file, "--domains", "d2", "--out", tmp_path / "one.npz").exit_code == 0
    one = json.loads(run("overlap", tmp_path / "one.npz", "--keep", 4, "--json").stdout)
    assert one["domains"] == ["d2"] and one["shared"] == [[1.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "FILE", "--keep", 0.6, "--mode", "graded", "--out", "p.json"), "--mode"),
        (("plan", "FILE", "--keep", 0.6, "--domains", "fr", "--out", "p.json"), "one of d0, d1"),
        (("plan", "FILE", "--keep", 0.6, "--domains", "d0,d0", "--out", "p.json"), "name each once"),
        (("plan", "FILE", "--keep", 0.1, "--out", "p.json"), "--keep"),
        (("plan", "FILE", "--keep", 0.6, "--out", "no/where/p.json"), "a place to write to"),
        (("overlap", "none.npz"), "nothing there"),
        (("report", "FILE", "--tier", "1bit"), "--tier"),
        (("calibrate", "--checkpoint", "none", "--out", "x.npz"), "exactly one"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(arguments: tuple, message: str, tmp_path: Path):
    file = tmp_path / "s.npz"
    measured().save(file)
    made = [file if part == "FILE" else tmp_path / part if str(part).endswith(".json") else part for part in arguments]
    result = run(*made)
    assert isinstance(result.exception, InputError) and message in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]
