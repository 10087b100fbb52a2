"""The text tower at true width: streamed layers, in small here; K3's own dimensions under the marker true_width."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fixtures.build import cached
from fixtures.catalogue import CATALOGUE, Entry, config, entry
from fixtures.values import tensor
from parity.blas import LEND
from parity.fault_catalogue.width import WIDTH_FAULTS
from parity.findings import Report
from parity.kill_matrix import kill
from parity.true_width import isolated, sides, text
from parity.true_width.partial import ATTENTION, MLP
from parity.true_width.source import ShardSource, SyntheticSource, expert_specs, layer_specs, top_specs
from parity.true_width.text import Options, run_text
from reference.errors import InputError

FAULTS = {fault.id: fault for fault in WIDTH_FAULTS}


def run(in_force=nullcontext, note=lambda line: None, **options) -> Report:
    return run_text(Options(**{"case": "mini", "threads": 1, **options}), note, in_force)


def failed(report: Report) -> set[str]:
    return {finding.module for finding in report.failures}


def numbers(report: Report) -> list[tuple]:
    return [(finding.check, finding.tap, finding.status, finding.error, finding.noise) for finding in report.findings]


@pytest.mark.parametrize("name", ["mini", "plain-residual", "kimi-linear", "dense-experts", "groups"])
def test_layers_alone_agree(name: str):
    known = CATALOGUE[name].parsed.text_config
    report = run(case=name, layers="0,1,2")
    assert report.exit_code == 0 and set(report.counts) == {"pass"}
    taps = {finding.tap.split(".", 4)[-1] for finding in report.findings if finding.check == "width"}
    assert {"self_attn.input", "self_attn.output", "mlp.input", "mlp.output"} <= taps
    assert ("moe.routed" in taps) == any(known.is_moe(layer) for layer in range(3))


def test_two_workers_find_what_one_finds():
    lines: list[str] = []
    one = run(layers="2,0,1")
    two = run_text(Options(case="mini", layers="2,0,1", threads=1), lines.append, workers=2)
    assert [f.model_dump_json() for f in two.findings] == [f.model_dump_json() for f in one.findings]
    assert {line.split(" (")[0] for line in lines} == {"layer 0", "layer 1", "layer 2"}
    assert two.header["bytes needed"] == one.header["bytes needed"]


def test_a_chain_is_one_work():
    with pytest.raises(InputError, match="--workers.*single layers.*a chain"):
        run_text(Options(case="mini", threads=1), workers=2)


def test_a_chain_is_the_whole_model():
    """The streamed chain ends where the whole reference ends: same weights, same mathematics, prompt and decode."""
    from parity.ports.reference import PORT
    from parity.protocol import Step
    from parity.true_width.chain import Chain, Plan
    from parity.true_width.state import State

    folder, ids = cached(entry("mini")), np.arange(7)[None]
    known = entry("mini")
    source = SyntheticSource("mini", known.parsed, known.expert_format, 0)
    streamed = sides.Run(text.Reader(source, 1), "mini", 5, 0)
    state = State({}, ids)
    findings = list(Chain(streamed, Plan(2, 5), state).findings())
    assert all(finding.status == "pass" for finding in findings)
    pieces = [ids[:, :5], ids[:, 5:6], ids[:, 6:]]
    session = PORT.open(folder, "float32")
    whole = session.run([Step(input_ids=piece) for piece in pieces])
    for position, taps in zip(state.positions["noise"], whole, strict=True):
        assert np.array_equal(position.prefix_sum, taps["language_model.model.layers.4.output"])


def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(tmp_path):
    class Stopped(Exception):
        pass

    def stop(line: str) -> None:
        if line.startswith("layer 2 "):
            raise Stopped

    begun = {"layers": "all", "state": tmp_path}
    with pytest.raises(Stopped):
        run(note=stop, **begun)
    with pytest.raises(InputError, match="--resume"):
        run(**begun)
    with pytest.raises(InputError, match="tokens"):
        run(**begun, resume=True, tokens=5)
    lines: list[str] = []
    resumed = run(note=lines.append, **begun, resume=True)
    assert [line.split(":")[0] for line in lines] == ["resumed before layer 3", "layer 3 of 5", "layer 4 of 5"]
    assert resumed.exit_code == 0 and numbers(resumed) == numbers(run(layers="all"))


def test_a_state_that_is_none_is_refused(tmp_path):
    (tmp_path / "chain.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="begin anew"):
        run(layers="all", state=tmp_path, resume=True)


def test_synthetic_weights_are_those_of_the_folder():
    known, folder = entry("mini"), cached(entry("mini"))
    synthetic, shards = SyntheticSource("mini", known.parsed, "mxfp4", 0), ShardSource(folder)
    specs = [*top_specs(known.parsed).values(), *layer_specs(known.parsed, 3).values()]
    for spec in [*specs, *expert_specs(known.parsed, "mxfp4", 3, 5)]:
        assert np.array_equal(synthetic.read(spec), shards.read(spec)), spec.name
        part = slice(0, max(1, spec.shape[0] // 2))
        assert np.array_equal(shards.read(spec)[part], shards.read(spec, part)), spec.name


@pytest.mark.parametrize("layers", ["all", "0,2,3"])
def test_a_whole_folder_gives_the_same_numbers(layers: str):
    report = run(checkpoint=cached(entry("mini")), layers=layers)
    assert report.exit_code == 0
    assert numbers(report) == numbers(run(layers=layers))
    assert int(report.header["bytes read"]) >= int(report.header["bytes needed"])


def some_tensors(folder: Path, target: Path, keep) -> None:
    """A partial download in one shard of its own, with the whole index beside it."""
    target.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(folder / name, target)
    tensors = {name: array for path in folder.glob("model-*") for name, array in load_file(path).items() if keep(name)}
    save_file(tensors, target / "part.safetensors")


def test_a_partial_download_is_checked_as_far_as_it_goes(tmp_path):
    """Layer 3 with six of its experts; layer 2 without its query; nothing of layer 1."""
    experts = entry("mini").parsed.text_config.num_experts

    def keep(name: str) -> bool:
        number = int(name.split("experts.")[1].split(".")[0]) if ".experts." in name else 0
        return (".layers.3." in name and number < 6) or (".layers.2." in name and "q_b_proj" not in name)

    some_tensors(cached(entry("mini")), tmp_path / "part", keep)
    report = run(checkpoint=tmp_path / "part", layers="1,2,3")
    assert report.exit_code == 0
    told = {finding.tap.partition(".layers.")[2]: finding.note for finding in report.findings if finding.note}
    assert {"1.self_attn.input", "1.self_attn.output", "1.mlp.input", "1.mlp.output"} <= set(told)
    assert "q_b_proj" in told["2.self_attn.output"] and "model-0" in told["2.self_attn.output"]
    assert "2.mlp.output" not in told
    assert f"{experts - 6} of {experts} in all" in told["3.moe.experts"]
    compared = {finding.tap.partition(".layers.")[2] for finding in report.findings if finding.status == "pass"}
    assert {"3.self_attn.output", "3.router.indices", "3.moe.routed", "3.mlp.output", "2.mlp.output"} <= compared
    assert not any(tap.startswith(("1.", "2.self_attn.q")) for tap in compared)


@pytest.mark.parametrize(
    ("absent", "reached"),
    [("embed_tokens", 0), (".layers.2.self_attn.o_proj", 2), (".layers.3.block_sparse_moe.experts", 3), ("lm_head", 5)],
)
def test_a_chain_goes_as_far_as_the_download(tmp_path, absent: str, reached: int):
    some_tensors(cached(entry("mini")), tmp_path / "part", lambda name: absent not in name)
    report = run(checkpoint=tmp_path / "part", layers="all")
    last = report.findings[-1]
    assert last.status == "unsupported" and absent.lstrip(".") in last.note and f"before layer {reached}:" in last.note
    assert report.exit_code == (0 if reached else 5)
    assert ("3.output" in {f.tap.partition(".layers.")[2] for f in report.findings[:-1]}) == (reached > 3)


def test_nothing_of_a_layer_is_not_agreement(tmp_path):
    some_tensors(cached(entry("mini")), tmp_path / "part", lambda name: ".layers.3." in name)
    assert run(checkpoint=tmp_path / "part", layers="1").exit_code == 5


def test_a_folder_without_shards_is_bad_input(tmp_path):
    shutil.copy(cached(entry("mini")) / "config.json", tmp_path)
    with pytest.raises(InputError, match="at least one shard"):
        run(checkpoint=tmp_path, layers="0")


def test_the_commands():
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "parity.cli.main"]
    words = ["check", "--case", "mini", "--layers", "0,3", "--json"]
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["header"]["layers"] == "0,3" and document["header"]["matrix product"]
    for wrong in (["--layers", "0,5"], ["--layers", "0", "--port", "reference"]):
        done = subprocess.run(
            [*command, "check", "--case", "mini", *wrong], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr


DEEP = Entry(
    "deep",
    config(
        {
            "hidden_size": 32, "intermediate_size": 32, "attn_res_block_size": 2, "num_experts": 640,
            "num_experts_per_token": 4, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32,
        },
        {"num_heads": 2, "head_dim": 16},
        "kkkm" * 4,
    ),
)  # fmt: skip
"""Eight blocks and more than 512 experts, in small."""


def failing(source, layer: int, kinds: tuple[str, ...], fault_id: str | None, tokens: int = 8) -> dict[str, str]:
    """Tap -> module of everything that fails in one layer, with a fault in the port or with none."""
    in_force = partial(FAULTS[fault_id].applied, "port") if fault_id else nullcontext
    reader = text.Reader(source, 2)
    findings = list(isolated.layer_findings(sides.Run(reader, "k3", tokens, 0, in_force=in_force), layer, kinds))
    reader.close()
    assert findings
    return {f.tap.partition(".layers.")[2]: f.module for f in findings if f.status != "pass"}


@pytest.mark.parametrize(
    ("fault_id", "layer", "kinds", "tap"),
    [("W01", 14, ATTENTION, "blocks"), ("W02", 1, MLP, "moe.routed")],
)
def test_faults_of_depth_and_number_show_in_small(fault_id: str, layer: int, kinds: tuple[str, ...], tap: str):
    source = SyntheticSource("deep", DEEP.parsed, "mxfp4", 0)
    assert not failing(source, layer, kinds, None)
    assert failing(source, layer, kinds, fault_id)[f"{layer}.{tap}"] == FAULTS[fault_id].module
    if fault_id == "W01":
        assert not failing(source, layer - 2, kinds, fault_id)


@pytest.mark.parametrize("fault_id", FAULTS)
def test_no_mini_model_shows_them(fault_id: str):
    assert kill(replace(FAULTS[fault_id], case="mini"), "mlx", "float32").status == "unseen"


def test_the_bank_s_fault_shows_in_a_chain_from_its_layer_on():
    from parity.true_width.chain import Chain, Plan
    from parity.true_width.state import State

    source = SyntheticSource("deep", DEEP.parsed, "mxfp4", 0)
    streamed = sides.Run(text.Reader(source, 1), "deep", 4, 0)
    streamed.in_force = partial(FAULTS["W01"].applied, "port")
    findings = list(Chain(streamed, Plan(1, 0), State({}, np.arange(5)[None])).findings())
    wrong = [f.tap.partition(".layers.")[2] for f in findings if f.status == "fail"]
    assert wrong and wrong[0] == "14.mlp.input"


K3_SOURCE = ["--case", "k3"]


def k3(*words: str) -> tuple[int, dict]:
    """``k3-parity check --layers`` in a process of its own, so that its memory is its own."""
    command = [sys.executable, "-m", "parity.cli.main", "check", *words, "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def lent(expression: str):
    """The value of an expression in this module's names, in a process that has torch's matrix product for MLX."""
    code = f"import json\nfrom parity.tests.test_width_text import *\nprint(json.dumps({expression}))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "2"}
    environment |= {LEND: "1" if sys.platform.startswith("linux") else "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.true_width
@pytest.mark.parametrize("layer", [0, 1, 3, 12, 92])
def test_a_layer_of_k3(layer: int):
    """The dense layer, KDA and MLA with experts, a layer that begins a block, the last one: 10 minutes, 12 GB."""
    code, document = k3(*K3_SOURCE, "--layers", str(layer), "--tokens", "8")
    assert code == 0, [finding for finding in document["findings"] if finding["status"] != "pass"]
    assert document["seconds"] < 600 and float(document["header"]["peak memory"].split()[0]) < 12
    agreement = [finding for finding in document["findings"] if finding["check"] == "agreement"]
    assert len(agreement) >= 8 and max(finding["error"] for finding in agreement) <= 1e-5


@pytest.mark.true_width
def test_a_layer_of_k3_with_mlx_s_own_product():
    _, document = k3(*K3_SOURCE, "--layers", "3", "--tokens", "8", "--no-lend-blas")
    assert document["header"]["matrix product"] == "MLX's own"
    agreement = [finding for finding in document["findings"] if finding["check"] == "agreement"]
    assert len(agreement) >= 8 and max(finding["error"] for finding in agreement) <= 1e-5


@pytest.mark.true_width
@pytest.mark.parametrize(
    ("fault_id", "layer", "kinds", "tap"),
    [
        ("W01", 84, ATTENTION, "blocks"),
        ("W02", 1, MLP, "moe.routed"),
        ("W03", 3, ATTENTION, "self_attn.attention"),
    ],
)
def test_k3_s_own_faults_are_caught(fault_id: str, layer: int, kinds: tuple[str, ...], tap: str):
    assert not lent(f"failing(text.source_of(Options()), {layer}, {kinds}, None)")
    found = lent(f"failing(text.source_of(Options()), {layer}, {kinds}, {fault_id!r})")
    assert found[f"{layer}.{tap}"] == FAULTS[fault_id].module


@pytest.mark.true_width
def test_the_bank_is_right_up_to_layer_83():
    assert not lent("failing(text.source_of(Options()), 72, ATTENTION, 'W01')")


def bytes_this_process_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


PRESENT = 40


def write_layer(folder: Path, layer: int) -> int:
    """A folder in the released format with one layer of K3 at full width, PRESENT of its experts; bytes of tensors."""
    source, shards = text.source_of(Options()), {}
    folder.mkdir()
    shutil.copy(text.PRESET, folder / "config.json")
    groups = [list(layer_specs(source.config, layer).values())]
    for first in range(0, PRESENT, 10):
        groups.append([
            spec
            for number in range(first, first + 10)
            for spec in expert_specs(source.config, "mxfp4", layer, number)
        ])  # fmt: skip
    for number, specs in enumerate(groups, 1):
        name = f"model-{number:05}-of-00096.safetensors"
        save_file({spec.name: tensor(0, spec, source.config) for spec in specs}, folder / name)
        shards |= dict.fromkeys((spec.name for spec in specs), name)
    for number in range(PRESENT, 896):
        for spec in expert_specs(source.config, "mxfp4", layer, number):
            shards[spec.name] = "model-00006-of-00096.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return sum(spec.nbytes for specs in groups for spec in specs)


def read_and_report(folder: str, layer: int) -> tuple[int, dict]:
    """The bytes that a run over ``folder`` has this process read, by the kernel's count, and its report."""
    run(layers="0")  # all that is imported has been read
    before = bytes_this_process_read()
    report = run(checkpoint=Path(folder), layers=str(layer), threads=2)
    return bytes_this_process_read() - before, json.loads(report.model_dump_json())


@pytest.mark.true_width
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the bytes that were read are the kernel's count")
def test_a_released_layer_of_which_40_experts_are_there(tmp_path):
    layer, folder = 1, tmp_path / "k3"
    write_layer(folder, layer)
    read, report = lent(f"read_and_report({str(folder)!r}, {layer})")
    needed, findings = int(report["header"]["bytes needed"]), report["findings"]
    assert all(finding["status"] in ("pass", "unsupported") for finding in findings)
    notes = [finding["note"] for finding in findings if finding["status"] == "unsupported"]
    assert len(notes) == 1 and "856 of 896 in all" in notes[0] and "model-00006-of-00096" in notes[0]
    passed = {f["tap"].rpartition(f"layers.{layer}.")[2] for f in findings if f["status"] == "pass"}
    assert {"self_attn.output", "router.indices", "moe.routed", "mlp.output"} <= passed
    assert needed <= read <= 1.05 * needed and int(report["header"]["bytes read"]) <= 1.05 * needed
