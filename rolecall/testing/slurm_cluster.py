"""A real Slurm on loopback (munged, slurmctld, and one slurmd for each of several nodes), and a job of rolecall's tests
on it: each replica is a Slurm job of its own. Everything is in one folder, and ends with `close`.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rolecall.testing.watched_job import STEPS, WatchedJob

COMMAND_SECONDS: Final = 30.0
START_SECONDS: Final = 60.0
END_SECONDS: Final = 15.0
PAUSE_SECONDS: Final = 0.1

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "scontrol", "sbatch", "srun", "scancel")
CONFIG: Final = """
ClusterName=rolecall-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
KillWait=2
MinJobAge=600
SchedulerParameters=sched_interval=1,sched_min_interval=0
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
{more}
"""


def missing() -> str:
    """Why it cannot be started here; empty: it can."""
    lacking = [p for p in PROGRAMS if _program(p) is None]
    if lacking:
        return f"no {', '.join(lacking)} here: the Debian packages slurm-wlm and munge have them"
    return "" if os.geteuid() == 0 else "slurmd starts only as root"


def slurm_version() -> str:
    """`slurm-wlm 22.05.8`. Raises OSError: it is not here."""
    program = _program("slurmd") or "slurmd"
    done = subprocess.run([program, "-V"], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
    return done.stdout.strip()


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


class SlurmCluster:
    """`nodes`: their names. `environment`: with it Slurm's commands reach this cluster. `more`: lines of its
    configuration."""

    def __init__(self, folder: Path, num_nodes: int, more: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._more = folder, more
        self.nodes = tuple(f"n{k}" for k in range(1, num_nodes + 1))
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + len(self.nodes))
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 State=UNKNOWN"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        (self.folder / "state").mkdir()
        names = {"user": "root", "folder": self.folder, "nodes": "\n".join(lines), "more": self._more}
        text = CONFIG.format(host=host, port=ports[0], **names)
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = [f"--{what}={self.folder}/munge.{what.split('-')[0]}" for what in ("socket", "pid-file", "log-file")]
        munge += [f"--key-file={key}", f"--seed-file={self.folder}/munge.seed"]
        self._start("munged", "--foreground", "--force", *munge)
        self._wait((self.folder / "munge.socket").exists, "munged listens", START_SECONDS)
        self._start("slurmctld", "-D", "-i")
        for node in self.nodes:
            (self.folder / f"spool-{node}").mkdir()
            self._start("slurmd", "-D", "-N", node)
        self._wait(self._is_up, "the nodes are idle", START_SECONDS)

    def _wait(self, until: Callable[[], bool], what: str, seconds: float) -> None:
        """Raises TimeoutError: not within `seconds`."""
        ends = time.monotonic() + seconds
        while not until():
            if time.monotonic() > ends:
                raise TimeoutError(f"not within {seconds:g} s: {what}; {self._logs()}")
            time.sleep(PAUSE_SECONDS)

    def _start(self, program: str, *arguments: str) -> None:
        path = _program(program)
        assert path is not None
        output = (self.folder / f"{program}.out").open("ab")
        with output:
            self._started.append(
                subprocess.Popen(
                    [path, *arguments],
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _is_up(self) -> bool:
        for process in self._started:
            if process.poll() is not None:
                raise OSError(f"{process.args!r} has ended: {self._logs()}")
        try:
            return self.run("sinfo", "--noheader", "--format=%T").split() == ["idle"] and len(
                self.run("sinfo", "--noheader", "--Node", "--format=%N").split()
            ) == len(self.nodes)
        except subprocess.CalledProcessError:
            return False

    def _logs(self) -> str:
        return "\n".join(
            f"{p.name}: {p.read_text(errors='replace')[-800:]}"
            for p in sorted(self.folder.iterdir())
            if p.suffix in (".log", ".out")
        )

    def run(self, *argv: str, **more: str) -> str:
        """Output of one of Slurm's commands, with `more` in its environment. Raises CalledProcessError: it ended with
        another code than 0."""
        environment = {**os.environ, **self.environment, "LC_ALL": "C", **more}
        done = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
        return done.stdout

    def submit(self, script: str, *options: str, **environment: str) -> int:
        """The number of the job."""
        path = self.folder / f"job-{time.monotonic_ns()}.sh"
        path.write_text(script)
        export = ",".join(["ALL", *(f"{k}={v}" for k, v in environment.items())])
        out = f"--output={self.folder}/job-%j.out"
        return int(self.run("sbatch", "--parsable", f"--export={export}", out, *options, str(path)))

    def restarts(self, job: int) -> int:
        return int(self._shown(job, "Restarts"))

    def started_at(self, job: int) -> float:
        """Wall seconds; 0: it has not started."""
        text = self._shown(job, "StartTime", SLURM_TIME_FORMAT="%s")
        return float(text) if text.isdecimal() else 0.0

    def nodes_of(self, job: int) -> list[str]:
        return self.run("scontrol", "show", "hostnames", self._shown(job, "NodeList")).split()

    def steps(self, job: int) -> list[str]:
        """Numbers of those that run, without the batch script."""
        rows = self.run("squeue", "--noheader", "--steps", "--format=%i").split()
        found = [number for one, _, number in (row.partition(".") for row in rows) if one in self._names(job)]
        return sorted(n for n in found if n.isdecimal())

    def _names(self, job: int) -> set[str]:
        """Its number, and `array_task`."""
        text = self._record(job)
        array, task = (text.partition(f"{key}=")[2].split(" ")[0] for key in ("ArrayJobId", "ArrayTaskId"))
        return {str(job), f"{array}_{task}"}

    def _record(self, job: int, **environment: str) -> str:
        records = self.run("scontrol", "show", "job", str(job), **environment).split("\n\n")
        return next(r for r in records if r.split()[:1] == [f"JobId={job}"])

    def _shown(self, job: int, key: str, **environment: str) -> str:
        return self._record(job, **environment).partition(f" {key}=")[2].split()[0]

    def close(self) -> None:
        try:
            self.run("scancel", "--user=root", "--signal=KILL")
            self.run("scancel", "--user=root")
            self._wait(lambda: not self.run("squeue", "--noheader").strip(), "the jobs have ended", END_SECONDS)
        except (subprocess.SubprocessError, OSError):
            pass  # the daemons end anyway
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._started):
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_SECONDS)


class SlurmJobs(WatchedJob):
    """An agent for each node of the cluster, and a requeueable Slurm job for each replica."""

    def __init__(self, folder: Path, cluster: SlurmCluster, replicas: tuple[str, ...]) -> None:
        super().__init__(folder, replicas, STEPS, cluster.environment)
        self._cluster = cluster
        self.jobs: dict[str, int] = {}  # replica -> number of its Slurm job
        (folder / "worker.py").write_text(STEPS)

    def start_agent(self) -> None:
        config = self.folder / "agent.yaml"
        config.write_text("jobs: {enabled: false}\n")  # all nodes are this machine: each agent would find all ranks
        for node in self._cluster.nodes:
            folder = self.folder / f"agent-{node}"
            folder.mkdir()
            options = ["--config", str(config), "--node", node, "--data-dir", str(folder), "--port", "0"]
            self.start([sys.executable, "-m", "rolecall.agent", *options])

    @property
    def agent_url(self) -> str:
        found = []
        for node in self._cluster.nodes:
            try:
                found.append(str(json.loads((self.folder / f"agent-{node}" / "agent.json").read_text())["url"]))
            except (OSError, ValueError, KeyError):
                return ""
        return ",".join(found)

    def start_replicas(self, options: Sequence[str] = ("--requeue", "--ntasks=1")) -> None:
        script = (
            "#!/bin/sh\n"
            f"export ROLECALL_AGENT_DIR={self.folder}/agent-$SLURMD_NODENAME ROLECALL_ROLE=rollout\n"
            f"srun --ntasks=1 {sys.executable} {self.folder}/worker.py\n"
        )
        for replica in self.replicas:
            self.jobs[replica] = self._cluster.submit(script, *options, ROLECALL_REPLICA=replica)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
