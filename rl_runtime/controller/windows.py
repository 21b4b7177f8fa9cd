"""Windows of an answer (T-PPO): the answer is trained on piece by piece, while it continues.

An answer is cut every `window_tokens`, and each piece is a separate group of the ledger: the first window is
`g00000007`, one that begins after 12 tokens `g00000007-00012`. A window follows entirely from its id, and from the
start of the next window if there is one. The successor of a cut window is in the ledger before any other line of that
window, so no failure loses the rest of an answer. The tokens before a window are its context: no step trains on them
again, even if they were regenerated because engine and controller both died. Pure.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

from rolecall.core.ids import GroupId
from rolecall.rl_runtime.controller.trajectories import OpenGroup, TrajectoryTable
from rolecall.rl_runtime.protocol.messages import EndReason
from rolecall.rl_runtime.tasks.task import group_id, group_number, group_start

NOTHING_FRESH = "nothing_fresh: its answer ended before this window"


def limit_of(start: int, *, window_tokens: int | None, longest: int, end: int | None = None) -> int:
    """Tokens at which the window from `start` ends. `end`: start of the next one, if known."""
    if end is not None:
        return end
    return longest if window_tokens is None else min(longest, start + window_tokens)


def ends(groups: Iterable[GroupId], void: Collection[GroupId] = (), *, longest: int) -> dict[GroupId, int]:
    """Group -> start of its next window, for all groups in the ledger.

    `void`: those dropped because their answer ended before them. An id is issued only once: if the previous window is
    regenerated and gets longer, it also contains their tokens.
    """
    starts: defaultdict[int, list[int]] = defaultdict(list)
    for group in groups:
        starts[group_number(group)].append(group_start(group))
    found: dict[GroupId, int] = {}
    for number, begins in starts.items():
        end: int | None = None
        for start in sorted(begins, reverse=True):
            group = group_id(number, start)
            if group in void:
                end = end or longest
            else:
                if end is not None:
                    found[group] = end
                end = start
    return found


def successor(group: OpenGroup) -> GroupId:
    """The window that continues this one after its cut."""
    return group_id(group_number(group.group_id), len(group.trajectories[0].tokens))


def windows_to_continue(table: TrajectoryTable) -> list[OpenGroup]:
    """Cut windows whose successor has not been issued, oldest first."""
    found = (g for g in table.groups.values() if g.is_cut and not g.followed)
    return sorted(found, key=lambda g: g.group_id)


def restore(table: TrajectoryTable) -> list[GroupId]:
    """Restores lost tokens of windows from later ones of the same answer, which contain them; windows without an engine
    take over their context.

    Returns:
        The groups that this finishes.
    """
    finished: list[GroupId] = []
    for windows in _answers(table):
        for i, window in enumerate(windows):
            (trajectory,) = window.trajectories
            held = max(windows[i + 1 :], key=lambda g: len(g.trajectories[0].tokens), default=None)
            if held is None or trajectory.finished:
                continue
            (longer,) = held.trajectories
            # Only if its tokens begin with this window's: they may have been regenerated differently in the meantime.
            if (
                len(longer.tokens) > len(trajectory.tokens)
                and longer.tokens[: len(trajectory.tokens)] == trajectory.tokens
            ):
                table.end_with(window.group_id, held)
                if trajectory.finished:
                    finished.append(window.group_id)
        _pass_context(windows)
    return finished


def settle(table: TrajectoryTable, longest: int) -> tuple[list[GroupId], list[OpenGroup]]:
    """(waiting groups that can now be assigned, windows whose answer ended before them); oldest first.

    A window waits while the previous one is being generated (again), and takes over its context when that is complete.
    If the previous one is trained or dropped, it waits for nothing, regardless of earlier windows.
    """
    ready: list[GroupId] = []
    void: list[OpenGroup] = []
    first = {g.group_id for g in table.groups.values() if g.waits and not g.first_fresh and not g.is_held_out}
    for windows in _answers(table):
        _pass_context(windows)
        for before, window in pairwise((None, *windows)):
            assert window is not None
            if not window.waits:
                continue
            (t,) = window.trajectories
            # They adjoin if no closed window is in between.
            adjoins = before and before.trajectories[0].request.max_response_tokens >= window.first_fresh
            if before is None or not adjoins or len(t.tokens) >= t.first_fresh:
                ready.append(window.group_id)
            elif before.trajectories[0].finished or before in void:
                void.append(window)
                before.trajectories[0].reach(longest)
    return sorted(first.union(ready)), void


def _pass_context(windows: Iterable[OpenGroup]) -> None:
    """A waiting window takes over its context as soon as that is complete."""
    for before, window in pairwise(windows):
        (earlier,), (t,) = before.trajectories, window.trajectories
        if window.waits and earlier.end is EndReason.TRUNCATED and len(earlier.tokens) == t.first_fresh > len(t.tokens):
            t.take_context(earlier)


def _answers(table: TrajectoryTable) -> Iterator[list[OpenGroup]]:
    """The open windows of each answer that has later ones, first to last."""
    numbers = {group_number(g.group_id) for g in table.groups.values() if g.first_fresh}
    found: defaultdict[int, list[OpenGroup]] = defaultdict(list)
    for group in table.groups.values():
        if not group.is_held_out and group_number(group.group_id) in numbers:
            found[group_number(group.group_id)].append(group)
    for _, windows in sorted(found.items()):
        yield sorted(windows, key=lambda g: g.first_fresh)
