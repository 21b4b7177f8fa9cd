"""Loss, gradient norm or reward is NaN or infinite in a job that rolecall did not start.

Nothing computes such a job's batch again, so the origin is not known: the data, the learning rate or the numerics, or a
machine whose numbers are wrong. In a job with collectives one NaN reaches all ranks within a step. (In the bundled
runtime a second computation decides: wrong_numbers.py.)
"""

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.faults import FaultClass
from rolecall.core.text import counted
from rolecall.detector.base.findings import ADVISES, NOT_FINITE, settles
from rolecall.detector.live.monitored_process import NOT_FINITE_SECONDS, MonitoredProcess
from rolecall.detector.live.processes import finding, names
from rolecall.detector.live.stages.stage import Stage, Tick

GATHER_SECONDS = 2.0
"""A value that is finite again within this time is not reported alone; the ranks of one job are sampled within it."""
LASTING = 10
"""This many within `NOT_FINITE_SECONDS` are reported even if values between them are finite."""
SCALED_MIN = 3
"""For the gradient norm alone: loss scaling in half precision skips single steps by design."""
EVIDENCE_MAX = 8
"""Ranks with evidence of their own."""
WORDS = {"loss": "loss", "grad_norm": "gradient norm", "reward": "reward"}


class NotFiniteStage(Stage):
    name = NOT_FINITE

    def evaluate(self, tick: Tick) -> list[Finding]:
        groups: dict[str, list[MonitoredProcess]] = {}
        for subject in tick.fleet.current():
            seen = subject.not_finite
            if seen.count and subject.foreign and tick.now - seen.newest <= NOT_FINITE_SECONDS:
                groups.setdefault(subject.replica, []).append(subject)
        return [_finding(tick, ranks) for ranks in groups.values() if any(_reported(s, tick.now) for s in ranks)]


def _reported(subject: MonitoredProcess, now: float) -> bool:
    seen = subject.not_finite
    lasts = 0.0 < seen.lasting_since <= now - GATHER_SECONDS
    scaled = seen.values.keys() == {"grad_norm"} and seen.count < SCALED_MIN
    return (lasts and not scaled) or seen.count >= LASTING


def _finding(tick: Tick, ranks: list[MonitoredProcess]) -> Finding:
    values: dict[str, str] = {}
    for subject in ranks:
        values |= subject.not_finite.values
    what = " and ".join(f"{WORDS[name]} {how}" for name, how in sorted(values.items()))
    steps = [s.not_finite.step for s in ranks if s.not_finite.step >= 0]
    since = f" since step {min(steps)}" if steps else ""
    first = [s for s in ranks if s.not_finite.step == min(steps)] if steps else ranks
    peers = [p for s in ranks[:1] for p in tick.fleet.peers(s) if p.replica == s.replica and not p.gone]
    others = len(peers) + 1 - len(ranks)
    who = ranks[0].name() if len(ranks) == 1 else names(ranks)
    because = f"{who}: {what or 'loss, gradient norm or reward is NaN or infinite'}{since}"
    if others > 0:
        because += f"; {counted(others, 'other rank')} of the job {'is' if others == 1 else 'are'} finite"
    if len(first) < len(ranks):
        because += f"; first on {names(first)}"
    back = f"before step {min(steps)}" if steps else "with finite values"
    return finding(
        NOT_FINITE,
        ranks,
        FaultClass.CANNOT_TELL,
        onset=min(s.not_finite.since for s in ranks),
        now=tick.now,
        confidence=0.95,
        because=because,
        evidence=(
            *(
                Evidence(
                    kind=NOT_FINITE,
                    text=f"{s.name()}: {counted(s.not_finite.count, 'value')} NaN or infinite"
                    + (f" since step {s.not_finite.step}" if s.not_finite.step >= 0 else ""),
                    values={"count": float(s.not_finite.count), "step": float(s.not_finite.step)},
                )
                for s in ranks[:EVIDENCE_MAX]
            ),
            Evidence(kind=ADVISES, text=f"stop the job and continue from the last checkpoint {back}"),
            settles(
                "the batch of that step computed again on another machine: finite there, the machine is at fault; not "
                "finite there, the data, the learning rate or the numerics are"
            ),
        ),
        about=f":{NOT_FINITE}",
    )
