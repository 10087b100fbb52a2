"""The audit: a fixture, the authors' own case, a checkpoint that contradicts, an index or headers alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from fixtures.build import build, cached
from fixtures.catalogue import CATALOGUE, entry
from parity.audit import ENTRIES, audited, subject_of
from parity.audit.a_log import audit_a_log
from parity.audit.conv import audit_conv
from parity.audit.gate_bias import audit_dt_bias
from parity.audit.ids import audit_ids
from parity.audit.inert import audit_inert
from parity.audit.kv_b import audit_kv_b
from parity.audit.layer_lists import audit_layer_lists
from parity.audit.nibbles import LADDER, LADDER_BYTES, ORDERS, audit_nibbles, ladder_fits
from parity.checks.plan import GOLDEN_IN_REPO
from parity.cli.main import app
from parity.tests.test_cli import assert_one_line, k3_parity

A_LOG, DT_BIAS = ".self_attn.A_log", ".self_attn.dt_bias"


def only(entries):
    (found,) = entries
    return found


def changed(folder: Path, ending: str, change) -> Path:
    """The checkpoint with ``change(array)`` in place of every tensor whose name has this ending."""
    for path in folder.glob("model-*.safetensors"):
        tensors = {name: array.copy() for name, array in load_file(path).items()}
        tensors = {name: change(array) if name.endswith(ending) else array for name, array in tensors.items()}
        save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    return build(entry("mini"), tmp_path / "mini")


@pytest.fixture(scope="module")
def golden():
    return {found.name: found for found in audited(subject_of(GOLDEN_IN_REPO, None, None))}


class TestALog:
    def test_a_fixture_is_per_head_by_its_zero_tail(self):
        found = only(audit_a_log(subject_of(cached(CATALOGUE["mini"]), None, None)))
        assert found.status == "decided" and found.verdict.startswith("per head")
        assert "cannot be decided by shapes alone" in found.verdict
        assert any("entries 3..31 are exactly 0 in all 3 layers" in line for line in found.evidence)
        assert 0.2 < found.apart["per channel"] < 1
        assert any("by 0 where A_log is read per head" in line for line in found.evidence)

    def test_the_authors_own_output_speaks_too(self, golden):
        found = golden["a-log"]
        assert found.status == "decided" and "the authors' own output agrees with it alone" in found.verdict
        assert "cannot be decided by shapes alone" in found.verdict
        assert any("entries 4..31 are exactly 0 in all 4 layers" in line for line in found.evidence)
        assert found.apart["per channel"] > 0.2

    def test_values_beyond_the_heads_contradict(self, mini, monkeypatch):
        values = np.linspace(-1, 1, 32, dtype=np.float32)
        changed(mini, A_LOG, lambda array: values[: len(array)])
        found = only(audit_a_log(subject_of(mini, None, None)))
        assert found.status == "contradicted" and "beyond its 3 heads" in found.verdict
        assert any("not all 0 in 3 of 3 layers" in line and "29 of 29 filled" in line for line in found.evidence)
        monkeypatch.setattr("parity.audit.ENTRIES", (audit_a_log,))
        done = CliRunner().invoke(app, ["audit", "--checkpoint", str(mini)])
        assert done.exit_code == 1 and "against K3.md: A_log has values beyond its 3 heads" in done.stdout

    def test_one_value_in_one_layer_is_enough(self, mini):
        name = "layers.1" + A_LOG
        changed(mini, name, lambda array: np.where(np.arange(len(array)) == 31, np.float32(1e-3), array))
        found = only(audit_a_log(subject_of(mini, None, None)))
        assert found.status == "contradicted"
        assert any("layer 1 has 1 of 29 filled, up to 0.001" in line for line in found.evidence)

    def test_zeros_everywhere_decide_nothing(self, mini):
        changed(mini, A_LOG, np.zeros_like)
        assert only(audit_a_log(subject_of(mini, None, None))).status == "undecided"

    @pytest.mark.parametrize("name, status", [("square-heads", "undecided"), ("more-heads", "decided")])
    def test_other_head_counts(self, name, status):
        found = only(audit_a_log(subject_of(cached(CATALOGUE[name]), None, None)))
        assert found.status == status
        assert ("cannot be decided by shapes alone" in found.verdict) == (status == "undecided")

    def test_without_kda_there_is_nothing_to_say(self):
        assert list(audit_a_log(subject_of(cached(CATALOGUE["all-mla"]), None, None))) == []


def test_the_authors_results_decide_what_shapes_cannot(golden):
    for name in ("dt-bias", "conv-taps", "kv-b", "tower-qkv", "rope-axis", "nibbles"):
        assert golden[name].status == "decided", name
        assert "the authors' own output agrees with it alone" in golden[name].verdict
        assert min(golden[name].apart.values()) > 0.01
    for name in ("eps-latent", "eps-kda-output"):
        assert golden[name].status == "decided", name
    for name in ("eps-key-length", "eps-tower"):
        assert golden[name].status == "undecided", name
        assert min(golden[name].apart.values()) > 1e-3, "rows of small size feel it"
    assert "rules out 2^-7" in golden["eps-tower"].verdict


def test_the_authors_results_may_speak_for_another_reading(tmp_path):
    """A folder whose kernels are stored newest first, beside the authors' results on the right ones."""
    folder = tmp_path / "reversed"
    shutil.copytree(GOLDEN_IN_REPO, folder)
    changed(folder, "conv1d.weight", lambda array: array[..., ::-1].copy())
    found = only(audit_conv(subject_of(folder, None, None)))
    assert found.status == "contradicted" and "the first tap is the current token's" in found.verdict


def test_a_trace_of_another_model_is_one_line(mini):
    shutil.copy(GOLDEN_IN_REPO / "trace-float32.safetensors", mini)
    assert_one_line(k3_parity("audit", "--checkpoint", mini), "trace-float32.safetensors", "self_attn.output")


def test_without_them_it_is_said_so():
    subject = subject_of(cached(CATALOGUE["mini"]), None, None)
    for audit in (audit_dt_bias, audit_conv, audit_kv_b, audit_nibbles):
        found = only(audit(subject))
        assert found.status == "undecided" and "cannot be decided" in found.verdict


def test_heads_that_differ_show_the_layout(mini):
    right = np.repeat(np.arange(3, dtype=np.float32), 32)
    noise = np.linspace(-0.1, 0.1, 96, dtype=np.float32)
    changed(mini, DT_BIAS, lambda array: right + noise)
    found = only(audit_dt_bias(subject_of(mini, None, None)))
    assert found.status == "decided" and found.verdict.startswith("head first")
    changed(mini, DT_BIAS, lambda array: (right + noise).reshape(3, 32).T.reshape(-1).copy())
    assert only(audit_dt_bias(subject_of(mini, None, None))).status == "contradicted"


def test_layer_lists_by_range_and_by_names(golden):
    found = golden["layer-lists"]
    assert found.status == "decided" and any("6 have the tensors of their kind" in line for line in found.evidence)
    released = only(audit_layer_lists(subject_of(None, "k3", None)))
    assert released.status == "decided" and "from 1 to 93" in released.evidence[0]


class TestNibbles:
    def test_only_one_reading_gives_the_ladder(self):
        fits = ladder_fits()
        assert fits["low nibble first"] == len(LADDER) == 32
        assert max(count for name, count in fits.items() if name != "low nibble first") < 16

    def test_the_ladder_in_a_checkpoint_comes_out_of_the_loaded_expert(self, mini):
        import torch

        from reference.moe import decode_mxfp4
        from reference.weights import load_model

        row = np.tile(np.frombuffer(bytes.fromhex(LADDER_BYTES), np.uint8), 2)
        name = "layers.1.block_sparse_moe.experts.0.w1.weight_"
        changed(mini, name + "packed", lambda array: np.tile(row, (len(array), 1)))
        changed(mini, name + "scale", lambda array: np.full_like(array, 127))
        expert = load_model(mini).language_model.model.layers[1].block_sparse_moe.experts[0].w1
        values = decode_mxfp4(expert.weight_packed, expert.weight_scale, torch.float32)
        np.testing.assert_array_equal(values.numpy(), np.tile(np.array(LADDER), (len(values), 2)))

    def test_statistics_cannot_tell(self, golden):
        assert any("equal maxima and mean squares" in line for line in golden["nibbles"].evidence)
        assert len(ORDERS) == 3

    def test_dense_experts_have_none(self):
        found = only(audit_nibbles(subject_of(cached(CATALOGUE["dense-experts"]), None, None)))
        assert "stored dense" in found.verdict and found.apart == {}


class TestIds:
    def test_a_fixture_agrees(self):
        found = only(audit_ids(subject_of(cached(CATALOGUE["mini"]), None, None)))
        assert found.status == "decided" and "tokenizer_config.json" in found.verdict

    def test_a_placeholder_that_the_tokenizer_calls_otherwise(self, mini):
        document = json.loads((mini / "config.json").read_text())
        (mini / "config.json").write_text(json.dumps(document | {"media_placeholder_token_id": 304}))
        found = only(audit_ids(subject_of(mini, None, None)))
        assert found.status == "contradicted" and "media_placeholder_token_id 304 is" in found.verdict

    def test_no_tokenizer(self, golden):
        assert golden["token-ids"].status == "needs data"


def test_inert_fields_are_measured(golden):
    found = golden["inert-fields"]
    inert = {"text_config.bos_token_id", "text_config.eos_token_id", "text_config.pad_token_id"}
    assert {field for field, moved in found.apart.items() if moved == 0} == inert
    assert found.apart["text_config.linear_attn_config.gate_lower_bound"] > 1e-3
    assert any("ignore_index" in line for line in found.evidence)


def test_a_field_may_be_without_effect_on_one_checkpoint_alone():
    found = only(audit_inert(subject_of(cached(CATALOGUE["kimi-linear"]), None, None)))
    assert "on this checkpoint also" in found.verdict and "text_config.activation_situ_beta" in found.verdict


def test_the_released_configuration_alone_says_what_needs_data():
    found = {entry.name: entry for entry in audited(subject_of(None, None, None))}
    assert found["a-log"].status == "needs data"
    assert "cannot be decided by shapes alone" in found["a-log"].verdict
    assert {found[name].status for name in ("layer-lists", "token-ids")} == {"decided"}
    assert all("needs the weights" in " ".join(found[name].evidence) for name in ("kv-b", "rope-axis", "eps-latent"))


def test_an_index_tells_the_length_of_a_log_by_its_bytes(mini):
    subject = subject_of(None, str(mini), mini / "model.safetensors.index.json")
    found = only(audit_a_log(subject))
    assert subject.level == "index" and found.status == "needs data"
    assert any("933,840" in line and "348 fewer" in line for line in found.evidence)


def test_headers_alone_are_enough_for_shapes(mini, tmp_path):
    bare = tmp_path / "headers"
    shutil.copytree(mini, bare)
    for path in bare.glob("model-*.safetensors"):
        data = path.read_bytes()
        path.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    subject = subject_of(bare, None, None)
    assert subject.level == "headers"
    found = list(audited(subject))
    assert len(found) >= len(ENTRIES)
    assert found[0].status == "needs data" and "the headers say" in found[0].evidence[0]


def test_json_is_one_document():
    done = k3_parity("audit", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["format"] == 2 and document["level"] == "configuration"
    assert "verdict (needs data): cannot be decided by shapes alone" in done.stderr
    assert {entry["status"] for entry in document["entries"]} <= {"decided", "undecided", "needs data"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--checkpoint", "/nonesuch"], ["/nonesuch", "no such folder"]),
        (["--config", "/nonesuch"], ["/nonesuch"]),
        (["--index", "/nonesuch"], ["--config"]),
        (["--config", "k3", "--index", "/nonesuch"], ["/nonesuch"]),
        (["--checkpoint", GOLDEN_IN_REPO, "--config", "k3"], ["--checkpoint"]),
    ],
)
def test_bad_input_is_one_line(arguments, words):
    assert_one_line(k3_parity("audit", *arguments), *words)


def test_a_damaged_shard_is_one_line(mini):
    path = sorted(mini.glob("model-*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-10])
    assert_one_line(k3_parity("audit", "--checkpoint", mini), path.name)
