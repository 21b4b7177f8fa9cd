"""Replicas that may work follow from two records, and a replica that recovery replaces is fenced at once."""

import pytest

from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.rl_runtime.protocol.membership import MembershipView, members_after

R = ReplicaId("rollout/1")
NODE = NodeId("node-1")


def fleet(wanted: int | None, **states: ReplicaState) -> MembershipView:
    """`_1=READY`: incarnation 1 is READY."""
    desired = {} if wanted is None else {R: Desired(replica=R, incarnation=wanted, node=NODE, because="it hangs")}
    actual = {
        (R, int(name[1:])): Actual(replica=R, incarnation=int(name[1:]), node=NODE, state=state, because="killed")
        for name, state in states.items()
    }
    return MembershipView(desired, actual)


S = ReplicaState


@pytest.mark.parametrize(
    ("seen", "usable", "lost"),
    [
        (fleet(1, _1=S.READY), [1], None),
        (fleet(1, _1=S.SERVING), [1], None),
        (fleet(1, _1=S.STARTING), [], None),
        (fleet(1, _1=S.LOST), [], "killed"),
        (fleet(1, _1=S.STOPPED), [], "killed"),
        (fleet(2, _1=S.SERVING), [], "incarnation 2 takes its place: it hangs"),
        (fleet(2, _1=S.SERVING, _2=S.STARTING), [], "incarnation 2 takes its place: it hangs"),
        (fleet(2, _1=S.LOST, _2=S.READY), [2], "incarnation 2 takes its place: it hangs"),
        (fleet(1, _1=S.SERVING, _2=S.READY), [2], "incarnation 2 has taken its place"),
        (fleet(None, _1=S.SERVING), [], "it is not wanted any more"),
        (fleet(1), [], "nothing is known of it"),
    ],
)
def test_verdicts_on_incarnation_one_from_the_records(
    seen: MembershipView, usable: list[int], lost: str | None
) -> None:
    assert [record.incarnation for record in seen.usable("rollout").values()] == usable
    assert seen.lost_because(R, 1) == lost
    assert seen.usable("trainer") == {}


def test_a_lender_is_replaced_alive_so_that_it_gives_its_tokens_first() -> None:
    because = "it lends node-1 to trainer/0"
    desired = {R: Desired(replica=R, incarnation=2, node=NodeId(""), because=because)}
    seen = MembershipView(desired, fleet(1, _1=S.SERVING).actual)
    assert seen.is_replaced_alive(R, 1) and seen.lost_because(R, 1) == because and seen.usable("rollout") == {}


def test_the_next_epochs_members_are_sorted_and_newest_only() -> None:
    a, b = (ReplicaId("trainer/0"), 1), (ReplicaId("trainer/1"), 1)
    assert members_after([b, a]) == (a, b)
    assert members_after([a, b], joined=[(b[0], 2)]) == (a, (b[0], 2))
    assert members_after([a, b], left=[b]) == (a,)
    assert members_after([a, (b[0], 2)], joined=[b]) == (a, (b[0], 2)), "an older one does not come back"
