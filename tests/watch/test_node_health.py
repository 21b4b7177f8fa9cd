"""What NVSentinel says of a node becomes evidence of the incidents there; nothing is changed."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.config.watched import NvSentinelConfig, parse_watched
from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.errors import ConfigError
from rolecall.core.faults import FaultClass
from rolecall.core.http import HttpAnswer, HttpFailed
from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.rundir import create_run_dir
from rolecall.recovery.interfaces import CollectedEvidence
from rolecall.watch.evidence.node_health import NodeHealth, NvSentinelHealth, told
from rolecall.watch.evidence.pull import EvidencePull
from tests.recovery.actuators.kubernetes_fake import FakeKubernetes, served
from tests.support import PATIENCE_SECONDS, eventually

NODE = "gpu-3"
PREFIX = "k8saas.nvidia.com/"
XID = {
    "type": "SysLogsXIDError",
    "status": "True",
    "reason": "SysLogsXIDErrorIsNotHealthy",
    "message": "ErrorCode:79 GPU:0 GPU has fallen off the bus Recommended Action=RESTART_BM;",
    "lastTransitionTime": "2026-11-06T10:00:00Z",
}
CORDONED = (
    f"NVSentinel has cordoned {NODE} at 2026-11-06T10-00-00Z by rule GPU-fatal-error-ruleset; its state is quarantined"
)
SAID = f"NVSentinel says of {NODE}: SysLogsXIDError since 2026-11-06T10:00:00Z: {XID['message']}"


@pytest.fixture
def fake() -> FakeKubernetes:
    it = FakeKubernetes()
    it.node(NODE)
    return it


@pytest.fixture
def health(fake: FakeKubernetes, tmp_path: Path) -> Iterator[NvSentinelHealth]:
    (tmp_path / "token").write_text("secret\n")
    with served(fake, "secret") as url:
        yield NvSentinelHealth(NvSentinelConfig(api=url, token_path=str(tmp_path / "token"), ca_path=""))


def test_a_quarantined_node_is_told_with_its_reason(fake: FakeKubernetes, health: NvSentinelHealth) -> None:
    fake.quarantine(NODE, XID)
    assert health([NODE]) == NodeHealth((CORDONED, SAID))
    assert fake.asked == [("get", "", "nodes")], "it reads, and changes nothing"


def test_a_healthy_node_is_not_told(fake: FakeKubernetes, health: NvSentinelHealth) -> None:
    fake.nodes[NODE]["status"]["conditions"].append({**XID, "status": "False", "message": "No Health Failures"})
    assert health([NODE]) == NodeHealth()


@pytest.mark.parametrize(
    ("spec", "labels", "annotations", "conditions", "said"),
    [
        ({"unschedulable": True}, {}, {}, [], []),  # somebody else has cordoned it
        ({}, {f"{PREFIX}cordon-by": "NVSentinel"}, {}, [], []),
        ({"unschedulable": True}, {f"{PREFIX}cordon-by": "NVSentinel"}, {}, [], [f"NVSentinel has cordoned {NODE}"]),
        ({"unschedulable": True}, {f"{PREFIX}cordon-by": "admin"}, {}, [], []),
        ({}, {}, {"quarantineHealthEvent": "{}"}, [], [f"NVSentinel has quarantined {NODE}, which is not cordoned"]),
        ({}, {}, {}, [XID], [SAID]),
        (
            {},
            {},
            {},
            [{"type": "GpuMemWatch", "status": "True"}],
            [f"NVSentinel says of {NODE}: GpuMemWatch: no message"],
        ),
        ({}, {}, {}, [{"type": "Ready", "status": "True"}, {"type": "GPUMissing", "status": "True"}], []),
    ],
)
def test_what_a_node_says(spec: Any, labels: Any, annotations: Any, conditions: Any, said: list[str]) -> None:
    value = {
        "metadata": {"labels": labels, "annotations": annotations},
        "spec": spec,
        "status": {"conditions": conditions},
    }
    assert list(told(NODE, value, PREFIX)) == said


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"metadata": [], "spec": "x", "status": 3},
        {"metadata": {"labels": [1], "annotations": "x"}, "status": {"conditions": [None, 3, {"type": 4}, "x"]}},
    ],
)
def test_an_answer_of_another_form_says_nothing(value: Any) -> None:
    assert told(NODE, value, PREFIX) == ()


def test_a_node_that_cannot_be_read_is_missing(fake: FakeKubernetes, health: NvSentinelHealth) -> None:
    fake.quarantine(NODE)
    found = health(["other", NODE])
    assert found.statements == (CORDONED,)
    assert found.missing == ('what NVSentinel says of other: status 404: nodes "other" not found',)
    fake.forbidden = {"nodes"}
    assert health([NODE]).missing == (f"what NVSentinel says of {NODE}: status 403: forbidden",)


def test_without_a_server_no_second_node_is_asked_for() -> None:
    health = NvSentinelHealth(NvSentinelConfig(api="http://127.0.0.1:9", token_path="", ca_path=""))
    assert health(["a", "b"]).missing == ("what NVSentinel says of a, b: connection refused",)


def test_many_slow_reads_end_at_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen nodes, each answered a moment before its own deadline, would hold the evidence up for minutes."""
    clock, asked = FakeClock(), list[float]()

    def slow(*_: object, deadline_seconds: float, **__: object) -> HttpAnswer:
        asked.append(deadline_seconds)
        if deadline_seconds < 3.0:
            clock.advance(deadline_seconds)
            raise HttpFailed("no whole answer", late=True)
        clock.advance(3.0)
        return HttpAnswer(200, b'{"kind": "Node", "spec": {"unschedulable": true}}')

    monkeypatch.setattr("rolecall.watch.evidence.node_health.request", slow)
    config = NvSentinelConfig(api="http://127.0.0.1:9", token_path="", ca_path="", call_seconds=5)
    began, nodes = clock.monotonic(), [f"n{n}" for n in range(20)]
    found = NvSentinelHealth(config, clock)(nodes, 10.0)
    assert clock.monotonic() - began == 10.0 and asked == [5.0, 5.0, 4.0, 1.0]
    (missing,) = found.missing
    assert missing == f"what NVSentinel says of {', '.join(nodes[3:16])}: no whole answer"
    assert "not read within 0 s" in NvSentinelHealth(config, clock)(nodes, 0.0).missing[0]


def test_an_api_that_never_answers_delays_neither_findings_nor_the_record(tmp_path: Path) -> None:
    run = create_run_dir(tmp_path / "runs", "run-1")
    run.write({"run_id": "run-1", "config": {}})
    never = threading.Event()

    def hangs(nodes: Sequence[str], seconds: float) -> NodeHealth:
        never.wait(PATIENCE_SECONDS)
        return NodeHealth(("too late",))

    pull = EvidencePull(run, dict, lambda _: "", list, SystemClock(), deadline_seconds=0.2, node_health=hangs)
    found: list[CollectedEvidence] = []
    try:
        pull.request("inc-1-x", diagnosis())
        eventually(lambda: found.extend(pull.collected()) or found, "the evidence is reported")
        assert not never.is_set()
    finally:
        never.set()
        pull.close()
    assert f"what another system says of {NODE}: nothing within 0.2 s" in found[0].payload.missing


def test_without_its_token_the_file_is_named(tmp_path: Path) -> None:
    health = NvSentinelHealth(NvSentinelConfig(api="http://127.0.0.1:9", token_path=str(tmp_path / "none"), ca_path=""))
    (missing,) = health(["a"]).missing
    assert str(tmp_path / "none") in missing


def diagnosis() -> Diagnosis:
    suspect = Suspect(node=NodeId(NODE), role="trainer", replica=ReplicaId("trainer/0"), rank=0, incarnation=1)
    return Diagnosis(
        suspects=(suspect,),
        fault_class=FaultClass.HANG,
        confidence=0.9,
        onset=1.0,
        detected_at=2.0,
        because="it hangs",
    )


def test_it_stands_in_the_evidence_of_the_incident(
    fake: FakeKubernetes, health: NvSentinelHealth, tmp_path: Path
) -> None:
    fake.quarantine(NODE, XID)
    run = create_run_dir(tmp_path / "runs", "run-1")
    run.write({"run_id": "run-1", "config": {}})
    pull = EvidencePull(run, dict, lambda _: "", list, SystemClock(), node_health=health)
    found: list[CollectedEvidence] = []
    try:
        pull.request("inc-1-x", diagnosis())
        eventually(lambda: found.extend(pull.collected()) or found, "the evidence is reported")
    finally:
        pull.close()
    payload = found[0].payload
    assert payload.statements[:2] == (CORDONED, SAID)
    assert CORDONED in payload.because


def test_it_is_off_unless_the_watch_file_has_it() -> None:
    assert parse_watched({}).nvsentinel is None
    config = parse_watched({"nvsentinel": {}}).nvsentinel
    assert config is not None and config.api == "https://kubernetes.default.svc" and config.label_prefix == PREFIX
    with pytest.raises(ConfigError, match=r"nvsentinel\.api"):
        parse_watched({"nvsentinel": {"api": "ftp://x"}})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"secret-1\nsecret-2\n", "the value of Authorization has a character that HTTP does not allow"),
        (b"\xff\xfe", "is not text"),
    ],
)
def test_a_file_that_holds_no_token_is_told_without_its_content(
    fake: FakeKubernetes, tmp_path: Path, content: bytes, why: str
) -> None:
    token = tmp_path / "token"
    token.write_bytes(content)
    with served(fake, "secret") as url:
        found = NvSentinelHealth(NvSentinelConfig(api=url, token_path=str(token), ca_path=""))([NODE])
    (missing,) = found.missing
    assert why in missing and "secret-" not in missing and found.statements == () and fake.asked == []
