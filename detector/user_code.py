"""User code told from hardware: the same exception on all ranks of a role, or twice in one step.

Hardware fails in one place; a wrong line fails wherever it is run. So one fingerprint (exception type and frames,
without values) on every rank of a role, or raised again in the same step by another rank or by the replacement of
the first, is the code's or its input's fault: nobody is named, for replacing any machine would change nothing.

Exceptions that say only that somebody else is gone, late or fenced are consequences and prove nothing about the code.
"""

from collections import defaultdict
from collections.abc import Mapping

from rolecall.core.diagnosis import Evidence, FaultClass, Finding
from rolecall.core.telemetry import AgentEventKind, Phase
from rolecall.detector.crash import exception_text
from rolecall.detector.findings import finding
from rolecall.detector.fleet import Fleet, SeenException

CONSEQUENCES = frozenset(
    {
        # ours: what a survivor raises when a peer or holder is lost, fenced or late
        "PeerLost",
        "DeadlineExceeded",
        "StaleIncarnation",
        "ProofMismatch",
        "WireError",
        # Ray's
        "ActorDiedError",
        "ActorUnavailableError",
        "RayActorError",
        "GetTimeoutError",
        "ObjectLostError",
        # Python's and torch's, of a broken connection or a wait that ran out
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "TimeoutError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        # a person or the supervisor wanted it
        "KeyboardInterrupt",
        "SystemExit",
    }
)
RANKS_MIN = 2
"""'On all ranks' says nothing about a role of one process: there only a repetition in the same step does."""
REMEMBER_SECONDS = 3600.0
"""Exceptions further apart than this are not held to be the same failure, even in the same step of a stuck job."""
ALL_RANKS_SECONDS = 60.0
"""Ranks of one role that raise within this raised together: steps may take this long, and a step apart is not."""


def find(fleet: Fleet, expected_roles: Mapping[str, int] | None, now: float) -> tuple[list[Finding], set[str]]:
    """Findings, and the fingerprints that they explain."""
    by_print: dict[tuple[str, str], list[SeenException]] = defaultdict(list)
    for seen in fleet.exceptions:
        fingerprint = seen.event.detail.get("fingerprint", "")
        if fingerprint and _blames_code(seen) and now - seen.received_wall <= REMEMBER_SECONDS:
            by_print[(seen.event.role, fingerprint)].append(seen)
    found, explained = [], set()
    for (role, fingerprint), seen_list in by_print.items():
        why = _why(fleet, role, seen_list, expected_roles)
        if why is None or _overcome(fleet, role, seen_list):
            continue
        explained.add(fingerprint)
        found.append(_finding(role, seen_list, why, now))
    return found, explained


def _blames_code(seen: SeenException) -> bool:
    return seen.event.detail.get("type", "").rpartition(".")[2] not in CONSEQUENCES


def _why(
    fleet: Fleet, role: str, seen_list: list[SeenException], expected_roles: Mapping[str, int] | None
) -> str | None:
    """Why these reports of one fingerprint blame the code, or None."""
    by_step: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
    for seen in seen_list:
        e = seen.event
        by_step[e.detail.get("step", "")].add((e.replica, e.rank, e.incarnation))
    newest = seen_list[-1].received_wall
    together = {(s.event.replica, s.event.rank) for s in seen_list if newest - s.received_wall <= ALL_RANKS_SECONDS}
    ranks = {(s.replica, s.rank) for s in fleet.current() if s.role == role} | together
    num_ranks = max(len(ranks), (expected_roles or {}).get(role, 0))
    if num_ranks >= RANKS_MIN and len(together) >= num_ranks:
        return f"all {num_ranks} ranks of role {role} raised it"
    for step, raisers in by_step.items():
        if len(raisers) > 1:
            who = ", ".join(f"{replica}#{incarnation}" for replica, _, incarnation in sorted(raisers))
            return f"it was raised {len(raisers)} times in step {step or 'unknown'} ({who})"
    return None


def _overcome(fleet: Fleet, role: str, seen_list: list[SeenException]) -> bool:
    """The role has since gone beyond the step in which it failed."""
    last = max((_step(seen) for seen in seen_list), default=-1)
    newest = seen_list[-1].received_wall
    return any(
        s.sample is not None
        and s.worked_wall > newest
        and s.phase != Phase.START
        and (last < 0 or s.sample.step > last)
        for s in fleet.current()
        if s.role == role
    )


def _step(seen: SeenException) -> int:
    try:
        return int(seen.event.detail.get("step", "-1"))
    except ValueError:
        return -1


def _finding(role: str, seen_list: list[SeenException], why: str, now: float) -> Finding:
    text = exception_text(seen_list[0].event)
    return finding(
        "user_code",
        [],
        FaultClass.USER_CODE,
        onset=seen_list[0].event.wall_at,
        now=now,
        confidence=0.95,
        because=f"role {role} fails in its code, not in its machines: {why}: {text}",
        evidence=tuple(
            Evidence(
                kind=AgentEventKind.EXCEPTION,
                text=f"{s.event.replica}#{s.event.incarnation} in step {s.event.detail.get('step', '?')}: "
                f"{exception_text(s.event)}",
            )
            for s in seen_list[-8:]
        ),
    )
