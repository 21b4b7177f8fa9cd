"""A standalone rollout replica is replaced in a job of verl's own classes on Ray, with stand-ins for engine and tensors.

Ray is told of three GPUs, one for each replica, so that a new engine finds one only when the old one's is free. Skipped
where verl cannot be imported: README.md says how to get it.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.actuators import VerlActuator
from rolecall.integrations.verl_control import ADDRESS, TOKEN_FILE
from rolecall.recovery.actuators.calls import Call, Reply
from rolecall.recovery.actuators.targets.verl import Verl
from tests.recovery.actuators.driving import Driven, drive, member, order
from tests.support import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None, reason="verl is not installed (tests/integrations/real/README.md)"
    ),
]
REPLICAS, TOKENS = ["0", "1", "2"], 40
SECONDS = 200.0
STOPPED_UPDATE_SECONDS = 3.0
"""An update must not wait for the engine that hangs (5 s for its requests alone), or for the one that starts."""


class Job:
    def __init__(self, folder: Path, where: str, *, replacing: bool = True) -> None:
        self.folder = folder
        self.token = folder / "token"
        self.token.write_text("s3cret")
        self.token.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        environ = {ADDRESS: f"127.0.0.1:{self.port}", TOKEN_FILE: str(self.token)} if replacing else {}
        environ["VERL_USE_EXTERNAL_MODULES"] = "rolecall.integrations.verl"  # also where this clone is not installed
        argv = [sys.executable, "-W", "ignore", "-m", "tests.integrations.real.verl_job", str(folder), where]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                argv, env={**os.environ, **environ}, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def status(self) -> dict[str, Any]:
        assert self.process.poll() is None, (self.folder / "log").read_text()[-3000:]
        with suppress(OSError):
            return dict(json.loads((self.folder / "status.json").read_text()))
        return {"step": 0, "num_answers": 0, "failed": [], "pids": {}, "balancer": []}

    def wait(self, ready: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        eventually(lambda: ready(self.status), what, seconds=SECONDS)
        return self.status

    def hold(self) -> None:
        """No update begins any more, and none is under way."""
        (self.folder / "hold").touch()
        step = self.status["step"]
        self.wait(lambda s: s["step"] > step or "versions" not in s, "the job holds")

    def go_on(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def replace(self, replica: int, pid: int, *, seen: bool) -> Driven:
        """As a watch does it. `seen`: the process of the replica is there."""
        config = VerlActuator(
            kind="verl", url=f"http://127.0.0.1:{self.port}", token_path=str(self.token), poll_seconds=0.5
        )
        node = socket.gethostname().lower()
        members = [member(f"rollout/{replica}", node, pid=pid, at=2e9)] if seen else []
        given = order(*members)
        assert given.replica == f"rollout/{replica}"

        def answer(call: Call) -> Reply:
            time.sleep(call.after_seconds)
            reply = call.make()
            if call.key == "order":
                self.go_on()
            return reply

        return drive(Verl(config).replace(given), answer)

    def close(self) -> None:
        (self.folder / "stop").touch()
        self.go_on()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.mark.parametrize(("where", "fault"), [("driver", "hang"), ("rollouter", "crash")])
def test_a_replica_is_replaced_while_the_job_goes_on(tmp_path: Path, where: str, fault: str) -> None:
    job = Job(tmp_path, where)
    try:
        before = job.wait(lambda s: s["step"] > 2 and s["num_answers"] > 5, "the job runs")
        assert sorted(before["pids"]) == REPLICAS and len(before["balancer"]) == 3
        job.hold()
        pid = before["pids"]["1"]
        os.kill(pid, signal.SIGSTOP if fault == "hang" else signal.SIGKILL)

        if fault == "crash":
            job.wait(lambda s: s["states"]["1"] == "DEAD", "Ray knows")
            job.go_on()
            step = job.status["step"]
            job.wait(lambda s: s["step"] > step + 2 and s["updated"] == [0, 2], "weights are updated without it")
        it = job.replace(1, pid, seen=fault == "hang")
        assert it.done == "rollout/1: the new engine has current weights and gets requests", it
        done = job.status["num_answers"]
        after = job.wait(
            lambda s: s["num_answers"] > done + 5 and any(1 in made_by for _, made_by in s["answers"]),
            "the new engine generates",
        )
        assert after["failed"] == [], "no request was lost"
        assert all(num_tokens == TOKENS for num_tokens, _ in after["answers"])
        assert after["pids"]["1"] != pid
        assert {r: after["pids"][r] for r in "02"} == {r: before["pids"][r] for r in "02"}, "the others stay"
        assert after["updated"] == [0, 1, 2] and len(set(after["versions"])) == 1
        assert after["balancer"] == sorted(after["lists"]["addresses"]) == before["balancer"]
        assert sorted(after["lists"]["replicas"]) == [0, 1, 2] and after["lists"]["handles"] == 3
        assert after["longest"] < STOPPED_UPDATE_SECONDS
        if where == "rollouter":
            assert after["lists"]["counted"] == [2, 3], "its limit of samples follows"

        again = job.replace(1, pid, seen=True)
        assert f"pid {pid} of rollout/1#2 is no process of the job's replica 1" in again.error, "the old one is stale"
        assert job.status["pids"] == after["pids"]
    finally:
        job.close()


def test_without_the_variable_a_crash_fails_requests_as_it_does_in_verl(tmp_path: Path) -> None:
    job = Job(tmp_path, "driver", replacing=False)
    try:
        before = job.wait(lambda s: s["step"] > 2 and s["num_answers"] > 5, "the job runs")
        job.hold()
        os.kill(before["pids"]["1"], signal.SIGKILL)
        after = job.wait(lambda s: s["failed"], "requests fail")
        assert "ActorDied" in after["failed"][0]
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", job.port)) != 0, "nothing is served"
    finally:
        job.close()
