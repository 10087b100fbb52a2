"""The command line as a user meets it: exit codes, one-line errors, JSON on stdout alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fixtures.build import build
from fixtures.catalogue import entry
from parity.checks.plan import GOLDEN_IN_REPO

ROOT = Path(__file__).parents[2]


def k3_parity(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "parity.cli.main", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


def assert_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    """Bad input: exit 2, nothing on stdout, one line on stderr that names what is meant."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_check_agrees():
    done = k3_parity("check", "--port", "reference", "--check", "modules", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["format"] == 1 and document["port"] == "reference"
    assert {finding["status"] for finding in document["findings"]} == {"pass"}
    assert "agree" in done.stderr


def test_nothing_compared_is_exit_5(tmp_path: Path):
    (tmp_path / "mute_port.py").write_text(
        "from parity.ports import load_port\n"
        "class Mute:\n"
        "    name, chat = 'mute', None\n"
        "    def __getattr__(self, name): return getattr(load_port('reference'), name)\n"
        "PORT = Mute()\n"
    )
    done = k3_parity("check", "--port", "mute_port:PORT", "--check", "chat", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 5, done.stderr
    assert "unsupported" in done.stdout


def test_unknown_regime_is_named():
    done = k3_parity("check", "--port", "mlx", "--check", "modules", "--regime", "no-such-regime")
    assert done.returncode == 2
    assert "no-such-regime" in done.stderr and "alike-keys" in done.stderr


def test_a_port_that_crashes_is_exit_3(tmp_path: Path):
    (tmp_path / "broken_port.py").write_text(
        "from parity.ports import load_port\n"
        "class Broken:\n"
        "    name = 'broken'\n"
        "    def __getattr__(self, name): return getattr(load_port('reference'), name)\n"
        "    def call(self, *args): raise RuntimeError('out of luck')\n"
        "PORT = Broken()\n"
    )
    done = k3_parity("check", "--port", "broken_port:PORT", "--check", "modules", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 3, done.stderr
    assert "out of luck" in done.stdout


@pytest.mark.parametrize("part", ["config.json", "inputs.safetensors"])
def test_check_with_a_folder_that_is_no_golden_case(tmp_path: Path, part: str):
    assert_one_line(k3_parity("check", "--golden", tmp_path), str(tmp_path), "config.json")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["check", "--port", "nonesuch"], ["--port", "nonesuch"]),
        (["check", "--port", "nonesuch:PORT"], ["--port", "nonesuch"]),
        (["check", "--port", "json:dumps"], ["--port", "json:dumps", "parity/protocol.py"]),
        (["check", "--port", "traces:/nonesuch"], ["/nonesuch", "no such folder"]),
        (["check", "--case", "nonesuch"], ["nonesuch"]),
        (["check", "--check", "nonesuch"], ["nonesuch"]),
        (["check", "--dtype", "int8"], ["int8"]),
        (["coverage"], ["--config"]),
        (["coverage", "--config", "/nonesuch"], ["/nonesuch"]),
        (["coverage", "--config", "k3", "--index", "/nonesuch"], ["/nonesuch"]),
        (["fixture", "build", "nonesuch", "/tmp/nonesuch"], ["nonesuch"]),
        (["compare", "/nonesuch", "/nonesuch"], ["/nonesuch"]),
        (["trace", "--checkpoint", "/nonesuch", "--inputs", "/nonesuch", "--out", "/nonesuch"], ["/nonesuch"]),
    ],
)
def test_usage_that_cannot_be_meant(arguments, words):
    assert_one_line(k3_parity(*arguments), *words)


def test_trace_and_compare_agree_and_a_spoilt_trace_does_not(tmp_path: Path):
    trace, golden = tmp_path / "t.safetensors", GOLDEN_IN_REPO / "trace-float32.safetensors"
    inputs = GOLDEN_IN_REPO / "inputs.safetensors"
    done = k3_parity("trace", "--port", "mlx", "--checkpoint", GOLDEN_IN_REPO, "--inputs", inputs, "--out", trace)
    assert done.returncode == 0, done.stderr
    done = k3_parity("compare", trace, golden, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    statuses = [
        finding["status"]
        for finding in document["findings"]
        if finding["tap"].startswith(("prefill", "decode", "padded"))
    ]
    assert set(statuses) == {"pass"} and len(statuses) > 40

    from parity.trace import load_trace, save_trace

    taps, metadata = load_trace(trace)
    name = "prefill/language_model.model.layers.2.mlp.output"
    save_trace(trace, taps | {name: taps[name] * 1.001}, metadata)
    done = k3_parity("compare", trace, golden)
    assert done.returncode == 1 and "L2.mlp.output" in done.stdout, done.stdout
    save_trace(trace, {key: value for key, value in taps.items() if key != name}, metadata)
    done = k3_parity("compare", trace, golden)
    assert done.returncode == 1 and "missing" in done.stdout


def test_a_trace_cannot_be_half_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    inputs = GOLDEN_IN_REPO / "inputs.safetensors"
    done = k3_parity(
        "trace", "--checkpoint", GOLDEN_IN_REPO, "--inputs", inputs, "--out", tmp_path / "file" / "t.safetensors"
    )
    assert_one_line(done, "t.safetensors")


class TestBadCheckpoints:
    """A spoilt folder is refused in one line that names the file and the tensor, by either port."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return build(entry("all-kda"), tmp_path / "spoilt")

    def trace(self, folder: Path, port: str = "mlx") -> subprocess.CompletedProcess:
        inputs, out = folder / "inputs.safetensors", folder.parent / "t.safetensors"
        done = k3_parity("trace", "--port", port, "--checkpoint", folder, "--inputs", inputs, "--out", out)
        assert not out.exists()
        return done

    def shard(self, folder: Path) -> Path:
        return sorted(folder.glob("model-*.safetensors"))[-1]

    def change_tensor(self, folder: Path, name: str, change) -> Path:
        from safetensors.numpy import load_file

        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        path = folder / index[name]
        tensors = {key: value.copy() for key, value in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, {"format": "pt"})
        return path

    @pytest.mark.parametrize("value", ["missing", None])
    def test_config_field(self, folder: Path, value):
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["hidden_size"] = value
        if value == "missing":
            del config["text_config"]["hidden_size"]
        (folder / "config.json").write_text(json.dumps(config))
        assert_one_line(self.trace(folder), "config.json", "text_config.hidden_size")

    def test_truncated_shard(self, folder: Path):
        path = self.shard(folder)
        path.write_bytes(path.read_bytes()[:-100])
        assert_one_line(self.trace(folder), path.name)

    def test_garbage_header(self, folder: Path):
        path = self.shard(folder)
        path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
        assert_one_line(self.trace(folder), path.name)

    def test_index_that_points_outside(self, folder: Path):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["language_model.lm_head.weight"] = "../../etc/passwd"
        path.write_text(json.dumps(index))
        assert_one_line(self.trace(folder), path.name, "passwd")

    def test_missing_and_extra_tensor(self, folder: Path):
        name = "language_model.model.norm.weight"
        path = self.change_tensor(folder, name, lambda tensors: tensors.update({name + "s": tensors.pop(name)}))
        assert_one_line(self.trace(folder), path.name, name)

    def test_misshaped_tensor(self, folder: Path):
        name = "language_model.model.layers.0.self_attn.f_a_proj.weight"
        path = self.change_tensor(folder, name, lambda tensors: tensors.update({name: tensors[name].T.copy()}))
        assert_one_line(self.trace(folder), path.name, name)

    def test_mistyped_tensor(self, folder: Path):
        name = "language_model.model.layers.0.self_attn.dt_bias"
        path = self.change_tensor(folder, name, lambda tensors: tensors.update({name: tensors[name].view(np.int32)}))
        assert_one_line(self.trace(folder), path.name, name)

    @pytest.mark.parametrize("port", ["mlx", "reference"])
    def test_nan_weight(self, folder: Path, port: str):
        name = "language_model.model.layers.1.self_attn.A_log"

        def spoil(tensors):
            tensors[name][1] = np.nan

        path = self.change_tensor(folder, name, spoil)
        assert_one_line(self.trace(folder, port), path.name, name)

    @pytest.mark.parametrize("port", ["mlx", "reference"])
    def test_scale_byte_255(self, folder: Path, port: str):
        name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"

        def spoil(tensors):
            tensors[name][2, 0] = 255

        path = self.change_tensor(folder, name, spoil)
        assert_one_line(self.trace(folder, port), path.name, name)

    def test_token_id_outside_the_vocabulary(self, folder: Path):
        save_file({"text.input_ids": np.array([[1, 2, 10**6]])}, folder / "inputs.safetensors")
        assert_one_line(self.trace(folder), "1000000")
        save_file({"text.input_ids": np.array([[1, 2, -1]])}, folder / "inputs.safetensors")
        assert_one_line(self.trace(folder), "-1")
