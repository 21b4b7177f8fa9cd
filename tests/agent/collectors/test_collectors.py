"""Kernel data of recorded trees (`proc/`: a busy, a stopped and a dead process, and a host)."""

import os
import shutil
from pathlib import Path

import pytest

from rolecall.agent.collectors.process.host import HostProbe, parse_cpu, parse_stalls
from rolecall.agent.collectors.process.process import (
    SLOW_ROUNDS,
    ProcessProbe,
    ThrottleProbe,
    cpu_cgroup,
    parse_run_delay,
    parse_stat,
    parse_throttled_seconds,
    stat_files,
)
from rolecall.core.ids import NodeId

RECORDED = Path(__file__).parents[1] / "proc"
BUSY, STOPPED, ZOMBIE = 22327, 22329, 22330


def probe(pid: int, proc: Path = RECORDED) -> ProcessProbe:
    return ProcessProbe(pid, proc=proc, cgroup_root=proc / "no-cgroups", ticks_per_second=100, page_bytes=4096)


def test_a_busy_process_with_brackets_in_its_name() -> None:
    found = probe(BUSY).read()
    assert (found.proc_state, found.cpu_seconds, found.num_threads) == ("R", 1.48, 2)
    assert found.rss_bytes == 3351 * 4096
    assert found.run_delay_seconds == pytest.approx(0.326072644 + 0.327591870)
    assert found.main_run_delay_seconds == pytest.approx(0.326072644)
    assert probe(BUSY).read(work_tid=22328).main_run_delay_seconds == pytest.approx(0.327591870)


def test_a_stopped_process_and_a_zombie() -> None:
    assert probe(STOPPED).read().proc_state == "T"
    dead = probe(ZOMBIE).read()
    assert (dead.proc_state, dead.rss_bytes) == ("Z", 0)
    assert parse_stat((RECORDED / str(ZOMBIE) / "stat").read_bytes()).exit_code == 3 << 8


def test_no_such_process() -> None:
    found = probe(1).read(work_tid=1)
    assert (found.proc_state, found.cpu_seconds, found.run_delay_seconds) == ("?", 0.0, 0.0)


def test_a_process_that_ends_keeps_its_last_values(tmp_path: Path) -> None:
    tree = tmp_path / str(BUSY)
    shutil.copytree(RECORDED / str(BUSY), tree)
    it = probe(BUSY, tmp_path)
    before = it.read()
    (tree / "stat").write_bytes(b"")
    after = it.read()
    assert (after.proc_state, after.cpu_seconds) == ("?", before.cpu_seconds)
    it.close()


def test_run_delay_grows_over_threads_that_come_and_go(tmp_path: Path) -> None:
    tree = tmp_path / str(BUSY)
    shutil.copytree(RECORDED / str(BUSY), tree)
    it = probe(BUSY, tmp_path)
    first = it.read().run_delay_seconds
    shutil.rmtree(tree / "task" / "22328")  # a thread ends: what it waited stays counted
    (tree / "task" / "30000").mkdir()  # another begins
    (tree / "task" / "30000" / "schedstat").write_text("5 2000000000 1\n")
    for _ in range(SLOW_ROUNDS - 1):
        assert it.read().run_delay_seconds == first  # read rarely
    assert it.read().run_delay_seconds == pytest.approx(first + 2.0)


@pytest.mark.parametrize("work_tid", [0, 22328])
def test_a_wait_in_progress_is_run_delay(tmp_path: Path, work_tid: int) -> None:
    """The kernel counts a wait when it is over."""
    shutil.copytree(RECORDED / str(BUSY), tmp_path / str(BUSY))
    task = tmp_path / str(BUSY) / "task" / str(work_tid or BUSY)
    (task / "stat").write_bytes((RECORDED / str(BUSY) / "stat").read_bytes())
    it = probe(BUSY, tmp_path)

    def delay(at: float, schedstat: str) -> float:
        (task / "schedstat").write_text(schedstat)
        return it.read(work_tid, at).main_run_delay_seconds

    assert delay(10.0, "1000 2000000000 3\n") == pytest.approx(2.0)
    assert delay(10.2, "1000 2000000000 3\n") == pytest.approx(2.0)  # since when it waits is not known
    assert delay(13.2, "1000 2000000000 3\n") == pytest.approx(5.0)
    assert delay(13.4, "2000 5100000000 4\n") == pytest.approx(5.1)  # it got a CPU
    assert delay(13.6, "9000 5100000000 4\n") == pytest.approx(5.1)  # it runs
    for name in (task / "stat", tmp_path / str(BUSY) / "stat"):
        name.write_bytes(name.read_bytes().replace(b") R ", b") S "))
    assert delay(20.0, "9000 5100000000 4\n") == delay(29.0, "9000 5100000000 4\n") == pytest.approx(5.1)  # it sleeps


@pytest.mark.parametrize("raw", [b"", b"no bracket", b"1 (x) R 2 3"])
def test_a_damaged_stat_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):
        parse_stat(raw)


def test_schedstat_of_a_kernel_without_it() -> None:
    assert parse_run_delay(b"0 0 0\n") == 0.0
    assert parse_run_delay(b"") == 0.0


V1 = "nr_periods 120\nnr_throttled 60\nthrottled_time 4500000000\nnr_bursts 0\nburst_time 0\n"
V2 = "usage_usec 900\nuser_usec 800\nsystem_usec 100\nnr_periods 10\nnr_throttled 5\nthrottled_usec 2500000\n"
V2_NO_QUOTA = "usage_usec 900\nuser_usec 800\nsystem_usec 100\n"


def test_throttled_time_of_both_versions() -> None:
    assert parse_throttled_seconds(V1) == pytest.approx(4.5)
    assert parse_throttled_seconds(V2) == pytest.approx(2.5)
    assert parse_throttled_seconds(V2_NO_QUOTA) == 0.0


def _tree(root: Path, stats: dict[str, str]) -> Path:
    for path, text in stats.items():
        (root / path).mkdir(parents=True)
        (root / path / "cpu.stat").write_text(text)
    return root


def _membership(tmp_path: Path, text: str) -> Path:
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cgroup").write_text(text)
    return tmp_path / "77"


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_v1_finds_the_controller_however_it_is_mounted(tmp_path: Path, mount: str) -> None:
    process = _membership(tmp_path, "4:memory:/job\n2:cpu,cpuacct:/job/a\n1:cpuset:/\n0::/elsewhere\n")
    root = _tree(tmp_path / "fs", {f"{mount}/job/a": V1})
    assert ThrottleProbe(process, root).read() == pytest.approx(4.5)


def test_v2_and_a_quota_on_an_ancestor(tmp_path: Path) -> None:
    process = _membership(tmp_path, "0::/job.slice/worker\n")
    root = _tree(tmp_path / "fs", {"job.slice/worker": V2_NO_QUOTA})
    (root / "job.slice" / "cpu.stat").write_text(V2)
    assert ThrottleProbe(process, root).read() == pytest.approx(2.5)


def test_hybrid_without_a_v1_cpu_controller(tmp_path: Path) -> None:
    process = _membership(tmp_path, "4:memory:/job\n0::/job\n")
    root = _tree(tmp_path / "fs", {"unified/job": V2})
    assert ThrottleProbe(process, root).read() == pytest.approx(2.5)


def test_a_process_that_moves_is_followed(tmp_path: Path) -> None:
    process = _membership(tmp_path, "0::/a\n")
    root = _tree(tmp_path / "fs", {"a": V2_NO_QUOTA, "b": V2})
    it = ThrottleProbe(process, root)
    assert it.read() == 0.0
    (process / "cgroup").write_text("0::/b\n")
    assert it.read() == pytest.approx(2.5)
    shutil.rmtree(root / "b")
    assert it.read() == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/../../podB/rank\n", ["kubepods/podB/rank", "kubepods/podB", "kubepods", "."]),
        ("0::/\n", ["kubepods/podA/agent", "kubepods/podA", "kubepods", "."]),  # of the agent's own container
        ("0::/child\n", ["kubepods/podA/agent", "kubepods/podA", "kubepods", "."]),  # removed meanwhile
        ("0::/../../../../../../etc\n", ["."]),
    ],
)
def test_an_agent_in_a_container_finds_the_hosts_cgroups(tmp_path: Path, text: str, expected: list[str]) -> None:
    """Its namespace begins with its own cgroup, and paths of others are relative to that."""
    root = _tree(tmp_path / "fs", {"kubepods/podA/agent": V2, "kubepods/podB/rank": V2, "other": V2})
    for folder in (".", "kubepods", "kubepods/podA", "kubepods/podB"):
        (root / folder / "cpu.stat").write_text(V2)
    (tmp_path / "own").symlink_to(root / "kubepods" / "podA" / "agent")
    assert stat_files(text, root, tmp_path / "own") == [root / folder / "cpu.stat" for folder in expected]


def test_a_namespace_that_cannot_be_found_is_the_root(tmp_path: Path) -> None:
    root = _tree(tmp_path / "fs", {"a": V2})
    assert stat_files("0::/a\n", root, tmp_path / "none") == [root / "a" / "cpu.stat"]
    assert stat_files("0::/a\n", root, root) == [root / "a" / "cpu.stat"]
    (tmp_path / "elsewhere").mkdir()
    assert stat_files("0::/a\n", root, tmp_path / "elsewhere") == [root / "a" / "cpu.stat"]


@pytest.mark.parametrize("text", ["", "0::/../../other\n", "garbage\n", "3:memory:/x\n"])
def test_no_cpu_cgroup_that_we_can_see(tmp_path: Path, text: str) -> None:
    assert ThrottleProbe(_membership(tmp_path, text), tmp_path / "fs").read() == 0.0
    assert cpu_cgroup("", tmp_path) is None


def test_the_host() -> None:
    it = HostProbe(NodeId("node-1"), proc=RECORDED)
    found = it.read(at=5.0, wall_at=1_700_000_005.0)
    assert it.failures == ()
    assert (found.node, found.at, found.cpu_count, found.load_1m) == ("node-1", 5.0, 2, 1.97)
    ticks = 49922 + 123273 + 17069 + 0 + 245 + 160
    assert found.cpu_busy_seconds == pytest.approx(ticks / 100)
    assert found.memory_total_bytes == 24684084 * 1024
    assert found.memory_available_bytes == 23658664 * 1024
    assert found.cpu_some_stall_seconds == pytest.approx(115.853003)
    assert (found.memory_some_stall_seconds, found.oom_kills) == (0.0, 0)


def test_the_files_of_the_host_stay_open_and_are_read_anew(tmp_path: Path) -> None:
    for name in ("stat", "meminfo", "vmstat", "loadavg"):
        shutil.copy(RECORDED / name, tmp_path / name)
    it = HostProbe(NodeId("node-1"), proc=tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    assert it.read(at=5.0, wall_at=6.0).load_1m == 1.97
    (tmp_path / "loadavg").write_text("3.50 1.00 1.00 1/2 3\n")  # in place, as a file of the kernel changes
    assert it.read(at=6.0, wall_at=7.0).load_1m == 3.5
    assert len(os.listdir("/proc/self/fd")) == before + 4
    it.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_host_that_shows_nothing_is_a_failed_probe_not_an_error(tmp_path: Path) -> None:
    it = HostProbe(NodeId("node-1"), proc=tmp_path)
    assert it.read(at=5.0, wall_at=6.0).cpu_count == 0
    assert set(it.failures) >= {"stat", "meminfo", "vmstat", "loadavg"}


def test_a_kernel_without_pressure_files_is_no_failure(tmp_path: Path) -> None:
    for name in ("stat", "meminfo", "vmstat", "loadavg"):
        shutil.copy(RECORDED / name, tmp_path / name)
    it = HostProbe(NodeId("node-1"), proc=tmp_path)
    assert it.read(at=5.0, wall_at=6.0).cpu_some_stall_seconds == 0.0
    assert it.failures == ()


def test_damaged_host_files() -> None:
    with pytest.raises(ValueError):
        parse_cpu("intr 1 2 3\n", 100)
    assert parse_stalls("full avg10=0.00 total=5\n") == {"full": 5e-6}
