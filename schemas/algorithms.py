"""The algorithm's part of a recipe: reward, advantage, loss, correction, KL. A function of stages/algorithms each."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from schemas.config import Config, Function, NotNegative, Probability


class OverlongConfig(Config):
    buffer_tokens: PositiveInt
    """Length of the ramp that ends at `agent.max_context_tokens`; shorter rollouts lose nothing."""
    factor: NotNegative = 1.0
    """Reward taken away at the end of the ramp (DAPO's soft overlong punishment)."""


class RewardConfig(Config):
    weights: dict[str, float] = {}
    """Reward = sum of weight x component, by names of the agent's `reward_components`; unset takes its `reward`."""
    clip: tuple[float, float] | None = None
    """Lowest and highest reward that is trained, after all else."""
    overlong: OverlongConfig | None = None
    """Penalty of rollouts that come close to their token limit."""
    truncated_factor: Annotated[float, Field(le=1)] | None = None
    """Truncated rollouts get reward x factor; a factor below 0 is their reward itself. Unset changes nothing."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.clip and not self.clip[0] < self.clip[1]:
            raise ValueError(f"clip: found {list(self.clip)}; allowed: [low, high] with low < high")
        if self.overlong and self.truncated_factor is not None:
            raise ValueError("overlong, truncated_factor: found both; allowed: one of them, both punish length")
        return self


class GRPOAdvantage(Config):
    type: Literal["grpo"] = "grpo"
    """Reward minus the group's mean, over the group's standard deviation."""


class DrGRPOAdvantage(Config):
    type: Literal["dr_grpo"] = "dr_grpo"
    """Reward minus the group's mean; not divided, so that easy and hard prompts weigh the same."""


class RLOOAdvantage(Config):
    type: Literal["rloo"] = "rloo"
    """Reward minus the mean of the other rollouts of its group."""


class MaxRLAdvantage(Config):
    type: Literal["maxrl"] = "maxrl"
    """Reward minus the group's mean, over that mean: the gradient of the log of the pass rate. Rewards must be >= 0."""


class ReinforceBaselineAdvantage(Config):
    type: Literal["reinforce_baseline"] = "reinforce_baseline"
    """Reward minus the group's mean, whitened over the trained tokens of the batch."""


class FlashReinforceAdvantage(Config):
    type: Literal["flash_reinforce"] = "flash_reinforce"
    """Reward minus the mean of the batch, whatever its group."""


class ReinforceAdvantage(Config):
    type: Literal["reinforce"] = "reinforce"
    """REINFORCE++: discounted sum of the rewards to come, whitened over the trained tokens of the batch."""
    gamma: Probability = 1.0
    """Discount by sampled token."""
    whiten: bool = True
    """Mean 0 and variance 1 over the trained tokens of the batch."""


class OnPolicyDistillAdvantage(Config):
    type: Literal["on_policy_distill"] = "on_policy_distill"
    """Log-prob of the teacher minus that of the policy, by token; rewards play no part. `reference` is the teacher."""


class CustomAdvantage(Config):
    type: Literal["custom"] = "custom"
    """A function of your own."""
    function: Function
    """`f(rewards, groups) -> advantages`, tensors [rollouts], as those in stages/algorithms/estimators.py."""


AdvantageConfig = Annotated[
    GRPOAdvantage
    | DrGRPOAdvantage
    | RLOOAdvantage
    | MaxRLAdvantage
    | ReinforceBaselineAdvantage
    | FlashReinforceAdvantage
    | ReinforceAdvantage
    | OnPolicyDistillAdvantage
    | CustomAdvantage,
    Field(discriminator="type"),
]
BY_TOKEN = ("reinforce",)
"""Estimators whose advantage differs from token to token, so that a KL can be part of the reward."""
BY_GROUP = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_baseline")
"""Estimators that compare the rollouts of a prompt."""


class LossConfig(Config):
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean-token-mean"] = (
        "token-mean"
    )
    """How the tokens of an optimizer step become one number; policy, KL and entropy share it."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; above 0 favours policies that are less sure."""
    epochs: PositiveInt = 1
    """Passes over each batch."""
    minibatches: PositiveInt = 1
    """Optimizer steps of each pass; the groups of a batch are dealt to them by `run.seed`."""


class PolicyGradientLoss(LossConfig):
    type: Literal["policy_gradient"] = "policy_gradient"
    """Minus advantage times log-prob by token (REINFORCE), weighed by the importance correction."""


class PPOLoss(LossConfig):
    type: Literal["ppo"] = "ppo"
    """PPO's clipped ratio to the policy before the batch; with one optimizer step per batch it clips nothing."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Ratios below 1 - clip_low gain nothing more."""
    clip_high: NotNegative = 0.2
    """Ratios above 1 + clip_high gain nothing more."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on how much a token of negative advantage weighs, as a ratio; unset bounds nothing."""


class CISPOLoss(LossConfig):
    type: Literal["cispo"] = "cispo"
    """Log-prob weighed by the detached ratio, which is clipped instead of the gradient (MiniMax-M1)."""
    high: Annotated[float, Field(ge=1)] = 5.0
    """Largest ratio."""
    low: Probability = 0.0
    """Smallest ratio."""


class GSPOLoss(LossConfig):
    type: Literal["gspo"] = "gspo"
    """PPO with one ratio per segment, the geometric mean over its tokens (GSPO)."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 3e-4
    """Ratios below 1 - clip_low gain nothing more."""
    clip_high: NotNegative = 4e-4
    """Ratios above 1 + clip_high gain nothing more."""


class CustomLoss(LossConfig):
    type: Literal["custom"] = "custom"
    """A function of your own."""
    function: Function
    """`f(logprobs, old_logprobs, advantages, mask, **args) -> PolicyLoss`, as those in stages/algorithms/losses.py."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""


LossChoice = Annotated[PolicyGradientLoss | PPOLoss | CISPOLoss | GSPOLoss | CustomLoss, Field(discriminator="type")]


class CorrectionConfig(Config):
    level: Literal["off", "token", "seq", "geo"] = "token"
    """Unit of the importance correction between engine and trainer: token, product over a segment, its geometric mean.
    `off` needs `window.max_policy_lag` = 0."""
    mode: Literal["mask", "clip", "trunc"] = "mask"
    """Outside the band: weight 0, the band's edge, or (`trunc`) the edge above only."""
    gate: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """What is compared with the band: the importance ratio, or how far the token's two probabilities are apart."""
    low: NotNegative = 0.5
    """Lower edge of the band. What is masked stays in the denominator."""
    high: PositiveFloat = 5.0
    """Upper edge of the band. What is masked stays in the denominator."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.gate == "ratio" and not self.low <= 1 <= self.high:
            raise ValueError(f"low, high: found [{self.low}, {self.high}]; allowed: a band that contains 1")
        if self.mode != "mask" and (self.level not in ("off", "token") or self.gate != "ratio"):
            found = f"mode: found {self.mode} with level = {self.level}, gate = {self.gate}"
            raise ValueError(f"{found}; allowed: mask, or level = token with gate = ratio")
        if self.gate != "ratio" and self.level == "geo":
            raise ValueError(f"gate: found {self.gate} with level = geo; allowed: ratio, or level = token or seq")
        if self.gate != "ratio" and self.low > 0:
            raise ValueError(f"low: found {self.low} with gate = {self.gate}, a distance; allowed: 0")
        return self


class KLConfig(Config):
    coef: NotNegative = 0.0
    """Weight of the KL; 0 adds none."""
    to: Literal["rollout", "reference"] = "rollout"
    """What the policy is kept close to: the policy that sampled the token, or the frozen `reference`."""
    kind: Literal["k1", "k2", "k3", "k3+"] = "k2"
    """Estimate: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d with d = log pi - log ref. In the loss, only k2 and k3+ (the
    value of k3, the gradient of k2) have the gradient of the reverse KL; k1's is zero on average and is refused."""
    place: Literal["loss", "reward"] = "loss"
    """Beside the policy loss, or taken from the reward of each token (estimator reinforce)."""
    target: PositiveFloat | None = None
    """KL by token that an adaptive coefficient steers to; unset keeps `coef`."""
    horizon: PositiveFloat = 10_000.0
    """Rollouts over which the adaptive coefficient moves."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.place == "loss" and self.kind == "k1":
            raise ValueError(
                "kind: found k1 with place = loss, whose gradient is zero on average; allowed: k2 (its unbiased form), "
                "k3, k3+"
            )
        if self.target is not None and self.coef == 0:
            raise ValueError(f"target: found {self.target} with coef = 0; allowed: a coef to start from")
        if self.place == "reward" and self.kind != "k1":
            found = f"kind: found {self.kind} with place = reward"
            raise ValueError(f"{found}, where only the log-ratio has the gradient of the reverse KL; allowed: k1")
        return self
