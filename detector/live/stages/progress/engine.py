"""An engine of a job that reports nothing hangs: by its own metrics it runs requests and generates no token.

Its server may answer all the while: vLLM's runs in another process than the engine's core. The metrics are polled every
few seconds, so that a stall shorter than `STALL_SECONDS` is not told from the time between two polls. A server that
does not answer says nothing: an engine that was hung stays so until it generates a token or ends, and of others the
process is judged by the kernel (`uninstrumented`).
"""

from dataclasses import dataclass

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.ids import ProcessId
from rolecall.core.text import counted
from rolecall.detector.live.monitored_process import Key, MonitoredProcess
from rolecall.detector.live.processes import finding
from rolecall.detector.live.stages.stage import Stage, Tick

STALL_SECONDS = 30.0
"""Six polls at the default interval."""
LONGEST_FACTOR = 3.0
"""The deadline is at least this multiple of the longest time without a token that ended: of long prompts, or a weight
update during which requests are kept."""


@dataclass(slots=True)
class EngineProgress:
    """As last read. Times are of its node (monotonic seconds). `running_since`: 0: it runs no requests."""

    tokens: int
    moved_at: float
    running_since: float = 0.0
    longest: float = 0.0
    has_generated: bool = False
    requests: int = 0
    hung: bool = False
    process: ProcessId | None = None

    def advance(self, at: float, tokens: int, requests: int) -> None:
        if tokens != self.tokens:
            if self.running_since and self.has_generated:
                self.longest = max(self.longest, at - self._since)
            self.tokens, self.moved_at, self.has_generated = tokens, at, True
        if requests > 0:
            self.running_since = self.running_since or at
        else:
            self.running_since = 0.0
        self.requests = requests
        self.hung = self.has_generated and self.stalled_seconds(at) >= self.deadline_seconds

    def miss(self) -> None:
        """Its metrics cannot be read. Unless it hangs, it may be idle meanwhile."""
        if not self.hung:
            self.running_since = 0.0

    @property
    def _since(self) -> float:
        return max(self.moved_at, self.running_since)

    def stalled_seconds(self, at: float) -> float:
        return at - self._since if self.running_since else 0.0

    @property
    def deadline_seconds(self) -> float:
        return max(STALL_SECONDS, LONGEST_FACTOR * self.longest)


class EngineStage(Stage):
    name = "engine"

    def __init__(self) -> None:
        self.state: dict[Key, EngineProgress] = {}

    def evaluate(self, tick: Tick) -> list[Finding]:
        found: list[Finding] = []
        known: dict[Key, EngineProgress] = {}
        for subject in tick.fleet.unpaged():
            sample = subject.sample
            if sample is None or subject.gone or subject.finished:
                continue
            progress = self.state.get(subject.key)
            if progress is not None and progress.process != subject.process:
                progress = None
            is_read = bool(sample.tokens or sample.requests_active)
            if is_read:
                progress = progress or EngineProgress(sample.tokens, sample.at, process=subject.process)
                progress.advance(sample.at, sample.tokens, sample.requests_active)
            elif progress is not None and progress.tokens:
                progress.miss()
            else:
                continue
            known[subject.key] = progress
            if progress.hung:
                found.append(_hung(subject, progress, progress.stalled_seconds(sample.at), is_read, tick.now))
        self.state = known
        return found


def _hung(subject: MonitoredProcess, progress: EngineProgress, stalled: float, is_read: bool, now: float) -> Finding:
    server = "while its server answers" if is_read else "and its metrics are no longer read"
    because = (
        f"{subject.name()} is hung: by its metrics it runs {counted(progress.requests, 'request')} and has generated "
        f"no token for {stalled:.0f} s (deadline {progress.deadline_seconds:.0f} s), {server}"
    )
    values = {
        "stalled_seconds": stalled,
        "deadline_seconds": progress.deadline_seconds,
        "requests": float(progress.requests),
    }
    return finding(
        "engine",
        [subject],
        FaultClass.HANG,
        onset=subject.onset_wall(stalled),
        now=now,
        confidence=0.8,
        because=because,
        evidence=(Evidence(kind="progress", text=f"no token for {stalled:.0f} s", values=values),),
    )
