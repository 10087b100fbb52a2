"""The pytest side: options, the port under test, the header, Hypothesis profiles."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, max_examples=20)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("nightly", deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("k3-parity")
    default = os.environ.get("K3_PARITY_PORT", "mlx")
    group.addoption(
        "--port", default=default, help="port under test: mlx, reference, traces:DIR or package.module:ATTRIBUTE"
    )
    seed = int(os.environ.get("K3_PARITY_SEED", "0"))
    group.addoption("--parity-seed", default=seed, type=int, help="seed of weights and inputs")


def pytest_report_header(config: pytest.Config) -> list[str]:
    from parity.ports import load_port
    from parity.runner import header

    port = load_port(config.getoption("port"))
    shown = header(port, port.capabilities().dtypes, config.getoption("parity_seed"))
    return ["k3-parity: " + ", ".join(f"{key} {value}" for key, value in shown.items())]


@pytest.fixture(scope="session")
def port(request: pytest.FixtureRequest):
    """The port under test."""
    from parity.ports import load_port

    return load_port(request.config.getoption("port"))


@pytest.fixture(scope="session")
def parity_seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("parity_seed")


@pytest.fixture(scope="session")
def opened() -> dict:
    """Sessions that are open already; checks of one worker share them."""
    return {}
