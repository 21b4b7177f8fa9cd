"""What is kept in order must say what a pass over all peers says."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from rolecall.detector.live.monitored_process import MonitoredProcess
from rolecall.detector.live.processes import ProcessIndex
from rolecall.detector.live.stages.progress.slow import RISING_SUM, SlowPeers

NUM = 6
STEPS = st.lists(
    st.tuples(
        st.integers(0, NUM - 1),
        st.sampled_from(["observe", "observe", "observe", "gone", "close", "come"]),
        st.sampled_from([-1.0, 0.0, 0.25, 0.5, 2.0]),  # the same value of several is the rule
        st.sampled_from([0.0, 0.5, 4.0, 7.0]),
        st.sampled_from([10.0, 10.0, 16.0]),
    ),
    max_size=60,
)


def made(n: int) -> MonitoredProcess:
    return MonitoredProcess(f"rollout/{n}", "rollout" if n < NUM - 1 else "reward", 0, 1, "node-0", None, seen_wall=0.0)


@given(STEPS)
def test_the_index_equals_a_scan_of_all_peers(steps: list[tuple[int, str, float, float, float]]) -> None:
    roster, peers, now = ProcessIndex(), SlowPeers(), 100.0
    subjects = [made(n) for n in range(NUM)]
    for s in subjects:
        roster.add(s)
    for n, what, value, passed, age in steps:
        now += passed
        s = subjects[n]
        if what == "gone":
            s.exit_wall = now
            roster.note_gone(s)
        elif what == "close":
            s.closed_wall = now
            roster.remove(s)
        elif what == "come":
            subjects[n] = made(n)
            roster.add(subjects[n])
        peers.refresh(roster, now)
        if what == "observe" and not s.closed_wall and not s.gone:
            s.slow.smooth, s.slow.residual_until, s.slow.cusum = value, now + age, value
            peers.note(s)
            peers.note_sum(s)
        for asked in roster:
            others = [p for p in roster if p.role == asked.role and p.key != asked.key]
            fresh = [p.slow.smooth for p in others if now <= p.slow.residual_until and not p.gone]
            assert peers.median_without(asked) == (len(fresh), median(fresh) if fresh else 0.0)
            assert peers.rising_without(asked) == any(p.slow.cusum >= RISING_SUM for p in others)
