"""What the cluster refuses before it waits for workers that Ray can never place."""

from __future__ import annotations

import pytest

from schemas.errors import RecipeError
from stages.workers.cluster import check_gpus


def test_too_few_gpus_are_refused_with_both_numbers() -> None:
    check_gpus(0, 0)
    check_gpus(2, 2)
    with pytest.raises(RecipeError, match=r"need 2 GPUs, Ray has 1; allowed: fewer .* or device=cpu"):
        check_gpus(2, 1)
