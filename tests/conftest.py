"""Options of the test-suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runs", type=int, default=1, help="runs of each chaos test; the long form has more")
    parser.addoption("--long", action="store_true", help="also what the short form of the tests leaves out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what installs programs, unless it is asked for by its mark."""
    if "harnesses" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("harnesses")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--runs"))
