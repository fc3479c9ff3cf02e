"""ScoringHead: log-probs and entropy of chosen tokens out of a model's forward, without its logits in memory.

    model(...) -> hidden states -> [head: hidden states of the scored positions -> scores, chunk by chunk] -> output

The work is done where the model calls its head: there FSDP has gathered the head's weights (tied to the embedding or
not) in compute precision, and it reduces their gradients as for any forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear

from schemas.errors import RecipeError
from stages.algorithms.logprobs import TokenScores, chunked_scores
from stages.algorithms.objective import Microbatch

Change = Callable[[torch.Tensor], torch.Tensor]


class Scores(NamedTuple):
    """[rows, seq] in float32, 0 where no score was asked for. `entropy` is that of the prediction of the token."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


class ScoringHead:
    def __init__(self, model: torch.nn.Module, chunk_tokens: int | None = None) -> None:
        """Takes the place of the head's forward; `model(...)` alone gives logits as before. Collective over all ranks.

        RecipeError for a head that is no plain linear layer, and for a model that changes its logits in another way
        than by a factor or soft-capping.
        """
        from nemo_automodel.components.utils.model_utils import get_lm_head_module

        head = get_lm_head_module(model)
        if not isinstance(head, torch.nn.Linear) or type(head).forward is not torch.nn.Linear.forward:
            raise RecipeError(
                f"model.path: {type(model).__name__} has the head {type(head).__name__}; allowed: models whose "
                "output layer is torch.nn.Linear, such as Qwen3"
            )
        self._model = model
        self._head = head
        self._chunk_tokens = chunk_tokens
        self._request: Change | None = None
        head.forward = self._forward
        self._change = self._measure_change()

    def __call__(self, batch: Microbatch, scored: torch.Tensor, with_entropy: bool = False) -> Scores:
        """Score the tokens of `batch` where `scored` [rows, seq] is true, each given those before it. The first token
        of a row has no prediction and gets 0. Every rank must call this equally often, if only for no token."""
        rows, before = scored[:, 1:].nonzero(as_tuple=True)  # the position before a token predicts it
        places = (rows, before + 1)
        found: list[TokenScores] = []

        def score(hidden: torch.Tensor) -> torch.Tensor:
            parameters = [self._head.weight, *([] if self._head.bias is None else [self._head.bias])]
            ids, temperatures = batch.token_ids[places][:, None], batch.temperatures[places]
            arguments = (hidden[rows, before], self._logits, parameters, ids, temperatures)
            found.append(chunked_scores(*arguments, with_entropy, self._chunk_tokens))
            # FSDP gathers weights for the backward when gradients reach what the head and the model return
            return hidden.new_zeros(*hidden.shape[:-1], 1) + _nothing_of(found[0].logprobs)

        output = self._run(score, batch.token_ids, batch.attention_mask)
        empty = torch.zeros(scored.shape, device=scored.device) + _nothing_of(output)
        logprobs, entropy = found[0]
        return Scores(
            empty.index_put(places, logprobs[:, 0]), None if entropy is None else empty.index_put(places, entropy)
        )

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        request, self._request = self._request, None
        return linear(hidden, self._head.weight, self._head.bias) if request is None else request(hidden)

    def _logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._change(linear(hidden, weight, bias))

    def _run(self, request: Change, token_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """What the model returns as logits when its head gives the answer to `request`."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        self._request = request
        output = self._model(
            input_ids=token_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
        )
        if self._request is not None:
            raise RecipeError(f"model.path: {type(self._model).__name__} does not call its head; allowed: ones that do")
        return output if isinstance(output, torch.Tensor) else output.logits

    @torch.no_grad()
    def _measure_change(self) -> Change:
        """What the model does to its logits behind the head, found by handing it logits that are known."""
        device = next(self._model.parameters()).device
        usual = torch.linspace(-80, 80, self._head.out_features, device=device)
        known = torch.stack([usual, torch.full_like(usual, 1e9)])  # [seq, vocab]; the second tells a factor or a cap
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
        found = self._run(lambda hidden: known[None], tokens, torch.ones_like(tokens))[0].float()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # else the root would keep its weights gathered until the first backward
        end = float(found[1, 0])
        changes: list[Change] = [lambda logits: logits]
        changes.append(lambda logits: logits * (end / 1e9))
        changes.append(lambda logits: torch.tanh(logits / end) * end)
        for change in changes:
            if torch.allclose(change(known), found, rtol=1e-5, atol=1e-5):
                return change
        raise RecipeError(
            f"model.path: {type(self._model).__name__} changes its logits behind its head in a way that is not known; "
            "allowed: models that leave them, scale them or cap them with tanh"
        )


def _nothing_of(tensor: torch.Tensor) -> torch.Tensor:
    """0 that gradients flow through, whatever the tensor holds."""
    return tensor.flatten()[:0].sum().float()
