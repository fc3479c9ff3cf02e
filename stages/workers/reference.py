"""The reference on one training rank: a frozen model that scores what the policy sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoTokenizer

from schemas.errors import RecipeError
from schemas.recipe import ModelConfig
from stages.workers.automodel import build_policy
from stages.workers.collate import TrainRow, collate
from stages.workers.device import Device
from stages.workers.head import ScoringHead


class Reference:
    def __init__(self, model: ModelConfig, path: str, device: Device) -> None:
        """Load `path` as the policy is loaded; collective over all ranks. RecipeError unless both have one vocabulary:
        the same token id must mean the same."""
        ours, theirs = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (model.path, path))
        if ours != theirs:
            differing = sorted(ours.items() ^ theirs.items())[:4]
            raise RecipeError(
                f"reference.path: {path} has another vocabulary than model.path = {model.path} ({len(theirs)} and "
                f"{len(ours)} tokens, different for example {differing}); allowed: a model with the same tokenizer"
            )
        self._model = build_policy(model.model_copy(update={"path": path}), device).model
        self._model.requires_grad_(False)
        self._device = next(self._model.parameters()).device
        self._score = ScoringHead(self._model)

    @torch.no_grad()
    def logprobs(self, microbatches: Sequence[Sequence[TrainRow]]) -> list[list[list[float]]]:
        """Log-probs of the sampled tokens of each row. Every rank must call this with as many microbatches."""
        found = []
        for rows in microbatches:
            batch = collate(rows, self._device)
            scores = self._score(batch, batch.sampled).logprobs.cpu()
            found.append(
                [
                    values[: len(row.token_ids)][row.mask.sampled].tolist()
                    for row, values in zip(rows, scores, strict=False)
                ]
            )
        return found
