"""Options of the test-suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runs", type=int, default=1, help="runs of each chaos test; the long form has more")


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--runs"))
