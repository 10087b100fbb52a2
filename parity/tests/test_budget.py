"""The arithmetic of what fits where, against figures worked out by hand (K3.md §2, §15)."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fixtures.build import cached
from fixtures.catalogue import CATALOGUE, entry
from parity.budget.components import parameters
from parity.budget.document import Settings, as_document, budget
from parity.budget.machines import Machine, ceilings, fit, machines, nodes_by_layers
from parity.budget.published import claims
from parity.budget.reads import caches, hop_bytes, layer_caches, read_per_token, state_traffic
from parity.budget.sizes import GB, RECIPES, Recipe, largest_keep, weights
from parity.budget.steps import steps
from parity.cli.main import app
from parity.coverage import load_config
from reference.checkpoint import logical_parameters, tensor_specs
from reference.errors import InputError
from reference.weights import load_model

K3 = load_config("k3")
MILLION = 1 << 20
DIFFERING = {
    "parameters",
    "the same if all weights are alike",
    "for the experts, the rest in 8 bits",
    "without what a text token does not read",
}


def test_every_component_of_every_configuration_is_counted_once():
    for item in CATALOGUE.values():
        assert sum(parameters(item.parsed).values()) == logical_parameters(item.parsed), item.name


def test_k3_has_2779_931_837_184_parameters():
    counts = parameters(K3)
    assert sum(counts.values()) == 2_779_931_837_184
    assert counts["routed experts"] == 92 * 896 * 3 * 3584 * 3072
    assert counts["router"] == 92 * (896 * 7168 + 896)
    assert counts["dense MLP"] == 3 * 7168 * 33792


@pytest.mark.parametrize(
    ("recipe", "kept", "nbytes"),
    [
        (Recipe("mxfp4"), None, 1_560_860_324_864),
        (Recipe("3bit"), None, 1_224_352_128_000),
        (Recipe("mixed2"), None, 965_260_768_256),
        (Recipe("2bit"), None, 884_009_524_224),
    ],
)
def test_bytes_per_tier(recipe: Recipe, kept: int | None, nbytes: int):
    whole = weights(K3, recipe, kept)
    assert whole.nbytes == nbytes
    assert sum(whole.layers) + sum(whole.top) == nbytes


def test_pruned_sizes_by_hand():
    expert = 3 * 3584 * 3072 * 17 // 32
    for kept, published in ((242, 451), (179, 350)):
        whole = weights(K3, Recipe("mxfp4", 8), kept)
        assert whole.routed == 92 * kept * expert
        assert round(whole.nbytes / GB) == published


def test_the_published_figures_and_which_of_them_differ():
    rows = claims(K3, 4)
    assert {row.figure.strip() for row in rows if not row.agrees} == DIFFERING
    assert all(row.reason for row in rows if not row.agrees)
    assert len(rows) > 20


def test_a_claim_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Another size of the shared key would move the sizes, and the table must say so."""
    larger = K3.model_copy(update={"text_config": K3.text_config.model_copy(update={"moe_intermediate_size": 3200})})
    differing = {row.figure for row in claims(larger, 4) if not row.agrees}
    assert {"released checkpoint", "tier mxfp4", "242 of 896 experts, the rest in 8 bits"} <= differing


def test_reads_per_token_by_hand():
    whole = weights(K3, Recipe("mxfp4", 8))
    read = read_per_token(whole, K3)
    assert read["routed experts"] == 92 * 16 * 3 * 3584 * 3072 * 17 // 32
    assert read["embedding"] == 7168 * 17 // 16
    assert read["vision tower"] == read["projector"] == 0
    unread = sum(whole.parts[name] for name in ("embedding", "vision tower", "projector")) - read["embedding"]
    assert sum(read.values()) == whole.rest - unread + read["routed experts"]
    pruned = read_per_token(weights(K3, Recipe("mxfp4", 8), 242), K3)
    assert pruned["routed experts"] == read["routed experts"]


def test_caches_by_hand():
    held = caches(K3, MILLION)
    assert held.kda_state == 69 * 96 * 128 * 128 * 4
    assert held.conv_state == 69 * 3 * 3 * 12288 * 2
    assert held.mla == 24 * MILLION * (512 + 64) * 2
    assert held.mla_expanded == 24 * MILLION * 96 * (192 + 128) * 2
    assert state_traffic(held) == 2 * (held.kda_state + held.conv_state) + held.mla
    assert sum(layer_caches(K3, MILLION)) == held.nbytes
    assert caches(K3, 0).nbytes == held.kda_state + held.conv_state
    assert hop_bytes(K3.text_config) == 9 * 7168 * 2


def test_the_states_of_a_real_cache_have_these_sizes():
    """The reference's own KDA state and MLA latent, after a pass over 7 tokens."""
    import torch

    from reference.cache import new_cache

    item = entry("mini")
    text, tokens = item.parsed.text_config, 7
    cache = new_cache(text, 1, "bfloat16")
    load_model(cached(item), "bfloat16")(torch.ones(1, tokens, dtype=torch.int64), cache=cache)
    held = [tensor for tensor in cache.tensors() if tensor.dtype != torch.bool]
    stored = sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert stored == caches(item.parsed, tokens).nbytes


def test_nodes_step_by_step():
    spark, held = machines()["spark-1"], caches(K3, MILLION)
    rows = steps(spark, weights(K3, Recipe("mxfp4")), K3, held, parameters(K3), 4)
    assert [row.nodes for row in rows] == [11, 12, 13, 13, 14, 16]
    assert [row.needed for row in rows[:3]] == [1_389_965_918_592, 1_475_051_569_536, 1_560_860_324_864]


def test_whole_layers_are_never_cut():
    whole, held = weights(K3, Recipe("mxfp4")), caches(K3, MILLION)
    sizes = [a + b for a, b in zip(whole.layers, layer_caches(K3, MILLION), strict=True)]
    assert nodes_by_layers(whole, K3, held, sum(sizes) + sum(whole.top)) == 1
    assert nodes_by_layers(whole, K3, held, max(sizes)) in (93, 94, 95)
    assert nodes_by_layers(whole, K3, held, max(sizes) - 1) is None


def test_the_most_experts_that_fit_fit_and_one_more_does_not():
    held = caches(K3, MILLION)
    for machine, recipe in zip([machines()["mac-512"], machines()["spark-4"]] * 3, RECIPES, strict=True):
        found = fit(machine, weights(K3, recipe), K3, held, 4)
        assert not found.fits and found.keep is not None
        room = found.usable - held.nbytes
        assert weights(K3, recipe, found.keep).nbytes <= room < weights(K3, recipe, found.keep + 1).nbytes
        assert found.by_bytes == ceil(found.needed / (found.usable / machine.nodes))
    assert largest_keep(K3, weights(K3, Recipe("mxfp4")), 10 * GB) is None


def test_ceilings_by_hand():
    whole, held = weights(K3, Recipe("mxfp4", 8)), caches(K3, 0)
    four = Machine(name="x", nodes=4, memory_gb=128, system_gb=8, bandwidth_gb_s=273, link_gb_s=25)
    moved = sum(read_per_token(whole, K3).values()) + state_traffic(held)
    slow, fast = ceilings(four, whole, K3, held)
    assert 1 / slow == pytest.approx(moved / 273e9 + 3 * 9 * 7168 * 2 / 25e9)
    assert fast == pytest.approx(4 * 273e9 / moved)


def test_a_users_machines_are_added_and_win(tmp_path: Path):
    row = {"name": "spark-1", "nodes": 1, "memory_gb": 256, "system_gb": 8, "bandwidth_gb_s": 300}
    toml, as_json = tmp_path / "mine.toml", tmp_path / "mine.json"
    toml.write_text("[[machine]]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in row.items()))
    as_json.write_text(json.dumps({"machine": [row]}))
    for file in (toml, as_json):
        known = machines(file)
        assert known["spark-1"].memory_gb == 256 and "mac-512" in known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "machine: expected a list of machines"),
        ("[[machine]]\nname = 'x'", "machine 0.nodes"),
        (
            "[[machine]]\nname = 'x'\nnodes = 1\nmemory_gb = -1\nsystem_gb = 0\nbandwidth_gb_s = 1",
            "machine 0.memory_gb",
        ),
        ("[[machine]]\nname = 'x'\nnodes = 2\nmemory_gb = 1\nsystem_gb = 0\nbandwidth_gb_s = 1", "machine 0.link_gb_s"),
        ("[[machine]]\nname = 'x'\nnodes = 1\nmemory_gb = 1\nsystem_gb = 0\nbandwidth_gb_s = 1\nram = 3", "ram"),
        ("[[machine", "expected TOML"),
    ],
)
def test_machines_that_are_none(text: str, message: str, tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        machines(file)
    assert str(file) in str(caught.value)


def test_a_mini_configuration_says_which_tiers_it_cannot_hold():
    result = budget(entry("mini").parsed, Settings(1000), [machines()["mac-512"]])
    assert [whole.recipe.name for whole in result.recipes] == ["mxfp4", "mxfp4+8bit"] and "2bit" in result.refused
    assert result.published == []
    specs = sum(spec.nbytes for spec in tensor_specs(entry("mini").parsed))
    assert as_document(result)["recipes"][0]["bytes"] == specs
    assert all(row.fits for row in result.fits)


def test_the_command():
    shown = CliRunner().invoke(app, ["budget"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    for figure in ("2,779,931,837,184", "97.94 %", "1.5609", "87.05 GB", "14 cut anywhere, 16 in whole layers"):
        assert figure in shown.output
    assert "Assumptions" in shown.output and "supported" in shown.output
    document = json.loads(CliRunner().invoke(app, ["budget", "--json", "--machine", "spark-4", "--keep", "242"]).stdout)
    assert document["format"] == 1 and {row["machine"]["name"] for row in document["machines"]} == {"spark-4"}
    assert document["recipes"][1]["kept"] == 242
    for wrong in (["--machine", "cray"], ["--keep", "15"], ["--machines", "nowhere.toml"], ["nowhere"]):
        result = CliRunner().invoke(app, ["budget", *wrong])
        assert isinstance(result.exception, InputError), wrong
