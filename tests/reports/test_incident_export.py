"""The bundle for a ticket: what is in it, that it is whole, and above all what is not in it."""

import hashlib
import io
import json
import os
import shutil
import stat
import string
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.cli.main import main
from rolecall.core.clock import FakeClock
from rolecall.core.diagnosis import Diagnosis, Evidence, Suspect
from rolecall.core.faults import FaultClass
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.journal.events import EventKind as K
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir, bearer_token
from rolecall.core.telemetry import AgentEvent, AgentEventKind, HostSample, SampleBatch
from rolecall.detector.base.observation import Observation
from rolecall.reports.incident_export import Bundle, IncidentRecord, build, export, gather
from rolecall.reports.redaction import Redactor, left_of_message
from tests.core.strategies import JSON_BODIES
from tests.events import filled

SUSPECT, PEER = "gpu-a17.cluster.example", "gpu-b04"
PROMPT = "Tell me, doctor, why my left knee hurts when it rains over Zürich"
INCIDENT = "inc-1-rollout-1"


def _diagnosis() -> Diagnosis:
    process = ProcessId(node=NodeId(SUSPECT), pid=4105, start_ticks=41050)
    suspect = Suspect(node=NodeId(SUSPECT), role="rollout", replica="rollout/1", incarnation=1, gpu=3, process=process)
    return Diagnosis(
        suspects=(suspect,),
        fault_class=FaultClass.GPU,
        onset=1_700_000_100.0,
        detected_at=1_700_000_100.3,
        confidence=0.97,
        because=f"GPU 3 of {SUSPECT} fell off the bus (XID 79); {PEER} at 10.20.30.40 waits for it",
        evidence=(
            Evidence(kind="xid", text=f"kernel of {SUSPECT}: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off"),
        ),
        detectors=("xid",),
        advice="replace the GPU",
    )


def _window() -> dict[str, Any]:
    process = ProcessId(node=NodeId(SUSPECT), pid=4105, start_ticks=41050)
    raised = AgentEvent(
        seq=1,
        kind=AgentEventKind.EXCEPTION,
        node=NodeId(SUSPECT),
        at=90.0,
        wall_at=1_700_000_099.0,
        process=process,
        detail={"type": "ValueError", "message": PROMPT, "where": "/home/marianne/rl/task.py:12 score"},
    )
    hosts = [
        HostSample(
            node=NodeId(n),
            at=90.0,
            wall_at=1_700_000_099.0,
            cpu_count=8,
            cpu_busy_seconds=1.0,
            load_1m=0.5,
            memory_total_bytes=10,
            memory_available_bytes=5,
        )
        for n in (SUSPECT, PEER)
    ]
    batches = tuple(
        SampleBatch(node=h.node, agent_pid=1, cursor=1, lost=0, at=90.0, wall_at=h.wall_at, processes=(), hosts=(h,))
        for h in hosts
    )
    seen = Observation(
        wall_at=1_700_000_099.5, batches=batches, events=(raised,), unreachable=(("gpu-c99", 1.0, "timed out"),)
    )
    return {"version": 1, "config": {}, "roles": {"rollout": 3}, "start": None, "observations": [seen.to_dict()]}


def _write(run: RunDir, *, close: bool = True) -> RunDir:
    """One incident more in `run`, with everything that a run can keep of one."""
    journal = Journal(run.database_url, clock=FakeClock(now=102.0), create=False)
    cause = journal.append(
        filled(K.REPLICA_LOST, {"replica": "rollout/1", "incarnation": 1, "because": "its process is gone"})
    )
    opened = journal.append(
        filled(K.INCIDENT_OPENED, {"diagnosis": _diagnosis().to_dict(), "window": "observations"}),
        incident_id=INCIDENT,
        caused_by=cause.event_id,
        key="incident:99",
    )
    if close:
        body = {"outcome": "escalated", "because": f"marianne@{PEER} asked for it"}
        journal.append(filled(K.INCIDENT_CLOSED, body), incident_id=INCIDENT, caused_by=opened.event_id)
    journal.save_window(INCIDENT, "observations", _window())
    journal.save_window(INCIDENT, "stacks", {"threads": [{"frames": [{"name": "score", "locals": {"x": PROMPT}}]}]})
    journal.close()
    node = run.node_dir(SUSPECT)
    node.mkdir(parents=True)
    event = {"seq": 7, "kind": "xid", "node": SUSPECT, "wall_at": 1_700_000_100.1, "detail": {"xid": "79", "gpu": "3"}}
    late = {**event, "seq": 8, "wall_at": 1_700_999_999.0, "detail": {"note": "weeks later"}}
    (node / "events.jsonl").write_text(f"{json.dumps(event)}\n{json.dumps(late)}\n{{torn")
    at = _local(1_700_000_100.1)
    (run.logs / "watch.log").write_text(
        f"{at} rolecall.recovery.loop INFO {INCIDENT} opened for {SUSPECT}\n{PROMPT}\n"
        "2001-01-01 00:00:00,000 rolecall.recovery.loop INFO long before\n"
    )
    (run.logs / "ray").mkdir(exist_ok=True)
    (run.logs / "ray" / "worker.out").write_text(PROMPT)
    return run


def _local(wall: float) -> str:
    return datetime.fromtimestamp(wall).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


@pytest.fixture
def written(fake_run: RunDir) -> RunDir:
    return _write(fake_run)


def _texts(bundle: Bundle) -> dict[str, str]:
    return {m.name: m.content.decode() for m in bundle.members}


def test_the_bundle_contains_the_incident(written: RunDir) -> None:
    found = _texts(export(written, INCIDENT))
    assert sorted(found) == [
        "MANIFEST.json",
        "README.txt",
        f"agents/{SUSPECT}.jsonl",
        "diagnosis.json",
        "incident.json",
        "journal.jsonl",
        "logs/watch.log",
        "versions.json",
        "windows/observations.json",
        "windows/stacks.json",
    ]
    page = found["README.txt"]
    assert f"rollout/1#1 on {SUSPECT}, GPU 3" in page and "fell off the bus (XID 79)" in page
    assert "Xid (PCI:0000:3b:00): 79" in page and "2023-11-14 22:15:00.000 UTC" in page
    events = [json.loads(line) for line in found["journal.jsonl"].splitlines()]
    assert [e["kind"] for e in events] == ["replica_lost", "incident_opened", "incident_closed"]
    assert events[1]["caused_by"] == f"e{events[0]['seq']}"
    assert [json.loads(line)["seq"] for line in found[f"agents/{SUSPECT}.jsonl"].splitlines()] == [7]
    assert found["logs/watch.log"].count("\n") == 1 and "long before" not in found["logs/watch.log"]
    assert json.loads(found["windows/observations.json"])["observations"][0]["batches"][1]["node"] == PEER


def test_members_match_the_manifest(written: RunDir) -> None:
    bundle = export(written, INCIDENT)
    with tarfile.open(fileobj=io.BytesIO(bundle.archive())) as tar:
        packed = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]
        assert all(m.mode == 0o600 and m.uid == 0 and m.mtime == 0 and m.isfile() for m in tar.getmembers())
    manifest = json.loads(packed.pop(f"{INCIDENT}/MANIFEST.json"))
    listed = {f"{INCIDENT}/{m['name']}": (m["sha256"], m["bytes"]) for m in manifest["members"]}
    assert listed == {name: (hashlib.sha256(raw).hexdigest(), len(raw)) for name, raw in packed.items()}


def test_two_exports_are_equal_byte_for_byte(written: RunDir) -> None:
    assert export(written, INCIDENT).archive() == export(written, INCIDENT).archive()
    assert export(written, INCIDENT, anonymous=True).archive() == export(written, INCIDENT, anonymous=True).archive()


def test_prompts_users_and_what_a_run_keeps_secret_stay_at_home(written: RunDir) -> None:
    token = written.token()
    journal = Journal(written.database_url, clock=FakeClock(now=103.0), create=False)
    said = {"because": f"reported {token} and {bearer_token(token)}; raised ValueError: {PROMPT[:40]}"}
    journal.append(filled(K.REPLICA_LOST, said), incident_id=INCIDENT)
    journal.close()
    for name, text in _texts(export(written, INCIDENT)).items():
        for hidden in ("knee", "Zürich", "doctor", "marianne", token, bearer_token(token)):
            assert hidden not in text, name
        assert str(written.path) not in text, name


def test_an_anonymous_bundle_names_no_node(written: RunDir) -> None:
    bundle = export(written, INCIDENT, anonymous=True)
    for member in bundle.members:
        text = f"{member.name}\n{member.content.decode()}".lower()
        for hidden in (SUSPECT, PEER, "gpu-a17", "cluster.example", "gpu-c99", "10.20.30.40"):
            assert hidden not in text, member.name
    found = _texts(bundle)
    assert "rollout/1#1 on node-1, GPU 3" in found["README.txt"]
    assert "GPU 3 of node-1 fell off the bus" in found["diagnosis.json"] and "ip-1" in found["diagnosis.json"]
    (seen,) = json.loads(found["windows/observations.json"])["observations"]
    assert [b["node"] for b in seen["batches"]] == ["node-1", "node-2"]
    assert seen["unreachable"] == [["node-3", 1.0, "timed out"]]
    assert "agents/node-1.jsonl" in found


def test_nodes_that_only_a_watch_of_agents_knows_are_anonymous_too(written: RunDir) -> None:
    written.write({**written.read(), "agents": {"dgx-far-9": "http://dgx-far-9:9477"}})
    journal = Journal(written.database_url, clock=FakeClock(now=103.0), create=False)
    journal.append(filled(K.REPLICA_LOST, {"because": "dgx-far-9 is silent"}), incident_id=INCIDENT)
    journal.close()
    assert "dgx-far-9" in _texts(export(written, INCIDENT))["journal.jsonl"]
    assert not any("dgx-far-9" in text for text in _texts(export(written, INCIDENT, anonymous=True)).values())


def test_names_that_stay_are_kept_without_the_option(written: RunDir) -> None:
    found = _texts(export(written, INCIDENT))
    assert "10.20.30.40" in found["diagnosis.json"] and PEER in found["diagnosis.json"]


def test_an_open_incident_is_exported_and_says_so(fake_run: RunDir) -> None:
    bundle = export(_write(fake_run, close=False), INCIDENT)
    assert bundle.is_open and "STILL OPEN (open)" in _texts(bundle)["README.txt"]


def test_a_window_too_large_is_narrowed_to_the_suspects(written: RunDir) -> None:
    material = gather(written, INCIDENT)
    window = json.loads(json.dumps(material.windows["observations"]))
    peer = window["observations"][0]["batches"][1]
    peer["hosts"] = peer["hosts"] * 1000
    holding = replace(material, windows={"observations": window})
    bundle = build(holding, Redactor(), bytes_max=100_000)
    assert sum(len(m.content) for m in bundle.members) < 100_000
    found = _texts(bundle)
    kept = json.loads(found["windows/observations.json"])["observations"][0]["batches"]
    assert [b["node"] for b in kept] == [SUSPECT]
    assert (
        "reduced to the suspects' nodes" in found["README.txt"]
        and "reduced to the suspects' nodes" in found["MANIFEST.json"]
    )
    none = _texts(build(holding, Redactor(), bytes_max=1000))
    assert "windows/observations.json" not in none and "bytes, too large" in none["README.txt"]


def test_pulled_evidence_is_in_it_and_redacted_once_more(written: RunDir) -> None:
    folder = written.path / "evidence" / INCIDENT
    folder.mkdir(parents=True)
    frame = {"name": "score", "filename": "/home/marianne/rl/task.py", "short_filename": "task.py", "line": 12}
    stacks = {"node": SUSPECT, "threads": [{"thread_name": "MainThread", "frames": [frame]}]}
    (folder / "stacks-rollout-1-rank_0.json").write_text(json.dumps(stacks))
    group = "0123456789abcdef0123456789abcdef01234567"  # PyTorch names groups by hashes
    (folder / "flight_rank_0.json").write_text(json.dumps({"pg_config": {group: {"name": group}}}))
    (folder / f"kernel-{SUSPECT}.log").write_text(f"[    1.000000] NVRM: of {SUSPECT}, 10.20.30.40\n")
    (folder / ".torn.1.tmp").write_text(PROMPT)
    (folder / "elsewhere").symlink_to("/etc/hostname")
    other = written.path / "evidence" / "inc-2-rollout-1"
    other.mkdir()
    (other / "stacks-rollout-1-rank_0.json").write_text(PROMPT)
    found = _texts(export(written, INCIDENT))
    names = [n.removeprefix("evidence/") for n in found if n.startswith("evidence/")]
    assert names == ["flight_rank_0.json", f"kernel-{SUSPECT}.log", "stacks-rollout-1-rank_0.json"]
    assert '"score"' in found["evidence/stacks-rollout-1-rank_0.json"] and "marianne" not in str(found)
    assert json.loads(found["evidence/flight_rank_0.json"])["pg_config"] == {group: {"name": group}}
    assert "stacks-rollout-1-rank_0.json collected from the agents" in " ".join(found["README.txt"].split())
    hidden = _texts(export(written, INCIDENT, anonymous=True))
    assert "evidence/kernel-node-1.log" in hidden and "10.20.30.40" not in str(hidden) and SUSPECT not in str(hidden)
    narrow = _texts(build(gather(written, INCIDENT), Redactor(), bytes_max=1000))
    assert "evidence/flight_rank_0.json" not in narrow and "too large" in narrow["README.txt"]


# --- secrets ------------------------------------------------------------------------------------------------------

ALNUM = string.ascii_letters + string.digits
BODY = st.text(ALNUM, min_size=24, max_size=48)
FORMS: Mapping[str, str] = {
    "password in a URL": "postgresql://ops:{}@db.example:5432/runs",
    "query of a URL": "https://hooks.example/services?sig={}",
    "path of a URL": "https://hooks.slack.example/services/T0/{}",
    "named": "password={}",
    "named, quoted": 'api_key: "{}"',
    "named, in JSON": '{{"client_secret": "{}"}}',
    "named, in JSON in JSON": '{{\\"token\\": \\"{}\\"}}',
    "named, upper case": "PGPASSWORD={}",
    "environment": "MY_SETTING={}",
    "option": "serve --api-key {} --port 1",
    "header": "Authorization: Bearer {}",
    "bearer": "sent bearer {} again",
    "Amazon": "AKIA{}",
    "GitHub": "ghp_{}",
    "Hugging Face": "hf_{}",
    "NVIDIA": "nvapi-{}",
    "OpenAI": "sk-proj-{}",
    "JWT": "eyJhbGciOi.eyJ{}.c2ln",
    "PEM": "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    "PEM, cut": "-----BEGIN PRIVATE KEY-----\n{}",
    "user's home": "/data/home/{}/ckpt",
    "user's home, elsewhere": "/export/users/{}/ckpt",
    "user, as audit says": 'op=PAM:authentication acct="a{}" exe="/usr/sbin/sshd"',
    "user, as logind says": "New session 5 of user a{}.",
    "prompt": "prompt: Once upon a time\nthere was {}",
    "prompt, in JSON": '{{"prompt": "Once {} was"}}',
    "chat": "messages=[{{'role': 'user', 'content': 'hi {}'}}]",
    "exception": "ValueError: {} is odd",
}
"""How a secret may be written; `{}` is what must not be seen."""
HIDING_KEYS = ("password", "apiKey", "hf-token", "webhook_url", "prompt", "completions", "env", "cmdline", "cookie")
STRUCTURE = frozenset({"kind", "node", "incident_id", "caused_by", "fault_class", "replica", "state", "action"})
"""Fields whose values are of closed sets, or ids that the journal has checked."""


def _plant(value: Any, text: str, key: str = "") -> Any:
    """`value` with `text` in every text that it holds, and as a key of every mapping."""
    if isinstance(value, Mapping):
        planted = {k: _plant(v, text, k) for k, v in value.items()}
        return planted if key in ("", "process") else {**planted, f"about {text}": text}
    if isinstance(value, list | tuple):
        return [_plant(v, text, key) for v in value]
    return f"{value} {text} so" if isinstance(value, str) and key not in STRUCTURE else value


def _planted(material: IncidentRecord, text: str) -> IncidentRecord:
    diagnosis = dict(material.diagnosis)
    for field in ("because", "advice", "settle"):
        diagnosis[field] = f"{diagnosis[field]} {text}"
    diagnosis["evidence"] = [{**e, "text": f"{e['text']} {text}"} for e in diagnosis["evidence"]]
    return replace(
        material,
        diagnosis=diagnosis,
        summary=_plant(material.summary, text),
        events=[{**_plant(e, text), "body": _plant(e["body"], text, "body")} for e in material.events],
        windows={name: _plant(w, text, "window") for name, w in material.windows.items()},
        agent_events={n: [_plant(e, text, "event") for e in found] for n, found in material.agent_events.items()},
        # Of a log only lines that begin with a time are gathered: none holds a line break.
        logs={name: f"{log.rstrip()} {' '.join(text.split())}\n" for name, log in material.logs.items()},
        left_out=[f"some file: {text}"],
    )


@pytest.fixture(scope="module")
def material(_built_run: Path, tmp_path_factory: pytest.TempPathFactory) -> IncidentRecord:
    path = tmp_path_factory.mktemp("material") / "run"
    shutil.copytree(_built_run, path)
    return gather(_write(RunDir(path)), INCIDENT)


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=3)
@given(body=BODY)
def test_a_secret_in_any_text_is_in_no_member(form: str, body: str, material: IncidentRecord) -> None:
    body = body.upper() if form == "Amazon" else body  # its keys have no small letters
    holding = _planted(material, FORMS[form].format(body))
    bundle = build(holding, _learned(holding))
    assert len(bundle.members) >= 9
    for member in bundle.members:
        assert body not in member.content.decode() and body not in member.name, (form, member.name)


@pytest.mark.parametrize(
    "text",
    [
        "which would make it user code, for user space 3",
        "prompts: 12, completions=3",
        "user=0.5 sys=0.1 of the time",
        "task_memcg=/user.slice/user-1000.slice/session-3.scope,task=python,pid=1,uid=1000",
    ],
)
def test_what_only_looks_like_one_stays(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize("key", HIDING_KEYS)
def test_what_stands_under_a_name_that_hides_it_is_in_no_member(key: str, material: IncidentRecord) -> None:
    hidden = {key: {"deeper": ["correct horse battery staple", PROMPT]}, f"my_{key}": "correct horse"}
    events = [{**e, "body": {**e["body"], "x": [hidden]}} for e in material.events]
    holding = replace(material, events=events, windows={"w": {"a": [hidden]}})
    for member in build(holding, _learned(holding)).members:
        assert "horse" not in member.content.decode() and "knee" not in member.content.decode(), member.name


def _learned(material: IncidentRecord) -> Redactor:
    known = Redactor(nodes=material.nodes)
    for part in (material.summary, material.diagnosis, material.events, material.windows, material.agent_events):
        known.learn(part)
    return known


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "GPU-5a6b7c8d-1234-5678-9abc-def012345678 at 0000:3b:00.0, serial 1650622012345",
        "mlx5_0 port 1, GUID 0x98039b0300abcdef, link down at 12:38:12.094",
        "trainer/0 (node-1, pid 16064, incarnation 1) hangs: in phase compute of step 53 for 2.6 s (deadline 2.5 s)",
        "task=python3,pid=4105,uid=0 in /usr/lib/python3.11/site-packages/torch/nn/module.py:1501 forward",
        "NCCL_IB_HCA=mlx5 driver 535.104.05, 4096 tokens: 12 prompts",
        "fe80 is no address, nor is c10::Error or 2.18.5",
    ],
)
@pytest.mark.parametrize("anonymous", [False, True])
def test_what_a_vendor_needs_is_left_as_it_is(text: str, anonymous: bool) -> None:
    assert Redactor(anonymous=anonymous).text(text) == text


def test_of_an_exceptions_message_the_drivers_words_stay() -> None:
    reported = "CUDA error: an illegal memory access was encountered\nprompt: " + PROMPT
    assert left_of_message(reported) == "(message left out: CUDA error: an illegal memory access was encountered)"
    assert left_of_message(PROMPT) == "(message left out)"


def test_addresses_and_hosts_get_the_same_number_everywhere() -> None:
    known = Redactor(nodes=["gpu-b04"], anonymous=True)
    assert known.text("10.0.0.7 then fe80::1:2 then 10.0.0.7 on GPU-B04") == "ip-1 then ip-2 then ip-1 on node-1"
    assert known.text("http://store.corp.example:9000/x and 10.0.0.7:80") == "http://host-1:9000 and ip-1:80"
    assert known.text("0c:42:a1:00:00:07 at 127.0.0.1") == "mac-1 at 127.0.0.1"


def test_a_user_named_like_a_role_does_not_rename_the_role() -> None:
    known = Redactor()
    known.learn({"role": "trainer", "where": "/home/trainer/job.py and /home/marianne/x"})
    assert known.text("trainer/0 by marianne in /home/trainer/job.py") == "trainer/0 by user in ~/job.py"


@settings(max_examples=50)
@given(body=JSON_BODIES)
def test_any_value_can_be_redacted(body: dict[str, Any]) -> None:
    known = Redactor(nodes=["a"], anonymous=True)
    known.learn(body)
    reported = known.value(body)
    assert json.loads(json.dumps(reported)) == reported


# --- the command --------------------------------------------------------------------------------------------------


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["incident", "export", *argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_writes_one_private_file(
    written: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "here"
    where.mkdir()
    monkeypatch.chdir(where)
    code, out, _ = _run(capsys, INCIDENT, "--run", str(written.path), "--json")
    (path,) = where.iterdir()
    said = json.loads(out)
    assert code == 0 and path.name == said["file"] == f"{INCIDENT}.tar.gz" and said["open"] is False
    assert said["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # Again, over a file that others could read.
    path.chmod(0o644)
    assert _run(capsys, INCIDENT, "--run", str(written.path), "-o", str(path))[0] == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(list(where.iterdir())) == 1


def test_an_id_that_does_not_exist_is_one_sentence_and_exit_code_2(
    written: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.tar.gz"
    code, out, err = _run(capsys, "inc-77", "--run", str(written.path), "-o", str(target))
    assert code == 2 and out == "" and not target.exists()
    assert "no incident inc-77; there are: " in err and INCIDENT in err


def test_a_folder_that_is_not_there_is_said(
    written: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = _run(capsys, INCIDENT, "--run", str(written.path), "-o", str(tmp_path / "no" / "x.tar.gz"))
    assert code == 2 and "No such file or directory" in err


def test_only_a_regular_file_is_replaced(
    written: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "dangling").symlink_to("nothing")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    before = {p.name: p.lstat().st_ino for p in tmp_path.iterdir()}
    for name in ("link", "dangling", "fifo", ".", "/"):
        code, out, err = _run(capsys, INCIDENT, "--run", str(written.path), "-o", name)
        assert (code, out) == (2, "")
        assert err == f"rolecall: -o: {name} exists, is not a regular file, and is not replaced\n"
    assert {p.name: p.lstat().st_ino for p in tmp_path.iterdir()} == before
