"""Rare events of this node, kept on disk: `events.jsonl`, one JSON line each, numbered without gaps.

An event is written to the file before it is visible, so a reader that keeps the last `seq` misses nothing across a
SIGKILL of the agent (at-least-once delivery). A torn last line is cut off at the next start. The file is trimmed to the
newest NUM_KEPT events when it reaches twice as many, and to older registrations of processes that have not exited: a
watch that starts later learns only from them which job a process is of. Numbers never restart while the file exists.
`sync()` flushes to disk; a node crash may reuse the numbers of the last second."""

import asyncio
import errno
import json
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path

from rolecall.core.clock import Clock
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import AgentEvent, AgentEventKind

logger = logging.getLogger(__name__)

NUM_KEPT = 2000
"""The newest; older registrations are at most a quarter as many: about two for each process of a full node."""
DETAIL_CHARACTERS_MAX = 2000
"""Per value in `detail`; longer ones are truncated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Response to a reader. `lost`: events after its cursor dropped by retention. `newest`: last seq issued.
    `after_wall_at`: of the event at its cursor; 0: not kept. If it differs from that of the event which the reader has,
    the numbers have restarted: in a new directory, or after a node crash."""

    events: tuple[AgentEvent, ...]
    newest: int
    lost: int
    after_wall_at: float = 0.0


class EventLog:
    """Owns the file. All methods may be called from any thread."""

    def __init__(self, path: Path, node: NodeId, clock: Clock, num_kept: int = NUM_KEPT) -> None:
        """Opens or creates the file and removes a torn last line.

        Raises:
            OSError: the file cannot be read or written.
        """
        self._path, self._node, self._clock, self._num_kept = path, node, clock, num_kept
        self._changed = threading.Condition()
        self._arrivals: set[Callable[[], object]] = set()  # called after each event
        self._events: deque[AgentEvent] = deque()  # the newest
        self._registered: deque[AgentEvent] = deque(maxlen=num_kept // 4)  # older, of processes that have not exited
        self._newest = 0
        self._lines = 0
        self._dirty = False
        self.num_unwritten = 0
        self.num_by_kind: Counter[str] = Counter()
        self._load()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _load(self) -> None:
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) != len(raw):
            os.truncate(self._path, len(whole))
            logger.warning("%s: cut off a torn last line of %d bytes", self._path, len(raw) - len(whole))
        damaged = 0
        for line in whole.splitlines():
            self._lines += 1
            try:
                event = self._of_this_node(AgentEvent.from_dict(json.loads(line)))
            except (ValueError, TypeError, KeyError):
                damaged += 1
                continue
            self._make_room(event)
            self._events.append(event)
            self._newest = max(self._newest, event.seq)
        if damaged:
            logger.warning("%s: %d damaged lines are ignored", self._path, damaged)
            self._newest += damaged  # their numbers may have been issued

    def _of_this_node(self, event: AgentEvent) -> AgentEvent:
        """The node may have been renamed since; a reader takes events of the present name only."""
        if event.node == self._node:
            return event
        process = None if event.process is None else replace(event.process, node=self._node)
        return replace(event, node=self._node, process=process)

    def _make_room(self, event: AgentEvent) -> None:
        """For this one, which comes next."""
        if len(self._events) >= self._num_kept:
            oldest = self._events.popleft()
            is_registered = oldest.kind is AgentEventKind.REGISTERED and oldest.process is not None
            if is_registered and not self.has(AgentEventKind.EXITED, oldest.process):
                self._registered.append(oldest)
        if event.kind is AgentEventKind.EXITED:
            of_living = (e for e in self._registered if e.process != event.process)
            self._registered = deque(of_living, self._registered.maxlen)

    def append(
        self,
        kind: AgentEventKind,
        *,
        process: ProcessId | None = None,
        role: str = "",
        replica: str = "",
        rank: int = 0,
        incarnation: int = 0,
        detail: Mapping[str, str] | None = None,
    ) -> AgentEvent:
        """Numbers the event, writes it, then publishes it. A full disk costs durability, not the event."""
        cut = {k: v[:DETAIL_CHARACTERS_MAX] for k, v in (detail or {}).items()}
        with self._changed:
            self._newest += 1
            event = AgentEvent(
                seq=self._newest,
                kind=kind,
                node=self._node,
                at=self._clock.monotonic(),
                wall_at=self._clock.wall(),
                process=process,
                role=role,
                replica=replica,
                rank=rank,
                incarnation=incarnation,
                detail=cut,
            )
            self._make_room(event)
            self._write(event)
            self._events.append(event)
            self.num_by_kind[str(kind)] += 1
            self._changed.notify_all()
            for arrived in tuple(self._arrivals):
                arrived()
        return event

    def _write(self, event: AgentEvent) -> None:
        line = json.dumps(event.to_dict(), separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                # A partial line would corrupt the next one once there is room again.
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._dirty = True
            self._lines += 1
        except OSError as e:
            self.num_unwritten += 1
            logger.warning("event %d could not be written: %s", event.seq, e)
            return
        if self._lines >= 2 * self._num_kept:
            try:
                self._shorten(event)
            except OSError as e:
                self._lines = self._num_kept  # retried after as many more
                logger.warning("%s could not be shortened: %s", self._path, e)

    def _shorten(self, newest: AgentEvent) -> None:
        """Atomically rewrites the file with the events that are kept."""
        kept = [*self._registered, *self._events, newest]
        temporary = self._path.with_suffix(".tmp")
        text = "".join(json.dumps(e.to_dict(), separators=(",", ":")) + "\n" for e in kept)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(os.dup(descriptor), "w") as f:
                f.write(text)
            os.fsync(descriptor)
            temporary.replace(self._path)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self._lines = descriptor, len(kept)

    def after(self, seq: int, limit: int = 1000) -> EventPage:
        """Events numbered above `seq`. A `seq` that is too large (from an earlier directory) starts from the first."""
        return self.wait(seq, 0.0, limit)

    def wait(self, seq: int, seconds: float, limit: int = 1000) -> EventPage:
        """`after`, but waits up to `seconds` for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest != seq, timeout=seconds)
            if seq > self._newest:
                seq = 0
            newest = tuple(takewhile(lambda e: e.seq > seq, reversed(self._events)))[::-1]
            older = tuple(e for e in self._registered if e.seq > seq)
            first = self._events[0].seq if self._events else self._newest + 1
            lost = max(0, first - seq - 1 - len(older)) if seq > 0 else 0
            kept = chain(reversed(self._events), self._registered)
            after_wall_at = next((e.wall_at for e in kept if e.seq == seq), 0.0)
            events = (*older, *newest)[:limit]
            return EventPage(events=events, newest=self._newest, lost=lost, after_wall_at=after_wall_at)

    def nothing_after(self, seq: int) -> EventPage | None:
        """The empty page of a reader that has the newest event; None if there are others. Takes no lock."""
        if self._newest != seq:
            return None
        last = self._events[-1] if self._events else None
        after_wall_at = last.wall_at if last is not None and last.seq == seq else 0.0
        return EventPage(events=(), newest=seq, lost=0, after_wall_at=after_wall_at)

    @property
    def newest(self) -> int:
        """Last seq issued. Takes no lock: that is held during a write to a disk that may hang."""
        return self._newest

    async def arrival(self, seq: int, seconds: float) -> None:
        """Waits up to `seconds` until `newest` differs from `seq`: as `wait`, in an event loop and without a lock."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def arrived() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        self._arrivals.add(arrived)
        timer = loop.call_later(seconds, changed.set)
        try:
            if self._newest == seq:
                await changed.wait()
        finally:
            timer.cancel()
            self._arrivals.discard(arrived)

    def has(self, kind: AgentEventKind, process: ProcessId | None) -> bool:
        """Whether such an event of this process is among the newest."""
        with self._changed:
            return any(e.kind is kind and e.process == process for e in reversed(self._events))

    def sync(self) -> None:
        """Flushes to disk what was written since the last call."""
        with self._changed:
            if not self._dirty:
                return
            try:
                descriptor = os.dup(self._descriptor)
            except OSError as e:  # no free descriptor: retry at the next call
                logger.warning("%s could not be flushed: %s", self._path, e)
                return
            self._dirty = False
        try:
            os.fdatasync(descriptor)  # outside the lock: a slow disk must not delay events
        except OSError as e:
            logger.warning("%s could not be flushed: %s", self._path, e)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self.sync()
        with self._changed:
            os.close(self._descriptor)
            self._descriptor = -1  # later events count as unwritten
