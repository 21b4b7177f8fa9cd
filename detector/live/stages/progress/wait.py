"""Silent suspicion: the ranks of a job stand still, some of them between two steps, for longer than they usually do.

Between two steps no progress is due: a job loads data, evaluates and writes checkpoints there, and its first checkpoint
may take minutes. A rank may also hang there, while the others wait for it in a collective. Their state is the same in
both cases, so nothing is reported. The watch collects the stacks of these ranks (`rolecall.watch.evidence`), and a
finding from them counts while the suspicion stands (`pulled_evidence`).

Weights go to the engines between two steps, too. Their processes are part of the suspicion of a trainer, so that their
stacks show who holds a weight transfer up (`detector.artifacts.stacks.weight_sync`).

Only of jobs that rolecall did not start: those of the bundled runtime name what they wait for.
"""

from collections.abc import Sequence

from rolecall.core.diagnosis import Finding
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import Phase
from rolecall.detector.base.findings import settles
from rolecall.detector.live.monitored_process import (
    MonitoredProcess,
    learned_deadline,
    least_of_few_units,
    least_of_long_units,
)
from rolecall.detector.live.processes import finding, names
from rolecall.detector.live.stages.stage import WORKING_CPUS, Stage, Tick

RANKS_MIN = 2
TRAINER, ENGINES = "trainer", "rollout"
"""Roles between which weights are sent, between two steps of the trainers."""
STANDING_PHASES = frozenset({Phase.WAIT, Phase.STEP, Phase.REDUCE})


class WaitStage(Stage):
    name = "wait"

    def evaluate(self, tick: Tick) -> Sequence[Finding]:
        """Adds to `tick.suspicions`; no findings."""
        floor = tick.config.hang_floor_seconds
        replicas = {
            s.replica: s
            for s in tick.fleet.current()
            if s.foreign and s.phase == Phase.WAIT and s.stall.wall >= floor and s.experienced
        }
        accused = {s.replica for f in tick.findings if f.fault_class is not FaultClass.CANNOT_TELL for s in f.suspects}
        for replica in replicas.keys() - accused:
            ranks = [s for s in tick.fleet.roster.of_replica(replica).values() if not s.finished]
            if not ranks or not all(_stands(s, floor) for s in ranks) or any(s.stopped for s in ranks):
                continue  # without any: the job is over; of a stopped one its heartbeats tell
            engines = _engines(tick, accused) if ranks[0].role == TRAINER else []
            if len(ranks) + len(engines) >= RANKS_MIN:
                self._suspect(tick, ranks, engines)
        return []

    def _suspect(self, tick: Tick, ranks: list[MonitoredProcess], engines: list[MonitoredProcess]) -> None:
        between = [s for s in ranks if s.phase == Phase.WAIT and s.stall.cpu < WORKING_CPUS * s.stall.effective]
        if not between:
            return
        group = ranks[0].group
        gaps, ceiling = tick.fleet.gaps, tick.config.hang_ceiling_seconds
        # Generations and evaluations lie here, too: a stack does not tell the longest of them from a hang.
        long = [m for m in least_of_long_units(gaps, group, Phase.WAIT) if m.factor * m.seconds > ceiling]
        usual = gaps.p99(group, Phase.WAIT) or 0.0
        deadline = learned_deadline(usual, tick.config, long)
        if not usual and any(Phase.WAIT not in s.phases_done for s in between):
            # The watch began in this pause: only what the process counted tells how long one may be.
            known = max((s.mean_step_seconds or 0.0 for s in between), default=0.0)
            deadline = learned_deadline(None, tick.config, least_of_few_units(known))
        longest = max(s.stall.wall for s in ranks)
        if longest < deadline.seconds:
            return
        because = (
            f"{names(ranks)} have stood still for {longest:.1f} s (deadline {deadline.text}), {names(between)} between "
            "two steps, where no progress is due"
        )
        if engines:
            because += f"; if they wait in a weight transfer, {names(engines)} take part in it"
        found = finding(
            self.name,
            [*ranks, *engines],
            FaultClass.CANNOT_TELL,
            onset=min(s.onset_wall(s.stall.wall) for s in ranks),
            now=tick.now,
            confidence=0.1,
            because=because,
            evidence=(settles("stacks of these ranks"),),
        )
        tick.suspicions = [*tick.suspicions, found]


def _engines(tick: Tick, accused: set[str]) -> list[MonitoredProcess]:
    """Processes of engines, which take part in a weight transfer: those that report progress have made none."""
    floor = tick.config.hang_floor_seconds
    return [
        s
        for s in tick.fleet.roster.of_role(ENGINES).values()
        if s.foreign and not s.gone and not s.finished and s.sample is not None
        if s.replica not in accused and (not s.reports or s.stall.wall >= floor)
    ]


def _stands(subject: MonitoredProcess, seconds: float) -> bool:
    return (
        not subject.gone and subject.experienced and subject.phase in STANDING_PHASES and subject.stall.wall >= seconds
    )
