"""Undoes an injector's faults on a process when the injector dies first, even by SIGKILL.

A child process reads from a pipe whose write end only the injector holds: end of file means that the injector is gone.
The guardian then resumes the target (SIGCONT), restores its CPU share and withdraws the request. Each action is
harmless when there is nothing to undo, so the guardian also runs them after a normal injection.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolecall.core.descriptors import is_readable
from rolecall.core.errors import InjectionRefused
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.faults.cpu_quota import QuotaUnavailable, cpu_group, lift_quota
from rolecall.rl_runtime.faults.process_side import request_path
from rolecall.rl_runtime.processes import kill_process

READY_SECONDS = 20.0
"""An interpreter starts in 0.1 s; in several seconds on a machine where everything starts at once."""
LIFT_SECONDS = 5.0
READY = b"ready\n"


@contextmanager
def guarded(run: RunDir, pid: int, start_ticks: int) -> Iterator[None]:
    """Within the context the target may be stopped: it is resumed even if this process dies.

    Raises:
        InjectionRefused: no guardian could be started; nothing was done.
    """
    argv = [sys.executable, "-m", "rolecall.rl_runtime.faults.guardian", str(run.path), str(pid), str(start_ticks)]
    # Its own session, so that Ctrl-C in the injector's terminal or a kill of its group does not reach the guardian.
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            if not is_readable(child.stdout, READY_SECONDS) or child.stdout.readline() != READY:
                raise InjectionRefused(f"process {pid}: no guardian could be started to resume it")
            yield
        finally:
            child.stdin.close()
            try:
                child.wait(LIFT_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()


def lift(run: RunDir, pid: int, start_ticks: int, cpu_home: Path | None) -> None:
    """Undoes every fault that may remain on a live process. `cpu_home`: its original control group."""
    request_path(run, pid, start_ticks).unlink(missing_ok=True)
    kill_process(pid, start_ticks, signal.SIGCONT)
    if cpu_home is not None:
        lift_quota(pid, cpu_home)


def main(argv: list[str]) -> int:
    run, pid, start_ticks = RunDir(Path(argv[0])), int(argv[1]), int(argv[2])
    try:
        cpu_home: Path | None = cpu_group(pid)[0]
    except QuotaUnavailable:
        cpu_home = None  # then no quota can be set either
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    lift(run, pid, start_ticks, cpu_home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
