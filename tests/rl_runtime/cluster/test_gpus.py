"""Ray gives each replica GPUs of its own: real Ray, GPUs that it only counts.

pytest tests/rl_runtime/cluster/test_gpus.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu_cluster.py"


@pytest.mark.e2e
@pytest.mark.light
def test_each_replica_sees_its_own_gpus_and_a_replacement_gets_those_that_were_freed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, env=env, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    for incarnation in ("trainer/0#1", "trainer/0#2", "trainer/1#1", "rollout/0#1"):
        assert seen[f"{incarnation} rank 0"] == seen[f"{incarnation} rank 1"], "rank k takes the k-th of one list"
    first, second = (set(seen[f"trainer/{i}#1 rank 0"].split(",")) for i in (0, 1))
    assert len(first) == len(second) == 2 and first | second == {"4", "5", "6", "7"}
    assert set(seen["trainer/0#2 rank 0"].split(",")) == first
    assert set(seen["rollout/0#1 rank 0"].split(",")) == {"2", "GPU-a"}
    assert seen["reward/0#1 rank 0"] == "", "a node without GPUs shows none of the machine's"
    assert seen["reward/1#1 rank 0"] == "", "an actor that requests no GPU sees none of its node's"
