"""The recipe: everything that decides a run, as frozen pydantic models. Unknown keys are refused.

A run never fails after its start for something that the recipe knew, so rules across fields are validators here.
The string under a field is its documentation: unit and effect. `schemas/loading.py` reads YAML into these models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from schemas.algorithms import (
    BY_GROUP,
    BY_TOKEN,
    AdvantageConfig,
    CorrectionConfig,
    GRPOAdvantage,
    KLConfig,
    LossChoice,
    PolicyGradientLoss,
    RewardConfig,
)
from schemas.config import Config, Text
from schemas.optimizer import AdamWOptimizer, OptimizerConfig

MIN_TEMPERATURE = 0.01
"""Lowest at which vLLM samples; it takes this instead of anything lower, and the trainer would not know."""

DECIDED_ENGINE_ARGS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "agent.max_context_tokens",
    "max_num_seqs": "engine.max_num_seqs",
    "kv_cache_memory_bytes": "engine.kv_cache_bytes",
    "seed": "run.seed and the number of the engine",
    "logprobs_mode": "fixed: the log-probs must be those of what was sampled from",
    "worker_extension_cls": "fixed: refits go through it",
    "weight_transfer_config": "fixed: refits go through it",
    "speculative_config": "refused: its log-probs were not checked against the trainer's",
    "quantization": "refused: the trainer computes in model.dtype",
    "kv_cache_dtype": "refused: the trainer computes in model.dtype",
    "load_format": "refused: engine and trainer start from the same weights",
}
"""Arguments of vLLM that the recipe decides elsewhere: in two places, engine and trainer could disagree."""


class RunConfig(Config):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Identifies the run; running the same name again resumes it."""
    root: str = "runs"
    """Folder or fsspec URI that holds the run folders."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Decides prompt order, sampling seeds and weight initialisation."""


class ModelConfig(Config):
    path: Text
    """Local folder in Hugging Face layout (config, weights, tokenizer, chat template), or a hub id `org/name`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute precision of trainer and engine alike; master weights are always float32."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of the trainer."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    trust_remote_code: bool = False
    """Allow Python code that ships with the checkpoint to run."""


class PromptsConfig(Config):
    path: Text
    """JSONL file of prompts, local or fsspec URI."""
    prompt: str = "prompt"
    """Column with the prompt: a string (one user message) or a list of chat messages."""
    label: str = "label"
    """Column that the environment grades against; rows without it get null."""
    tools: str = "tools"
    """Column with tool definitions in OpenAI's form, offered to the policy in its prompt; rows may be without."""
    shuffle: bool = True
    """New order every epoch, drawn from `run.seed`; false keeps the order of the file."""


class AgentConfig(Config):
    entry: Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]
    """`module:Class` or `path/to/file.py:Class`, a subclass of `stages.agents.Env` or `ChatAgent`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the constructor."""
    max_turns: PositiveInt = 16
    """Model calls per rollout; reaching it truncates the rollout."""
    max_context_tokens: PositiveInt = 2048
    """Prompt, sampled and observation tokens of one rollout; reaching it truncates the rollout."""
    timeout_seconds: PositiveFloat = 600.0
    """Deadline of one rollout, tools included; past it the rollout is recorded as `timeout`."""
    num_hosts: PositiveInt = 1
    """Processes that run agents."""
    honor_request_sampling: bool = False
    """A `ChatAgent`'s requests decide the temperature they are sampled and trained at; `top_p`, `top_k` are refused."""


class SamplingConfig(Config):
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits, in the engine and in the trainer's log-probs alike."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus size. Training needs 1: the trainer's log-probs are over the whole vocabulary."""
    top_k: int = -1
    """Candidates kept; -1 keeps all. Training needs -1, as for `top_p`."""
    max_tokens: PositiveInt = 512
    """Tokens sampled in one turn."""
    stop: list[Text] = []
    """Strings that end a turn, beside the model's own end-of-turn token."""

    @model_validator(mode="after")
    def _top_k_is_all_or_some(self) -> Self:
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k: found {self.top_k}; allowed: -1 (all tokens) or 1 and more")
        return self


class RolloutConfig(Config):
    batch_groups: PositiveInt = 32
    """Groups (prompts) trained between two refits."""
    group_size: PositiveInt = 8
    """Rollouts of each prompt."""
    min_group_size: PositiveInt = 2
    """Rollouts that must succeed; a group with fewer is dropped and counted."""
    max_failed_groups: PositiveInt = 64
    """Failed or too small groups in a row after which the run stops and says why."""
    sampling: SamplingConfig = SamplingConfig()

    @model_validator(mode="after")
    def _group_can_be_large_enough(self) -> Self:
        if self.min_group_size > self.group_size:
            found = f"min_group_size: found {self.min_group_size}"
            raise ValueError(f"{found}; allowed: at most group_size = {self.group_size}")
        return self


class WindowConfig(Config):
    max_policy_lag: Annotated[int, Field(ge=0)] = 1
    """Refits that a trained token may be behind the trainer. 0 is on-policy."""
    stale: Literal["mask", "wait", "drop"] = "mask"
    """What happens to tokens past the bound: `mask` leaves them out of the loss, `wait` trains in admission order so
    that there are none, `drop` discards their group."""
    groups_in_flight: Literal["auto"] | PositiveInt = "auto"
    """Groups admitted and not yet trained. `auto` follows what keeps the trainer busy."""
    straggler_wait_seconds: PositiveFloat = 60.0
    """With `wait`: how long a batch waits for its slowest groups before they are aborted and counted."""


class FilteringConfig(Config):
    zero_variance: Literal["keep", "drop"] = "keep"
    """`drop` discards groups whose rollouts all scored the same: they carry no advantage (DAPO's dynamic sampling)."""
    max_dropped_groups: PositiveInt = 4096
    """Groups dropped in a row after which the run stops: there is nothing to learn."""


class TrainerConfig(Config):
    num_ranks: PositiveInt = 1
    """Data-parallel FSDP2 ranks, one process and (on GPU) one device each."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Padded tokens of one forward-backward; a longer single row runs alone."""
    optimizer: OptimizerConfig = AdamWOptimizer()
    """What makes an update of the gradients."""
    timeout_seconds: PositiveFloat = 1800.0
    """Longest time that one collective operation or one batch may take."""


class EngineConfig(Config):
    num_engines: PositiveInt = 1
    """vLLM engines, each with its own copy of the weights."""
    max_num_seqs: PositiveInt = 256
    """Sequences that an engine decodes at the same time."""
    kv_cache_bytes: PositiveInt | None = None
    """Size of the key-value cache; unset lets vLLM measure it (GPU) or takes 1 GiB (CPU)."""
    tool_parser: str | None = None
    """vLLM's parser of the model's tool calls, e.g. `hermes`; unset leaves calls in the text."""
    reasoning_parser: str | None = None
    """vLLM's parser of the model's reasoning, e.g. `qwen3`; unset leaves reasoning in the text."""
    args: dict[str, Any] = {}
    """Any other argument of vLLM's AsyncEngineArgs, under vLLM's own name."""
    timeout_seconds: PositiveFloat = 600.0
    """Longest time that starting an engine may take."""

    @model_validator(mode="after")
    def _args_are_others(self) -> Self:
        for name in sorted(self.args.keys() & DECIDED_ENGINE_ARGS.keys()):
            value, decided = self.args[name], DECIDED_ENGINE_ARGS[name]
            raise ValueError(f"args.{name}: found {value!r}; allowed: any other argument, this one is {decided}")
        return self


class RefitConfig(Config):
    cache: Literal["recompute", "keep"] = "recompute"
    """`recompute` prefills the contexts in flight again under the new weights; `keep` goes on with the old keys and
    values, so that later tokens match no single version of the weights."""
    timeout_seconds: PositiveFloat = 300.0
    """Longest time that one refit may take."""


class EvaluateConfig(Config):
    path: Text
    """JSONL file of held-out prompts, with the columns of `prompts`."""
    every: PositiveInt | None = None
    """Batch steps between evaluations; unset evaluates only before the first and after the last."""
    num_prompts: PositiveInt | None = None
    """Rows used from the start of the file; unset uses all."""
    samples_per_prompt: PositiveInt = 1
    """Rollouts of each row; their rewards are averaged."""
    sampling: SamplingConfig | None = None
    """Unset takes `rollout.sampling`."""


class CheckpointConfig(Config):
    every: PositiveInt = 50
    """Batch steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 2
    """Newest complete checkpoints kept."""


class Recipe(Config):
    """What RL and SFT recipes share."""

    run: RunConfig
    model: ModelConfig
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    max_steps: PositiveInt
    """Batch steps after which the run ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engine and trainer run; `auto` takes GPUs when there are any."""
    export: str | None = None
    """Folder for the final weights in Hugging Face layout; unset writes `exports/final` in the run folder."""


class SFTDataConfig(Config):
    path: Text
    """JSONL file of conversations, local or fsspec URI."""
    messages: str = "messages"
    """Column with the chat messages; the last one is the assistant's and is the one that is trained."""
    tools: str = "tools"
    """Column with tool definitions in OpenAI's form; rows may be without."""
    batch_size: PositiveInt = 64
    """Conversations per optimizer step."""
    max_tokens: PositiveInt = 2048
    """Longer rows are refused, with their number."""


class SFTRecipe(Recipe):
    kind: Literal["sft"]
    """Chooses supervised fine-tuning."""
    data: SFTDataConfig


class ReferenceConfig(Config):
    path: Text
    """Model with the policy's tokenizer: local folder in Hugging Face layout, or a hub id `org/name`."""


class RLRecipe(Recipe):
    kind: Literal["rl"]
    """Chooses reinforcement learning."""
    prompts: PromptsConfig
    agent: AgentConfig
    rollout: RolloutConfig = RolloutConfig()
    window: WindowConfig = WindowConfig()
    filtering: FilteringConfig = FilteringConfig()
    reward: RewardConfig = RewardConfig()
    """What becomes of the agent's reward before the estimator sees it; filters see the score as it was."""
    advantage: AdvantageConfig = GRPOAdvantage()
    """Estimator that turns rewards into advantages."""
    loss: LossChoice = PolicyGradientLoss()
    """Policy loss, and the optimizer steps of a batch."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    reference: ReferenceConfig | None = None
    """Frozen model that a KL is measured against, or the teacher of a distillation; unset loads none."""
    engine: EngineConfig = EngineConfig()
    refit: RefitConfig = RefitConfig()
    evaluate: EvaluateConfig | None = None
    """Evaluation on held-out prompts; unset evaluates nothing."""

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        """What is wrong across fields, a line each: the keys, what was found, what is allowed."""
        yield from self._where_policies_disagree()
        yield from self._where_window_is_wrong()
        yield from self._where_algorithms_disagree()
        rollout, agent = self.rollout, self.agent
        if rollout.min_group_size < 2 and self.advantage.type in BY_GROUP:
            yield (
                f"rollout.min_group_size: found {rollout.min_group_size} (group_size {rollout.group_size}) with "
                f"advantage.type = {self.advantage.type}, which compares rollouts of one prompt; allowed: 2 and more"
            )
        for key, sampling in (
            ("rollout.sampling", rollout.sampling),
            ("evaluate.sampling", self.evaluate.sampling if self.evaluate else None),
        ):
            if sampling and sampling.max_tokens >= agent.max_context_tokens:
                yield (
                    f"{key}.max_tokens: found {sampling.max_tokens}; allowed: below agent.max_context_tokens = "
                    f"{agent.max_context_tokens}, which also holds the prompt"
                )

    def _where_policies_disagree(self) -> Iterator[str]:
        """Forward consistency: what the engine samples from is what the trainer computes log-probs of."""
        sampling = self.rollout.sampling
        if sampling.temperature < MIN_TEMPERATURE:
            yield (
                f"rollout.sampling.temperature: found {sampling.temperature:g}; allowed: {MIN_TEMPERATURE} and more "
                "(0 has no log-probabilities to train on; the engine raises what is lower; evaluate.sampling may be 0)"
            )
        if sampling.top_p != 1 or sampling.top_k != -1:
            yield (
                f"rollout.sampling: found top_p={sampling.top_p}, top_k={sampling.top_k}; allowed: top_p=1, top_k=-1 "
                "(the trainer's log-probs are over the whole vocabulary)"
            )
        if self.filtering.zero_variance == "drop" and self.rollout.group_size == 1:
            yield "filtering.zero_variance: found drop with rollout.group_size = 1, without variance; allowed: keep"
        if self.correction.level == "off" and self.window.max_policy_lag > 0:
            yield (
                f"correction.level: found off with window.max_policy_lag = {self.window.max_policy_lag}; "
                "allowed: token, or max_policy_lag = 0"
            )
        if self.correction.level == "off" and self.refit.cache == "keep":
            yield "refit.cache: found keep with correction.level = off; allowed: recompute, or level = token"

    def _where_algorithms_disagree(self) -> Iterator[str]:
        reward, kl, loss = self.reward, self.kl, self.loss
        if reward.overlong and reward.overlong.buffer_tokens > self.agent.max_context_tokens:
            yield (
                f"reward.overlong.buffer_tokens: found {reward.overlong.buffer_tokens}; allowed: at most "
                f"agent.max_context_tokens = {self.agent.max_context_tokens}"
            )
        if kl.coef and kl.place == "reward" and self.advantage.type not in BY_TOKEN:
            yield (
                f"kl.place: found reward with advantage.type = {self.advantage.type}, which gives all tokens one "
                f"advantage; allowed: loss, or advantage.type = {' or '.join(BY_TOKEN)}"
            )
        if self.advantage.type == "maxrl" and (reward.overlong or (reward.truncated_factor or 0) < 0):
            yield (
                "advantage.type: found maxrl with a reward that shaping makes negative; allowed: maxrl without "
                "reward.overlong and with reward.truncated_factor from 0 to 1, as it takes the reward for a pass rate"
            )
        distills = self.advantage.type == "on_policy_distill"
        needs_reference = distills or (kl.coef > 0 and kl.to == "reference")
        if needs_reference and self.reference is None:
            key = f"advantage.type = {self.advantage.type}" if distills else "kl.to = reference"
            yield f"reference: found none with {key}; allowed: reference.path, a model with the policy's tokenizer"
        if self.reference is not None and not needs_reference:
            yield (
                "reference: found one that nothing uses; allowed: none, or kl.coef above 0 with kl.to = reference, or "
                "advantage.type = on_policy_distill"
            )
        if distills and self.filtering.zero_variance == "drop":
            yield (
                "filtering.zero_variance: found drop with advantage.type = on_policy_distill, which has no rewards; "
                "allowed: keep"
            )
        if loss.minibatches > self.rollout.batch_groups:
            yield (
                f"loss.minibatches: found {loss.minibatches}; allowed: at most rollout.batch_groups = "
                f"{self.rollout.batch_groups}, as groups stay whole"
            )

    def _where_window_is_wrong(self) -> Iterator[str]:
        places, batch = self.window.groups_in_flight, self.rollout.batch_groups
        if places == "auto":
            return
        most = (self.window.max_policy_lag + 1) * batch
        if places < batch:
            yield f"window.groups_in_flight: found {places}; allowed: at least rollout.batch_groups = {batch}"
        if self.window.stale == "wait" and places > most:
            yield (
                f"window.groups_in_flight: found {places} with window.stale = wait; allowed: at most "
                f"(max_policy_lag + 1) x batch_groups = {most}, so that no token passes the bound"
            )
