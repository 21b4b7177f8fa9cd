"""The Fleet page in all its states."""

import html
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.faults import FaultClass
from rolecall.core.journal.events import EventKind
from rolecall.dashboards.data import hardware
from rolecall.dashboards.data.hardware import live_of, of_run
from rolecall.dashboards.pages import shell
from rolecall.dashboards.pages.overview import view
from rolecall.dashboards.pages.prometheus import ASK_SECONDS, PrometheusPoller
from rolecall.recovery.operators import commands
from rolecall.views import observed_ranks
from rolecall.views.observed_ranks import ObservedRank
from rolecall.watch.agents import observing_run
from tests.dashboards.acting_world import HOSTILE, World, page, texts, world
from tests.dashboards.prometheus_of_demo import DemoPrometheus
from tests.support import PATIENCE_SECONDS

K = EventKind
NO_SERVER = "http://127.0.0.1:9"
"""The port `discard`: nothing listens."""
BURN_IN = {
    "passed": False,
    "seconds": 31.5,
    "checks": [
        {"name": "matmul", "passed": True, "because": "the same bits", "values": {"rounds": 32}},
        {"name": "memory", "passed": False, "because": "3 words differ", "values": {}},
        {"name": "nccl", "passed": None, "because": "no second GPU", "values": {}},
    ],
}


def _html(at: AppTest) -> str:
    return "\n".join(str(h.proto.body) for h in at.get("html"))


@pytest.fixture
def made(tmp_path: Path) -> World:
    return world(tmp_path)


def test_nodes_worst_first_with_word_and_glyph(made: World) -> None:
    made.open("i-1", "rollout/2", "XID 79 on GPU 3 of node-3: fallen off the bus", fault_class=FaultClass.GPU)
    commands.quarantine(made.run, "node-5", "carla", "its fan is loud")
    at = page("fleet", made)
    assert not at.exception
    table = at.dataframe[0].value
    assert list(table["health"])[:2] == ["▲ faulty", "■ quarantined"]
    assert list(table["node"])[:2] == ["node-3", "node-5"]
    assert list(table["XIDs"])[:1] == ["XID 79!"]
    assert "--prometheus URL" in texts(at)


def test_the_panel_of_a_node_shows_incidents_codes_quarantines_and_burn_ins(made: World) -> None:
    made.open("i-1", "rollout/2", "XID 79 on GPU 3 of node-3: fallen off the bus", fault_class=FaultClass.GPU)
    commands.quarantine(made.run, "node-3", "carla", "its fan is loud")
    commands.record_burn_in(made.run, "node-3", BURN_IN, "carla")
    at = page("fleet", made)
    at.selectbox(key="fleet.node").select("node-3").run()
    reported = texts(at) + _html(at)
    assert not at.exception
    for said in (
        "<b>1 replica</b>",
        "rollout/2#1 suspect",
        "quarantined by carla: its fan is loud",
        "✗ memory: 3 words differ",
    ):
        assert said in reported
    assert "✗ failed in 31.5 s, by carla" in reported
    assert "– skipped: nccl" in reported
    (codes,) = [d.value for d in at.dataframe if "severity" in d.value.columns]
    assert list(codes["severity"]) == ["✖ fatal"]
    assert list(codes["advice"]) == ["drain the machine and reboot it"]


def test_the_chart_of_a_node_comes_once_it_is_chosen(made: World) -> None:
    """Its library is large, and would delay the table of all nodes."""
    for n in (1, 2):
        made.open(f"i-{n}", "rollout/2", "XID 79 on GPU 3 of node-3: fallen off the bus", fault_class=FaultClass.GPU)
    at = page("fleet", made)
    assert "i-2" in _html(at) and not at.get("vega_lite_chart")
    at.selectbox(key="fleet.node").select("node-3").run()
    assert len(at.get("vega_lite_chart")) == 1


def test_a_watched_job_has_the_same_states_as_on_the_overview(tmp_path: Path) -> None:
    """The rank of one node hangs, and nobody has seen those of the other for a minute."""
    clock = SystemClock()
    made = World(run=observing_run(tmp_path, "torchrun", {"vm-1": NO_SERVER, "vm-2": NO_SERVER}), users_path=tmp_path)
    now = clock.wall()
    ranks = [
        ObservedRank(f"trainer/{n}", 0, f"vm-{n + 1}", 40 + n, True, "compute", 5, now - 60.0 * (n == 0), now)
        for n in range(2)
    ]
    made.journal.set_flag(observed_ranks.FLAG, observed_ranks.to_json(ranks))
    made.open("i-1", "trainer/1", "rank 0 of trainer/1 is stopped", fault_class=FaultClass.HANG, node="vm-2")
    at = page("fleet", made)
    assert not at.exception
    assert list(at.dataframe[0].value["health"]) == ["✖ lost", "◆ suspect"]
    assert list(at.dataframe[0].value["why"]) == [
        "every replica on it is lost: trainer/0 (not seen for 1 min)",
        "trainer/1 hung",
    ]
    assert "trainer/0 rank 0, pid 40 lost" in _html(at)
    at.selectbox(key="fleet.node").select("vm-2").run()
    assert "trainer/1 rank 0, pid 41 suspect" in _html(at)
    states = {c.replica: c.state for r in view.roles(shell.reader().latest()) for c in r.cells}
    assert states["trainer/0"] == "lost"


def test_a_journal_without_nodes_says_so(tmp_path: Path) -> None:
    at = page("fleet", world(tmp_path, homes={}))
    assert not at.exception
    assert "contains no nodes yet" in texts(at)


def test_a_prometheus_that_is_away_is_a_sentence(made: World) -> None:
    at = page("fleet", made, prometheus_url=NO_SERVER)
    assert not at.exception
    assert "Prometheus is not responding" in texts(at)


def test_what_a_real_prometheus_has_of_a_demo_is_shown(demo_prometheus: DemoPrometheus) -> None:
    poller = PrometheusPoller(demo_prometheus.url, "", FakeClock(), lambda ask: hardware.fleet_metrics(ask, "demo-7"))
    answers = [
        [(v.labels, v.value) for v in demo_prometheus.query(e)]
        for e in (
            hardware.COUNTS,
            hardware.LAST_SEEN,
            hardware.GPUS,
            hardware.AGENTS,
            hardware.DCGM,
        )
    ]
    live = live_of(*(of_run(found, "demo-7") for found in answers))
    assert {(c.node, c.gpu, c.code) for c in live.codes} == {("gpu-1", "1", 31), ("gpu-1", "1", 79)}
    assert set(live.agents or {}) == {*(f"node-{n}" for n in range(7)), "gpu-1"}
    poller.latest()
    assert poller.wait(PATIENCE_SECONDS)
    assert poller.latest().error == ""


def test_hostile_text_is_shown_as_text(made: World) -> None:
    made.open("i-1", "rollout/2", HOSTILE, evidence=(HOSTILE,))
    commands.quarantine(made.run, "node-3", HOSTILE[:60], HOSTILE)
    at = page("fleet", made)
    at.selectbox(key="fleet.node").select("node-3").run()
    assert not at.exception
    assert HOSTILE in texts(at)
    assert html.escape(HOSTILE) in _html(at) and HOSTILE not in _html(at)
    assert not any("onerror" in str(m.value) for m in at.markdown)


def test_a_server_that_does_not_answer_is_asked_again_later_and_never_waited_for() -> None:
    clock = FakeClock()
    poller = PrometheusPoller(NO_SERVER, "", clock, lambda ask: ask("up"))
    poller.latest()
    assert poller.wait(30)
    first = poller.latest()
    assert first.error
    assert first.at is None
    clock.advance(ASK_SECONDS)
    poller.latest()
    assert poller.wait(30)


def test_a_wrong_address_is_reported_without_the_password_in_it() -> None:
    poller = PrometheusPoller("http://anna:secret@127.0.0.1:9", "", FakeClock(), lambda ask: ask("up"))
    poller.latest()
    assert poller.wait(30)
    assert "credentials do not belong" in poller.latest().error
    assert "secret" not in poller.latest().error
