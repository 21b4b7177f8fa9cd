"""Step formation and containment as tables: snapshots in, decisions with their reason out."""

from copy import deepcopy
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from rolecall.core.config.job import RunMode
from rolecall.core.errors import CommitVoteRejected, DeadlineExceeded, NonFiniteMicrobatch, NonFiniteValue, PeerLost
from rolecall.core.ids import GroupId, NodeId, ReplicaId
from rolecall.core.journal.payloads.run import ChainHead
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.rl_runtime.controller.step_plan import (
    PATIENCE_SECONDS,
    BatchSnapshot,
    EngineLoad,
    FormStep,
    HybridWork,
    LoopAction,
    LoopState,
    StepPlan,
    StepProgress,
    TrainerChanges,
    Wait,
    choose_state,
    contain_attempt,
    form_step,
    late_or_lost,
    least_loaded,
    membership_changes,
    missing_replicas,
    next_step,
    place_groups,
    reassign,
    staleness_if_issued,
    work_of_hybrids,
)
from rolecall.rl_runtime.protocol.clients import ReplicaExited
from rolecall.rl_runtime.protocol.membership import Member, MembershipView
from rolecall.rl_runtime.protocol.messages import CommitRecord, Holder, TrainerInfo
from rolecall.rl_runtime.tasks.task import group_id

T0, T1, T2 = ((ReplicaId(f"trainer/{n}"), 1) for n in range(3))
PLAN = StepPlan(step=3, microbatches=(), ledger=ChainHead(position=0, hash=""))
NODE = NodeId("node-0")
S = ReplicaState


# --- the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "changes", "action", "because"),
    [
        ({"stop_because": "asked"}, TrainerChanges(joining=[T1]), LoopAction.FINISH, "asked"),
        ({"step": 8}, TrainerChanges(), LoopAction.FINISH, "8 steps"),
        ({"step": 8, "hold": True}, TrainerChanges(), LoopAction.FORM, "step 8"),
        ({"step": 8, "evaluating": True}, TrainerChanges(), LoopAction.EVALUATE, "version 8"),
        ({"step": 8, "evaluating": True}, TrainerChanges(lost={T0: "killed"}), LoopAction.REGROUP, "trainer/0#1"),
        ({"step": 8, "evaluating": True, "stop_because": "asked"}, TrainerChanges(), LoopAction.FINISH, "asked"),
        ({"step": 8, "evaluating": True, "published": False}, TrainerChanges(), LoopAction.PUBLISH, "version 8"),
        ({"evaluating": True}, TrainerChanges(), LoopAction.FORM, "step 3"),
        ({"step": 8, "plan": PLAN}, TrainerChanges(), LoopAction.TRAIN, "step 3"),
        ({}, TrainerChanges(joining=[T1]), LoopAction.REGROUP, "trainer/1#1 joins"),
        ({}, TrainerChanges(lost={T0: "killed"}), LoopAction.REGROUP, "trainer/0#1: killed"),
        ({"plan": PLAN}, TrainerChanges(lost={T0: "killed"}), LoopAction.REGROUP, "trainer/0#1: killed"),
        ({"published": False}, TrainerChanges(), LoopAction.PUBLISH, "version 3"),
        ({"published": False, "publish_failed": True}, TrainerChanges(), LoopAction.PUBLISH, "version 3"),
        ({"published": False, "plan": PLAN}, TrainerChanges(), LoopAction.PUBLISH, "version 3"),
        ({"published": False, "publish_failed": True, "plan": PLAN}, TrainerChanges(), LoopAction.TRAIN, "step 3"),
        ({"step_ended": True}, TrainerChanges(), LoopAction.CHECKPOINT, "step 2 has ended"),
        ({"step_ended": True, "plan": PLAN}, TrainerChanges(), LoopAction.CHECKPOINT, "step 2 has ended"),
        ({"step_ended": True}, TrainerChanges(joining=[T1]), LoopAction.REGROUP, "trainer/1#1 joins"),
        ({"step_ended": True, "published": False}, TrainerChanges(), LoopAction.PUBLISH, "version 3"),
        ({"step": 8, "step_ended": True}, TrainerChanges(), LoopAction.FINISH, "8 steps"),
        ({}, TrainerChanges(), LoopAction.FORM, "step 3"),
    ],
)
def test_the_loops_next_action(loop: dict[str, Any], changes: TrainerChanges, action: LoopAction, because: str) -> None:
    state = LoopState(**{"num_steps": 8, "step": 3, "published": True, **loop})
    before = deepcopy(state)
    decision = next_step(state, changes)
    assert decision.action is action and because in decision.because
    assert state == before


@pytest.mark.parametrize(
    ("mode", "plan", "num_ready", "others_serve", "work"),
    [
        ("async", PLAN, 8, True, HybridWork.GENERATE),
        ("sync", None, 0, False, HybridWork.GENERATE),
        ("sync", None, 7, False, HybridWork.GENERATE),
        ("sync", PLAN, 0, False, HybridWork.TRAIN),
        ("semi_sync", None, 3, True, HybridWork.GENERATE),
        ("semi_sync", None, 4, True, HybridWork.TRAIN),
        ("semi_sync", None, 7, False, HybridWork.GENERATE),  # nobody else would finish the rest
        ("semi_sync", PLAN, 0, False, HybridWork.TRAIN),
    ],
)
def test_what_hybrids_do(
    mode: RunMode, plan: StepPlan | None, num_ready: int, others_serve: bool, work: HybridWork
) -> None:
    loop = LoopState(num_steps=9, plan=plan)
    facts = {"num_ready": num_ready, "groups_per_step": 8, "others_serve": others_serve}
    assert work_of_hybrids(loop, mode=mode, **facts) is work


def test_engines_of_hybrids_sleep_before_a_step_is_trained_and_after_a_regroup() -> None:
    loop, awake = LoopState(num_steps=8, step=3, plan=PLAN), [(ReplicaId("rollout/1"), 2)]
    decision = next_step(loop, TrainerChanges(), awake)
    assert decision.action is LoopAction.SLEEP and "rollout/1#2 must sleep" in decision.because
    assert next_step(loop, TrainerChanges(joining=[T1]), awake).action is LoopAction.REGROUP
    assert next_step(replace(loop, stop_because="asked"), TrainerChanges(), awake).action is LoopAction.FINISH


def test_a_fresh_run_waits_for_every_desired_replica_except_standbys() -> None:
    names = [ReplicaId(r) for r in ("trainer/0", "rollout/0", "reward/0", "standby/0")]
    desired = {r: Desired(replica=r, incarnation=1, node=NODE) for r in names}
    states = {"trainer/0": S.READY, "rollout/0": S.SERVING, "reward/0": S.STARTING}
    current = {ReplicaId(r): Actual(replica=ReplicaId(r), incarnation=1, node=NODE, state=s) for r, s in states.items()}
    assert missing_replicas(desired, current) == ["reward/0"]
    assert missing_replicas(desired, {}) == names[:3]
    lent = {names[0]: replace(desired[names[0]], incarnation=2, node=NodeId(""))}
    assert missing_replicas({**desired, **lent}, {}) == names[1:3], "what has lent its node is not missing"


# --- forming a step -----------------------------------------------------------------------------------------------

G = [group_id(n) for n in range(8)]
FULL = BatchSnapshot(step=5, groups_per_step=2, staleness_max=1, ready=G[:2])


@pytest.mark.parametrize(
    ("batch", "groups", "because"),
    [
        (FULL, G[:2], "2 groups are ready"),
        (replace(FULL, ready=G[:3]), G[:2], "2 groups are ready"),
        (replace(FULL, ready=G[:1]), None, "1 of 2 groups are ready"),
        (replace(FULL, ready=[], set_aside=G), None, "0 of 2 groups are ready"),
        (replace(FULL, ready=G[:1], set_aside=G[4:6], at_refill_limit=True), [G[0], G[4]], "1 filtered groups fill"),
        (replace(FULL, ready=[], set_aside=G[4:5], at_refill_limit=True), None, "0 of 2 groups are ready"),
        (replace(FULL, newest_versions={G[0]: 4, G[1]: 4}), G[:2], "2 groups are ready"),
        # A group of version 4 must be trained by step 5, which takes two others.
        (replace(FULL, newest_versions={G[2]: 4}), None, f"{G[2]} is not ready"),
        (replace(FULL, newest_versions={G[2]: 4}, full_since=8.5), None, f"{G[2]} is not ready"),
        (replace(FULL, newest_versions={G[2]: 4}, full_since=8.0), G[:2], f"waited 2 s for {G[2]}"),
        # Ready ones that will be too old are no reason to wait: waiting does not make them younger.
        (replace(FULL, ready=G[:3], newest_versions={G[2]: 4}), G[:2], "2 groups are ready"),
        # Version 5 may be trained in step 6: two fit, a third does not.
        (replace(FULL, newest_versions=dict.fromkeys(G[2:4], 5)), G[:2], "2 groups are ready"),
        (replace(FULL, newest_versions=dict.fromkeys(G[2:5], 5)), None, f"{G[2]} is not ready"),
    ],
)
def test_which_groups_make_a_step(batch: BatchSnapshot, groups: list[GroupId] | None, because: str) -> None:
    decision = form_step(batch, 8.0 + PATIENCE_SECONDS)
    assert because in decision.because
    assert (list(decision.groups) if isinstance(decision, FormStep) else None) == groups


def test_a_full_step_remembers_since_when_it_waits_and_forgets_it_when_it_is_not_full() -> None:
    waiting = replace(FULL, newest_versions={G[2]: 4})
    first = form_step(waiting, 7.0)
    assert isinstance(first, Wait) and first.full_since == 7.0
    second = form_step(replace(waiting, full_since=first.full_since), 8.0)
    assert isinstance(second, Wait) and second.full_since == 7.0
    third = form_step(replace(waiting, ready=G[:1], full_since=7.0), 8.5)
    assert isinstance(third, Wait) and third.full_since is None


# --- engines and their groups -------------------------------------------------------------------------------------


def load(name: str, **changes: Any) -> EngineLoad:
    return EngineLoad(**{"key": (ReplicaId(name), 1), "version": 1, "may_serve": True, "num_requests": 0, **changes})


R0, R1, R2 = "rollout/0", "rollout/1", "rollout/2"


@pytest.mark.parametrize(
    ("engines", "chosen"),
    [
        ([load(R0, may_serve=False), load(R1, num_requests=50)], R1),
        ([load(R0, may_serve=False)], None),
        ([load(R0), load(R2, version=2), load(R1, version=2)], R1),
        ([load(R0, num_requests=1), load(R1)], R1),
    ],
)
def test_the_least_loaded_engine_then_newer_weights_then_by_name(engines: list[EngineLoad], chosen: str | None) -> None:
    engine = least_loaded(engines)
    assert (engine.key[0] if engine else None) == chosen


@pytest.mark.parametrize(
    ("step", "ahead", "version", "staleness"),
    [(0, 0, 0, 0), (4, 7, 4, 0), (4, 8, 4, 1), (4, 23, 4, 2), (4, 24, 4, 3), (4, 0, 3, 1)],
)
def test_how_stale_a_group_will_be_if_everything_ahead_goes_first(
    step: int, ahead: int, version: int, staleness: int
) -> None:
    assert staleness_if_issued(step, ahead, 8, version) == staleness


@pytest.mark.parametrize(
    ("engines", "loop", "ahead", "placed"),
    [
        ([load(R0), load(R1)], {}, 0, [R0, R1, R0, R1]),  # steps 1 and 2, each of two groups
        ([load(R0), load(R1, num_requests=9)], {}, 0, [R0] * 4),
        ([load(R0)], {}, 3, [R0]),
        ([load(R0)], {}, 4, []),
        ([load(R0, version=0)], {}, 0, [R0, R0]),  # its tokens are a version older
        ([load(R0)], {"num_steps": 2}, 0, [R0, R0]),
        ([load(R0)], {"num_steps": 1, "hold": True}, 0, [R0] * 4),
        ([load(R0, may_serve=False)], {}, 0, []),
        # R1 gets the newest version in a moment: its share is kept for it.
        ([load(R0), load(R1, version=-9, is_due=True)], {}, 0, [R0]),
    ],
)
def test_groups_are_issued_as_far_as_they_can_be_trained_in_time(
    engines: list[EngineLoad], loop: dict[str, Any], ahead: int, placed: list[str]
) -> None:
    state = LoopState(**{"num_steps": 9, "step": 1, **loop})
    limits = {"groups_per_step": 2, "group_size": 2, "staleness_max": 1}
    found = place_groups(state, map(group_id, count(0)), engines, ahead=ahead, **limits)
    assert [key[0] for _, key in found] == placed
    assert [g for g, _ in found] == G[: len(placed)]


def test_in_the_modes_with_hybrids_nothing_is_issued_before_all_engines_have_the_version() -> None:
    state = LoopState(num_steps=9, step=1)
    limits: dict[str, Any] = {"groups_per_step": 2, "group_size": 2, "staleness_max": 0, "ahead": 0}

    def issued(engines: list[EngineLoad], **more: bool) -> int:
        return len(place_groups(state, map(group_id, count(0)), engines, **limits, **more))

    behind = load(R1, version=0, is_behind=True)
    assert issued([load(R0), load(R1)], together=True) == 2, "and no more than one step"
    assert issued([load(R0), behind], together=True) == 0
    assert issued([load(R0), replace(behind, is_behind=False)], together=True) == 2, "it is too late, or silent"
    assert issued([load(R0), behind]) == 2


def test_unassigned_requests_go_to_the_least_loaded_engine_one_group_after_the_other() -> None:
    engines = [load(R0, num_requests=3), load(R1), load(R2, may_serve=False)]
    placed = reassign({G[0]: 4, G[1]: 2, G[2]: 1}, engines)
    assert [(g, key[0]) for g, key in placed] == [(G[0], R1), (G[1], R0), (G[2], R1)]
    assert reassign({G[0]: 4}, engines[2:]) == []


# --- containment --------------------------------------------------------------------------------------------------


def test_membership_changes_distinguish_lost_replaced_and_new_incarnations() -> None:
    wanted = {"rollout/0": 1, "rollout/1": 2, "rollout/2": 2, "rollout/3": 1, "trainer/0": 1}
    states = {
        ("rollout/0", 1): S.SERVING,
        ("rollout/1", 1): S.SERVING,
        ("rollout/2", 1): S.LOST,
        ("rollout/2", 2): S.READY,
        ("rollout/3", 1): S.READY,
        ("trainer/0", 1): S.READY,
    }
    fleet = MembershipView(
        {
            ReplicaId(r): Desired(replica=ReplicaId(r), incarnation=n, node=NODE, because="slow")
            for r, n in wanted.items()
        },
        {
            (ReplicaId(r), n): Actual(replica=ReplicaId(r), incarnation=n, node=NODE, state=state)
            for (r, n), state in states.items()
        },
    )
    active: list[Member] = [(ReplicaId(f"rollout/{n}"), 1) for n in range(3)]
    changes = membership_changes(fleet, "rollout", active=active)
    assert list(changes.lost) == [("rollout/2", 1)]
    assert changes.replaced == {("rollout/1", 1): "incarnation 2 takes its place: slow"}
    assert [(r.replica, r.incarnation) for r in changes.joining] == [("rollout/2", 2), ("rollout/3", 1)]
    known = membership_changes(fleet, "rollout", active=active, known=[(ReplicaId("rollout/3"), 1)])
    assert [r.replica for r in known.joining] == ["rollout/2"]


@pytest.mark.parametrize(
    ("lost", "failed_at", "ended"),
    [
        ({}, None, {}),
        ({}, 7.0, {}),  # exactly the grace
        ({}, 6.9, {T0: DeadlineExceeded, T1: DeadlineExceeded}),
        ({T1: "killed"}, None, {T1: ReplicaExited}),
        ({T1: "killed"}, 6.9, {T0: DeadlineExceeded, T1: ReplicaExited}),
        ({T2: "killed"}, None, {}),
    ],
)
def test_late_and_lost_members_are_not_waited_for(
    lost: dict[Member, str], failed_at: float | None, ended: dict[Member, type]
) -> None:
    found = late_or_lost([T0, T1], lost, failed_at=failed_at, now=10.0, grace_seconds=3.0)
    assert {m: type(e) for m, e in found.items()} == ended


def test_a_member_that_still_computes_is_not_late() -> None:
    progress = StepProgress(started_at=0.0, unit_seconds=4.0)
    for at, num_computed in [(0.0, 7), (3.0, 7), (4.0, 8), (7.0, 8), (9.0, 8)]:
        progress.add(T0, num_computed, at)
    assert progress.working_at == {T0: 7.0}, "at 9.0 its microbatch takes too long"

    def late(now: float) -> list[Member]:
        rest: dict[str, Any] = {"now": now, "grace_seconds": 3.0, "working_at": progress.working_at}
        return list(late_or_lost([T0, T1], {}, failed_at=5.0, **rest))

    assert (late(8.0), late(8.1), late(10.0), late(10.1)) == ([], [T1], [T1], [T0, T1])
    assert not progress.stands_still(9.0, 5.0) and progress.stands_still(9.1, 5.0)
    assert StepProgress(started_at=1.0, unit_seconds=4.0).stands_still(6.1, 5.0)


EXITED = ReplicaExited(replica=T1[0], incarnation=1, because="killed")
LATE = DeadlineExceeded(waited_for="trainer/1#1", seconds=3.0)
PEER = PeerLost(epoch=2, because="connection reset")
VOTE = CommitVoteRejected(epoch=2, step=3, because="digests differ")
BAD = NonFiniteMicrobatch(replica="trainer/1", step=3, microbatch_id="3.1", group_ids=["g7"])
NAN = NonFiniteValue(replica="trainer/0", step=3, what="loss")


@pytest.mark.parametrize(
    ("answers", "before", "root", "lost", "resets", "raised", "awaits"),
    [
        ({T0: PEER, T1: EXITED}, 0, ["trainer/1#1"], ["trainer/1"], False, [], False),
        ({T0: PEER, T1: LATE}, 1, ["trainer/1#1"], ["trainer/1"], False, [], False),
        ({T0: PEER, T1: PEER}, 0, ["trainer/0#1", "trainer/1#1"], [], False, [], False),
        ({T0: object(), T1: EXITED}, 0, ["trainer/1#1"], ["trainer/1"], False, [], False),
        ({T0: ValueError("no"), T1: PEER}, 0, ["trainer/0#1"], [], False, [T0], False),
        ({T0: ValueError("no"), T1: PEER}, 1, ["trainer/0#1"], [], False, [T0], True),
        ({T0: NAN, T1: ValueError("no")}, 0, ["trainer/0#1", "trainer/1#1"], [], False, [T0, T1], True),
        ({T0: NAN}, 0, ["trainer/0#1"], [], False, [T0], False),  # alone: it may be its machine
        ({T0: VOTE, T1: PEER}, 0, ["trainer/0#1"], [], True, [T0], False),
        ({T0: BAD, T1: BAD}, 0, ["trainer/0#1", "trainer/1#1"], [], False, [], False),  # one machine: first elsewhere
    ],
)
def test_how_a_failed_attempt_is_contained(
    answers: dict[Member, Any],
    before: int,
    root: list[str],
    lost: list[str],
    resets: bool,
    raised: list[Member],
    awaits: bool,
) -> None:
    found = contain_attempt(answers, code_errors=before)
    assert [part.split(":")[0] for part in found.because.split("; ")] == root
    assert (list(found.lost), found.resets_gradients, list(found.raised)) == (lost, resets, raised)
    assert found.awaits_recovery is awaits


def test_a_microbatch_that_is_not_finite_at_two_trainers_is_the_data_or_the_code() -> None:
    first = contain_attempt({T0: BAD, T1: BAD}, code_errors=0)
    assert first.not_finite is BAD and not first.awaits_recovery and not first.raised
    second = contain_attempt({T1: BAD}, code_errors=0, not_finite={"3.1": BAD})
    assert second.awaits_recovery and second.raised == {T1: BAD}
    other = contain_attempt({T1: BAD}, code_errors=0, not_finite={"3.0": BAD})
    assert not other.awaits_recovery and not other.raised


def info(member: Member, step: int | None, epoch: int = 1) -> TrainerInfo:
    """`step` None: it has no state yet."""
    commit = CommitRecord(
        step=-1 if step is None else step,
        epoch=epoch,
        microbatch_ids=(),
        group_ids=(),
        gradient_digest="",
        ledger=ChainHead(position=0, hash=""),
    )
    return TrainerInfo(
        replica=member[0],
        incarnation=member[1],
        has_state=step is not None,
        commit=commit,
        holder=Holder(replica=member[0], incarnation=member[1], host="host", port=1),
        computed=(),
        num_computed=0,
        joined_epoch=epoch,
    )


@pytest.mark.parametrize(
    ("states", "committed", "step", "holders", "copies"),
    [
        ({T0: (4, 1), T1: (4, 1)}, 4, 4, [T0, T1], {}),
        ({T0: (4, 1), T1: (3, 1)}, 3, 4, [T0], {T1: T0}),
        ({T0: (4, 1), T1: (4, 2)}, 4, 4, [T1], {T0: T1}),  # committed in an epoch that the others left
        ({T0: (4, 1), T1: (None, 0)}, 4, 4, [T0], {T1: T0}),
        ({T0: (None, 0), T1: (4, 1), T2: (None, 0)}, 4, 4, [T1], {T0: T1, T2: T1}),
        ({T0: (-1, 0)}, -1, -1, [T0], {}),
        ({T0: (3, 1), T1: (3, 1)}, 4, None, [], {}),
        ({T0: (None, 0)}, -1, None, [], {}),
        ({}, -1, None, [], {}),
    ],
)
def test_a_new_epoch_starts_from_the_newest_committed_state(
    states: dict[Member, tuple[int | None, int]],
    committed: int,
    step: int | None,
    holders: list[Member],
    copies: dict[Member, Member],
) -> None:
    choice = choose_state({m: info(m, *state) for m, state in states.items()}, committed)
    if choice is None:
        assert step is None
        return
    assert choice.step == step and list(choice.holders) == holders
    assert {m: (h.replica, h.incarnation) for m, h in choice.copies.items()} == copies
