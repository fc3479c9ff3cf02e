"""Scores of chosen tokens against full logits, on real models that FSDP2 shards over one rank and over two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from schemas.recipe import ModelConfig
from stages.algorithms.logprobs import token_scores
from stages.algorithms.objective import Microbatch
from stages.workers.automodel import build_policy
from stages.workers.device import CPU
from stages.workers.head import ScoringHead
from tests.real.ranks import on_ranks

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

VOCAB = 61
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {"tie_word_embeddings": True},  # a class of AutoModel's own, head and embedding share their weight
    "Llama": {"tie_word_embeddings": False},  # the same with a head that FSDP shards as a unit of its own
    "Gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},  # Hugging Face's classes from here on
    "Granite": {"logits_scaling": 0.3, "tie_word_embeddings": False},
    "Cohere": {"logit_scale": 3.0},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        torch.manual_seed(1)
        config = getattr(transformers, f"{name}Config")(**TINY | options)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder / name)
    return folder


def test_scores_and_gradients_are_those_of_full_logits_on_one_rank_and_on_two(models: Path, tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        on_ranks(num_ranks, _compare, models, tmp_path / f"{num_ranks}")
    one, two = (torch.load(tmp_path / f"{num_ranks}", weights_only=True) for num_ranks in (1, 2))
    assert one.keys() == two.keys()
    for name, gradient in one.items():
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(two[name], gradient, rtol=1e-5, atol=1e-6)


def _microbatches() -> list[Microbatch]:
    """This rank's share of four microbatches of two rows: the last one has nothing to train."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for index in range(4):
        shape = (2, 12)
        attention = torch.ones(shape, dtype=torch.int64)
        attention[1, 9:] = 0
        trained = (torch.rand(shape, generator=generator) < 0.6) & (attention > 0) & torch.tensor(index != 3)
        made.append(
            Microbatch(
                token_ids=torch.randint(0, VOCAB, shape, generator=generator),
                attention_mask=attention,
                sampled=trained,
                trained=trained,
                rollout_logprobs=torch.zeros(shape),
                temperatures=torch.rand(shape, generator=generator) + 0.5,
                advantages=torch.randn(shape, generator=generator),
                row_weights=torch.ones(2),
            )
        )
    return made[dist.get_rank() :: dist.get_world_size()]


def _build(models: Path, name: str, dtype: Any) -> torch.nn.Module:
    config = ModelConfig(path=str(models / name), dtype=dtype, attention="eager" if name == "Gemma2" else "sdpa")
    return build_policy(config, CPU).model


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name, which are gone from the model afterwards."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    model.zero_grad()
    return found


def _loss(batch: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    per_token = logprobs * batch.advantages + 0.1 * entropy
    return torch.where(batch.trained, per_token, 0.0).sum() * dist.get_world_size() / 40


def _compare(models: Path, path: Path) -> None:
    """By scores and by full logits; keeps the float32 gradients."""
    dist.init_process_group("gloo")
    kept = {}
    for name in MODELS:
        for dtype, near in (("float32", 1e-6), ("bfloat16", 2e-2)):
            model = _build(models, name, dtype)
            head = ScoringHead(model, chunk_tokens=4)
            is_sharded = dist.get_world_size() > 1 or dtype != "float32"
            assert all(isinstance(p, DTensor) for p in model.parameters()) == is_sharded
            scores = [_by_head(head, batch) for batch in _microbatches()]
            found = _gradients(model)
            expected_scores = [_by_logits(model, batch, getattr(torch, dtype)) for batch in _microbatches()]
            expected = _gradients(model)
            for pair, expected_pair in zip(scores, expected_scores, strict=True):
                for tensor, wanted in zip(pair, expected_pair, strict=True):
                    torch.testing.assert_close(tensor, wanted, rtol=near, atol=3 * near)
            assert found.keys() == expected.keys()
            for key, gradient in found.items():
                size = max(1, float(expected[key].abs().max()))
                torch.testing.assert_close(gradient, expected[key], rtol=near, atol=near * size, msg=f"{name} {key}")
            if dtype == "float32":
                kept |= {f"{name} {key}": gradient for key, gradient in found.items()}
    if dist.get_rank() == 0:
        torch.save(kept, path)


def _by_head(head: ScoringHead, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropy = head(batch, batch.trained, with_entropy=True)
    assert entropy is not None
    _loss(batch, logprobs, entropy).backward()
    return logprobs.detach(), entropy.detach()


def _by_logits(model: torch.nn.Module, batch: Microbatch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As the model itself computes them, at once and for all positions."""
    positions = torch.arange(batch.token_ids.shape[1]).expand_as(batch.token_ids)
    output = model(
        input_ids=batch.token_ids, attention_mask=batch.attention_mask, position_ids=positions, use_cache=False
    )
    logits = (output if isinstance(output, torch.Tensor) else output.logits)[:, :-1]
    assert logits.dtype == dtype
    scores = token_scores(
        logits.reshape(-1, VOCAB), batch.token_ids[:, 1:].reshape(-1, 1), batch.temperatures[:, 1:].reshape(-1), True
    )
    assert scores.entropy is not None
    logprobs, entropy = (
        torch.nn.functional.pad(tensor.reshape(logits.shape[:2]), (1, 0))
        for tensor in (scores.logprobs, scores.entropy)
    )
    _loss(batch, logprobs, entropy).backward()
    scored = batch.trained.clone()
    scored[:, 0] = False
    return torch.where(scored, logprobs, 0).detach(), torch.where(scored, entropy, 0).detach()
