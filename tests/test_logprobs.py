"""Log-probs and entropy: values by hand, chunks against full logits, and what a forward and backward allocates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stages.algorithms.logprobs import chunked_scores, token_scores, token_temperatures
from tests.tensors import close


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        # logits / T = 2, 1, 0: log(e^2 + e + 1) = 2.4076
        (1.0, [2 - 2.4076, 1 - 2.4076, 0 - 2.4076]),
        # logits / T = 3.3333, 1.6667, 0: log of the sum of exponentials = 3.5359
        (0.6, [-0.2026, -1.8692, -3.5359]),
    ],
)
def test_logprobs_are_those_of_the_tempered_softmax(temperature: float, expected: list[float]) -> None:
    scores = token_scores(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0, 1, 2]]), torch.tensor([temperature]))
    assert scores.logprobs[0].tolist() == close(*expected) and scores.entropy is None


def test_each_token_has_the_logprob_of_the_temperature_that_sampled_it() -> None:
    # prompt, a turn of two tokens at 0.6, an observation, a turn of one token at 2: logits / 2 = 1, 0.5, 0, whose
    # exponentials add up to e^1.6802
    turns = [{"temperature": 0.6}, {"temperature": 2.0}]
    spans = [{"start": 1, "end": 2, "turn": 0}, {"start": 2, "end": 3, "turn": 0}, {"start": 4, "end": 5, "turn": 1}]
    temperatures = token_temperatures(spans, turns, 5)
    assert temperatures.tolist() == close(1, 0.6, 0.6, 1, 2)
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(4, 3)
    scores = token_scores(logits, torch.tensor([[0], [1], [2], [1]]), temperatures[1:])
    assert scores.logprobs[:, 0].tolist() == close(-0.2026, -1.8692, -2.4076, 0.5 - 1.6802)


def test_a_span_of_a_turn_that_is_not_stored_is_refused() -> None:
    with pytest.raises(ValueError, match="belongs to none of the segment's 1 turns"):
        token_temperatures([{"start": 0, "end": 1, "turn": 1}], [{"temperature": 1.0}], 1)


def test_entropy_is_that_of_the_tempered_softmax() -> None:
    # 1/4, 1/4, 1/2: 2 x 1/4 log 4 + 1/2 log 2 = 1.0397. The square root of the odds at T = 2: 1, 1, sqrt(2) over
    # 3.4142, so 0.2929, 0.2929, 0.4142: 2 x 0.2929 x 1.2279 + 0.4142 x 0.8814 = 1.0844. Even odds: log 3 = 1.0986
    logits = torch.tensor([[1.0, 1.0, 2.0], [1.0, 1.0, 2.0], [7.0, 7.0, 7.0]]).log()
    scores = token_scores(logits, torch.zeros(3, 1, dtype=torch.int64), torch.tensor([1.0, 2.0, 1.0]), True)
    assert scores.entropy is not None and scores.entropy.tolist() == close(1.0397, 1.0844, 1.0986)


def test_entropy_of_a_certain_prediction_is_zero_and_finite() -> None:
    logits = torch.tensor([[500.0, -500.0, 0.0]], requires_grad=True)
    scores = token_scores(logits, torch.tensor([[0]]), torch.tensor([0.01]), True)
    assert scores.entropy is not None and scores.entropy.tolist() == [0]
    scores.entropy.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_what_cannot_be_sampled_has_no_part_in_the_entropy() -> None:
    # the third token is gone: log(e^2 + e) = 2.3133; of two equal ones the entropy is ln 2
    logits = torch.tensor([[2.0, 1.0, -math.inf], [1.0, 1.0, -math.inf]]).requires_grad_()
    scores = token_scores(logits, torch.tensor([[0], [1]]), torch.ones(2), with_entropy=True)
    assert scores.logprobs[:, 0].tolist() == close(2 - 2.3133, -math.log(2))
    assert scores.entropy is not None and scores.entropy[1].item() == pytest.approx(math.log(2))
    scores.entropy.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_logprobs_of_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.bfloat16)
    scores = token_scores(logits, torch.tensor([[1]]), torch.ones(1))
    assert scores.logprobs.dtype == torch.float32 and scores.logprobs.item() == pytest.approx(-1.4076, abs=1e-4)


# ---- chunks ----


def case(tokens: int, vocab: int = 13, k: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return {
        "hidden": torch.randn(tokens, 8, generator=generator).to(dtype).requires_grad_(),
        "weight": torch.randn(vocab, 8, generator=generator).to(dtype).requires_grad_(),
        "bias": torch.randn(vocab, generator=generator).to(dtype).requires_grad_(),
        "ids": torch.randint(0, vocab, (tokens, k), generator=generator),
        "temperatures": torch.rand(tokens, generator=generator) + 0.5,
        "weights": torch.randn(tokens, k + 1, generator=generator),
    }


def capped(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.tanh(linear(hidden, weight, bias) / 3) * 3


def results(given: dict[str, torch.Tensor], chunk_tokens: int | None, entropy: bool = True) -> list[torch.Tensor]:
    """Scores and the gradients of hidden states, weight and bias; without chunks if `chunk_tokens` is 0."""
    inputs = [given[name] for name in ("hidden", "weight", "bias")]
    hidden, *parameters = inputs
    if chunk_tokens == 0:
        scores = token_scores(capped(hidden, *parameters), given["ids"], given["temperatures"], entropy)
    else:
        arguments = (hidden, capped, parameters, given["ids"], given["temperatures"], entropy, chunk_tokens)
        scores = chunked_scores(*arguments)
    columns = [scores.logprobs] + ([scores.entropy[:, None]] if scores.entropy is not None else [])
    joined = torch.cat(columns, 1)
    gradients = torch.autograd.grad((joined * given["weights"][:, : joined.shape[1]]).sum(), inputs)
    return [joined.detach(), *gradients]


@settings(deadline=None, max_examples=40)
@given(tokens=st.integers(0, 20), k=st.integers(1, 3), chunk=st.integers(1, 25) | st.none(), entropy=st.booleans())
def test_chunks_give_the_scores_and_gradients_of_full_logits(
    tokens: int, k: int, chunk: int | None, entropy: bool
) -> None:
    given = case(tokens, k=k)
    for found, expected in zip(results(given, chunk, entropy), results(given, 0, entropy), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)


def test_gradients_of_bfloat16_parameters_are_added_up_in_float32() -> None:
    given = case(512, dtype=torch.bfloat16)
    exact = results(
        {name: t.detach().float().requires_grad_() if t.requires_grad else t for name, t in given.items()}, 0
    )
    errors = [float((results(given, chunk)[2].float() - exact[2]).norm() / exact[2].norm()) for chunk in (512, 1)]
    assert errors[1] < 1.2 * errors[0], (
        "512 chunks lose no more than one: adding up in bfloat16 would lose 4 times more"
    )


def test_a_weight_that_is_frozen_gets_no_gradient() -> None:
    given = case(6)
    weight = given["weight"].detach()
    arguments = (given["ids"], given["temperatures"], False, 2)
    scores = chunked_scores(given["hidden"], capped, [weight, given["bias"]], *arguments)
    hidden, bias = torch.autograd.grad(scores.logprobs.sum(), [given["hidden"], given["bias"]])
    assert hidden.any() and bias.any()
    frozen = chunked_scores(given["hidden"].detach(), capped, [weight, given["bias"].detach()], *arguments)
    assert not frozen.logprobs.requires_grad and torch.equal(frozen.logprobs, scores.logprobs)


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    given = case(4)
    with pytest.raises(ValueError, match=r"found shapes \[\[4, 8\], \[4\], \[4\]\]; allowed: \[tokens, hidden\]"):
        chunked_scores(given["hidden"], capped, [given["weight"], given["bias"]], given["ids"][:, 0], torch.ones(4))


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor that any operation gave, forward and backward."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        sizes = [leaf.untyped_storage().nbytes() // 4 for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


def largest(tokens: int, vocab: int, chunk_tokens: int) -> int:
    given = case(tokens, vocab)
    with Allocations() as allocations:
        results(given, chunk_tokens)
    return allocations.largest


@pytest.mark.parametrize(("tokens", "vocab"), [(40, 500), (400, 500), (400, 2000)])
def test_memory_is_that_of_a_chunk_and_of_what_comes_in(tokens: int, vocab: int) -> None:
    # a chunk of 10 tokens x the vocabulary, or the hidden states of 8 numbers a token, or the weight of 8 a vocable
    assert largest(tokens, vocab, chunk_tokens=10) == max(10 * vocab, 8 * tokens, 8 * vocab)
    assert largest(tokens, vocab, chunk_tokens=0) == tokens * vocab


def test_what_is_kept_for_the_backward_does_not_grow_with_the_vocabulary() -> None:
    kept = []
    for vocab in (500, 2000):
        given = case(100, vocab)
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            parameters = [given["weight"], given["bias"]]
            chunked_scores(given["hidden"], capped, parameters, given["ids"], given["temperatures"], True, 10)
        kept.append(sum(sizes) - 9 * vocab)  # weight and bias are there anyway
    assert kept[0] == kept[1] == 100 * (8 + 1 + 1), "hidden states, one id and one temperature a token"
