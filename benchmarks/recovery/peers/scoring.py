"""What became of a fault in another system, from what its workers wrote and what it said. Pure.

Found: the first line by which the system says that something is wrong. Named right: its lines name the worker that was
hit and no other, with words that fit the fault. Cured: every rank commits steps with a finite loss again, the hit one
in a new process (or, of wrong numbers, after the step was discarded). Lost: steps done again, and steps attempted and
discarded. Innocent: workers that were not hit and whose process is gone. Stall: the longest time without a committed
step of the workers that were not hit.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.recovery.chaos.schedule import Fault
from benchmarks.recovery.peers.loop import Attempt, Worker, is_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A line of a system's log, with the wall time at which it was read."""

    wall_at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Lines by which a system says that something is wrong. `names`: a group `pid` or `rank` tells who."""

    pattern: re.Pattern[str]
    kinds: frozenset[str] = frozenset()  # last words of the faults that it describes
    names: bool = False


def _sign(pattern: str, *kinds: str, names: bool = False) -> Sign:
    return Sign(pattern=re.compile(pattern), kinds=frozenset(kinds), names=names)


NODE = "node"
"""The kind of a lost node; of all others it is the last word of the fault's kind."""
SIGNS = {
    "torchft": (
        # torchrun, of its own child
        _sign(r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: (?P<pid>\d+)\)", "kill", names=True),
        _sign(r"should_commit=False"),
        _sign(r"got exception in "),
        _sign(r"Detected quorum change"),
    ),
    "ray-train": (
        _sign(r"\[Rank (?P<rank>\d+) Error Snippet\]", names=True),
        _sign(r"died unexpectedly|died or was killed|actor is dead", "kill"),
        _sign(r"its node has died|marked dead|node was terminated", NODE),
        _sign(r"\[FailurePolicy\]"),
        _sign(r"Training failed due to"),
    ),
}


def judged(
    system: str,
    fault: Fault,
    hit: Worker,
    others: Collection[tuple[int, int]],
    injected_at: float,
    ended_at: float,
    workers: Sequence[Worker],
    alive: Collection[tuple[int, int]],
    said: Sequence[Said],
) -> dict[str, Any]:
    """`hit`: as it was before. `others`: keys of the workers that were neither hit nor must end with it. `alive`: keys
    of the workers whose process lives at the end of the observation, `ended_at`."""
    lines = [x for x in said if x.wall_at >= injected_at]
    matched = [(x, sign, m) for x in lines for sign in SIGNS[system] if (m := sign.pattern.search(x.text))]
    found_at = min((x.wall_at for x, _, _ in matched), default=None)
    named = _names_right(fault, hit, matched)
    cured_at = cured(fault, hit, injected_at, workers)
    return {
        "found_seconds": None if found_at is None else round(found_at - injected_at, 2),
        "named": named,
        "cured_seconds": None if cured_at is None else round(cured_at - injected_at, 2),
        "innocent": len([key for key in others if key not in alive]),
        "lost_steps": lost_steps(others, injected_at, workers),
        "stall_seconds": round(stall_seconds(others, injected_at, ended_at, workers), 1),
        "quote": _quote(matched),
    }


QUOTE_LENGTH = 300
FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.@-]+/)+")
"""Of a path: they differ between machines."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _quote(matched: Sequence[tuple[Said, Sign, re.Match[str]]]) -> str:
    """The first line, the first that names, and the first that says what it was; each once."""
    lines = [
        next((x.text for x, sign, _ in matched if wanted(sign)), "")
        for wanted in (lambda _: True, lambda sign: sign.names, lambda sign: bool(sign.kinds))
    ]
    cleaned = [FOLDERS.sub("", COLOUR.sub("", text)).strip()[:QUOTE_LENGTH] for text in lines if text]
    return " ... ".join(dict.fromkeys(cleaned))


def _names_right(fault: Fault, hit: Worker, matched: Sequence[tuple[Said, Sign, re.Match[str]]]) -> bool:
    who = {(name, int(value)) for _, sign, m in matched if sign.names for name, value in m.groupdict().items() if value}
    kinds = {kind for _, sign, _ in matched for kind in sign.kinds}
    return (
        bool(who)
        and who <= {("pid", hit.pid), ("rank", hit.rank)}
        and (NODE if fault.kind == "node-kill" else fault.last_word) in kinds
    )


def cured(fault: Fault, hit: Worker, injected_at: float, workers: Sequence[Worker]) -> float | None:
    """Wall seconds from which every rank makes progress again; None: not within the observation."""
    ranks = {w.rank for w in workers}
    good = {rank: [] for rank in ranks}  # type: dict[int, list[float]]
    for w in workers:
        if w.key == hit.key and not _discarded(fault, w, injected_at):
            continue
        good[w.rank] += [a.wall_at for a in w.attempts if a.wall_at > injected_at and a.committed and is_finite(a)]
    back_at = min(good[hit.rank], default=None)
    if back_at is None:
        return None
    firsts = [min((at for at in good[rank] if at >= back_at), default=None) for rank in ranks]
    return None if None in firsts else max(at for at in firsts if at is not None)


def _discarded(fault: Fault, hit: Worker, injected_at: float) -> bool:
    """Whether wrong numbers of this worker were kept out of the weights."""
    after = [a for a in hit.attempts if a.wall_at > injected_at]
    return fault.last_word in ("nan", "wrong") and bool(after) and not after[0].committed


def lost_steps(others: Collection[tuple[int, int]], injected_at: float, workers: Sequence[Worker]) -> int:
    """Steps that a rank which was not hit does again in a new process, and those that it attempted and discarded."""
    last = max((a.step for w in workers for a in w.attempts if a.committed and a.wall_at <= injected_at), default=-1)
    again, discarded = [0], [0]
    for w in workers:
        if w.key in others:
            discarded.append(sum(a.wall_at > injected_at and not a.committed for a in w.attempts))
        elif w.rank in {other.rank for other in workers if other.key in others}:
            again += [last + 1 - a.step for a in w.attempts if a.committed and a.wall_at > injected_at][:1]
    return max(again) + max(discarded)


def stall_seconds(
    others: Collection[tuple[int, int]], injected_at: float, ended_at: float, workers: Sequence[Worker]
) -> float:
    """The longest time without a committed step of a rank that was not hit, whichever process holds it."""
    longest = 0.0
    for rank in {w.rank for w in workers if w.key in others}:
        done: list[Attempt] = [a for w in workers if w.rank == rank for a in w.attempts if a.committed]
        times = [injected_at, *sorted(a.wall_at for a in done if injected_at < a.wall_at < ended_at), ended_at]
        longest = max(longest, *(b - a for a, b in pairwise(times)))
    return longest
