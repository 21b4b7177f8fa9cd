"""An engine of a job that reports nothing hangs: by its own metrics it runs requests and generates no token.

Its server may answer all the while: vLLM's runs in another process than the engine's core. The metrics are polled every
few seconds, so that a stall shorter than `STALL_SECONDS` is not told from the time between two polls. A server that
does not answer says nothing; its process is judged by the kernel (`uninstrumented`).
"""

from dataclasses import dataclass

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
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
    """Times are of its node (monotonic seconds). `running_since`: 0: it runs no requests."""

    tokens: int
    moved_at: float
    running_since: float = 0.0
    longest: float = 0.0
    has_generated: bool = False

    def advance(self, at: float, tokens: int, requests: int) -> None:
        if tokens != self.tokens:
            if self.running_since and self.has_generated:
                self.longest = max(self.longest, at - self._since)
            self.tokens, self.moved_at, self.has_generated = tokens, at, True
        if requests > 0:
            self.running_since = self.running_since or at
        else:
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
            if sample is None or subject.gone or subject.finished or not (sample.tokens or sample.requests_active):
                continue
            progress = self.state.get(subject.key) or EngineProgress(sample.tokens, sample.at)
            progress.advance(sample.at, sample.tokens, sample.requests_active)
            known[subject.key] = progress
            stalled = progress.stalled_seconds(sample.at)
            if progress.has_generated and stalled >= progress.deadline_seconds:
                found.append(_hung(subject, progress, sample.requests_active, stalled, tick.now))
        self.state = known
        return found


def _hung(subject: MonitoredProcess, progress: EngineProgress, requests: int, stalled: float, now: float) -> Finding:
    because = (
        f"{subject.name()} is hung: by its metrics it runs {counted(requests, 'request')} and has generated no token "
        f"for {stalled:.0f} s (deadline {progress.deadline_seconds:.0f} s), while its server answers"
    )
    values = {"stalled_seconds": stalled, "deadline_seconds": progress.deadline_seconds, "requests": float(requests)}
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
