"""Sampling that user code chooses turn by turn: what may be asked for, and what the trainer could not compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from schemas.errors import AgentError
from schemas.recipe import MIN_TEMPERATURE, SamplingConfig

DISTRIBUTION = ("temperature", "top_p", "top_k")
"""The parameters that decide from which distribution a token is drawn."""


def chosen(recipe: SamplingConfig, last: SamplingConfig, given: Any) -> SamplingConfig:
    """The sampling of the next turns: `last`, with the keys of a mapping changed, or another SamplingConfig.

    Raises AgentError for what cannot be, and for a distribution that is not the recipe's and cannot be trained.
    """
    if given is None:
        return last
    values = given.model_dump(warnings=False) if isinstance(given, SamplingConfig) else given
    names = ", ".join(SamplingConfig.model_fields)
    if not isinstance(values, Mapping):
        found = f"sampling_params: found a {type(given).__name__}"
        raise AgentError(f"{found}; allowed: a mapping with some of {names}, or a SamplingConfig")
    try:
        sampling = SamplingConfig.model_validate(last.model_dump() | dict(values))
    except ValidationError as refused:
        first = refused.errors(include_url=False)[0]
        where = ".".join(map(str, ("sampling_params", *first["loc"])))
        allowed = names if first["type"] == "extra_forbidden" else first["msg"]
        raise AgentError(f"{where}: found {str(first['input'])[:80]}; allowed: {allowed}") from None
    asked = {name: getattr(sampling, name) for name in DISTRIBUTION}
    problem = untrainable({name: value for name, value in asked.items() if value != getattr(recipe, name)})
    if problem is not None:
        raise AgentError(f"sampling_params.{problem[1]}")
    return sampling


def untrainable(sampling: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first parameter at which the trainer could not compute log-probs, and what is wrong with it.

    The rules are those of `rollout.sampling`.
    """
    for name, fits, allowed in (
        ("temperature", lambda value: value >= MIN_TEMPERATURE, f"{MIN_TEMPERATURE} and more"),
        ("top_p", lambda value: value == 1, "1"),
        ("top_k", lambda value: value == -1, "-1"),
    ):
        if name in sampling and not fits(sampling[name]):
            return name, f"{name}: found {sampling[name]}; allowed: {allowed}, as what is sampled is trained"
    return None
