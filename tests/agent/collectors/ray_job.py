"""A job on a small Ray cluster of its own whose actors end in every way, one after the other, on command.

`python ray_job.py FOLDER`: prints `name pid` for each actor that it starts, and reads one command a line. The actors'
class name is unique, so that an agent with a rule of its own finds no other process.
"""

import os
import signal
import sys
import time

import ray


@ray.remote(num_cpus=0)
class CauseProbe:
    def __init__(self, raises_after: float = 0.0) -> None:
        if raises_after:
            time.sleep(raises_after)
            raise ValueError("no weights at /models/x")

    def pid(self) -> int:
        return os.getpid()

    def leave(self) -> None:
        ray.actor.exit_actor()

    def end(self, code: int) -> None:
        sys.exit(code)

    def adopt(self) -> int:
        self.child = CauseProbe.remote()
        return ray.get(self.child.pid.remote())


def main(folder: str) -> None:
    ray.init(num_cpus=1, include_dashboard=False, _temp_dir=folder, log_to_driver=False, object_store_memory=80_000_000)
    actors: dict[str, object] = {}
    for line in sys.stdin:
        what, *names = line.split()
        try:
            for name in names:
                command(what, name, actors)
        except ray.exceptions.RayActorError:
            pass
        print("ok", flush=True)
    ray.shutdown()


def command(what: str, name: str, actors: dict[str, object]) -> None:
    if what == "start":
        actors[name] = CauseProbe.remote()
        print(name, ray.get(actors[name].pid.remote()), flush=True)
    elif what == "fail":
        actors[name] = CauseProbe.remote(8.0)
    elif what == "child":
        print("child", ray.get(actors[name].adopt.remote()), flush=True)
    elif what == "kill":
        ray.kill(actors[name])
    elif what == "drop":
        del actors[name]
    elif what == "leave":
        ray.get(actors[name].leave.remote())
    elif what == "exit3":
        ray.get(actors[name].end.remote(3))
    elif what == "raylet":
        os.kill(int(name), signal.SIGKILL)
        os.waitpid(int(name), 0)  # its workers take a zombie for a living raylet


if __name__ == "__main__":
    main(sys.argv[1])
