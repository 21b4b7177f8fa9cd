"""The requests held by a rollout, with their tokens, until they are acknowledged. No engine, no clock.

A token is written once and never changes; offsets count from the first new token, including those of other engines (the
prefix). An answer may therefore be lost, retried or delivered twice without losing or duplicating tokens.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rolecall.core.errors import RolecallError, TokenBufferFull
from rolecall.rl_runtime.protocol.messages import ENVIRONMENT_VERSION, GenerationRequest, TokenChunk
from rolecall.rl_runtime.rollout.engine import NewTokens


class RequestRefused(RolecallError, ValueError):
    """A request that this engine can never serve; names it and the reason. Nothing of its batch was accepted."""


@dataclass(slots=True)
class _BufferedRequest:
    request: GenerationRequest
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str = ""
    begun: bool = False  # started in the engine: tokens of a step before this are not its own

    def chunk(self, offset: int) -> TokenChunk:
        return TokenChunk(
            request_id=self.request.request_id,
            offset=offset,
            tokens=tuple(self.tokens[offset:]),
            logprobs=tuple(self.logprobs[offset:]),
            versions=tuple(self.versions[offset:]),
            finished=bool(self.finish_reason),
            finish_reason=self.finish_reason,
        )


@dataclass(slots=True)
class TokenBuffer:
    """Requests and their tokens. Thread-safe; each call takes microseconds."""

    requests_max: int  # unfinished; of those that ended the job bounds the number
    end_tokens: frozenset[int]
    model_len_max: int
    vocab_size: int
    _held: dict[str, _BufferedRequest] = field(default_factory=dict)
    _num_tokens: int = 0
    _generated: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Adds new requests and skips those already held, so that a repeated call is harmless. One that continues a
        finished request behind its tokens (the next turn of a conversation) replaces it.

        Returns:
            Requests to generate: new, and not already completed by their prefix.

        Raises:
            RequestRefused, TokenBufferFull: none of them is accepted.
        """
        for request in requests:
            self._check(request)
        with self._lock:
            new = {r.request_id: r for r in requests if self._is_new(r)}
            replaced = [held for i in new if (held := self._held.get(i)) is not None]
            unfinished = sum(not held.finish_reason for held in self._held.values())
            if unfinished + len(new) > self.requests_max:
                raise TokenBufferFull(f"{unfinished} requests are unfinished, {self.requests_max} at most")
            self._num_tokens += sum(len(r.prefix_tokens) for r in new.values())
            self._num_tokens -= sum(len(held.tokens) for held in replaced)
            for request in new.values():
                self._held[request.request_id] = self._fresh(request)
            return [r for r in new.values() if not self._held[r.request_id].finish_reason]

    def _is_new(self, request: GenerationRequest) -> bool:
        held = self._held.get(request.request_id)
        return held is None or (bool(held.finish_reason) and len(request.prefix_tokens) > len(held.tokens))

    def _check(self, request: GenerationRequest) -> None:
        length = len(request.prompt_tokens) + request.max_response_tokens
        sizes = {len(request.prefix_tokens), len(request.prefix_logprobs), len(request.prefix_versions)}
        problem = ""
        if not request.prompt_tokens or request.max_response_tokens < 1:
            problem = "has no prompt, or asks for no token"
        elif length > self.model_len_max:
            problem = f"may grow to {length} tokens, the engine takes {self.model_len_max}"
        elif len(sizes) != 1 or len(request.prefix_tokens) > request.max_response_tokens:
            problem = "has a prefix whose tokens, log-probabilities and versions do not fit together or the limit"
        elif not all(0 <= t < self.vocab_size for t in (*request.prompt_tokens, *request.prefix_tokens)):
            problem = f"has a token outside of the vocabulary of {self.vocab_size}"
        if problem:
            raise RequestRefused(f"request {request.request_id[:100]!r} {problem}")

    def _fresh(self, request: GenerationRequest) -> _BufferedRequest:
        held = _BufferedRequest(
            request, list(request.prefix_tokens), list(request.prefix_logprobs), list(request.prefix_versions)
        )
        if held.tokens and held.tokens[-1] in self.end_tokens and held.versions[-1] != ENVIRONMENT_VERSION:
            held.finish_reason = "stop"
        elif len(held.tokens) >= request.max_response_tokens:
            held.finish_reason = "length"
        return held

    def begin(self, request: GenerationRequest) -> bool:
        """Marks it started: the engine's next step includes it. False if this request is no longer held."""
        with self._lock:
            held = self._held.get(request.request_id)
            if held is None or held.request is not request:
                return False
            held.begun = True
            return True

    def record(self, made: Iterable[NewTokens], version: int) -> int:
        """Writes the tokens of one engine step under `version`. Skips requests dropped during the step, even if they
        were submitted again, possibly with another prefix, before it ended.

        Returns:
            Number of generated tokens, including those of dropped requests.
        """
        num_made = 0
        with self._lock:
            for new in made:
                num_made += len(new.tokens)
                held = self._held.get(new.request_id)
                if held is None or not held.begun:
                    continue
                held.tokens.extend(new.tokens)
                held.logprobs.extend(new.logprobs)
                held.versions.extend([version] * len(new.tokens))
                held.finish_reason = new.finish_reason
                self._num_tokens += len(new.tokens)
            self._generated += num_made
        return num_made

    def since(self, offsets: Mapping[str, int]) -> tuple[tuple[TokenChunk, ...], tuple[str, ...]]:
        """(chunks with new tokens, ids not held here)."""
        chunks, unknown = [], []
        with self._lock:
            for request_id, offset in offsets.items():
                held = self._held.get(request_id)
                if held is None:
                    unknown.append(request_id)
                elif offset < len(held.tokens) or held.finish_reason:
                    chunks.append(held.chunk(max(0, offset)))
        return tuple(chunks), tuple(unknown)

    def everything(self) -> list[tuple[GenerationRequest, TokenChunk]]:
        with self._lock:
            return [(held.request, held.chunk(0)) for held in self._held.values()]

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """Drops requests; unknown ones are ignored. Returns those that the engine was still generating."""
        unfinished = []
        with self._lock:
            for request_id in request_ids:
                held = self._held.pop(request_id, None)
                if held is not None:
                    self._num_tokens -= len(held.tokens)
                    if not held.finish_reason:
                        unfinished.append(request_id)
        return unfinished

    @property
    def num_requests(self) -> int:
        return len(self._held)

    @property
    def num_tokens(self) -> int:
        """Of all requests that are held, prefixes included."""
        return self._num_tokens

    @property
    def tokens_generated(self) -> int:
        """Tokens generated since this process started."""
        return self._generated
