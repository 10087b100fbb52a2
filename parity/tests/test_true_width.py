"""K3's own vision dimensions: the command agrees, says so in JSON, and stays within memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = 27
PARAMETERS = 447_358_976
GIGABYTE = 10**9


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.true_width
def test_vision_at_full_size():
    done = python("-m", "parity.cli.main", "width", "vision", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads(done.stdout)
    assert document["format"] == 1 and document["agree"] is True
    assert document["parameters"] == PARAMETERS
    assert document["peak_rss_bytes"] < 6 * GIGABYTE
    errors = {(row["item"], row["mode"], row["tap"]): row["error"] for row in document["rows"]}
    for item in ("448x448", "611x437", "video 2x280x168"):
        for tap in ("tower.output", "projector.output"):
            assert 0 < errors.pop((item, "chained", tap)) <= 1.5e-6
    taps = {tap for item, mode, tap in errors if (item, mode) == ("video 2x280x168", "isolated")}
    blocks = {f"encoder.blocks.{block}.{what}" for block in range(BLOCKS) for what in ("attention", "output")}
    assert taps == blocks | {"patch_embed.output", "tower.output", "projector.output"}
    assert len(errors) == len(taps)


@pytest.mark.true_width
def test_vision_with_mlx_s_own_product():
    """Without lending the limits are looser, and the document says why."""
    done = python("-m", "parity.cli.main", "width", "vision", "--small", "--no-lend-blas", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads(done.stdout)
    assert document["versions"]["matrix product"] == "MLX's own" and document["agree"] is True
    assert document["limits"]["end_to_end"] == 5e-6 and document["limits"]["reason"]
    assert any(row["error"] > 1.5e-6 for row in document["rows"]) or not sys.platform.startswith("linux")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the BLAS is lent on Linux only")
@pytest.mark.parametrize(("lend", "product"), [("1", "BLAS lent from torch"), ("0", "MLX's own")])
def test_the_header_says_whose_product_it_is(lend: str, product: str):
    code = (
        "import sys\n"
        "from parity.ports.mlx import PORT\n"
        "print(PORT.versions()['matrix product'], 'torch' in sys.modules)"
    )
    done = python("-c", code, K3_PARITY_LEND_BLAS=lend)
    assert done.stdout.strip() == f"{product} False", done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the BLAS is lent on Linux only")
def test_a_lent_product_is_torch_s_and_right():
    """The same bits as torch's where both ask for the same product; MLX's own sums in another order."""
    code = (
        "import numpy as np\n"
        "from parity.ports.mlx import PORT\n"
        "import mlx.core as mx\n"
        "import torch\n"
        "x, y = np.random.default_rng(0).standard_normal((2, 64, 4096), dtype=np.float32)\n"
        "found = np.array(mx.array(x) @ mx.array(y).T)\n"
        "shared = (torch.from_numpy(x) @ torch.from_numpy(y).T).numpy()\n"
        "truth = x.astype(np.float64) @ y.astype(np.float64).T\n"
        "print(np.abs(found - shared).max(), np.sqrt(np.mean((found - truth) ** 2) / np.mean(truth**2)))"
    )
    results = {}
    for lend in "01":
        done = python("-c", code, K3_PARITY_LEND_BLAS=lend, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        results[lend] = [float(word) for word in done.stdout.split()]
    apart, error = results["1"]
    assert apart == 0 and error < 4e-7
    apart, error = results["0"]
    assert apart > 0 and error < 2e-6


def test_the_limits_are_far_below_a_fault():
    """The subtlest mistake that ports have made here, the other kind of GELU, seen at inputs of 2.7."""
    import torch

    from parity.true_width.vision import limit_for
    from reference.projector import gelu_erf
    from reference.vision import gelu_tanh

    x = torch.tensor([-2.7, 2.7], dtype=torch.float64)
    error = ((gelu_erf(x) - gelu_tanh(x)).square().mean() / gelu_erf(x).square().mean()).sqrt().item()
    widest = max(max(limit_for(lent, small)[:3]) for lent in (True, False) for small in (True, False))
    assert error > 20 * widest


def test_lending_comes_too_late_once_mlx_is_imported():
    code = "import mlx.core; from parity.blas import lend_torch_blas; lend_torch_blas()"
    done = python("-c", code)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    words = ("InputError", "K3_PARITY_LEND_BLAS", "mlx.core" if sys.platform.startswith("linux") else "platform")
    assert all(word in last for word in words), last


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the BLAS is lent on Linux only")
def test_without_torch_there_is_nothing_to_lend():
    code = (
        "import importlib.util\n"
        "importlib.util.find_spec = lambda name: None\n"
        "from parity.blas import lend_torch_blas\n"
        "lend_torch_blas()"
    )
    done = python("-c", code)
    assert done.returncode == 1 and "an installed torch" in done.stderr.strip().splitlines()[-1], done.stderr
