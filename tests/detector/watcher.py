"""The detector's side as a process: asks agents, prints what it learns and tells as JSON lines. For tests in which the
detector must run on a machine of its own.

python watcher.py '{"node-0": "http://..."}' '{"trainer": 3}'      # ends when its stdin does
"""

import json
import sys
import threading

from rolecall.core.clock import SystemClock
from rolecall.core.config.job import DetectorConfig
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.monitored_process import EXPERIENCED_UNITS
from rolecall.detector.sources.agents import AgentsSource

agents, roles = json.loads(sys.argv[1]), json.loads(sys.argv[2])
detector = LiveDetector(DetectorConfig(mask_proc_state=True), roles)
source = AgentsSource(lambda: agents, SystemClock())
over = threading.Event()


def wait_for_the_end() -> None:
    sys.stdin.read()
    over.set()


def say(kind: str, value: object) -> None:
    print(json.dumps([kind, value]), flush=True)


def is_experienced(replica: str) -> bool:
    healthy, sentence = detector.progressing(replica, 1)
    return healthy and int(sentence.partition("has finished ")[2].split()[0]) >= EXPERIENCED_UNITS


threading.Thread(target=wait_for_the_end, daemon=True).start()
replicas = [f"{role}/{i}" for role, count in roles.items() for i in range(count)]
source.start()
said: set[str] = set()
while not over.is_set():
    for diagnosis in detector.observe(source.poll(0.25)):
        if diagnosis.key not in said:
            say("diagnosis", diagnosis.to_dict())
        said.add(diagnosis.key)
    gaps = detector._fleet.gaps
    learned = ("/".join(key) for key in gaps.values if gaps.p99(*key) is not None)
    news = [("learned", name) for name in learned if name not in said]
    news += [("experienced", r) for r in replicas if r not in said and is_experienced(r)]
    for kind, name in news:
        say(kind, name)
        said.add(name)
source.close()
