"""A process like a rollout: works in units of a few milliseconds, reports them, and takes a fault by line on stdin. A
standby has started and waits."""

import re
import sys
import threading
import time

from rolecall.agent.reporter import reporter

replica, incarnation, node_dir, secret = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
unit_seconds = float(sys.argv[5])
fault: list[str] = []


def listen() -> None:
    for line in sys.stdin:
        fault.append(line.strip())


def unit() -> None:
    end = time.thread_time() + unit_seconds
    while time.thread_time() < end:
        sum(range(2000))


reporter.start(replica=replica, rank=0, incarnation=incarnation, secret=secret, node_dir=node_dir)
threading.Thread(target=listen, daemon=True).start()
if replica.startswith("standby/"):
    for phase in ("start", "wait"):
        reporter.enter_phase(phase)
        time.sleep(0.5)
    threading.Event().wait()
reporter.enter_phase("generate")
reporter.update(requests_active=8)
while True:
    begun = time.monotonic()
    unit()
    if fault and fault[-1] == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=600)
    if fault and fault[-1] == "gil":
        re.match(r"(a|aa)+$", "a" * 60 + "b")  # exponential, in one C call that never gives the interpreter back
    if fault and fault[-1] == "raise":
        raise ValueError("a mistake in user code")
    if fault and fault[-1] == "delay":
        time.sleep(4 * unit_seconds)
    if fault and fault[0].startswith("step "):
        version, reward, entropy = fault.pop(0).split()[1:]
        reporter.update(policy_version=int(version), reward=float(reward))
        reporter.health(entropy=float(entropy), response_length=7.0, log_ratio_max=1e-6)
    if fault and fault[-1] == "finish":
        reporter.finish("asked")
        break
    reporter.progress(busy_seconds=time.monotonic() - begun, tokens=8)
