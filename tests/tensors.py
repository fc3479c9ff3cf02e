"""Small tensors and how numbers worked out by hand are compared with them."""

from __future__ import annotations

import pytest
import torch

TRUE = torch.tensor([[True, True, True]])


def close(*values: float, abs: float = 1e-4) -> object:
    return pytest.approx(list(values), abs=abs)


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
