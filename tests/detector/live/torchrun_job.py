"""A torchrun job with the reporter, as the detector sees it: the ranks of one replica, in phase `step`."""

import math
from dataclasses import dataclass, field

from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import UNCOUNTED, AgentEvent, AgentEventKind, ProcessSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector

NODE = NodeId("vm")
WALL = 1_700_000_000.0
SAMPLE_SECONDS = 0.5
FIRST_INCARNATION = UNCOUNTED
"""A watch that may act counts incarnations from 1."""
GLOO_CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:19148"


@dataclass
class Rank:
    rank: int
    pid: int
    replica: str = "trainer/0"
    step: int = 0
    alive: bool = True
    is_stopped: bool = False  # by a signal
    waits: bool = False  # in its step, with heartbeats
    beats: int = 0
    loss: float = 0.5
    unfinite: int = 0
    jumps: int = 0
    incarnation: int = UNCOUNTED

    @property
    def process(self) -> ProcessId:
        return ProcessId(node=NODE, pid=self.pid, start_ticks=self.pid * 7)


@dataclass
class TorchrunJob:
    """Two steps a second. A rank that is stopped or dead keeps the others in their step."""

    ranks: list[Rank]
    detector: LiveDetector = field(
        default_factory=lambda: LiveDetector(DetectorConfig(), foreign=FIRST_INCARNATION != UNCOUNTED)
    )
    incarnation: int = field(default_factory=lambda: FIRST_INCARNATION)
    now: float = 100.0
    standing: list[Diagnosis] = field(default_factory=list)
    _events: list[AgentEvent] = field(default_factory=list)
    _seq: int = 0

    def __post_init__(self) -> None:
        self.register(*self.ranks)

    def register(self, *ranks: Rank) -> None:
        for r in ranks:
            r.incarnation = self.incarnation
            self.event(AgentEventKind.REGISTERED, r, launcher="torchrun")

    def replaced_by(self, *ranks: Rank) -> None:
        """The launcher starts the job again."""
        self.ranks = list(ranks)
        self.incarnation += self.incarnation != UNCOUNTED
        self.register(*ranks)

    def event(self, kind: AgentEventKind, r: Rank, ago: float = 0.0, **detail: str) -> None:
        self._seq += 1
        self._events.append(
            AgentEvent(
                seq=self._seq, kind=kind, node=NODE, at=self.now - ago, wall_at=WALL + self.now - ago,
                process=r.process, role="trainer", replica=r.replica, rank=r.rank, incarnation=r.incarnation, detail=detail,
            )
        )  # fmt: skip

    def raises(self, r: Rank, kind: str, message: str, fingerprint: str, ago: float = 0.0) -> None:
        self.event(
            AgentEventKind.EXCEPTION, r, ago,
            type=kind, message=message, where="train.py:13 <module>", fingerprint=fingerprint, step=str(r.step),
        )  # fmt: skip

    def exits(self, r: Rank, ago: float = 0.0, **detail: str) -> None:
        r.alive = False
        self.event(AgentEventKind.EXITED, r, ago, last_phase="step", step=str(r.step), **detail)

    def ended_by_launcher(self, r: Rank) -> None:
        self.event(AgentEventKind.FINISHED, r, reason="ended on SIGTERM")
        self.exits(r, signal="15")

    def run(self, seconds: float) -> list[Diagnosis]:
        """What stands at the end."""
        ends = self.now + seconds
        while self.now < ends:
            self.now += SAMPLE_SECONDS
            together = all(r.alive and not r.is_stopped and not r.waits for r in self.ranks)
            for r in self.ranks:
                r.step += together
                r.beats += not r.is_stopped
                if not math.isfinite(r.loss):
                    r.unfinite += together
            batch = SampleBatch(
                node=NODE, agent_pid=1, cursor=0, lost=0, at=self.now, wall_at=WALL + self.now, hosts=(),
                processes=tuple(self._sample(r) for r in self.ranks),
            )  # fmt: skip
            events, self._events = tuple(self._events), []
            self.standing = self.detector.observe(Observation(wall_at=WALL + self.now, batches=(batch,), events=events))
        return self.standing

    def suspect(self, rank: int) -> Suspect:
        r = self.ranks[rank]
        return Suspect(
            node=NODE, role="trainer", replica=r.replica, rank=rank, incarnation=r.incarnation, process=r.process
        )

    def _sample(self, r: Rank) -> ProcessSample:
        return ProcessSample(
            process=r.process, role="trainer", replica=r.replica, rank=r.rank, incarnation=r.incarnation,
            at=self.now, wall_at=WALL + self.now, alive=r.alive, page_ok=True, phase="step", phase_since=100.0,
            phase_entries=2, step=r.step, progress=r.step, progress_at=self.now, beats=r.beats,
            proc_state="T" if r.is_stopped else "S", cpu_seconds=0.1 * r.beats,
            loss=r.loss, unfinite=r.unfinite, jumps=r.jumps,
        )  # fmt: skip


def job(num_ranks: int = 4, pid: int = 100, seconds: float = 20.0) -> TorchrunJob:
    """A job that has run for a while."""
    made = TorchrunJob([Rank(n, pid + n) for n in range(num_ranks)])
    assert made.run(seconds) == []
    return made
