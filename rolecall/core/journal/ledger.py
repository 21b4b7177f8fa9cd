"""Exactly once: each prompt group is trained on once, or dropped with a reason, across any sequence of deaths.

Groups move along

    issued -> accepted -> assigned -> trained            trained -> undone -> accepted, assigned ...
       |                    ^ |  ^                           (back to an older checkpoint)
       +--------------------+ v  |
                          returned -> accepted            all but trained -> dropped

Accepted groups passed dynamic sampling; a run with dynamic sampling trains on no others. Each move is one line of a
hash chain, in one transaction with the check that the move is legal. The chain's head is in the trainer's commit
record, its checkpoints and the report, so a truncated tail is detected, too. No prompt or sample text is stored: a
group id identifies the prompt, which the task generates from (seed, group number).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import LedgerViolation
from rolecall.core.ids import GroupId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.journal.store import GENESIS, Store, chain_hash, chain_head
from rolecall.core.journal.tables import LEDGER, LEDGER_GROUPS
from rolecall.core.text import counted


class GroupState(StrEnum):
    ISSUED = "issued"
    ACCEPTED = "accepted"
    ASSIGNED = "assigned"
    RETURNED = "returned"
    TRAINED = "trained"
    DROPPED = "dropped"
    UNDONE = "undone"


LEGAL: Mapping[GroupState | None, frozenset[GroupState]] = {
    None: frozenset({GroupState.ISSUED}),
    GroupState.ISSUED: frozenset({GroupState.ACCEPTED, GroupState.ASSIGNED, GroupState.DROPPED}),
    GroupState.ACCEPTED: frozenset({GroupState.ASSIGNED, GroupState.DROPPED}),
    GroupState.ASSIGNED: frozenset({GroupState.TRAINED, GroupState.RETURNED, GroupState.DROPPED}),
    GroupState.RETURNED: frozenset({GroupState.ACCEPTED, GroupState.ASSIGNED, GroupState.DROPPED}),
    GroupState.TRAINED: frozenset({GroupState.UNDONE}),
    GroupState.UNDONE: frozenset({GroupState.ACCEPTED, GroupState.ASSIGNED, GroupState.DROPPED}),
    GroupState.DROPPED: frozenset(),
}
_STATES = frozenset(str(s) for s in GroupState)
FILTERED = "filtered: "
"""Prefix of the reason of a drop by dynamic sampling: a choice by rewards, not a loss."""

_FIELDS = ("seq", "group_id", "state", "step", "num_tokens", "reason", "wall_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    group_id: GroupId
    state: GroupState
    step: int = -1  # optimizer step, for assigned, returned, trained, undone; for what dynamic sampling judged
    num_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of a check of the whole ledger. `ok` only without problems."""

    ok: bool
    problems: tuple[str, ...]
    head: ChainHead
    groups_issued: int
    groups_trained: int
    groups_dropped: int
    groups_undone: int  # undo moves, not groups that ended undone
    duplicates: int
    unaccounted: int  # neither trained nor dropped in the end
    dropped_by_reason: dict[str, int] = field(default_factory=dict)
    dropped_by_length: dict[str, int] = field(default_factory=dict)  # bucket of num_tokens -> groups
    filtered_by_length: dict[str, int] = field(default_factory=dict)  # of these, dropped by dynamic sampling


class Ledger:
    """The table of prompt groups. Shares the journal's database."""

    def __init__(self, store: Store, *, clock: Clock | None = None) -> None:
        self._store = store
        self._clock = clock or SystemClock()

    def write(self, lines: Sequence[LedgerLine]) -> ChainHead:
        """Appends all lines, or none. Raises LedgerViolation: naming the group and the move that is not legal."""
        with self._store.write() as conn:
            head = chain_head(conn, LEDGER)
            seq, link = head.position, head.hash
            for line in lines:
                before = conn.execute(sa.select(LEDGER_GROUPS).where(LEDGER_GROUPS.c.group_id == line.group_id)).first()
                _check_move(line, GroupState(before.state) if before else None, before.step if before else -1)
                seq += 1
                entry = {
                    "seq": seq,
                    "group_id": line.group_id,
                    "state": str(line.state),
                    "step": line.step,
                    "num_tokens": line.num_tokens,
                    "reason": line.reason,
                    "wall_at": self._clock.wall(),
                }
                link = chain_hash(link, entry)
                conn.execute(LEDGER.insert().values(**entry, hash=link))
                values = {"state": str(line.state), "step": line.step}
                if before is None:
                    conn.execute(LEDGER_GROUPS.insert().values(group_id=line.group_id, **values))
                else:
                    conn.execute(
                        LEDGER_GROUPS.update().where(LEDGER_GROUPS.c.group_id == line.group_id).values(**values)
                    )
            return ChainHead(position=seq, hash=link)

    def head(self) -> ChainHead:
        with self._store.read() as conn:
            return chain_head(conn, LEDGER)

    def groups(
        self, states: Iterable[GroupState] | None = None, *, among: Iterable[GroupId] | None = None
    ) -> dict[GroupId, tuple[GroupState, int]]:
        """group -> (state, step), in the order of their ids; of those `among` only, where it is given."""
        query = sa.select(LEDGER_GROUPS).order_by(LEDGER_GROUPS.c.group_id)
        if states is not None:
            query = query.where(LEDGER_GROUPS.c.state.in_([str(s) for s in states]))
        if among is not None:
            query = query.where(LEDGER_GROUPS.c.group_id.in_([str(g) for g in among]))
        found = self._store.rows(query)
        return {GroupId(r["group_id"]): (GroupState(r["state"]), r["step"]) for r in found}

    def dropped_for(self, reason: str) -> set[GroupId]:
        """Groups that were dropped with exactly this reason."""
        query = sa.select(LEDGER.c.group_id).where(LEDGER.c.state == str(GroupState.DROPPED), LEDGER.c.reason == reason)
        return {GroupId(r["group_id"]) for r in self._store.rows(query)}

    def last_trained_step(self) -> int:
        """Highest step with a trained group, -1 if there is none."""
        with self._store.read() as conn:
            query = sa.select(sa.func.max(LEDGER_GROUPS.c.step)).where(LEDGER_GROUPS.c.state == str(GroupState.TRAINED))
            step = conn.execute(query).scalar()
        return -1 if step is None else int(step)

    def includes(
        self,
        step: int,
        group_ids: Iterable[GroupId],
        head: ChainHead,
        states: AbstractSet[GroupState] = frozenset({GroupState.TRAINED}),
    ) -> bool:
        """Whether a commit of `step`, made from the assignment that the ledger had at `head`, is part of the run's
        history: its groups still are in one of `states` by that assignment. One that was undone since, or is of another
        ledger, is not. The state before the first step (-1) always is.
        """
        if step < 0:
            return True
        groups = sorted({str(g) for g in group_ids})
        with self._store.read() as conn:
            link = conn.execute(sa.select(LEDGER.c.hash).where(LEDGER.c.seq == head.position)).scalar()
            assigned = sa.select(sa.func.max(LEDGER.c.seq)).where(
                LEDGER.c.group_id.in_(groups), LEDGER.c.state == str(GroupState.ASSIGNED)
            )
            last = conn.execute(assigned).scalar()
            now = conn.execute(sa.select(LEDGER_GROUPS).where(LEDGER_GROUPS.c.group_id.in_(groups))).all()
        is_current = len(now) == len(groups) and all(g.step == step and g.state in states for g in now)
        return link == head.hash and last is not None and last <= head.position and is_current

    def undo_after(self, step: int, reason: str) -> list[GroupId]:
        """Marks groups trained after `step` undone: they return to the queue. Returns them."""
        later = [g for g, (state, at) in self.groups([GroupState.TRAINED]).items() if at > step]
        self.write([LedgerLine(group_id=g, state=GroupState.UNDONE, step=step, reason=reason) for g in later])
        return later

    def undone_steps(self, after: int = 0) -> dict[int, float]:
        """Optimizer step -> wall time at which groups trained in it were last marked undone, in lines after `after`."""
        undone, trained, earlier = LEDGER.alias(), LEDGER.alias(), LEDGER.alias()
        last = sa.select(sa.func.max(earlier.c.seq)).where(
            earlier.c.group_id == undone.c.group_id,
            earlier.c.state == str(GroupState.TRAINED),
            earlier.c.seq < undone.c.seq,
        )
        query = (
            sa.select(trained.c.step, undone.c.wall_at)
            .join_from(undone, trained, trained.c.seq == last.scalar_subquery())
            .where(undone.c.state == str(GroupState.UNDONE), undone.c.seq > after)
            .order_by(undone.c.seq)
        )
        return {int(row["step"]): float(row["wall_at"]) for row in self._store.rows(query)}

    def lines(self) -> list[Mapping[str, Any]]:
        return [dict(r) for r in self._store.rows(sa.select(LEDGER).order_by(LEDGER.c.seq))]


def _check_move(line: LedgerLine, before: GroupState | None, before_step: int) -> None:
    if line.state not in LEGAL[before]:
        raise LedgerViolation(f"group {line.group_id}: {before or 'unknown'} -> {line.state} is not a legal move")
    if line.state is GroupState.TRAINED and line.step != before_step:
        raise LedgerViolation(
            f"group {line.group_id}: assigned to step {before_step}, cannot be trained in step {line.step}"
        )
    if line.state is GroupState.DROPPED and not line.reason:
        raise LedgerViolation(f"group {line.group_id}: dropped without a reason")


def length_bucket(num_tokens: int) -> str:
    """`0`, `1-1`, `2-3`, `4-7`, ...: drops are counted by length, because losing long answers is a bias."""
    if num_tokens <= 0:
        return "0"
    low = 1 << (num_tokens.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def audit(
    lines: Sequence[Mapping[str, Any]],
    anchors: Sequence[tuple[str, ChainHead]] = (),
    *,
    ended: bool = True,
) -> Audit:
    """Walks the ledger from its first line and checks chain, moves and anchors. Pure.

    `anchors`: (where it was stored, head): position and hash that the chain must have there; a position beyond the last
    line means a truncated tail. `ended`: the run is over, so open groups are unaccounted.
    """
    problems: list[str] = []
    link, states, steps = GENESIS, dict[str, GroupState](), dict[str, int]()
    hash_at = {0: GENESIS}
    trained_open: set[str] = set()
    duplicates = undone = 0
    reasons, lengths, filtered = Counter[str](), Counter[str](), Counter[str]()
    unjudged: list[str] = []
    judges = False
    for expected, line in enumerate(lines, start=1):
        if line["seq"] != expected:
            problems.append(f"ledger line {expected} is missing or repeated: found line {line['seq']} in its place")
            break
        entry = {k: line[k] for k in _FIELDS}
        if chain_hash(link, entry) != line["hash"]:
            problems.append(f"ledger line {expected} (group {line['group_id']}) was changed: its hash does not match")
            break
        link = line["hash"]
        hash_at[expected] = link
        if line["state"] not in _STATES:
            problems.append(f"ledger line {expected}: state {line['state']!r} is unknown")
            break
        group, state = line["group_id"], GroupState(line["state"])
        if state is GroupState.TRAINED:
            duplicates += group in trained_open
            trained_open.add(group)
        elif state is GroupState.UNDONE:
            undone += 1
            trained_open.discard(group)
        elif state is GroupState.DROPPED:
            reasons[str(line["reason"])] += 1
            bucket = length_bucket(int(line["num_tokens"]))
            lengths[bucket] += 1
            filtered[bucket] += str(line["reason"]).startswith(FILTERED)
        elif state is GroupState.ACCEPTED:
            judges = True
        elif state is GroupState.ASSIGNED and states.get(group) is not GroupState.ACCEPTED:
            unjudged.append(str(group))
        move = LedgerLine(group_id=group, state=state, step=line["step"], reason=line["reason"])
        try:
            _check_move(move, states.get(group), steps.get(group, -1))
        except LedgerViolation as e:
            problems.append(f"ledger line {expected}: {e}")
        states[group], steps[group] = state, line["step"]
    if judges and unjudged:
        names = ", ".join(unjudged[:5])
        problems.append(
            f"assigned to a step although dynamic sampling had not accepted it: "
            f"{counted(len(unjudged), 'group')}: {names}"
        )
    for where, anchor in anchors:
        if anchor.position not in hash_at:
            problems.append(
                f"{where} has {anchor.position} ledger lines, the ledger {len(hash_at) - 1}: its tail was truncated"
            )
        elif hash_at[anchor.position] != anchor.hash:
            problems.append(f"{where} is of another ledger: line {anchor.position} has another hash")
    final = Counter(states.values())
    open_groups = len(states) - final[GroupState.TRAINED] - final[GroupState.DROPPED]
    unaccounted = open_groups if ended else 0
    if unaccounted:
        problems.append(f"neither trained nor dropped: {counted(unaccounted, 'group')}")
    return Audit(
        ok=not problems and not duplicates,
        problems=tuple(problems),
        head=ChainHead(position=len(hash_at) - 1, hash=link),
        groups_issued=len(states),
        groups_trained=final[GroupState.TRAINED],
        groups_dropped=final[GroupState.DROPPED],
        groups_undone=undone,
        duplicates=duplicates,
        unaccounted=unaccounted,
        dropped_by_reason=dict(reasons),
        dropped_by_length=dict(lengths),
        filtered_by_length=dict(+filtered),
    )
