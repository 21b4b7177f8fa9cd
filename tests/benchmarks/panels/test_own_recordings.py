"""The own recordings are those of their list and hold the faults it says; the judge counts right, on alarms made up."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.panels.own_job import job as own_job
from benchmarks.panels.own_job import recordings as own
from benchmarks.panels.own_job.job import METRICS, Case, Fault, StepReport
from benchmarks.panels.own_job.recordings import Alarm, Verdict, node, verdict
from rolecall.detector.panels.panel import Panel
from rolecall.detector.sources import recording

BYTES_MAX = 3_000_000
CASE = Case(
    name="made-up",
    seed=1,
    num_workers=4,
    fault=Fault.CPU_QUOTA,
    severity=0.1,
    worker=2,
    onset_seconds=60,
    num_ticks=240,
)
HEALTHY = replace(CASE, fault=Fault.NONE, worker=-1, onset_seconds=0)
CASES = own.read_cases(own.FOLDER / own.CASES)


def test_the_list_is_the_one_that_the_seed_gives() -> None:
    assert CASES == own.drawn(own.SEED)


def test_the_list_has_each_fault_from_the_start_and_later_in_jobs_of_4_to_12_workers() -> None:
    healthy = [c for c in CASES if c.fault.is_healthy]
    faulty = [c for c in CASES if not c.fault.is_healthy]
    assert len(CASES) >= 24 and len(healthy) >= 8
    assert {c.num_workers for c in CASES} == {4, 6, 8, 12}
    kinds = {f for f in Fault if not f.is_healthy}
    assert {(c.fault, c.onset_seconds > 0) for c in faulty} == {(f, later) for f in kinds for later in (False, True)}
    assert all(0 <= c.worker < c.num_workers and c.onset_seconds < c.num_ticks for c in faulty)


def test_each_case_has_a_recording_and_a_line_that_says_how_it_was_made() -> None:
    names = sorted(c.name for c in CASES)
    assert sorted(p.stem for p in own.FOLDER.glob("*.parquet")) == names
    made = [json.loads(line) for line in (own.FOLDER / own.RECORDED).read_text().splitlines()]
    assert sorted(fact["name"] for fact in made) == names
    assert all(fact["commit"] and fact["host"] and fact["began_at"] for fact in made)
    assert sum(p.stat().st_size for p in own.FOLDER.iterdir()) < BYTES_MAX


@pytest.fixture(scope="module")
def panels() -> dict[str, Panel]:
    return {case.name: panel for case, panel in own.read(own.FOLDER)}


def test_recordings_have_the_workers_and_seconds_of_their_case(panels: dict[str, Panel]) -> None:
    for case in CASES:
        assert recording.is_recording(own.FOLDER / f"{case.name}.parquet")
        panel = panels[case.name]
        assert panel.shape.metrics == METRICS and panel.shape.interval_seconds == 1
        assert [m.node for m in panel.shape.machines] == [node(rank) for rank in range(case.num_workers)]
        assert len(panel.at) == case.num_ticks


MARKS = {
    Fault.CPU_HOG: "run_queue_seconds_per_second",
    Fault.CPU_QUOTA: "compute_seconds",
    Fault.MEMORY: "read_bytes_per_second",
    Fault.DISK: "checkpoint_seconds",
}
"""Where a fault shows by the way it is made. A slow link delays its neighbours as much."""
WEAK = {"09-cpu-hog-8", "17-cpu-quota-8", "22-cpu-quota-4"}


@pytest.mark.parametrize("case", [c for c in CASES if c.fault in MARKS and c.name not in WEAK], ids=lambda c: c.name)
def test_the_worker_of_the_list_is_the_one_that_the_fault_hits(case: Case, panels: dict[str, Panel]) -> None:
    values = panels[case.name].values[METRICS.index(MARKS[case.fault]), case.onset_seconds :]
    assert int(np.argmax(np.nanmean(values, axis=0))) == case.worker


def test_the_faulty_worker_counts_from_the_onset_on_and_every_other_alarm_is_wrong() -> None:
    alarms = [Alarm(node=node(2), seconds=s) for s in (30.0, 75.0, 90.0)] + [Alarm(node=node(0), seconds=70.0)]
    assert verdict(CASE, alarms) == Verdict(case=CASE, delay_seconds=15.0, wrong=(alarms[0], alarms[3]))
    assert verdict(CASE, alarms[:1]).delay_seconds is None


def test_a_machine_named_wrongly_twice_counts_once() -> None:
    alarms = [Alarm(node=node(0), seconds=70.0), Alarm(node=node(0), seconds=80.0)]
    assert verdict(CASE, alarms).wrong == (alarms[0],)


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.EVERYONE])
def test_every_alarm_in_a_healthy_recording_is_wrong(fault: Fault) -> None:
    case = replace(HEALTHY, fault=fault)
    assert verdict(case, [Alarm(node=node(3), seconds=5.0)]).wrong
    assert verdict(case, []) == Verdict(case=case, delay_seconds=None, wrong=())


def test_a_row_has_recall_precision_f1_delay_and_flagged_recordings() -> None:
    wrong = (Alarm(node=node(0), seconds=1.0), Alarm(node=node(1), seconds=1.0))
    named = [Verdict(case=CASE, delay_seconds=float(d), wrong=()) for d in range(1, 9)]
    missed = [Verdict(case=CASE, delay_seconds=None, wrong=())] * 2
    healthy = [Verdict(case=HEALTHY, delay_seconds=None, wrong=w) for w in (wrong, (), (), ())]
    row = dict(zip(own.HEAD, own.row("x", [*named, *missed, *healthy]), strict=True))
    # Clopper and Pearson for 8 of 10 and 1 of 4: published tables.
    assert row["recall [95 %]"] == row["precision [95 %]"] == "0.80 [0.44, 0.97]"
    assert row["flagged [95 %]"] == "0.25 [0.01, 0.81]"
    assert (row["faults"], row["named"], row["wrong"], row["F1"]) == ("10", "8", "2", "0.80")
    assert row["delay P50, ticks = s"] == "5"


def test_without_faults_or_alarms_there_is_no_recall_or_precision() -> None:
    row = own.row("x", [Verdict(case=HEALTHY, delay_seconds=None, wrong=())])
    assert row[3] == row[5] == row[6] == row[7] == "-"


def made_up_panel() -> Panel:
    """Compute of worker 2 is 5 standard deviations of its peers higher from the onset on."""
    rng = np.random.default_rng(0)
    values = rng.normal(1.0, 0.1, (len(METRICS), CASE.num_ticks, CASE.num_workers)).astype(np.float32)
    values[METRICS.index("compute_seconds"), CASE.onset_seconds :, CASE.worker] += 0.5
    return own.panel(CASE, 1000.4, values)


def test_the_effect_is_that_of_the_metric_in_which_the_worker_is_farthest_from_its_peers() -> None:
    metric, spreads = own.effect(CASE, made_up_panel())
    assert metric == "compute_seconds"
    # Three peers less their median: one of them is 0, so that their spread is below 0.1.
    assert 5 < spreads < 8


def test_a_report_names_the_case_and_what_was_named_in_it() -> None:
    lines = own.report([(CASE, made_up_panel()), (HEALTHY, made_up_panel())], ["step-time"], 100.0)
    (told,) = [line for line in lines if line.startswith("| made-up | 0.1 | 60 |")]
    assert "compute_seconds" in told
    assert own.detectors("sequential+step-time", 100.0)[1].name == "step-time"


def test_a_panel_begins_a_second_after_the_first_readings_and_keeps_four_digits() -> None:
    values = np.full((len(METRICS), CASE.num_ticks, CASE.num_workers), 0.0123456, dtype=np.float32)
    values[0, 0, 0], values[1, 0, 0] = np.nan, 0.0
    panel = own.panel(CASE, 1000.4, values)
    assert list(panel.at[:2]) == [1001.0, 1002.0]
    assert panel.values[2, 0, 0] == np.float32(0.01235)
    assert np.isnan(panel.values[0, 0, 0]) and panel.values[1, 0, 0] == 0


def write_process(root: Path, *, cpu: int, threads: dict[int, int]) -> None:
    """`cpu`: nanoseconds of each thread; `threads`: voluntary switches by thread id."""
    (root / "net").mkdir(parents=True)
    stat = ["S", "1", "1", "1", "0", "-1", "0", "111", "0", "22", "0", "7", "3", "0", "0", "20", "0", str(len(threads))]
    (root / "stat").write_text(f"42 (a (name) S) {' '.join(stat)} 0 100 4096 25 0\n")
    (root / "io").write_text("rchar: 1\nread_bytes: 4096\nwrite_bytes: 8192\n")
    for tid, switches in threads.items():
        task = root / "task" / str(tid)
        task.mkdir(parents=True)
        (task / "schedstat").write_text(f"{cpu} 500000000 9\n")
        (task / "status").write_text(
            f"Name:\tx\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t5\n"
        )
    head = "Inter-|   Receive |  Transmit\n face |bytes packets|bytes packets\n"
    (root / "net" / "dev").write_text(
        f"{head}    lo: 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0\n  eth0: 100 0 0 0 0 0 0 0 200 0 0 0 0 0 0 0\n"
    )
    (root / "net" / "snmp").write_text("Ip: Forwarding\nIp: 1\nTcp: OutSegs RetransSegs\nTcp: 10 3\n")


def test_readings_are_summed_over_threads_and_interfaces(tmp_path: Path) -> None:
    write_process(tmp_path / "42", cpu=2_000_000_000, threads={42: 10, 43: 30})
    assert own_job.process_readings(42, proc=tmp_path) == {
        "cpu_seconds": 4.0,
        "run_queue_seconds": 1.0,
        "minor_page_faults": 111,
        "major_page_faults": 22,
        "threads": 2,
        "rss_bytes": 25 * 4096,
        "voluntary_context_switches": 40,
        "involuntary_context_switches": 10,
        "read_bytes": 4096,
        "write_bytes": 8192,
        "network_receive_bytes": 101,
        "network_transmit_bytes": 201,
        "tcp_retransmitted_segments": 3,
    }


def test_a_tick_has_rates_over_its_own_length_and_means_over_its_steps() -> None:
    before = dict.fromkeys((*own_job.COUNTERS, *own_job.GAUGES), 10.0)
    now = dict.fromkeys((*own_job.COUNTERS, *own_job.GAUGES), 13.0)
    steps = [
        StepReport(data_load=0.1, compute=0.2, all_reduce=0.3, step=1.0, checkpoint=0.0),
        StepReport(data_load=0.3, compute=0.4, all_reduce=0.5, step=2.0, checkpoint=0.7),
    ]
    values = own_job.measured(before, now, 1.5, steps, 0.7)
    assert set(values) == set(METRICS)
    assert values["cpu_seconds_per_second"] == 2.0 and values["threads"] == 13.0
    assert values["compute_seconds"] == pytest.approx(0.3) and values["step_seconds"] == 1.5
    assert values["samples_per_second"] == pytest.approx(2 * own_job.BATCH_SAMPLES / 1.5)


def test_a_tick_without_a_finished_step_has_no_step_times() -> None:
    counters = dict.fromkeys((*own_job.COUNTERS, *own_job.GAUGES), 1.0)
    values = own_job.measured(counters, counters, 1.0, [], 0.7)
    assert np.isnan([values[name] for name in own_job.REPORTED]).all()
    assert (values["samples_per_second"], values["checkpoint_seconds"]) == (0.0, 0.7)
