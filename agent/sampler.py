"""One sampling round: registered processes each time, the node every HOST_SECONDS, and the newest poll of the GPUs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rolecall.agent.collectors.process.host import HostProbe
from rolecall.agent.registry import Registry, Tracked
from rolecall.agent.reporter import page_layout as at
from rolecall.agent.samples import SampleRing
from rolecall.core.clock import Clock
from rolecall.core.telemetry import GpuSample, HostSample, ProcessSample
from rolecall.core.uninstrumented import NO_PAGE

HOST_SECONDS = 1.0


def sample_of(tracked: Tracked, at: float, wall_at: float) -> ProcessSample:
    """Joins page and kernel state into one sample. `registry.poll` has just read the page."""
    who, page = tracked.registration, tracked.page
    kernel = tracked.probe.read(page.work_tid if page else 0)
    alive = tracked.exited_at is None
    reported: dict[str, Any] = {} if page is None else {name: getattr(page, name) for name in _PAGE_FIELDS}
    if who.found:
        reported["phase"] = NO_PAGE
    return ProcessSample(
        process=who.process,
        role=who.role,
        replica=who.replica,
        rank=who.rank,
        incarnation=who.incarnation,
        at=at,
        wall_at=wall_at,
        alive=alive,
        page_ok=tracked.page_ok,
        proc_state=kernel.proc_state if alive else "X",
        cpu_seconds=kernel.cpu_seconds,
        run_delay_seconds=kernel.run_delay_seconds,
        main_run_delay_seconds=kernel.main_run_delay_seconds,
        throttled_seconds=kernel.throttled_seconds,
        rss_bytes=kernel.rss_bytes if alive else 0,
        num_threads=kernel.num_threads if alive else 0,
        major_faults=kernel.major_faults,
        **reported,
    )


_PAGE_FIELDS = (
    "epoch",
    "phase",
    "phase_since",
    "phase_entries",
    "step",
    "policy_version",
    "progress",
    "progress_at",
    "beats",
    "collectives_entered",
    "collectives_done",
    "busy_seconds",
    "work_units",
    "tokens",
    "requests_active",
    "loss",
    "grad_norm",
    "reward",
    "unfinite",
    "jumps",
    "healths",
    *at.HEALTH_WORDS,
)


@dataclass(slots=True)
class RoundStats:
    num_rounds: int = 0
    last_at: float = float("-inf")  # node monotonic, when the newest round ended
    round_seconds: float = 0.0
    process_seconds: float = 0.0
    host_seconds: float = 0.0
    host_ok: bool = True
    processes_ok: bool = True


class Sampler:
    """Called from one thread; writes samples into the ring."""

    def __init__(
        self,
        registry: Registry,
        host: HostProbe,
        ring: SampleRing,
        clock: Clock,
        gpus: Callable[[float, float], tuple[GpuSample, ...]] | None = None,
    ) -> None:
        """`gpus(monotonic, wall)`: samples of the newest poll of the GPUs, if not yet taken."""
        self._registry, self._host, self._ring, self._clock, self._gpus = registry, host, ring, clock, gpus
        self._host_due = 0.0
        self.stats = RoundStats()

    def round(self) -> None:
        """Samples everything once."""
        begun, wall = self._clock.monotonic(), self._clock.wall()
        samples = []
        for tracked in self._registry.processes():
            with self._registry.locked():
                if tracked.exited_at is None:
                    self._registry.poll(tracked)
                at = self._clock.monotonic()
                samples.append(sample_of(tracked, at, wall + (at - begun)))
        looked = self._clock.monotonic()
        hosts: tuple[HostSample, ...] = ()
        if begun >= self._host_due:
            self._host_due = begun + HOST_SECONDS
            hosts = (self._host.read(begun, wall),)
            self.stats.host_ok = not self._host.failures
            self.stats.host_seconds = self._clock.monotonic() - looked
        gpus = self._gpus(begun, wall) if self._gpus is not None else ()
        self._ring.add(tuple(samples), hosts, gpus)
        self.stats.num_rounds += 1
        self.stats.process_seconds = looked - begun
        self.stats.processes_ok = all(s.proc_state != "?" or not s.alive for s in samples)
        self.stats.last_at = self._clock.monotonic()
        self.stats.round_seconds = self.stats.last_at - begun
