"""Verification of a process's claimed identity, from the socket or its page. Pure: no files, no clock."""

import hmac
from dataclasses import dataclass
from typing import Any

from rolecall.agent.processes.state_pages import PageState
from rolecall.core.errors import InvalidId
from rolecall.core.ids import NodeId, ProcessId, split_replica
from rolecall.core.rundir import registration_secret

RANK_MAX = 1 << 20
NUM_DETAILS_MAX, DETAIL_CHARACTERS_MAX = 16, 200
INCARNATION_MAX = 1 << 40


class ClaimRejected(Exception):
    """A message of a process was rejected; the text says why. `for_now`: it may be accepted later, once another process
    has ended."""

    def __init__(self, reason: str, *, for_now: bool = False) -> None:
        self.for_now = for_now
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A verified claim, or the identity that a discovery rule gives an uninstrumented process."""

    process: ProcessId
    replica: str
    role: str
    rank: int
    incarnation: int
    found: bool = False
    """Discovered by a rule: the process is uninstrumented and has no state page."""
    job: str = ""
    """Distinguishes its job from others on this node: from the rule, or the process's own run id."""

    @property
    def slot(self) -> tuple[str, int, int]:
        return self.replica, self.rank, self.incarnation

    def facts(self) -> dict[str, Any]:
        """As fields of an AgentEvent."""
        return {k: getattr(self, k) for k in ("process", "role", "replica", "rank", "incarnation")}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Registration":
        return cls(**{**record, "process": ProcessId(**record["process"])})


def sender(peer_pid: int, message: dict[str, Any], node: NodeId) -> ProcessId:
    """The process that sent `message`; `peer_pid` is its PID according to the kernel.

    Raises:
        ClaimRejected: it claims to be another process.
    """
    pid, start_ticks = message.get("pid"), message.get("start_ticks")
    if type(pid) is not int or type(start_ticks) is not int:
        raise ClaimRejected("pid and start_ticks must be integers")
    if pid != peer_pid:
        raise ClaimRejected(f"process {peer_pid} may not report for process {pid}")
    return ProcessId(node=node, pid=pid, start_ticks=start_ticks)


def detail_of(message: dict[str, Any]) -> dict[str, str]:
    """What a process adds to its registration: its launcher, job, world size, local rank.

    Raises:
        ClaimRejected: not a few short texts.
    """
    detail = message.get("detail", {})
    if not isinstance(detail, dict) or len(detail) > NUM_DETAILS_MAX:
        raise ClaimRejected(f"detail must be at most {NUM_DETAILS_MAX} strings")
    if not all(isinstance(v, str) and len(v) <= DETAIL_CHARACTERS_MAX for pair in detail.items() for v in pair):
        raise ClaimRejected(f"detail must be strings of at most {DETAIL_CHARACTERS_MAX} characters")
    return detail


def verified(peer_pid: int, message: dict[str, Any], node: NodeId, token: str) -> Registration:
    """The claim of a registration message, if its secret was issued for this rank and incarnation.

    Raises:
        ClaimRejected: malformed, another process's, or a wrong secret.
    """
    process = sender(peer_pid, message, node)
    replica, secret = message.get("replica"), message.get("secret")
    rank, incarnation = message.get("rank"), message.get("incarnation")
    if not isinstance(replica, str) or not isinstance(secret, str):
        raise ClaimRejected("replica and secret must be strings")
    if type(rank) is not int or not 0 <= rank <= RANK_MAX:
        raise ClaimRejected(f"rank must be an integer from 0 to {RANK_MAX}")
    if type(incarnation) is not int or not 0 <= incarnation <= INCARNATION_MAX:
        raise ClaimRejected(f"incarnation must be an integer from 0 to {INCARNATION_MAX}")
    try:
        role, _ = split_replica(replica)
    except InvalidId as e:
        raise ClaimRejected(str(e)) from None
    detail = detail_of(message)
    wanted = registration_secret(token, replica, rank, incarnation)
    if not hmac.compare_digest(wanted.encode(), secret.encode("utf-8", "replace")):
        raise ClaimRejected(f"wrong secret for {replica}:{rank}#{incarnation}")
    return Registration(
        process=process,
        replica=replica,
        role=role,
        rank=rank,
        incarnation=incarnation,
        job=detail.get("rendezvous") or detail.get("job", ""),
    )


def proven(page: PageState, node: NodeId, token: str) -> Registration | None:
    """The identity on a page, if its writer held the secret of this rank and incarnation; else None."""
    try:
        role, _ = split_replica(page.replica)
    except InvalidId:
        return None
    if not page.proven_by(registration_secret(token, page.replica, page.rank, page.incarnation)):
        return None
    process = ProcessId(node=node, pid=page.pid, start_ticks=page.start_ticks)
    return Registration(process=process, replica=page.replica, role=role, rank=page.rank, incarnation=page.incarnation)
