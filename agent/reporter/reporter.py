"""Reports the state of a training process on one memory-mapped page, and rare events over a Unix socket.

    from rolecall import reporter

    reporter.start()
    for n in range(num_steps):
        with reporter.step(n):
            ...

`start()` takes rank, role and run from the launcher's environment (`launcher.py`) and the secret from the directory of
this node's agent (`agent/data_dir.py`). Everything works before it, after it and without an agent; one that starts
later is found.

State goes to the page (`page_layout.py`), which the node's agent reads even while this process is stopped or dead. A
call costs about a microsecond, makes no system call, never waits (see LOCK_SECONDS for the one bounded exception) and
never raises into training. Registration, exceptions and the intended exit are on the page, too, and sent by a side
thread (`sender.py`); the calling thread only enqueues them.
Standard library only.
"""

import atexit
import contextlib
import logging
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from rolecall.agent.data_dir import SOCKET_NAME, TOKEN_NAME, data_dirs_of_jobs
from rolecall.agent.reporter import page_layout as at
from rolecall.agent.reporter.flight_recorder_request import RECORDER_NAMES, FlightRecorderResponder
from rolecall.agent.reporter.jumps import OutlierDetector
from rolecall.agent.reporter.launcher import LAUNCHERS, LaunchedProcess, RankUnknown, launched_process
from rolecall.agent.reporter.sender import ReporterClient, describe_exception
from rolecall.core.errors import InvalidId
from rolecall.core.ids import process_start_ticks
from rolecall.core.rundir import registration_secret

logger = logging.getLogger(__name__)

LOCK_SECONDS = 0.001
"""How long a writer waits for another thread's write before it writes anyway. A reader may then see values of both
writes, which is better than a training thread that waits for a stopped one."""
BEAT_SECONDS = 0.2
"""Period of the ticker thread."""
BEATS_PER_SWITCH_CHECK = 5
OFF_SWITCH = "reporter.off"
"""While this file exists in the run directory, no process of the run beats: `make bench` measures the beats' cost."""
FLUSH_SECONDS = 0.2
"""How long interpreter exit waits for queued messages to be sent; the page holds them anyway."""
BEATS_PER_AGENT_CHECK = 25
"""Beats between two searches for an agent, while there is none."""
RECORDER_CHARACTERS_MAX = 20
PHASE_START, PHASE_STEP = "start", "step"
"""core.telemetry.Phase, which is not imported here."""
NUM_PHASES_CACHED_MAX = 64
UNKNOWN_AT_FIRST = (
    *(at.W_STEP, at.W_POLICY_VERSION, at.W_EXCEPTION_STEP),
    *(at.W_COLLECTIVES_ISSUED, at.W_COLLECTIVES_AT_STEP, at.W_COLLECTIVES_AT_BEGIN),
)

_phase_bytes: dict[str, bytes] = {}


def _phase_area(name: str) -> bytes:
    area = _phase_bytes.get(name)
    if area is None:
        area = at.padded(name, at.A_PHASE[1])
        if len(_phase_bytes) < NUM_PHASES_CACHED_MAX:
            _phase_bytes[name] = area
    return area


class _Page:
    """The page of this process. `with page:` is a write: it takes the lock and suppresses exceptions."""

    def __init__(self) -> None:
        self.detach()

    def detach(self) -> None:
        """Starts a new page in anonymous memory: at import, and in a forked child (the file is the parent's)."""
        self.lock = threading.RLock()  # reentrant: a signal handler may report from inside a write
        self.work_ident = 0
        self.phase = ""
        self.failures = 0
        self.waited_seconds = 0.0  # in collectives
        self.flight: FlightRecorderResponder | None = None  # used only by the ticker thread
        self.count_collectives: Callable[[], int] | None = None
        self.watches = {word: OutlierDetector() for word in (at.W_LOSS, at.W_GRAD_NORM, at.W_REWARD)}
        self._map(memoryview(bytearray(at.PAGE_BYTES)))
        self.d[at.W_LOSS] = self.d[at.W_GRAD_NORM] = self.d[at.W_REWARD] = math.nan
        for word in UNKNOWN_AT_FIRST:
            self.q[word] = -1
        self.q[at.W_LAYOUT] = at.LAYOUT_VERSION
        self.raw[0:8] = at.MAGIC
        self.set_phase(PHASE_START)

    def _map(self, memory: memoryview) -> None:
        self.raw, self.q, self.d = memory, memory.cast("q"), memory.cast("d")

    def move_to(self, path: Path) -> None:
        """Moves to a file at `path`; stays in memory with a warning if that fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600)
            try:
                os.fchmod(descriptor, at.PAGE_MODE)  # fails for another user's file, which may be one of its group
                # Writing, unlike truncating, allocates the block: a store to a hole on a full disk raises SIGBUS.
                if os.write(descriptor, bytes(self.raw)) != at.PAGE_BYTES:
                    raise OSError("short write")
                mapped = mmap.mmap(descriptor, at.PAGE_BYTES)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as e:
            logger.warning("cannot create the state page %s, this process is invisible to its agent: %s", path, e)
            return
        with self:
            mapped[:] = bytes(self.raw)
            self._map(memoryview(mapped))

    def __enter__(self) -> Self:
        if not self.lock.acquire(False):
            self.lock.acquire(timeout=LOCK_SECONDS)
        self.q[at.W_SEQUENCE] |= 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        self.q[at.W_SEQUENCE] = (self.q[at.W_SEQUENCE] | 1) + 1
        try:
            self.lock.release()
        except RuntimeError:
            pass  # not acquired: the wait timed out
        if error is None:
            return False
        if isinstance(error, Exception):  # a wrong argument to the reporter must not stop training
            self.failures += 1
            if self.failures == 1:
                logger.warning("a report could not be written (logged once): %s: %s", type(error).__name__, error)
            return True
        return False

    def set_phase(self, name: str) -> None:
        with self:
            self.write_phase(name)

    def write_phase(self, name: str) -> None:
        """Inside `with page:` only."""
        offset, length = at.A_PHASE
        self.raw[offset : offset + length] = _phase_area(name)
        self.phase = name
        self.d[at.W_PHASE_SINCE] = monotonic()
        self.q[at.W_PHASE_ENTRIES] += 1
        if not self.work_ident:  # until progress is reported, the thread that enters phases is the working thread
            self.q[at.W_WORK_TID] = threading.get_native_id()

    def add_progress(
        self,
        units: int,
        work_units: int,
        busy_seconds: float,
        exchange_seconds: float,
        loading_seconds: float,
        tokens: int,
    ) -> None:
        """Inside `with page:` only."""
        integers, floats = self.q, self.d
        ident = threading.get_ident()
        if ident != self.work_ident:
            self.work_ident = ident
            integers[at.W_WORK_TID] = threading.get_native_id()
        integers[at.W_PROGRESS] += units
        floats[at.W_PROGRESS_AT] = monotonic()
        if busy_seconds > 0.0:
            floats[at.W_BUSY_SECONDS] += busy_seconds
            floats[at.W_EXCHANGE_SECONDS] += exchange_seconds
            floats[at.W_LOADING_SECONDS] += loading_seconds
            integers[at.W_WORK_UNITS] += work_units
        if tokens:
            integers[at.W_TOKENS] += tokens

    def set_training(self, word: int, value: float) -> None:
        """Sets loss, gradient norm or reward, and counts outliers. Inside `with page:` only."""
        self.d[word] = value
        number = self.d[word]  # a float: a tensor would keep its graph alive
        if not math.isfinite(number):
            self.q[at.W_UNFINITE] += 1
        elif self.watches[word].jumps(number):
            self.q[at.W_JUMPS] += 1

    def set_text(self, area: tuple[int, int], text: str) -> None:
        """Inside `with page:` only."""
        self.raw[area[0] : area[0] + area[1]] = at.padded(text, area[1])

    def set_identity(self, replica: str, rank: int, incarnation: int, secret: str, pid: int, start_ticks: int) -> None:
        proof = at.identity_proof(
            secret, replica=replica, rank=rank, incarnation=incarnation, pid=pid, start_ticks=start_ticks
        )
        with self:
            self.q[at.W_PID], self.q[at.W_START_TICKS] = pid, start_ticks
            self.q[at.W_RANK], self.q[at.W_INCARNATION] = rank, incarnation
            self.set_text(at.A_REPLICA, replica)
            self.set_text(at.A_PROOF, proof)
            self.q[at.W_IDENTITIES] += 1


_page = _Page()
_client: ReporterClient | None = None
_ticker: threading.Thread | None = None
_find_agent: Callable[[], str] | None = None
"""Set while no agent is found: registers with one, or returns why it cannot."""
_uncounted = False
"""Whether this process started by itself: nobody counts its incarnations or waits for `finish`."""
_uncaught = False
_previous_excepthook: Callable[[type[BaseException], BaseException, TracebackType | None], object] | None = None
"""Set once a process: a hook that was installed since calls this module's, which must not call it in turn."""
_starting = threading.Lock()


def _tick(page: _Page) -> None:
    pause = threading.Event()  # never set: an interruptible sleep
    run = os.environ.get("ROLECALL_RUN")
    switch = os.path.join(run, OFF_SWITCH) if run else ""
    beats = 0
    while True:
        pause.wait(BEAT_SECONDS)
        page.q[at.W_BEATS] += 1
        count = page.count_collectives  # another thread may take it away
        if count is not None:
            page.q[at.W_COLLECTIVES_ISSUED] = count()
        if page.flight is not None:
            page.flight.poll()
        beats += 1
        if beats % BEATS_PER_AGENT_CHECK == 0 and _find_agent is not None:
            with _starting:
                _look_for_agent()
        if beats % BEATS_PER_SWITCH_CHECK == 0:
            while switch and os.path.exists(switch):
                pause.wait(BEAT_SECONDS * BEATS_PER_SWITCH_CHECK)


def start(
    *,
    role: str | None = None,
    replica: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    run_id: str | None = None,
    incarnation: int = 0,
    secret: str | None = None,
    node_dir: str | None = None,
    source: str = "",
) -> None:
    """Registers this process with the agent of its node. Call it once in each rank, after the process has started.

    Without arguments everything comes from the environment of torchrun, srun or Ray (`launcher.py`) and from the
    directory of the agent (`node_dir`, else $ROLECALL_AGENT_DIR, else that of this user's agent, else
    /var/lib/rolecall). Without an agent a warning is logged, the state stays in memory, and an agent that starts later
    is found. A second call changes the identity.

    `replica`: `role/index`, by default `trainer/0`: the ranks of a job are one replica. `incarnation`: 0, or counted by
    the one who starts the process and gives it a `secret` (registration_secret); then `node_dir` is by default
    `$ROLECALL_RUN/nodes/$ROLECALL_NODE`. `source`: who reports, as `hooks`; empty: the job's own calls.
    """
    global _find_agent, _ticker, _previous_excepthook, _uncounted
    with _starting:
        try:
            launched = launched_process(
                os.environ,
                role=role,
                replica=replica,
                rank=rank,
                world_size=world_size,
                local_rank=local_rank,
                run_id=run_id,
            )
            if secret is not None:
                run, node = os.environ.get("ROLECALL_RUN"), os.environ.get("ROLECALL_NODE")
                node_dir = node_dir or (f"{run}/nodes/{node}" if run and node else None)
                _register(launched, incarnation, secret, Path(node_dir) if node_dir else None, source)
            else:
                _uncounted = incarnation == 0
                _find_agent = partial(_register_with_agent, launched, incarnation, node_dir, source)
                if missing := _look_for_agent():
                    seconds = BEATS_PER_AGENT_CHECK * BEAT_SECONDS
                    logger.warning(
                        "rolecall does not watch this process yet: %s; looking again every %.0f s", missing, seconds
                    )
        except (RankUnknown, InvalidId) as e:
            logger.warning("rolecall does not watch this process: %s", e)
        except Exception as e:  # noqa: BLE001 training continues without observation
            logger.warning("this process is invisible to its agent: %s: %s", type(e).__name__, e)
        if _ticker is None:
            _ticker = threading.Thread(target=_tick, args=(_page,), name="rolecall-beats", daemon=True)
            _ticker.start()
        if _previous_excepthook is None:
            _previous_excepthook, sys.excepthook = sys.excepthook, _excepthook


def is_started() -> bool:
    """Whether `start` was called in this process."""
    return _ticker is not None


def _look_for_agent() -> str:
    """Why there is none; empty if it was found. Holds `_starting`. Never raises."""
    global _find_agent
    try:
        missing = _find_agent() if _find_agent is not None else ""
    except Exception as e:  # noqa: BLE001 the ticker thread must go on
        missing = f"{type(e).__name__}: {e}"
    if not missing:
        _find_agent = None
    return missing


def _register_with_agent(launched: LaunchedProcess, incarnation: int, node_dir: str | None, source: str) -> str:
    """Why it cannot; empty if it registered."""
    places = (Path(node_dir),) if node_dir else data_dirs_of_jobs(os.geteuid(), os.environ)
    for place in places:
        if os.path.exists(place / SOCKET_NAME) and os.access(place / TOKEN_NAME, os.R_OK):
            token = (place / TOKEN_NAME).read_text().strip()
            secret = registration_secret(token, launched.replica, launched.rank, incarnation)
            _register(launched, incarnation, secret, place, source)
            return ""
    return f"no agent runs at {' or '.join(map(str, places))} (`rolecall agent` starts one) or its token is unreadable"


def _register(
    launched: LaunchedProcess, incarnation: int, secret: str, directory: Path | None, source: str = ""
) -> None:
    global _client
    pid = os.getpid()
    start_ticks = process_start_ticks(pid) or 0
    replica, rank = launched.replica, launched.rank
    _page.set_identity(replica, rank, incarnation, secret, pid, start_ticks)
    if directory is not None and _client is None:
        _client = ReporterClient(directory / SOCKET_NAME, pid, start_ticks)
        path = directory / "pages" / at.page_name(pid, start_ticks)
        _page.move_to(path)
        _page.flight = FlightRecorderResponder(path)
    if _client is not None:
        detail = launched.detail()
        if launched.launcher in LAUNCHERS and "RAY_JOB_ID" not in os.environ:  # the parent of an actor is Ray's
            detail["launcher_pid"] = str(os.getppid())
        if source:
            detail["source"] = source
        if recorder := next((value for name in RECORDER_NAMES if (value := os.environ.get(name))), ""):
            detail["flight_recorder"] = recorder[:RECORDER_CHARACTERS_MAX]
        _client.register(replica=replica, rank=rank, incarnation=incarnation, secret=secret, detail=detail)


def become(*, replica: str, incarnation: int, secret: str) -> None:
    """A promoted standby replaces `replica`, as the same rank; its counters continue."""
    start(replica=replica, rank=_page.q[at.W_RANK], incarnation=incarnation, secret=secret)


def enter_phase(name: str) -> None:
    """Enters a phase (core.telemetry.Phase)."""
    _page.set_phase(name)


class phase:
    """`with phase("update"):` enters a phase and restores the previous one on exit."""

    __slots__ = ("_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._before = _page.phase
        _page.set_phase(self._name)

    def __exit__(self, *_: object) -> None:
        _page.set_phase(self._before)


class collective(phase):
    """`with collective():` is phase `reduce` and counts collectives: this rank is inside one while entered > done.
    Leaving by an exception counts as done: the collective is over for this rank."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        super().__init__("reduce")

    def __enter__(self) -> None:
        super().__enter__()
        self._since = monotonic()
        with _page as page:
            page.q[at.W_COLLECTIVES_ENTERED] += 1

    def __exit__(self, *_: object) -> None:
        with _page as page:
            page.q[at.W_COLLECTIVES_DONE] += 1
            page.waited_seconds += monotonic() - self._since
        super().__exit__()


def exchange() -> None:
    """This rank begins to wait for the other ranks of its replica."""
    _page.q[at.W_EXCHANGES] += 1  # one word, which is written at once


def set_step(n: int) -> None:
    """The optimizer step that this process works on."""
    with _page as page:
        page.q[at.W_STEP] = n


class step:
    """`with step(n):` sets the step; it stays after the block, until the next. An exception is reported and passes on.

    In a job that names no phases the phase is `step` from here on, and a block in which no progress was reported counts
    as one unit of work, without the time spent in `collective()`."""

    __slots__ = ("_n", "_progress", "_since", "_waited")

    def __init__(self, n: int) -> None:
        self._n = n

    def __enter__(self) -> None:
        set_step(self._n)
        if _page.phase == PHASE_START:
            _page.set_phase(PHASE_STEP)
        self._progress, self._waited, self._since = _page.q[at.W_PROGRESS], _page.waited_seconds, monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            exception(error)
            with contextlib.suppress(Exception):
                error._rolecall_reported = True  # type: ignore[attr-defined] # a prompt shows it again
        elif _page.phase == PHASE_STEP and _page.q[at.W_PROGRESS] == self._progress:
            progress(busy_seconds=monotonic() - self._since - (_page.waited_seconds - self._waited))


def progress(
    units: int = 1,
    *,
    busy_seconds: float = 0.0,
    exchange_seconds: float = 0.0,
    loading_seconds: float = 0.0,
    tokens: int = 0,
) -> None:
    """`units` of work took `busy_seconds`, beside `exchange_seconds` of waiting for the other ranks of the replica, and
    gave `tokens` tokens. `loading_seconds`: those of `busy_seconds` in which data was loaded. The caller becomes the
    working thread."""
    with _page as page:
        page.add_progress(units, units, busy_seconds, exchange_seconds, loading_seconds, tokens)


def finish_step(
    n: int,
    phase: str,
    *,
    work_units: int = 1,
    busy_seconds: float = 0.0,
    exchange_seconds: float = 0.0,
    loading_seconds: float = 0.0,
) -> None:
    """`set_step(n)`, `progress` of one unit and `enter_phase(phase)` in one write: for hooks, which are called in each
    step of a job. `work_units`: parts of the step (microbatches) that took the seconds."""
    with _page as page:
        page.q[at.W_STEP] = n
        if page.count_collectives is not None:
            page.q[at.W_COLLECTIVES_ISSUED] = page.q[at.W_COLLECTIVES_AT_STEP] = page.count_collectives()
            page.q[at.W_COLLECTIVES_AT_BEGIN] = -1
        page.add_progress(1, work_units, busy_seconds, exchange_seconds, loading_seconds, 0)
        page.write_phase(phase)


def begin_step(phase: str) -> None:
    """Enters the phase of the step after the one that `finish_step` ended."""
    with _page as page:
        if page.count_collectives is not None:
            page.q[at.W_COLLECTIVES_AT_BEGIN] = page.count_collectives()
        page.write_phase(phase)


def count_collectives(issued: Callable[[], int]) -> None:
    """`issued`: the collectives that this process has issued so far, -1 if unknown; called at each beat in a thread of
    its own, and at the beginning and the end of each step. It must not raise."""
    _page.count_collectives = issued


def update(
    *,
    epoch: int | None = None,
    policy_version: int | None = None,
    requests_active: int | None = None,
    tokens_held: int | None = None,
    loss: float | None = None,
    grad_norm: float | None = None,
    reward: float | None = None,
) -> None:
    """Sets the given values. Counts a loss, gradient norm or reward that is NaN, infinite or an outlier of its recent
    range (jumps.py)."""
    with _page as page:
        integers = page.q
        if epoch is not None:
            integers[at.W_EPOCH] = epoch
        if policy_version is not None:
            integers[at.W_POLICY_VERSION] = policy_version
        if requests_active is not None:
            integers[at.W_REQUESTS_ACTIVE] = requests_active
        if tokens_held is not None:
            integers[at.W_TOKENS_HELD] = tokens_held
        if loss is not None:
            page.set_training(at.W_LOSS, loss)
        if grad_norm is not None:
            page.set_training(at.W_GRAD_NORM, grad_norm)
        if reward is not None:
            page.set_training(at.W_REWARD, reward)


def health(
    *,
    entropy: float | None = None,
    clip_fraction_low: float | None = None,
    clip_fraction_high: float | None = None,
    ratio_mean: float | None = None,
    ratio_max: float | None = None,
    kl_sampler: float | None = None,
    response_length: float | None = None,
    truncated_fraction: float | None = None,
    filtered_fraction: float | None = None,
    log_ratio_max: float | None = None,
) -> None:
    """Policy-health metrics of the step that a trainer has just finished. Replaces all of them: omitted, None or NaN
    means unknown (fields of core.telemetry.ProcessSample; rl_runtime/protocol/policy_health.py)."""
    signs = (
        *(entropy, clip_fraction_low, clip_fraction_high, ratio_mean, ratio_max, kl_sampler, response_length),
        *(truncated_fraction, filtered_fraction, log_ratio_max),
    )
    with _page as page:
        values = [math.nan if sign is None else float(sign) for sign in signs]
        for word, value in zip(at.HEALTH_WORDS.values(), values, strict=True):
            page.d[word] = value
        page.q[at.W_HEALTHS] += 1


def exception(exc: BaseException) -> None:
    """Reports an exception that ends this process or its work. It is on the page when this returns, whatever happens to
    the process; the side thread sends it to the agent, and interpreter exit waits for that (<= FLUSH_SECONDS)."""
    _report_exception(exc, uncaught=False)


def _report_exception(exc: BaseException, *, uncaught: bool) -> None:
    """`uncaught`: nothing caught it, so this process ends, which may take seconds."""
    try:
        detail = describe_exception(exc)
        texts = (
            detail["fingerprint"].encode(),
            at.fitting(detail["type"], at.A_EXCEPTION_TYPE[1]),
            at.fitting(detail["where"], at.A_EXCEPTION_WHERE[1]),
            at.fitting(detail["message"], at.A_EXCEPTION_MESSAGE[1]),
        )
        with _page as page:
            q = page.q
            number, in_step = q[at.W_EXCEPTIONS] + 1, q[at.W_STEP]
            q[at.W_EXCEPTIONS], q[at.W_EXCEPTION_STEP], q[at.W_UNCAUGHT] = number, in_step, int(uncaught)
            if page.count_collectives is not None:
                q[at.W_COLLECTIVES_ISSUED] = page.count_collectives()
            page.d[at.W_EXCEPTION_AT] = monotonic()
            at.EXCEPTION_TEXTS.pack_into(page.raw, at.A_EXCEPTION_FINGERPRINT[0], *texts)
        if _client is not None:
            detail["step"] = str(in_step)
            if uncaught:
                detail[at.UNCAUGHT] = "1"
            _client.exception(detail, number=number)
    except Exception as e:  # noqa: BLE001 reporting one error must not raise another
        logger.warning("an exception could not be reported: %s", type(e).__name__)


def finish(reason: str = "") -> None:
    """Announces an intended exit of this process."""
    with _page as page:
        page.set_text(at.A_FINISH_REASON, reason)
        page.q[at.W_FINISHED] = 1
    if _client is not None:
        _client.finished(reason)


def page_bytes() -> bytes:
    """A copy of this process's page, for tests and for tools in the same process."""
    return bytes(_page.raw)


def _excepthook(kind: type[BaseException], exc: BaseException, where: TracebackType | None) -> None:
    global _uncaught
    if not isinstance(exc, KeyboardInterrupt):  # Ctrl-C is intended, not a fault
        _uncaught = True
        ends = not hasattr(sys, "ps1")  # a prompt shows the exception and goes on
        if ends or not getattr(exc, "_rolecall_reported", False):  # reported before, it might still have been caught
            _report_exception(exc, uncaught=ends)
    if _previous_excepthook is not None:
        _previous_excepthook(kind, exc, where)


@atexit.register
def _flush() -> None:
    """At interpreter exit, when daemon threads still run."""
    _page.count_collectives = None  # no thread may be inside of torch when the interpreter ends it
    if _uncounted and not _uncaught:
        with _page as page:
            if not page.q[at.W_FINISHED]:
                page.set_text(at.A_FINISH_REASON, at.INTERPRETER_ENDED)
                page.q[at.W_FINISHED] = 1
    if _client is not None:
        _client.flush(FLUSH_SECONDS)


def _after_fork_in_child() -> None:
    """The child must not write its parent's page, and has none of its parent's threads."""
    global _client, _ticker, _starting, _find_agent, _uncounted
    _client = _ticker = _find_agent = None
    _uncounted = False
    _starting = threading.Lock()
    _page.detach()


os.register_at_fork(after_in_child=_after_fork_in_child)
