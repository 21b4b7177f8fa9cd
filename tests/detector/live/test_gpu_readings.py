"""GPUs of a run: whose they are, how several count for one rank, and a replica whose GPU throttles while all keep
step."""

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.config.job import DetectorConfig
from rolecall.core.diagnosis import Diagnosis, Finding
from rolecall.core.ids import NodeId, ProcessId
from rolecall.core.telemetry import GpuSample, Phase, ProcessSample, SampleBatch
from rolecall.detector.base.findings import PANEL
from rolecall.detector.base.observation import Observation
from rolecall.detector.live.engine import LiveDetector
from rolecall.detector.live.gpu_readings import _WORDS, GPU_METRICS, PREFIX, GpuReadings
from rolecall.detector.live.run_panels import RunPanels
from rolecall.detector.panels.panel import Panel, findings
from rolecall.detector.panels.registry import detector
from rolecall.detector.sources import recording
from rolecall.detector.sources.agent_panels import AgentsPanels
from rolecall.detector.sources.agents import AgentsSource
from tests.support import some

NODE = NodeId("node-1")
CLOCK = "rolecall_gpu_sm_clock_hertz"
HEAT = "rolecall_gpu_thermal_throttle_ratio"


def gpu(index: int, at: float, *pids: int, **values: float) -> GpuSample:
    known = {"node": NODE, "gpu": index, "uuid": f"GPU-{index}", "at": at, "wall_at": at, "pids": pids}
    return GpuSample(**known, joined_by="nvml", **values)  # type: ignore[arg-type]


def reported(*ticks: list[GpuSample]) -> list[dict[int, dict[str, float]]]:
    """By PID, at each tick."""
    readings, found = GpuReadings(), []
    for n, samples in enumerate(ticks):
        for sample in samples:
            readings.take(sample, float(n))
        found.append({pid: values for (_, pid), values in readings.tick(float(n)).items()})
    return found


# --- readings


def test_counters_become_rates_of_the_gpus_own_looks() -> None:
    ticks = [
        [gpu(0, at, 5, thermal_throttle_seconds=10 + s, power_watts=300 + s)] for at, s in ((1.0, 0.0), (3.0, 0.5))
    ]
    first, quiet, second = reported(ticks[0], [], ticks[1])
    assert first == {5: {"rolecall_gpu_power_watts": 300}}, "a rate needs two looks"
    assert quiet == {}, "no look, no value"
    assert second == {5: {"rolecall_gpu_power_watts": 300.5, HEAT: 0.25}}


def test_a_counter_that_starts_again_or_is_old_gives_no_rate() -> None:
    again = reported([gpu(0, 1.0, 5, thermal_throttle_seconds=10)], [gpu(0, 2.0, 5, thermal_throttle_seconds=1)])
    assert again[1] == {5: {}}
    late = reported([gpu(0, 1.0, 5, thermal_throttle_seconds=10)], [gpu(0, 60.0, 5, thermal_throttle_seconds=11)])
    assert late[1] == {5: {}}
    other = [replace(gpu(0, 2.0, 5, thermal_throttle_seconds=11), uuid="GPU-new")]
    assert reported([gpu(0, 1.0, 5, thermal_throttle_seconds=10)], other)[1] == {5: {}}, "it was replaced"


def test_of_several_gpus_the_slowest_clock_the_highest_temperature_and_the_mean_of_the_rest() -> None:
    values = [
        gpu(0, 1.0, 5, sm_clock_hertz=1.7e9, temperature_celsius=60, power_watts=500, sm_active_ratio=0.8),
        gpu(1, 1.0, 5, sm_clock_hertz=1.2e9, temperature_celsius=80, power_watts=300, sm_active_ratio=0.4),
        gpu(2, 1.0, 6, sm_clock_hertz=1.8e9),
    ]
    (found,) = reported(values)
    assert found[5] == {
        CLOCK: 1.2e9,
        "rolecall_gpu_temperature_celsius": 80,
        "rolecall_gpu_power_watts": 400,
        "rolecall_gpu_sm_active_ratio": pytest.approx(0.6),
    }
    assert found[6] == {CLOCK: 1.8e9}


def test_ranks_that_share_a_gpu_each_have_it_and_evidence_says_so() -> None:
    readings = GpuReadings()
    readings.take(gpu(0, 1.0, 5, 6, sm_clock_hertz=1.2e9, power_watts=301.2), 1.0)
    readings.take(replace(gpu(1, 1.0, 7, sm_clock_hertz=1.7e9), joined_by="environment"), 1.0)
    found = readings.tick(1.0)
    assert found[NODE, 5] == found[NODE, 6] and found[NODE, 7] == {CLOCK: 1.7e9}
    everyone = [(NODE, pid) for pid in (5, 6, 7, 8)]
    (shared,) = readings.evidence((NODE, 5), everyone, ("rolecall_gpu_power_watts",))
    assert shared.text == (
        "GPU 0 of node-1 (GPU-0, shared by 2 ranks): power 301 W (peers 301 W), SM clock 1200 MHz (peers 1450 MHz)"
    )
    assert shared.values == {
        "gpu": 0,
        CLOCK: 1.2e9,
        f"{CLOCK}_peers": 1.45e9,
        "rolecall_gpu_power_watts": 301.2,
        "rolecall_gpu_power_watts_peers": 301.2,
    }
    (guessed,) = readings.evidence((NODE, 7), everyone)
    assert "by the environment of the process" in guessed.text
    assert readings.evidence((NODE, 8), everyone) == ()


def test_a_gpu_that_is_silent_is_forgotten() -> None:
    readings = GpuReadings()
    readings.take(gpu(0, 1.0, 5, sm_clock_hertz=1.2e9), 1.0)
    assert readings.tick(1.0) and readings.tick(2.0) == {}
    assert readings.evidence((NODE, 5), ())
    readings.tick(60.0)
    assert readings.evidence((NODE, 5), ()) == ()


def test_every_metric_has_words() -> None:
    assert {PREFIX + short for short in _WORDS} == GPU_METRICS


# --- a run


class Training:
    """Four replicas in step, each with a GPU on a node of its own; from `hot_from` on that of trainer/2 is too hot."""

    def __init__(self, seed: int = 7, hot_from: float = math.inf) -> None:
        self.rng, self.hot_from = random.Random(seed), hot_from
        self.processes = [ProcessId(node=NodeId(f"node-{i}"), pid=100 + i, start_ticks=1) for i in range(4)]
        self.heat = [0.0] * 4
        self.begun = 1_700_000_000.0

    def observations(self, seconds: int) -> Iterator[Observation]:
        for second in range(1, seconds + 1):
            load = self.rng.gauss(1.0, 0.01)  # of all alike: they wait for each other
            batches = tuple(self._batch(i, float(second), load) for i in range(4))
            yield Observation(wall_at=self.begun + second, batches=batches)

    def _batch(self, i: int, at: float, load: float) -> SampleBatch:
        who, wall = self.processes[i], self.begun + at
        units = int(at)  # a step a second, for all
        process = ProcessSample(
            process=who,
            role="trainer",
            replica=f"trainer/{i}",
            rank=0,
            incarnation=1,
            at=at,
            wall_at=wall,
            alive=True,
            page_ok=True,
            phase=Phase.COMPUTE,
            step=units,
            progress=units,
            progress_at=at,
            beats=int(at * 10),
            busy_seconds=at * 0.9,
            work_units=units,
            tokens=units * 4096,
            cpu_seconds=at * 0.8,
            rss_bytes=int(2e9 + self.rng.gauss(0, 1e6)),
        )
        head = {"node": who.node, "agent_pid": 1, "cursor": 1, "lost": 0, "at": at, "wall_at": wall}
        return SampleBatch(**head, processes=(process,), hosts=(), gpus=(self._gpu(i, at, load),))

    def _gpu(self, i: int, at: float, load: float) -> GpuSample:
        hot = i == 2 and at >= self.hot_from
        slowed = 0.68 if hot else 1.0
        self.heat[i] += 0.85 if hot else 0.0
        noise = self.rng.gauss
        return GpuSample(
            node=self.processes[i].node,
            gpu=3,
            uuid=f"GPU-{i}{i}{i}{i}",
            at=at,
            wall_at=self.begun + at,
            pids=(self.processes[i].pid,),
            joined_by="nvml",
            utilization_ratio=0.99,
            sm_active_ratio=0.8 * load * (0.75 if hot else 1.0) + noise(0, 0.01),
            tensor_active_ratio=0.45 * load + noise(0, 0.01),
            dram_active_ratio=0.35 * load + noise(0, 0.01),
            memory_used_bytes=60 * 2.0**30,
            power_watts=560 * load * slowed + noise(0, 5),
            temperature_celsius=round(62 + i + (20 if hot else 0) + noise(0, 0.4)),
            sm_clock_hertz=1.755e9 * slowed + 15e6 * round(noise(0, 1)),
            thermal_throttle_seconds=self.heat[i],
            power_throttle_seconds=0.0,
        )


def watched(observations: Iterator[Observation]) -> tuple[list[Finding], dict[str, Diagnosis]]:
    """What the panels said, and what the engine made of it."""
    panels, engine = RunPanels(detector()), LiveDetector(DetectorConfig(mask_proc_state=True), {"trainer": 4})
    said: list[Finding] = []
    diagnoses: dict[str, Diagnosis] = {}
    for observation in observations:
        found = panels.findings(observation)
        said += found
        diagnoses |= {d.key: d for d in engine.observe(replace(observation, panel_findings=found))}
    return said, diagnoses


HOT_AT = 560.0
"""After the detector's youth."""


def test_a_gpu_that_throttles_names_its_replica_and_itself_while_all_keep_step() -> None:
    observations = list(Training(hot_from=HOT_AT).observations(700))
    said, diagnoses = watched(iter(observations))
    (finding,) = said
    ((key, diagnosis),) = diagnoses.items()
    assert key == "slow:trainer/2#1" and finding.detector == f"{PANEL}sequential"
    assert 0 <= finding.detected_at - (Training().begun + HOT_AT) < 30
    (of_gpu,) = [e for e in diagnosis.evidence if e.kind == "gpu"]
    assert "GPU 3 of node-2 (GPU-2222)" in of_gpu.text and of_gpu.text in diagnosis.because
    assert re.search(r"SM clock 1\d\d\d MHz \(peers 17\d\d MHz\)", of_gpu.text)
    assert "held down by heat 85% of the time (peers 0%)" in of_gpu.text
    assert "power limit" not in of_gpu.text, "of no one"
    assert of_gpu.values[CLOCK] < 0.75 * of_gpu.values[f"{CLOCK}_peers"]
    again = [Observation.from_dict(json.loads(json.dumps(o.to_dict(), allow_nan=False))) for o in observations]
    assert watched(iter(again)) == (said, diagnoses), "what was stored says the same"


@pytest.mark.parametrize("seed", some([(1,), (2,)], [(1,)]))
def test_healthy_gpus_give_no_finding(seed: int) -> None:
    assert watched(Training(seed=seed).observations(1800)) == ([], {})


class Played:
    """Observations, as a source of agents would give them."""

    def __init__(self, observations: Iterator[Observation]) -> None:
        self.left = list(observations)[::-1]

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def poll(self, timeout_seconds: float) -> Observation:
        return self.left.pop()


def test_a_recording_of_the_agents_keeps_the_gpus_and_finds_the_same(tmp_path: Path) -> None:
    """`rolecall record run`, and a detector that reads the file."""
    played = Played(Training(hot_from=600.0).observations(700))
    source = AgentsPanels(cast(AgentsSource, played), FakeClock(0.0), 1.0)
    ticks = list(source.ticks(lambda: not played.left))
    shape = ticks[-1].shape
    said = Training()._gpu(0, 1.0, 1.0).to_dict()
    assert {HEAT, *(f"{PREFIX}{name}" for name in said if PREFIX + name in GPU_METRICS)} <= set(shape.metrics)
    assert [(m.replica, m.rank, m.gpu) for m in shape.machines] == [(f"trainer/{i}", 0, None) for i in range(4)]
    kept = [t for t in ticks if t.shape == shape]
    assert len(kept) > 690
    live = Panel(shape=shape, at=np.array([t.at for t in kept]), values=np.stack([t.values for t in kept], axis=1))
    recording.write(tmp_path / "run.parquet", [live])
    (stored,) = recording.read(tmp_path / "run.parquet").panels
    (found,) = findings(detector(), stored)
    assert found.suspects[0].replica == "trainer/2" and any(HEAT in e.kind for e in found.evidence)
    assert findings(detector(), live) == [found]
