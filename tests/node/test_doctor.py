"""`rolecall doctor`: the result of each check of a node, and the output of the command."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall.agent.local_access import own_authorization
from rolecall.cli.main import main
from rolecall.core.clock import FakeClock, SystemClock
from rolecall.core.errors import ConfigError
from rolecall.node.doctor import NHC_CODES, CheckLevel, ClockOffset, NodeFacts, examine, worst
from rolecall.node.facts import (
    _raylets,
    ask_agent,
    clock_offsets,
    down_probes,
    read_clock,
    read_facts,
    within,
)
from rolecall.terminal import doctor as rendering
from rolecall.terminal.console import as_text
from tests.agent.http.test_web_config import HASH
from tests.agent.test_settings import QUIET, running
from tests.support import PATIENCE_SECONDS, eventually

FIT = NodeFacts(
    is_root=True,
    kernel="6.18.33",
    gpu_devices=8,
    pci_gpus=8,
    driver="570.86.15",
    py_spy=True,
    ptrace_scope=1,
    agent="ok",
    agent_url="http://127.0.0.1:9477",
    socket=True,
    data_dir="/var/lib/rolecall",
    free_bytes=100 << 30,
    free_inodes=1_000_000,
    environ={"NCCL_RAS_ENABLE": "1", "TORCH_FR_BUFFER_SIZE": "2000"},
    clock_state=0,
    clock_error_seconds=0.01,
    pressure=True,
    pidfd=True,
    files_soft=65536,
    files_hard=1 << 20,
)

W, B, U = CheckLevel.WARNING, CheckLevel.BROKEN, CheckLevel.UNKNOWN
UNFIT: dict[str, tuple[dict[str, Any], str, CheckLevel, str, str]] = {
    "no driver": ({"driver": ""}, "driver", B, "8 NVIDIA GPUs and no driver loaded", "modprobe"),
    "a GPU that did not come up": ({"gpu_devices": 7}, "driver", W, "8 NVIDIA GPUs on the PCI bus, 7", "kernel log"),
    "NVML of another version": ({"nvml": "Driver/library version mismatch"}, "nvml", B, "mismatch", "reboot"),
    "no kernel log": ({"kmsg": "Operation not permitted"}, "kernel_log", W, "not permitted", "CAP_SYSLOG"),
    "no py-spy": ({"py_spy": False}, "stacks", W, "not installed", "pip install"),
    "no ptrace": ({"is_root": False}, "stacks", W, "ptrace_scope is 1", "CAP_SYS_PTRACE"),
    "no ptrace at all": ({"ptrace_scope": 3}, "stacks", W, "no process can", "reboot"),
    "no agent": ({"agent": ""}, "agent", W, "no agent listens at http://127.0.0.1:9477", "rolecall agent"),
    "a sick agent": ({"agent": "it is not healthy"}, "agent", B, "it is not healthy", "restart"),
    "no socket": ({"socket": False}, "agent", W, "agent.sock", "restart"),
    "no directory": ({"data_dir_error": "cannot be created"}, "data_dir", B, "cannot be created", "create it"),
    "open to the network": (
        {"open_to_network": "http://0.0.0.0:9477"},
        "network",
        W,
        "without TLS: http://0.0.0.0:9477",
        "web_config_file",
    ),
    "little room": ({"free_bytes": 1 << 30}, "data_dir", W, "1024 MiB", "free disk space"),
    "no room": ({"free_bytes": 1 << 20}, "data_dir", B, "1 MiB", "free disk space"),
    "no inodes": ({"free_inodes": 0}, "data_dir", B, "0 inodes", "free disk space"),
    "space unknown": ({"free_bytes": None}, "data_dir", U, "cannot be read", "agent's user"),
    "no Flight Recorder": (
        {"environ": {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}},
        "nccl",
        W,
        "TORCH_NCCL_TRACE_BUFFER_SIZE=0: PyTorch's Flight Recorder is off",
        "2000",
    ),
    "no RAS": ({"environ": {"NCCL_RAS_ENABLE": "0"}}, "nccl", W, "RAS is off", "set it to 1"),
    "Ray without cleanup": ({"raylets": {7: False}}, "ray", W, "raylet 7 leaves the children", "before `ray start`"),
    "Ray of another user": ({"raylets": {7: None}}, "ray", U, "raylet 7 cannot be read", "Ray's user"),
    "an unsynchronized clock": ({"clock_state": 5}, "clock", W, "not synchronized", "chronyd"),
    "a clock that may be wrong": ({"clock_error_seconds": 2.0}, "clock", W, "2.00 s", "closer"),
    "a clock unknown": ({"clock_state": None}, "clock", U, "does not report", "adjtimex"),
    "another clock behind": (
        {"clock_offsets": (ClockOffset(agent="http://b:1", seconds=-1.5, error_seconds=0.1),)},
        "clocks",
        W,
        "http://b:1: its clock is 1.50 s behind this node's",
        "chronyd",
    ),
    "another agent that is silent": (
        {"clock_offsets": (ClockOffset(agent="http://b:1", reason="timed out"),)},
        "clocks",
        U,
        "http://b:1: clock unknown: timed out",
        "is reachable",
    ),
    "something that the agent cannot read": (
        {"probes_down": {"kernel_log": "no permission"}},
        "probe",
        W,
        "the agent cannot read kernel_log: no permission",
        "docs/reference/agent.md",
    ),
    "a job of another user": (
        {"rank_uid": 1000, "rank_gids": frozenset({100}), "socket_uid": 0, "socket_gid": 0},
        "socket",
        W,
        "runs as user 1000, but /var/lib/rolecall/agent.sock is only for user 0 and group 0",
        "User=",
    ),
    "hidden processes": (
        {"is_root": False, "ptrace_scope": 0, "hidepid": "2"},
        "processes",
        W,
        "hidepid=2",
        "gid=",
    ),
    "no pressure": ({"pressure": False}, "pressure", W, "does not exist", "psi=1"),
    "no pidfd": ({"pidfd": False}, "exits", B, "pidfd_open", "seccomp"),
    "an older Linux": ({"kernel": "6.14.2-generic"}, "exits", W, "Linux 6.14.2-generic", "6.15"),
    "few files": ({"files_soft": 1024}, "files", W, "1024 open files", "ulimit"),
    "hardly any files": ({"files_soft": 256}, "files", B, "256 open files", "ulimit"),
}


def test_a_fit_node_is_well_in_everything() -> None:
    checks = examine(FIT)
    assert {c.level for c in checks} == {CheckLevel.OK} and not any(c.fix for c in checks)
    names = {
        "driver",
        "nvml",
        "kernel_log",
        "stacks",
        "agent",
        "data_dir",
        "nccl",
        "clock",
        "pressure",
        "exits",
        "files",
    }
    assert {c.name for c in checks} == names


@pytest.mark.parametrize(("changed", "name", "level", "message", "fix"), UNFIT.values(), ids=UNFIT)
def test_each_problem_is_reported_with_its_fix(
    changed: dict[str, Any], name: str, level: CheckLevel, message: str, fix: str
) -> None:
    checks = examine(replace(FIT, **changed))
    [wrong] = [c for c in checks if c.level is not CheckLevel.OK]
    assert (wrong.name, wrong.level) == (name, level)
    assert message in wrong.message and fix in wrong.fix and wrong.fix
    assert worst(checks) is level
    assert as_text(rendering.checks(checks)).splitlines()[-3].startswith(f"{level:8} {name}: ")


def test_settings_of_nccl_are_those_of_a_rank() -> None:
    def said(**changed: Any) -> str:
        [check] = [c for c in examine(replace(FIT, **changed)) if c.name == "nccl"]
        return check.message

    assert said() == "no rank was checked; --pid PID checks the torch and NCCL settings of one"
    assert said(rank_uid=0) == "torch and NCCL settings allow diagnosis"


def test_a_job_of_the_agents_group_may_register() -> None:
    facts = replace(FIT, rank_uid=1000, rank_gids=frozenset({100, 7}), socket_uid=0, socket_gid=7)
    [check] = [c for c in examine(facts) if c.name == "socket"]
    assert check.level is CheckLevel.OK and "the process (user 1000) may register" in check.message


def test_a_process_cannot_register_where_no_agent_has_run() -> None:
    [check] = [c for c in examine(replace(FIT, rank_uid=1000, socket_uid=None)) if c.name == "socket"]
    assert check.level is CheckLevel.UNKNOWN and "cannot register yet" in check.message


def test_a_node_without_a_gpu_lacks_no_permission_for_it() -> None:
    down = {"gpu": "no libnvidia-ml.so.1", "gpu_events": "no libnvidia-ml.so.1", "kernel_log": "no permission"}
    facts = replace(FIT, driver="", gpu_devices=0, pci_gpus=0, probes_down=down)
    assert [c.message for c in examine(facts) if c.name == "probe"] == [
        "the agent cannot read kernel_log: no permission"
    ]
    assert len([c for c in examine(replace(FIT, probes_down=down)) if c.name == "probe"]) == 3


def test_what_the_agent_creates_by_itself_is_not_broken() -> None:
    [check] = [c for c in examine(replace(FIT, data_dir_exists=False)) if c.name == "data_dir"]
    assert check.level is CheckLevel.OK and "creates it at its first start" in check.message


def test_a_node_without_gpus_needs_no_driver() -> None:
    checks = examine(replace(FIT, gpu_devices=0, pci_gpus=0, driver="", nvml="libnvidia-ml.so.1 not found"))
    assert worst(checks) is CheckLevel.OK and "nvml" not in {c.name for c in checks}


def test_a_broken_check_outweighs_an_unknown_one() -> None:
    assert worst(examine(replace(FIT, clock_state=None))) is CheckLevel.UNKNOWN
    assert worst(examine(replace(FIT, clock_state=None, pressure=False))) is CheckLevel.WARNING
    assert worst(examine(replace(FIT, clock_state=None, pressure=False, pidfd=False))) is CheckLevel.BROKEN
    assert [
        NHC_CODES[level] for level in (CheckLevel.OK, CheckLevel.WARNING, CheckLevel.BROKEN, CheckLevel.UNKNOWN)
    ] == [0, 1, 2, 3]


# --- facts of a real node


@pytest.fixture
def served() -> Iterator[tuple[str, list[tuple[int, bytes]]]]:
    """A server that gives the answers put into the list, and its address."""
    answers: list[tuple[int, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.pop()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", answers
    server.shutdown()
    thread.join(PATIENCE_SECONDS)
    server.server_close()


def test_an_agent_is_distinguished_from_other_servers(served: tuple[str, list[tuple[int, bytes]]]) -> None:
    url, answers = served
    for status, body, expected in (
        (200, b'{"ok": true}', "ok"),
        (401, b"", "ok"),
        (503, b'{"ok": false}', "its newest sample is too old"),
        (503, b'{"ok": false, "newest_round_age_seconds": 40}', "its newest sample is 40 s old"),
        (404, b"<html>", "no agent"),
        (200, b"[]", "no agent"),
    ):
        answers.append((status, body))
        assert expected in ask_agent(url)


def test_facts_are_read_from_a_tree(tmp_path: Path) -> None:
    for path, text in {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16\nGCC "
        "12.2\n",
        "proc/sys/kernel/yama/ptrace_scope": "2\n",
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
        "proc/pressure/cpu": "some avg10=0.00",
        "proc/7/environ": "RANK=3\0NCCL_RAS_ENABLE=0\0broken\0",
        "agent.yaml": f"data_dir: {tmp_path}\nport: 1\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    facts = read_facts(tmp_path / "agent.yaml", 7, root=tmp_path)
    assert (facts.driver, facts.gpu_devices, facts.pci_gpus, facts.ptrace_scope) == ("570.86.15", 1, 1, 2)
    assert facts.environ == {"RANK": "3", "NCCL_RAS_ENABLE": "0"}
    assert facts.pressure and facts.kmsg == "No such file or directory"
    assert facts.data_dir == str(tmp_path) and not facts.data_dir_error and facts.free_bytes
    assert (facts.agent, facts.agent_url, facts.socket) == ("", "http://127.0.0.1:1", False)
    (tmp_path / "proc/7/environ").write_bytes(b"\0\0\0")
    with pytest.raises(ConfigError, match="overwritten its environment"):
        read_facts(tmp_path / "agent.yaml", 7, root=tmp_path)
    (tmp_path / "agent.yaml").write_text("[")
    with pytest.raises(ConfigError, match=r"agent\.yaml"):
        read_facts(tmp_path / "agent.yaml", None, root=tmp_path)


def test_settings_in_agent_yaml_override_the_defaults(tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    here = f"data_dir: {tmp_path}\nport: 1\nhost: '::'\n"
    config.write_text(here + "kernel_log: {path: /var/log/kern.log}\ngpu: {enabled: false}\n")
    facts = read_facts(config, None, root=tmp_path)
    assert (facts.kernel_log, facts.kmsg) == ("/var/log/kern.log", "No such file or directory")
    assert (facts.nvml, facts.nvml_wanted) == ("", False)
    assert facts.agent_url == "http://[::1]:1" and facts.agent in (
        "",
        "OSError: [Errno 99] Cannot assign requested address",
    )
    messages = [c.message for c in examine(replace(facts, driver="570", gpu_devices=1))]
    assert any("/var/log/kern.log: No such file" in message for message in messages)
    assert "not checked: gpu is disabled in agent.yaml" in messages
    (tmp_path / "var/log").mkdir(parents=True)
    (tmp_path / "var/log/kern.log").write_text("")
    assert read_facts(config, None, root=tmp_path).kmsg == ""
    config.write_text(here + "kernel_log: {enabled: false}\n")
    assert "not read: disabled in agent.yaml" in [c.message for c in examine(read_facts(config, None, root=tmp_path))]


@pytest.mark.parametrize(
    ("host", "served", "open_to", "asked"),
    [
        ("0.0.0.0", None, "http://0.0.0.0:1", "http://127.0.0.1:1"),
        ("127.0.0.1", None, "", "http://127.0.0.1:1"),
        ("127.0.0.1", "http://10.0.0.7:2", "http://10.0.0.7:2", "http://10.0.0.7:2"),  # --host of the running agent
        ("0.0.0.0", "https://0.0.0.0:2", "", "https://127.0.0.1:2"),
    ],
)
def test_an_address_beyond_loopback_without_tls_is_known(
    tmp_path: Path, host: str, served: str | None, open_to: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolecall.node.facts.ask_agent", lambda url: "ok")
    monkeypatch.setattr("rolecall.node.facts.down_probes", lambda url, own: {})
    config = tmp_path / "agent.yaml"
    config.write_text(f"data_dir: {tmp_path}\nport: 1\nhost: {host}\ngpu: {{enabled: false}}\n")
    if served:
        (tmp_path / "agent.json").write_text(json.dumps({"url": served}))
    facts = read_facts(config, None, root=tmp_path)
    assert (facts.open_to_network, facts.agent_url) == (open_to, asked)


def test_a_driver_that_hangs_does_not_hang_doctor() -> None:
    ends = threading.Event()
    try:
        assert within(0.05, lambda: str(ends.wait())) == "no answer within 0.05 s"
        assert within(PATIENCE_SECONDS, lambda: "no driver") == "no driver"
    finally:
        ends.set()


def test_the_kernel_reports_the_error_of_the_clock() -> None:
    state, error_seconds = read_clock()
    assert state in (None, 0, 1, 2, 3, 4, 5)
    assert error_seconds is None or 0 <= error_seconds < 3600


def test_the_command_checks_this_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, taken = tmp_path / "agent.yaml", tmp_path / "taken"
    config.write_text(f"data_dir: {tmp_path / 'none'}\nport: 1\n")
    main(["doctor", "--config", str(config)])
    assert "ok       data_dir" in (text := capsys.readouterr().out) and "creates it at its first start" in text
    taken.write_text("")
    config.write_text(f"data_dir: {taken}\nport: 1\n")
    assert main(["doctor", "--config", str(config)]) == 1
    said = capsys.readouterr().out
    assert f"broken   data_dir: {taken}: not a directory" in said and "-> create it" in said
    assert "1 broken" in said.splitlines()[-1] and "\x1b" not in said
    assert main(["doctor", "--config", str(config), "--nhc", "--json"]) == 2
    reported = json.loads(capsys.readouterr().out)
    assert reported["level"] == "broken"
    assert {"name": "data_dir", "level": "broken"}.items() <= next(
        c for c in reported["checks"] if c["name"] == "data_dir"
    ).items()
    assert main(["doctor", "--pid", "999999999"]) == 2


def test_the_environment_of_a_rank_is_read(tmp_path: Path) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "0"},
    )
    try:
        # Until it runs its program its environment is empty.
        eventually(lambda: b"TORCH_FR" in Path(f"/proc/{rank.pid}/environ").read_bytes(), "it has started")
        checks = examine(read_facts(None, rank.pid))
        assert any("TORCH_FR_BUFFER_SIZE=0" in c.message for c in checks)
    finally:
        rank.communicate(timeout=PATIENCE_SECONDS)


# --- agents


def test_a_real_agent_reports_unreadable_probes_and_its_time(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text(f"basic_auth_users: {{prometheus: {HASH}}}\n")
    path, data = tmp_path / "agent.yaml", tmp_path / "data"
    log = tmp_path / "none.log"
    off = {**QUIET, "kernel_log": {"path": str(log)}}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = {"node": "node-7", "port": port, "data_dir": str(data), "web_config_file": "web.yml", **off}
    path.write_text(yaml.safe_dump(file))
    with running(path) as url:
        own = own_authorization(data, None)
        assert own and not own_authorization(tmp_path / "none", None)
        eventually(lambda: down_probes(url, own), "unreadable probes are reported")
        assert list(down_probes(url, own)) == ["kernel_log"] and "does not exist" in down_probes(url, own)["kernel_log"]
        assert down_probes(url, "") == {}  # without the token there is no answer
        [offset] = clock_offsets({"a": url}, own)
        assert offset.seconds is not None and abs(offset.seconds) <= offset.error_seconds + 0.1
        slow = FakeClock(wall_offset=SystemClock().wall() - 1000.0 - 7.0)  # an hour and nothing passes on it
        [offset] = clock_offsets({"a": url}, own, clock=slow)
        assert offset.seconds is not None and 7.0 <= offset.seconds < 7.0 + PATIENCE_SECONDS
        [refused] = clock_offsets({"a": url})
        assert refused.seconds is None and "--credentials" in refused.reason
    [gone] = clock_offsets({"a": url}, own)
    assert gone.seconds is None and "refused" in gone.reason


def test_the_command_compares_clocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agents").write_text("http://127.0.0.1:1\n")
    config = tmp_path / "agent.yaml"
    config.write_text(f"data_dir: {tmp_path}\nport: 1\n")
    main(["doctor", "--config", str(config), "--agents", str(tmp_path / "agents")])
    assert "unknown  clocks: http://127.0.0.1:1: clock unknown:" in capsys.readouterr().out
    assert main(["doctor", "--config", str(config), "--agents", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(("options", "expected"), [("rw,hidepid=2", "2"), ("rw", ""), ("rw,hidepid=off", "")])
def test_hidden_processes_are_known_by_the_mount(tmp_path: Path, options: str, expected: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(f"tmpfs / tmpfs rw 0 0\nproc /proc proc {options} 0 0\n")
    (tmp_path / "agent.yaml").write_text(f"data_dir: {tmp_path}\nport: 1\n")
    assert read_facts(tmp_path / "agent.yaml", None, root=tmp_path).hidepid == expected


def test_raylets_are_found_with_their_setting(tmp_path: Path) -> None:
    environs = {
        "7": b"A=1\0RAY_process_group_cleanup_enabled=1\0",
        "8": b"X_RAY_process_group_cleanup_enabled=1",
        "9": None,
    }
    for pid, environ in environs.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "comm").write_text("raylet\n")
        if environ is not None:
            (tmp_path / pid / "environ").write_bytes(environ)
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "comm").write_text("ray\n")
    assert _raylets(tmp_path) == {7: True, 8: False, 9: None}
    checks = examine(replace(FIT, raylets={7: True}))
    assert any(c.name == "ray" and c.level is CheckLevel.OK for c in checks)
