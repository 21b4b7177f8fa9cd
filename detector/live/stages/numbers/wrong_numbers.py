"""Numbers that are not finite, or that others do not get from the same input: a faulty machine, or data and code?

The runtime computes a microbatch again on another replica, within the same step, if loss or gradient are not finite or
unusual, and has a share of the rewards scored twice. It reports the result as an exception:

    NonFiniteMicrobatch   from each replica at which it is not finite. If it was finite elsewhere, the role goes beyond
                          the step, and the replica that reported it is suspect. If two replicas report the same
                          microbatch, its prompt groups or the code are at fault, and no machine.
    WrongNumbers          names the suspect replica: from a trainer that computed a microbatch again, with usual
                          numbers, or from the controller, if two scorers contradict a third.
    CorruptTransfer       names a holder of weights, from the replica that pulled them, the puller. One that gets wrong
                          bytes three times, from several holders, is itself what they have in common, and the suspect;
                          twice may be chance at each of two holders. The reports of one puller alone count once against
                          a holder, since either of the two may be faulty; unless no other replica has the puller's
                          role, which could contradict it.

Once may be chance (a bit flip); twice within an hour, in two steps or prompt groups, is a machine.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from rolecall.core.diagnosis import Evidence, Finding
from rolecall.core.errors import CorruptTransfer, NonFiniteMicrobatch, WrongNumbers
from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import AgentEventKind
from rolecall.detector.base.findings import WRONG_NUMBERS, WRONG_NUMBERS_ONCE
from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import MonitoredProcesses, ReceivedException, finding
from rolecall.detector.live.stages.exits.crash import step_of
from rolecall.detector.live.stages.stage import Stage, Tick

REMEMBER_SECONDS = 3600.0
"""Within this time, a second microbatch of the same process makes a machine of what may have been chance."""
STANDS_SECONDS = 60.0
"""How long a single one is reported, and one of data or code."""
COMMON_REPORTS_MIN = 3
"""Transfers from several holders that one puller got wrong, from which on the puller is the suspect."""
SHOWN_MAX = 4
"""Microbatches that the sentence quotes."""
HEALTH = ("loss", "grad_norm", "entropy", "ratio_max", "kl_sampler", "response_length")
"""What is quoted of the policy's health: fields of `ProcessSample`."""


class WrongNumbersStage(Stage):
    name = WRONG_NUMBERS

    def evaluate(self, tick: Tick) -> list[Finding]:
        fleet, now = tick.fleet, tick.now
        # By its groups, too: after a rollback a step has the same microbatch ids and other groups.
        by_microbatch: dict[tuple[str, str, str], list[ReceivedException]] = defaultdict(list)
        # (replica, incarnation) -> unit of work -> first report of numbers that others did not get
        alone: dict[tuple[str, int], dict[str, ReceivedException]] = defaultdict(dict)
        # (replica, incarnation) of the puller -> holder, unit, report
        pulled: dict[tuple[str, int], list[tuple[tuple[str, int], str, ReceivedException]]] = defaultdict(list)
        for seen in fleet.wrong_numbers:
            message = seen.event.detail.get("message", "")
            wrong, parsed = WrongNumbers.parse(message), NonFiniteMicrobatch.parse(message)
            sent = CorruptTransfer.parse(message)
            if now - seen.received_wall > REMEMBER_SECONDS:
                continue
            if wrong is not None:
                replica, incarnation, unit, _ = wrong
                alone[(replica, incarnation)].setdefault(unit, seen)
            elif parsed is not None:
                by_microbatch[(seen.event.role, *parsed)].append(seen)
            elif sent is not None:
                puller = seen.event.replica, seen.event.incarnation
                pulled[puller].append(((sent[0], sent[1]), f"version {sent[2]}", seen))
        # holder -> unit, report; of pullers that named no other one
        named: dict[tuple[str, int], list[tuple[str, ReceivedException]]] = defaultdict(list)
        for puller, transfers in pulled.items():
            is_common = len(transfers) >= COMMON_REPORTS_MIN and len({holder for holder, _, _ in transfers}) > 1
            for holder, unit, seen in transfers:
                if is_common:
                    alone[puller].setdefault(unit, seen)
                else:
                    named[holder].append((unit, seen))
        for holder, reported in named.items():
            pullers = {seen.event.replica for _, seen in reported}
            is_sure = len(pullers) > 1 or _is_only(tick, reported[0][1].event.role)
            if not is_sure:
                reported = [("transfers of one puller", _to_report([seen for _, seen in reported]))]
            for unit, seen in reported:
                alone[holder].setdefault(unit, seen)
        found = list[Finding]()
        for (role, microbatch, groups), reports in by_microbatch.items():
            raisers = {(s.event.replica, s.event.incarnation) for s in reports}
            if len(raisers) > 1 or (len(reports) > 1 and fleet.roster.sizes().get(role, 0) < 2):
                if now - reports[-1].received_wall <= STANDS_SECONDS:
                    found.append(_of_data(fleet, role, microbatch, groups, reports, now))
                continue
            # When a process of the role has gone beyond the step, the microbatch was finite elsewhere.
            first, step = reports[0], step_of(reports[0])
            if any(
                s.sample is not None and s.sample.step > step and s.seen_wall > first.received_wall
                for s in fleet.roster.of_role(role).values()
            ):
                alone[(first.event.replica, first.event.incarnation)].setdefault(f"step {step}", first)
        for subject in fleet.current() if alone else ():
            units = alone.get((subject.replica, subject.incarnation), {})
            reports = sorted(units.values(), key=lambda s: s.received_wall)
            if len(reports) > 1 or (reports and now - reports[0].received_wall <= STANDS_SECONDS):
                found.append(_of_machine(subject, reports, now))
        return found


def _to_report(reports: Sequence[ReceivedException]) -> ReceivedException:
    """Which of one puller's reports, oldest first, stands for all: the newest, unless the one before it stands still or
    came less long ago than the first before that one. A link that is always faulty is reported ever more rarely."""
    first = shown = reports[0]
    for seen in reports:
        age = shown.received_wall - first.received_wall
        if seen.received_wall - shown.received_wall > max(STANDS_SECONDS, age):
            shown = seen
    return shown


def _is_only(tick: Tick, role: str) -> bool:
    """Whether the role has one replica: no other could contradict it."""
    replicas = {s.replica for s in tick.fleet.roster.of_role(role).values()}
    return max(len(replicas), tick.expected_roles.get(role, 0)) < 2


def _of_machine(subject: MonitoredProcess, reports: Sequence[ReceivedException], now: float) -> Finding:
    twice = len(reports) > 1
    first = reports[0]
    of_transfers = all(CorruptTransfer.parse(s.event.detail.get("message", "")) for s in reports)
    does = "transfers wrong bytes" if of_transfers else "computes wrong numbers"
    because = f"{subject.name()} {does}: {'; '.join(_what(s) for s in reports[:SHOWN_MAX])}"
    if twice:
        seconds = reports[-1].received_wall - first.received_wall
        because += (
            f", {len(reports)} times within {f'{seconds / 60:.0f} min' if seconds >= 120 else f'{seconds:.0f} s'}"
        )
    else:
        because += "; if it happens again within an hour, the replica is replaced"
        if of_transfers and subject.replica != first.event.replica:
            because += ", but not if only one of several replicas gets wrong bytes"
    return finding(
        WRONG_NUMBERS if twice else WRONG_NUMBERS_ONCE,
        [subject],
        FaultClass.SILENT_CORRUPTION,
        onset=first.received_wall,
        now=now,
        confidence=0.9 if twice else 0.5,
        because=because,
        evidence=_reports(reports),
        about=":twice" if twice else ":once",
    )


def _what(seen: ReceivedException) -> str:
    message = seen.event.detail.get("message", "")
    wrong, parsed = WrongNumbers.parse(message), NonFiniteMicrobatch.parse(message)
    if (sent := CorruptTransfer.parse(message)) is not None:
        holder, incarnation, version, reason = sent
        return f"from {holder}#{incarnation} to {seen.event.replica}, in version {version}, {reason}"
    if wrong is not None:
        return f"in {wrong[2]} {wrong[3]}"
    which = parsed[0] if parsed else "?"
    return f"loss or gradient of microbatch {which} was not finite there; computed again, it was finite"


def _of_data(
    fleet: MonitoredProcesses, role: str, microbatch: str, groups: str, reports: Sequence[ReceivedException], now: float
) -> Finding:
    where = sorted({f"{s.event.replica}#{s.event.incarnation}" for s in reports})
    at = f"on {' and on '.join(where)}" if len(where) > 1 else f"twice on {where[0]}, the only replica of {role}"
    health = _health(fleet, role)
    because = (
        f"loss or gradient of microbatch {microbatch} (prompt groups {groups}) is not finite {at}: the data or the "
        f"code, no machine{f'; {health.text}' if health else ''}"
    )
    return finding(
        WRONG_NUMBERS,
        [],
        FaultClass.DATA,
        onset=reports[0].received_wall,
        now=now,
        confidence=0.9,
        because=because,
        evidence=(*_reports(reports), *((health,) if health else ())),
        about=f":{microbatch}",
    )


def _reports(reports: Sequence[ReceivedException]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            kind=AgentEventKind.EXCEPTION, text=s.event.detail.get("message", ""), values={"step": float(step_of(s))}
        )
        for s in reports[-8:]
    )


def _health(fleet: MonitoredProcesses, role: str) -> Evidence | None:
    """What the role last reported of the policy."""
    newest = max(
        (s.sample for s in fleet.roster.of_role(role).values() if s.sample is not None),
        key=lambda sample: sample.step,
        default=None,
    )
    values = {name: float(getattr(newest, name)) for name in HEALTH if newest is not None}
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    if newest is None or not known:
        return None
    shown = ", ".join(f"{name} {value:.3g}" for name, value in known.items())
    return Evidence(kind="policy_health", text=f"policy at step {newest.step}: {shown}", values=known)
