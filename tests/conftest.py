"""Options of the test-suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runs", type=int, default=1, help="runs of each chaos test; the long form has more")
    parser.addoption("--long", action="store_true", help="also what the short form of the tests leaves out")


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--runs"))
