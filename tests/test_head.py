"""What the trainer asks of a model's head, with models small enough to be written here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from schemas.errors import RecipeError
from stages.workers.collate import collate
from stages.workers.head import ScoringHead

Change = Callable[[torch.Tensor], torch.Tensor]


class Tiny(torch.nn.Module):
    """Embedding and head; `change` is what it does to its logits."""

    def __init__(self, change: Change, head: torch.nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(7, 4)
        self.lm_head = head or torch.nn.Linear(4, 7)
        self.change = change

    def forward(self, input_ids: torch.Tensor, **options: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.change(self.lm_head(self.embed(input_ids))))


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits,
        lambda logits: logits / 7,
        lambda logits: torch.tanh(logits / 0.5) * 0.5,
    ],
    ids=["nothing", "scaled", "capped"],
)
def test_what_the_model_does_to_its_logits_is_in_the_scores(change: Change) -> None:
    model = Tiny(change)
    head = ScoringHead(model, chunk_tokens=2)
    batch = collate([], torch.device("cpu"))
    scored = torch.tensor([[True, True]])
    logprobs, entropy = head(batch, scored, with_entropy=True)
    expected = model(batch.token_ids).logits[0, 0].log_softmax(-1)
    assert entropy is not None
    torch.testing.assert_close(logprobs, torch.stack([torch.zeros(()), expected[0]])[None], rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy[0, 1], -(expected.exp() * expected).sum(), rtol=0, atol=1e-6)
    assert head(batch, scored).entropy is None


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits + 1,
        lambda logits: logits / logits.norm(dim=-1, keepdim=True),
        lambda logits: logits.clamp(-9, 9),
    ],
    ids=["shifted", "normalised", "clamped"],
)
def test_a_model_that_changes_its_logits_in_another_way_is_refused(change: Change) -> None:
    with pytest.raises(RecipeError, match=r"model.path: Tiny changes its logits .*; allowed: models that leave them"):
        ScoringHead(Tiny(change))


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    class Normalised(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(hidden, torch.nn.functional.normalize(self.weight))

    with pytest.raises(RecipeError, match="Tiny has the head Normalised; allowed: models whose output layer is torch"):
        ScoringHead(Tiny(lambda logits: logits, Normalised(4, 7, bias=False)))


def test_a_model_that_goes_around_its_head_is_refused() -> None:
    class Around(Tiny):
        def forward(self, input_ids: torch.Tensor, **options: object) -> SimpleNamespace:
            return SimpleNamespace(logits=self.embed(input_ids) @ self.lm_head.weight.T)

    with pytest.raises(RecipeError, match="Around does not call its head"):
        ScoringHead(Around(lambda logits: logits))


def test_a_rank_without_anything_to_score_takes_part_in_the_backward() -> None:
    model = Tiny(lambda logits: logits)
    scores = ScoringHead(model)(collate([], torch.device("cpu")), torch.zeros(1, 2, dtype=torch.bool))
    assert scores.logprobs.tolist() == [[0, 0]]
    scores.logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
