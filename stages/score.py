"""Score: the forward passes that an advantage needs before it can be computed (reference log-probs, critic values).

The estimators here compare rewards alone and need none, so groups pass as they are. With one optimizer step per batch
the old policy's log-probs need no pass of their own either: they are the detached ones of the training forward.
"""

from __future__ import annotations

from schemas.types import Filtered


def score(filtered: Filtered) -> Filtered:
    return filtered
