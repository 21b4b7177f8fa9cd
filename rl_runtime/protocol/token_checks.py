"""Validation of streamed tokens before any is accepted: an invalid number stops only its engine.

Unchecked, one such token ends the run: every trainer rejects its step in the same way, as if the job's own code were
wrong (invariant Bounded remediation, docs/invariants.md).
"""

import math
from collections.abc import Iterable
from typing import Final

from rolecall.core.errors import RolecallError
from rolecall.rl_runtime.protocol.messages import TokenChunk

LOGPROB_MAX: Final = 1e-3
"""A probability is at most 1, up to the rounding of an engine's arithmetic."""
ENDS: Final = ("", "stop", "length")
"""Valid end reasons. Engine libraries have others (abort, error): treating them as the model's own end would turn an
infrastructure failure into a wrong answer (invariant Infrastructure is not reward, docs/invariants.md).
"""


class InvalidTokens(RolecallError):
    def __init__(self, *, request_id: str, reason: str) -> None:
        self.request_id, self.reason = request_id, reason
        super().__init__(f"it streamed invalid tokens: request {request_id}: {reason}")


def check_chunks(chunks: Iterable[TokenChunk], vocab_size: int | None = None) -> None:
    """
    Raises:
        BadTokens: names the first token outside the vocabulary or with an invalid log-probability, or an invalid end
            reason.
    """
    for chunk in chunks:
        reason = _invalid_reason(chunk, vocab_size)
        if reason:
            raise InvalidTokens(request_id=chunk.request_id, reason=reason)


def _invalid_reason(chunk: TokenChunk, vocab_size: int | None) -> str:
    num = len(chunk.tokens)
    if not num == len(chunk.logprobs) == len(chunk.versions):
        return f"{num} tokens with {len(chunk.logprobs)} log-probabilities and {len(chunk.versions)} versions"
    for place, (token, logprob) in enumerate(zip(chunk.tokens, chunk.logprobs, strict=True), start=chunk.offset):
        if not (math.isfinite(logprob) and logprob <= LOGPROB_MAX):
            return f"token {place} has a log-probability of {logprob}"
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            return f"token {place} is {token}, and the vocabulary has {vocab_size}"
    if chunk.finish_reason not in ENDS:
        return f"its end is {chunk.finish_reason[:40]!r}, which is no end of an answer"
    return ""
