"""One real cluster of seven nodes with trivial actors: started, examined from outside, damaged, and ended in order
(kill -9: tests/e2e/test_quick_succession.py)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rolecall.core.ids import NodeId, ReplicaId
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import Actual, Desired, ReplicaState
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.cluster import ray_commands
from rolecall.rl_runtime.processes import find_processes, is_alive, ray_dir, stop_run
from tests.support import eventually

SCRIPT = Path(__file__).parents[1] / "cluster_run.py"
NODES = [f"node-{i}" for i in range(7)]
S = ReplicaState


@dataclass
class ClusterRun:
    process: subprocess.Popen[bytes]
    run: RunDir
    log: Path
    journal: Journal

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def actual(self, replica: str, incarnation: int = 1) -> Actual:
        return self.journal.actual()[(ReplicaId(replica), incarnation)]

    def until(self, replica: str, incarnation: int, state: ReplicaState) -> Actual:
        def reached() -> bool:
            record = self.journal.actual().get((ReplicaId(replica), incarnation))
            return record is not None and record.state is state

        eventually(reached, f"{replica}#{incarnation} to be {state}\n{self.output()[-2000:]}")
        return self.actual(replica, incarnation)

    def until_started(self) -> None:
        def started() -> bool:
            assert self.process.poll() is None, f"it ended:\n{self.output()[-4000:]}"
            return "STARTED" in self.output()

        eventually(started, f"the cluster to start:\n{self.output()[-2000:]}", seconds=150)


@contextmanager
def cluster_run(root: Path) -> Iterator[ClusterRun]:
    log, run = root / "log", RunDir((root / "runs" / "r").resolve())
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(root / "runs"), "r"], stdout=out, stderr=out, env=env
        )
    try:
        eventually(lambda: (run.path / "run.json").exists(), f"the run to begin:\n{log.read_text()}")
        journal = Journal(run.database_url)
        try:
            yield ClusterRun(process, run, log, journal)
        finally:
            journal.close()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        stop_run(run.path)


def listening(pids: set[int]) -> list[tuple[str, int]]:
    """(local address in hex, pid) of every listening TCP socket of these processes."""
    inodes = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes[target[8:-1]] = pid
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append((fields[1].partition(":")[0], inodes[fields[9]]))
    return found


# /proc/net/tcp shows addresses as little-endian words.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.e2e
@pytest.mark.light
@pytest.mark.timeout(400)
def test_seven_nodes_from_start_to_interrupt(tmp_path: Path) -> None:
    with cluster_run(tmp_path) as c:
        c.until_started()
        standby = c.until("standby/0", 1, S.READY)
        _check_environment(c)
        _check_sockets_and_secrets(c)
        _check_processes(c)
        _check_death_is_seen(c, standby)
        _check_raylet_death(c)
        everything = find_processes(c.run.path)
        temp = ray_dir(c.run.path)
        assert temp is not None and temp.stat().st_mode & 0o077 == 0, "other users can reach Ray's sockets"
        begun = time.monotonic()
        c.process.send_signal(signal.SIGINT)
        assert c.process.wait(120) == 0, c.output()[-3000:]
        print(f"started {c.output().split('STARTED ')[1].split()[0]} s, stopped in {time.monotonic() - begun:.1f} s")
        assert find_processes(c.run.path) == []
        assert [p for p in everything if is_alive(p.pid, p.start_ticks)] == []
        assert not temp.exists()
        assert all(a.state in (S.LOST, S.STOPPED) for a in c.journal.actual().values())


def _check_environment(c: ClusterRun) -> None:
    for replica, record in c.journal.current().items():
        text = (c.run.path / f"env.{replica.replace('/', '-')}.1").read_text()
        facts = dict(line.split("=", 1) for line in text.splitlines())
        assert facts["ROLECALL_RUN"] == str(c.run.path)
        assert facts["ROLECALL_NODE"] == record.node
        assert facts["OMP_NUM_THREADS"] == "1" and facts["NICE"] == str(os.nice(0))
        assert facts["RAY_AUTH_TOKEN"] == "", "the token itself is in an environment"


def _check_sockets_and_secrets(c: ClusterRun) -> None:
    processes = find_processes(c.run.path)
    sockets = listening({p.pid for p in processes})
    names = {p.pid: p.name for p in processes}
    assert {names[pid] for _, pid in sockets} >= {"gcs", "supervisor", *(f"raylet-{n}" for n in NODES)}
    assert len(sockets) >= 2 * len(NODES) + 9
    assert [(a, names[pid]) for a, pid in sockets if a not in LOOPBACK] == []
    token = c.run.token().encode()
    for p in processes:
        assert token not in Path(f"/proc/{p.pid}/cmdline").read_bytes()
        assert token not in Path(f"/proc/{p.pid}/environ").read_bytes()
    assert c.run.token_path.stat().st_mode & 0o077 == 0
    logs = [p for p in c.run.logs.rglob("*") if p.is_file()]
    assert logs and not [p for p in logs if token in p.read_bytes()]
    assert _join_without_the_token(c).returncode != 0


def _join_without_the_token(c: ClusterRun) -> subprocess.CompletedProcess[str]:
    """A stranger on this machine asks the GCS for the session's name."""
    gcs = next(p for p in find_processes(c.run.path) if p.name == "gcs")
    port = next(
        int(line.split()[1].partition(":")[2], 16)
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[9] in _inodes(gcs.pid)
    )
    ask = (
        "from ray._raylet import GcsClient\n"
        f"print(GcsClient(address='127.0.0.1:{port}').internal_kv_get(b'session_name', b'session', timeout=10))"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    right = {**env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": c.run.token()}
    wrong = {**env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    admitted, refused = (
        subprocess.run([sys.executable, "-c", ask], env=e, capture_output=True, text=True, timeout=120, check=False)
        for e in (right, wrong)
    )
    assert admitted.returncode == 0 and "session_rolecall" in admitted.stdout, admitted.stderr[-1000:]
    assert "session_rolecall" not in refused.stdout
    return refused


def _inodes(pid: int) -> set[str]:
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").glob("*")]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _check_processes(c: ClusterRun) -> None:
    processes = find_processes(c.run.path)
    actors = {a.pid for a in c.journal.current().values()}
    assert actors <= {p.pid for p in processes}
    for node in NODES:
        there = [p.name for p in processes if p.node == node]
        assert f"raylet-{node}" in there and f"agent-{node}" in there
    # Beside them only the supervisor, GCS and what holds Ray's agents' places: no dashboard, no idle worker.
    others = [p.name for p in processes if p.pid not in actors and not p.name.startswith(("raylet-", "agent-"))]
    assert sorted(set(others)) == ["cat", "gcs", "supervisor"] and others.count("cat") == 2 * len(NODES)


def _check_death_is_seen(c: ClusterRun, standby: Actual) -> None:
    killed, survivors = c.actual("rollout/1"), {c.actual(f"rollout/{i}").pid for i in (0, 2)}
    os.kill(killed.pid, signal.SIGKILL)
    c.until("rollout/1", 1, S.LOST)
    wanted = Desired(replica=ReplicaId("rollout/1"), incarnation=2, node=killed.node, because="the test says so")
    assert c.journal.set_desired(wanted, expect_incarnation=1)
    promoted = c.until("rollout/1", 2, S.READY)
    assert (promoted.pid, promoted.node) == (standby.pid, standby.node)
    refilled = c.until("standby/0", 2, S.READY)
    assert refilled.node == killed.node
    assert {c.actual(f"rollout/{i}").pid for i in (0, 2)} == survivors
    assert all(is_alive(a.pid, a.start_ticks) for a in c.journal.current().values())


def _check_raylet_death(c: ClusterRun) -> None:
    trainer = c.actual("trainer/1")
    raylet = next(p for p in find_processes(c.run.path) if p.name == f"raylet-{trainer.node}")
    os.kill(raylet.pid, signal.SIGKILL)
    lost = c.until("trainer/1", 1, S.LOST)
    assert not is_alive(trainer.pid, trainer.start_ticks)
    assert f"raylet of {trainer.node}" in lost.because
    # Its node can take nothing any more; another one can.
    assert c.journal.set_desired(
        Desired(replica=ReplicaId("trainer/1"), incarnation=2, node=trainer.node, because="the same node")
    )
    assert "no raylet" in c.until("trainer/1", 2, S.LOST).because
    assert c.journal.set_desired(
        Desired(replica=ReplicaId("trainer/1"), incarnation=3, node=NodeId("node-0"), because="another node")
    )
    c.until("trainer/1", 3, S.READY)


def test_command_lines_hold_no_secret_and_bind_loopback(tmp_path: Path) -> None:
    argv = ray_commands.raylet_command(
        node=NodeId("node-1"),
        node_id="ab",
        cluster_id="cd",
        gcs_address="127.0.0.1:1",
        session=tmp_path / "session_r",
        logs=tmp_path,
        store=tmp_path,
        head=False,
    )
    assert "--node_ip_address=127.0.0.1" in argv and "--num_prestart_python_workers=0" in argv
    assert not [a for a in argv if "0.0.0.0" in a or "token" in a]
    run = RunDir(tmp_path)
    run.token_path.write_text("secret-token")
    environment = ray_commands.ray_environment(run)
    assert environment["RAY_AUTH_MODE"] == "token" and "secret-token" not in environment.values()
