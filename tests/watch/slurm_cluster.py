"""A real Slurm on loopback: munged, slurmctld, and one slurmd for each of several nodes, in a folder of their own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

from tests.support import PATIENCE_SECONDS, eventually

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
"""


def missing() -> str:
    """Why it cannot be started here; empty: it can."""
    lacking = [p for p in PROGRAMS if _program(p) is None]
    if lacking:
        return f"no {', '.join(lacking)} here: the Debian packages slurm-wlm and munge have them"
    return "" if os.geteuid() == 0 else "slurmd starts only as root"


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


class Slurm:
    """`nodes`: their names. `environment`: with it Slurm's commands reach this cluster."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        if why := missing():
            pytest.skip(why)
        self.folder = folder
        self.nodes = tuple(f"n{k}" for k in range(1, num_nodes + 1))
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "LC_ALL": "C"}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + len(self.nodes))
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 State=UNKNOWN"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        (self.folder / "state").mkdir()
        text = CONFIG.format(host=host, port=ports[0], user="root", folder=self.folder, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = [f"--{what}={self.folder}/munge.{what.split('-')[0]}" for what in ("socket", "pid-file", "log-file")]
        munge += [f"--key-file={key}", f"--seed-file={self.folder}/munge.seed"]
        self._start("munged", "--foreground", "--force", *munge)
        eventually((self.folder / "munge.socket").exists, "munged listens")
        self._start("slurmctld", "-D", "-i")
        for node in self.nodes:
            (self.folder / f"spool-{node}").mkdir()
            self._start("slurmd", "-D", "-N", node)
        eventually(self._is_up, f"the nodes are idle; {self._logs()}")

    def _start(self, program: str, *arguments: str) -> None:
        path = _program(program)
        assert path is not None
        output = (self.folder / f"{program}.out").open("ab")
        with output:
            self._started.append(
                subprocess.Popen(
                    [path, *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _is_up(self) -> bool:
        for process in self._started:
            if process.poll() is not None:
                raise AssertionError(f"{process.args} has ended: {self._logs()}")
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

    def run(self, *argv: str) -> str:
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
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
        text = self.run("scontrol", "show", "job", str(job))
        return int(text.partition("Restarts=")[2].split()[0])

    def close(self) -> None:
        try:
            self.run("scancel", "--signal=KILL", "--user=root")
            self.run("scancel", "--user=root")
            eventually(lambda: not self.run("squeue", "--noheader").strip(), "the jobs have ended", seconds=20)
        except (subprocess.SubprocessError, OSError, AssertionError):
            pass  # the daemons end anyway
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._started):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
