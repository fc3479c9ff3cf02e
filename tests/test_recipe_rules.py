"""Combinations of algorithms that mean nothing, or something else than they say, are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.builders import recipe

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "groups of one": (
        {"rollout": {"group_size": 1, "min_group_size": 1, "sampling": {"max_tokens": 8}}},
        "min_group_size: found 1 .* which compares rollouts of one prompt; allowed: 2 and more",
    ),
    "k1 in the loss": ({"kl": {"coef": 0.1, "kind": "k1"}}, "kind: found k1 with place = loss"),
    "k1 in the loss, switched off": ({"kl": {"kind": "k1"}}, "kind: found k1 with place = loss"),
    "k3 in the reward": ({"kl": {"kind": "k3", "place": "reward"}}, "kind: found k3 with place = reward.*allowed: k1"),
    "KL in the reward of a group estimator": (
        {"kl": {"coef": 0.1, "kind": "k1", "place": "reward"}},
        "kl.place: found reward with advantage.type = grpo.*allowed: loss, or advantage.type = reinforce",
    ),
    "clip of a sequence": ({"correction": {"level": "seq", "mode": "clip"}}, "mode: found clip with level = seq"),
    "trunc of a divergence": (
        {"correction": {"mode": "trunc", "gate": "tv", "low": 0}},
        "mode: found trunc with level = token, gate = tv",
    ),
    "divergence of a geometric mean": (
        {"correction": {"level": "geo", "gate": "binary_kl", "low": 0}},
        "gate: found binary_kl with level = geo",
    ),
    "distance with a lower bound": ({"correction": {"gate": "tv"}}, "low: found 0.5 with gate = tv"),
    "band without 1": ({"correction": {"low": 1.5}}, r"low, high: found \[1.5, 5.0\]; allowed: a band that contains 1"),
    "no correction of lagging tokens": ({"correction": {"level": "off"}}, "correction.level: found off with window"),
    "both length penalties": (
        {"reward": {"overlong": {"buffer_tokens": 10}, "truncated_factor": 0.5}},
        "overlong, truncated_factor: found both",
    ),
    "a ramp longer than the context": (
        {"reward": {"overlong": {"buffer_tokens": 5000}}},
        "reward.overlong.buffer_tokens: found 5000; allowed: at most agent.max_context_tokens = 2048",
    ),
    "a reward clip that is reversed": ({"reward": {"clip": [1, 0]}}, r"clip: found \[1.0, 0.0\]"),
    "more than all of a truncated reward": ({"reward": {"truncated_factor": 1.5}}, "less than or equal to 1"),
    "a pass rate below 0": (
        {"advantage": {"type": "maxrl"}, "reward": {"truncated_factor": -1}},
        "advantage.type: found maxrl with a reward that shaping makes negative",
    ),
    "more minibatches than groups": (
        {"loss": {"type": "ppo", "minibatches": 33}},
        "loss.minibatches: found 33; allowed: at most rollout.batch_groups = 32",
    ),
    "a dual clip within the clip": ({"loss": {"type": "ppo", "dual_clip": 1}}, "greater than 1"),
    "a CISPO ceiling below 1": ({"loss": {"type": "cispo", "high": 0.9}}, "greater than or equal to 1"),
    "a clip of the whole ratio": ({"loss": {"type": "ppo", "clip_low": 1}}, "less than 1"),
    "temperature 0": ({"rollout": {"sampling": {"temperature": 0, "max_tokens": 8}}}, "temperature: found 0; allowed"),
    "top_p": ({"rollout": {"sampling": {"top_p": 0.9, "max_tokens": 8}}}, "rollout.sampling: found top_p=0.9"),
    "an adaptive KL without weight": ({"kl": {"target": 0.1}}, "target: found 0.1 with coef = 0"),
    "a distillation without teacher": (
        {"advantage": {"type": "on_policy_distill"}},
        "reference: found none with advantage.type = on_policy_distill; allowed: reference.path",
    ),
    "a KL to a reference that is not there": (
        {"kl": {"coef": 0.1, "to": "reference"}},
        "reference: found none with kl.to = reference",
    ),
    "a reference without use": ({"reference": {"path": "m"}}, "reference: found one that nothing uses"),
    "a distillation that drops equal rewards": (
        {
            "advantage": {"type": "on_policy_distill"},
            "reference": {"path": "m"},
            "filtering": {"zero_variance": "drop"},
        },
        "zero_variance: found drop with advantage.type = on_policy_distill",
    ),
    "an estimator that nobody has": ({"advantage": {"type": "gpro"}}, "does not match any of the expected tags"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_combination_without_meaning_is_refused(name: str) -> None:
    parts, problem = REFUSED[name]
    with pytest.raises(ValidationError, match=problem):
        recipe(**parts)


@pytest.mark.parametrize(
    "parts",
    [
        {"advantage": {"type": "reinforce"}, "kl": {"coef": 0.1, "kind": "k1", "place": "reward"}},
        {
            "advantage": {"type": "flash_reinforce"},
            "rollout": {"group_size": 1, "min_group_size": 1, "sampling": {"max_tokens": 8}},
        },
        {"correction": {"level": "seq", "gate": "binary_kl", "low": 0, "high": 0.01}},
        {"advantage": {"type": "on_policy_distill"}, "reference": {"path": "m"}},
        {"kl": {"coef": 0.1, "to": "reference"}, "reference": {"path": "m"}},
        {"correction": {"mode": "trunc"}, "loss": {"type": "gspo"}},
        {"kl": {"coef": 0.1, "kind": "k3+", "target": 0.05}},
        {"correction": {"level": "off"}, "window": {"max_policy_lag": 0}},
    ],
)
def test_what_means_something_is_taken(parts: dict[str, Any]) -> None:
    recipe(**parts)
