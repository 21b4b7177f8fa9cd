"""Lifts what an injector left on a process when the injector itself dies, by SIGKILL too, before it could.

A child process that reads from a pipe whose other end only the injector has: the end of the file is the injector's end,
however it came. Then the target continues (SIGCONT), has its CPU share back, and is asked for nothing any more. Each of
these does no harm when there is nothing to lift, so the guardian does them after an injection in good order as well.
"""

import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolecall.core.errors import InjectionRefused
from rolecall.core.rundir import RunDir
from rolecall.rl_runtime.faults.cpu_quota import QuotaUnavailable, cpu_group, lift_quota
from rolecall.rl_runtime.faults.process_side import request_path
from rolecall.rl_runtime.processes import kill_process

READY_SECONDS = 20.0
"""An interpreter starts in 0.1 s; on a machine where everything starts at once in several."""
LIFT_SECONDS = 5.0
READY = b"ready\n"


@contextmanager
def guarded(run: RunDir, pid: int, start_ticks: int) -> Iterator[None]:
    """Within: the target may be stopped: it is resumed even if this process dies.

    Raises:
        InjectionRefused: no guardian could be started; nothing was done.
    """
    argv = [sys.executable, "-m", "rolecall.rl_runtime.faults.guardian", str(run.path), str(pid), str(start_ticks)]
    # A session of its own: Ctrl-C in the injector's terminal, or the end of its group, is not for the guardian.
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            heard = select.select([child.stdout], [], [], READY_SECONDS)[0]
            if not heard or child.stdout.readline() != READY:
                raise InjectionRefused(f"process {pid}: no guardian could be started to resume it")
            yield
        finally:
            child.stdin.close()
            try:
                child.wait(LIFT_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()


def lift(run: RunDir, pid: int, start_ticks: int, cpu_home: Path | None) -> None:
    """Undoes every fault that a living process could be left with. `cpu_home`: the control group that it came from."""
    request_path(run, pid, start_ticks).unlink(missing_ok=True)
    kill_process(pid, start_ticks, signal.SIGCONT)
    if cpu_home is not None:
        lift_quota(pid, cpu_home)


def main(argv: list[str]) -> int:
    run, pid, start_ticks = RunDir(Path(argv[0])), int(argv[1]), int(argv[2])
    try:
        cpu_home: Path | None = cpu_group(pid)[0]
    except QuotaUnavailable:
        cpu_home = None  # then it cannot be under a quota either
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    lift(run, pid, start_ticks, cpu_home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
