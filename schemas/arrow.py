"""The columnar schemas of a run's tables. Each carries its version; readers refuse versions they don't know.

`traces` has one row per trajectory segment; a rollout that failed before its first token has one row without tokens.
`batches` has one row per trained segment and is written before the training; `outcomes` has one row per group that
ended otherwise. Together the last two are the ledger.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = "2"


def _schema(name: str, *fields: pa.Field) -> pa.Schema:
    return pa.schema(fields, metadata={"moltflow.table": name, "moltflow.version": SCHEMA_VERSION})


SPAN = pa.struct(
    [
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("version", pa.int32(), nullable=False),
    ]
)
"""Sampled tokens [start, end) of one turn under one policy version; a turn that a refit crossed has several spans."""

TURN = pa.struct(
    [
        pa.field("temperature", pa.float32(), nullable=False),
        pa.field("top_p", pa.float32(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("seconds", pa.float32(), nullable=False),
    ]
)

TRACES = _schema(
    "traces",
    pa.field("sequence", pa.int64(), nullable=False),  # position of the group in the dispatch order of the run
    pa.field("group_id", pa.string(), nullable=False),  # epoch-prompt-attempt
    pa.field("rollout", pa.int32(), nullable=False),
    pa.field("segment", pa.int32(), nullable=False),
    pa.field("run_attempt", pa.int32(), nullable=False),
    pa.field("opened", pa.string(), nullable=False),  # why the segment begins: new, branch or rewritten
    pa.field("status", pa.string(), nullable=False),  # see schemas.types.Status
    pa.field("error", pa.string()),
    pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("logprobs", pa.list_(pa.float32()), nullable=False),  # as long as token_ids; 0 where not sampled
    pa.field("spans", pa.list_(SPAN), nullable=False),
    pa.field("num_tokens", pa.int32(), nullable=False),
    pa.field("num_sampled", pa.int32(), nullable=False),
    pa.field("oldest_version", pa.int32(), nullable=False),
    pa.field("newest_version", pa.int32(), nullable=False),
    pa.field("turns", pa.list_(TURN), nullable=False),
    pa.field("reward", pa.float64()),  # null unless status is ok or truncated
    pa.field("reward_components", pa.string(), nullable=False),  # JSON object
    pa.field("score", pa.float64()),
    pa.field("messages", pa.string(), nullable=False),  # JSON, as the agent saw them
    pa.field("tools", pa.string(), nullable=False),  # JSON
    pa.field("label", pa.string(), nullable=False),  # JSON
    pa.field("info", pa.string(), nullable=False),  # JSON
    pa.field("image_hashes", pa.list_(pa.string()), nullable=False),
    pa.field("seed", pa.int64(), nullable=False),  # of the environment; the engine draws from its own
    pa.field("started_at", pa.float64(), nullable=False),  # seconds since the epoch
    pa.field("seconds", pa.float64(), nullable=False),
)

BATCHES = _schema(
    "batches",
    pa.field("step", pa.int64(), nullable=False),  # also the trainer's policy version at the start of the batch
    pa.field("position", pa.int32(), nullable=False),  # order inside the batch
    pa.field("sequence", pa.int64(), nullable=False),
    pa.field("group_id", pa.string(), nullable=False),
    pa.field("rollout", pa.int32(), nullable=False),
    pa.field("segment", pa.int32(), nullable=False),
    pa.field("trace_row", pa.int64(), nullable=False),  # stable row id in traces
    pa.field("num_tokens", pa.int32(), nullable=False),
    pa.field("advantage", pa.float64(), nullable=False),
    pa.field("minibatch", pa.int32(), nullable=False),  # in which optimizer step of the batch the row is trained;
    pa.field("num_ranks", pa.int32(), nullable=False),  # the microbatch plan: for how many ranks,
    pa.field("rank", pa.int32(), nullable=False),  # which of them trains the row,
    pa.field("microbatch", pa.int32(), nullable=False),  # and in which of its passes
    pa.field("run_attempt", pa.int32(), nullable=False),
)

SCORES = _schema(
    "scores",
    pa.field("step", pa.int64(), nullable=False),  # of the batch that was scored
    pa.field("trace_row", pa.int64(), nullable=False),  # stable row id in traces
    pa.field("reference_logprobs", pa.list_(pa.float32()), nullable=False),  # of the row's sampled tokens, in order
)

OUTCOMES = _schema(
    "outcomes",
    pa.field("sequence", pa.int64(), nullable=False),
    pa.field("group_id", pa.string(), nullable=False),
    pa.field("outcome", pa.string(), nullable=False),  # dropped or failed
    pa.field("reason", pa.string(), nullable=False),
    pa.field("step", pa.int64(), nullable=False),  # batch step under way when it was decided
    pa.field("num_tokens", pa.int64(), nullable=False),
    pa.field("detail", pa.string(), nullable=False),
    pa.field("run_attempt", pa.int32(), nullable=False),
)
