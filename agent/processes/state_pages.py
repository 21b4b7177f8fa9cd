"""Reads state pages of running, stopped and dead processes.

A copy is valid only if the sequence number was even and unchanged across it; otherwise the read is repeated up to
NUM_TRIES times (the writer may be stopped in the middle of a write). The file is read with `pread`, never mapped,
because truncating a mapped page would kill the agent (SIGBUS)."""

import math
import os
import struct
import sys
from collections.abc import Collection
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from rolecall.agent.data_dir import open_owned
from rolecall.agent.reporter import page_layout as at

NUM_TRIES = 4
_WORD_BYTES = 8
_FLOAT_MAX = sys.float_info.max


class PageUnreadable(Exception):
    """No consistent state could be read; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedException:
    """The last exception that a process reported. `number` counts from 1 within the process."""

    number: int
    step: int
    at: float  # node monotonic
    fingerprint: str
    type: str
    where: str
    message: str
    uncaught: bool = False

    def detail(self) -> dict[str, str]:
        keys = ("type", "message", "where", "fingerprint")
        ends = {at.UNCAUGHT: "1"} if self.uncaught else {}
        return {**{k: getattr(self, k) for k in keys}, "step": str(self.step), "number": str(self.number), **ends}


class PageState(NamedTuple):
    """State that a process reported, at one moment. Fields as in `telemetry.ProcessSample`; those of policy health are
    NaN until reported, and for reporters without them. A tuple, because one is made five times a second: first the
    numbers, each the word of the same name, those of policy health last."""

    rank: int
    incarnation: int
    pid: int
    start_ticks: int
    work_tid: int
    epoch: int
    phase_since: float
    phase_entries: int
    step: int
    policy_version: int
    progress: int
    progress_at: float
    beats: int
    collectives_entered: int
    collectives_done: int
    collectives_issued: int
    collectives_at_step: int
    collectives_at_begin: int
    exchanges: int
    busy_seconds: float
    exchange_seconds: float
    loading_seconds: float
    work_units: int
    tokens: int
    requests_active: int
    tokens_held: int
    loss: float
    grad_norm: float
    reward: float
    unfinite: int
    jumps: int
    healths: int
    entropy: float
    clip_fraction_low: float
    clip_fraction_high: float
    ratio_mean: float
    ratio_max: float
    kl_sampler: float
    response_length: float
    truncated_fraction: float
    filtered_fraction: float
    log_ratio_max: float
    replica: str
    proof: str
    phase: str
    finished: bool
    finish_reason: str
    exception: ReportedException | None

    def proven_by(self, secret: str) -> bool:
        """Whether the writer of this identity held `secret`."""
        import hmac

        wanted = at.identity_proof(
            secret,
            replica=self.replica,
            rank=self.rank,
            incarnation=self.incarnation,
            pid=self.pid,
            start_ticks=self.start_ticks,
        )
        return hmac.compare_digest(wanted, self.proof)


_NUMBERS = {name: kind for name, kind in PageState.__annotations__.items() if kind in (int, float)}
_WORDS = [getattr(at, f"W_{name.upper()}") for name in _NUMBERS]
_FLOAT_WORDS = {at.W_EXCEPTION_AT} | {w for w, kind in zip(_WORDS, _NUMBERS.values(), strict=True) if kind is float}
_PAGE_WORDS = struct.Struct("=" + "".join("d" if word in _FLOAT_WORDS else "q" for word in range(at.NUM_WORDS)))
_numbers = itemgetter(*_WORDS)
_NO_HEALTH = (math.nan,) * len(at.HEALTH_WORDS)
_UNHEALTHY = len(_NUMBERS) - len(_NO_HEALTH)


def _text(raw: bytes, area: tuple[int, int]) -> str:
    return at.text_of(raw[area[0] : area[0] + area[1]])


def _finite(value: float) -> float:
    """Replaces infinity, which JSON lacks, by the largest float. NaN stays (not reported), and so does an integer."""
    return math.copysign(_FLOAT_MAX, value) if math.isinf(value) else value


def parse_page(raw: bytes) -> PageState:
    """Parses a consistent copy of a page.

    Raises:
        PageUnreadable: not a page, another layout, or copied in the middle of a write.
    """
    if len(raw) != at.PAGE_BYTES:
        raise PageUnreadable(f"{len(raw)} bytes instead of {at.PAGE_BYTES}")
    if raw[:8] != at.MAGIC:
        raise PageUnreadable("not a state page")
    words = _PAGE_WORDS.unpack_from(raw)
    if words[at.W_LAYOUT] != at.LAYOUT_VERSION:
        raise PageUnreadable(f"layout {words[at.W_LAYOUT]}, this agent reads {at.LAYOUT_VERSION}")
    if words[at.W_SEQUENCE] & 1:
        raise PageUnreadable("copied in the middle of a write")
    numbers = _numbers(words)
    if math.inf in numbers or -math.inf in numbers:
        numbers = tuple(map(_finite, numbers))
    if not words[at.W_HEALTHS] > 0:
        numbers = numbers[:_UNHEALTHY] + _NO_HEALTH
    finished = bool(words[at.W_FINISHED])
    exception = None
    if words[at.W_EXCEPTIONS] > 0:
        exception = ReportedException(
            number=words[at.W_EXCEPTIONS],
            step=words[at.W_EXCEPTION_STEP],
            at=_finite(words[at.W_EXCEPTION_AT]),
            fingerprint=_text(raw, at.A_EXCEPTION_FINGERPRINT),
            type=_text(raw, at.A_EXCEPTION_TYPE),
            where=_text(raw, at.A_EXCEPTION_WHERE),
            message=_text(raw, at.A_EXCEPTION_MESSAGE)[: at.MESSAGE_CHARACTERS_MAX],
            uncaught=words[at.W_UNCAUGHT] == 1,
        )
    texts = (_text(raw, area) for area in (at.A_REPLICA, at.A_PROOF, at.A_PHASE))
    finish_reason = _text(raw, at.A_FINISH_REASON) if finished else ""
    return PageState._make((*numbers, *texts, finished, finish_reason, exception))


class PageReader:
    """Keeps one page file open. Close it when the process is dropped."""

    def __init__(self, path: Path, owners: Collection[int] | None = None) -> None:
        """Raises OSError when there is no such file of one of `owners` (None: of anyone)."""
        self.path = path
        self._descriptor = open_owned(path, owners)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _sequence(self) -> bytes:
        return os.pread(self._descriptor, _WORD_BYTES, at.W_SEQUENCE * _WORD_BYTES)

    def read(self) -> PageState:
        """The state now.

        Raises:
            PageUnreadable: see `parse_page`; or the process kept writing, or is stopped inside a write.
            OSError: the file can no longer be read.
        """
        for _ in range(NUM_TRIES):
            before = self._sequence()
            raw = os.pread(self._descriptor, at.PAGE_BYTES, 0)
            if before == self._sequence() and not (before and before[0 if sys.byteorder == "little" else -1] & 1):
                return parse_page(raw)
        raise PageUnreadable(f"no consistent copy in {NUM_TRIES} tries")
