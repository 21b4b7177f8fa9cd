"""Copies of InfiniBand trees: what is found in folders, whose fault it is, and what one copy cannot tell."""

import os
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from rolecall.core.diagnosis import Diagnosis
from rolecall.core.faults import FaultClass
from rolecall.detector.artifacts.infiniband import COUNTERS, SETTLE_COUNTS, is_device, read
from rolecall.diagnose import diagnose as diagnosing
from rolecall.terminal.console import as_text
from rolecall.terminal.findings import report
from tests.infiniband_tree import port

NICS = tuple(f"mlx5_{n}" for n in range(8))
IN_ORDER = {"port_rcv_data": 10**12, "port_xmit_data": 10**12, "link_downed": 0, "symbol_error": 0}
DOWN = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}


def fleet(folder: Path, num_nodes: int = 8, nics: tuple[str, ...] = NICS) -> Path:
    """Nodes with all ports in order."""
    for n in range(num_nodes):
        for nic in nics:
            port(folder / f"node-{n}", nic, counters=IN_ORDER)
    return folder


def diagnosed(*paths: Path) -> tuple[list[Diagnosis], tuple[str, ...], int]:
    """Diagnoses, remarks, exit code."""
    answer = diagnosing.diagnose(paths, [])
    [trees] = [i for i in answer.inputs if i.kind == "infiniband trees"]
    return answer.diagnoses, trees.remarks, diagnosing.exit_code(answer)


def suspects(d: Diagnosis) -> list[str]:
    return [s.node for s in d.suspects]


def made_at(folder: Path, at: float) -> None:
    for file in folder.rglob("state"):
        os.utime(file, (at, at))


def test_a_fleet_in_order_is_healthy(tmp_path: Path) -> None:
    answer = diagnosing.diagnose([fleet(tmp_path)], [])
    assert answer.diagnoses == [] and diagnosing.exit_code(answer) == 0
    [trees] = answer.inputs  # nothing of the trees is "of no known kind"
    assert trees.content == "64 ports of 8 nodes, 64 of them active"
    assert trees.remarks == () and trees.path == str(tmp_path)
    assert as_text(report(answer)).startswith("healthy: nothing found in\n")


def test_one_port_down_is_its_node(tmp_path: Path) -> None:
    fleet(tmp_path)
    port(tmp_path / "node-3", "mlx5_2", **DOWN)
    [d], remarks, code = diagnosed(tmp_path)
    assert (suspects(d), d.fault_class, code, remarks) == (["node-3"], FaultClass.NETWORK, 1, ())
    assert d.because == (
        "node-3: port mlx5_2/1 is down (DOWN, physical state Polling), and active on 7 of 7 other nodes"
    )
    assert d.evidence[0].values == {"num_up": 7.0, "num_peers": 7.0}


def test_one_node_with_two_faults_is_one_diagnosis(tmp_path: Path) -> None:
    fleet(tmp_path)
    port(tmp_path / "node-3", "mlx5_2", **DOWN)
    port(tmp_path / "node-3", "mlx5_5", rate="100 Gb/sec (1X NDR)")
    [d], _, _ = diagnosed(tmp_path)
    assert suspects(d) == ["node-3"] and d.because.endswith("; and 1 more") and len(d.evidence) == 2


@pytest.mark.parametrize("num_down", [3, 8])
def test_a_rail_that_is_down_on_many_nodes_is_no_machine(tmp_path: Path, num_down: int) -> None:
    fleet(tmp_path)
    for n in range(num_down):
        port(tmp_path / f"node-{n}", "mlx5_2", **DOWN)
    [d], _, code = diagnosed(tmp_path)
    assert (d.fault_class, code) == (FaultClass.CANNOT_TELL, 1)
    assert suspects(d) == [f"node-{n}" for n in range(num_down)]
    assert d.because == f"port mlx5_2/1 is down on {num_down} of 8 nodes: a shared cause, not a single machine"
    assert "switch" in d.settle and "evict nothing" in d.advice


def test_everything_down_everywhere_is_one_diagnosis(tmp_path: Path) -> None:
    fleet(tmp_path, num_nodes=4)
    for n in range(4):
        for nic in NICS:
            port(tmp_path / f"node-{n}", nic, state="2: INIT")
    [d], _, _ = diagnosed(tmp_path)
    assert d.because.startswith("port mlx5_0/1 (and 7 more) is down on 4 of 4 nodes")


def test_faults_of_three_machines_on_three_rails_are_theirs(tmp_path: Path) -> None:
    fleet(tmp_path)
    for n in range(3):
        port(tmp_path / f"node-{n}", f"mlx5_{n}", **DOWN)
    found, _, _ = diagnosed(tmp_path)
    assert sorted(suspects(d) for d in found) == [["node-0"], ["node-1"], ["node-2"]]


def test_most_nodes_with_some_port_down_are_no_machine(tmp_path: Path) -> None:
    fleet(tmp_path)
    for n in range(8):
        port(tmp_path / f"node-{n}", f"mlx5_{n}", **DOWN)
    [d], _, _ = diagnosed(tmp_path)
    assert d.because == "some port is down on 8 of 8 nodes: a shared cause, not a single machine"


def test_a_shared_fault_does_not_hide_a_machine_of_its_own(tmp_path: Path) -> None:
    fleet(tmp_path)
    for n in range(4):
        port(tmp_path / f"node-{n}", "mlx5_2", **DOWN)
    port(tmp_path / "node-0", "mlx5_7", **DOWN)
    found, _, _ = diagnosed(tmp_path)
    assert {d.fault_class: suspects(d) for d in found} == {
        FaultClass.NETWORK: ["node-0"],
        FaultClass.CANNOT_TELL: ["node-1", "node-2", "node-3"],
    }


def test_unused_ports_are_a_remark(tmp_path: Path) -> None:
    fleet(tmp_path, num_nodes=2)
    for n in range(2):
        port(tmp_path / f"node-{n}", "mlx5_9", **DOWN, counters={"link_downed": 0, "port_rcv_data": 0})
    found, remarks, code = diagnosed(tmp_path)
    assert (found, code) == ([], 0)
    [remark] = remarks
    assert remark.startswith("cannot tell whether port mlx5_9/1 should be active: it is down")
    assert remark.endswith("(on 2 nodes)")


def test_a_single_node_has_only_itself_to_tell(tmp_path: Path) -> None:
    fleet(tmp_path, num_nodes=1)
    port(tmp_path / "node-0", "mlx5_2", **DOWN)
    [d], _, _ = diagnosed(tmp_path)
    assert d.because.endswith("is down (DOWN, physical state Polling), and has been in use") and d.confidence == 0.7


@pytest.mark.parametrize(
    ("num_nodes", "words", "confidence"),
    [(8, "7 of 7 ports of other nodes at 400 Gb/s (4X NDR)", 0.85), (1, "7 of 7 ports of its node at 400 Gb/s", 0.6)],
)
def test_a_slower_port(tmp_path: Path, num_nodes: int, words: str, confidence: float) -> None:
    fleet(tmp_path, num_nodes)
    port(tmp_path / "node-0", "mlx5_2", rate="200 Gb/sec (2X NDR)")
    [d], _, _ = diagnosed(tmp_path)
    assert suspects(d) == ["node-0"] and d.confidence == confidence
    assert f"port mlx5_2/1 runs at 200 Gb/s (2X NDR), {words}" in d.because


def test_a_rail_of_another_speed_is_in_order(tmp_path: Path) -> None:
    """Storage NICs are slower than those of the GPUs, on every node."""
    fleet(tmp_path)
    for n in range(8):
        port(tmp_path / f"node-{n}", "mlx5_2", rate="100 Gb/sec (4X EDR)", link_layer="Ethernet")
    assert diagnosed(tmp_path)[0] == []


@pytest.mark.parametrize(("link_layer", "found"), [("InfiniBand", 1), ("Ethernet", 0)])
def test_one_lane_alone_is_slow_on_infiniband(tmp_path: Path, link_layer: str, found: int) -> None:
    port(tmp_path, rate="25 Gb/sec (1X EDR)", link_layer=link_layer)
    assert len(diagnosed(tmp_path)[0]) == found


@pytest.mark.parametrize(
    ("counters", "usual", "is_found"),
    [
        ({"symbol_error": 5000}, {"symbol_error": 10}, True),
        ({"symbol_error": 65535}, {"symbol_error": 0}, True),
        ({"symbol_error": 119}, {"symbol_error": 0}, False),
        ({"symbol_error": 5000}, {"symbol_error": 600}, False),
        ({"link_downed": 1}, {"link_downed": 0}, False),
        ({"link_downed": 2}, {"link_downed": 0}, True),
        ({"link_downed": 2}, {"link_downed": 1}, False),
        ({"local_link_integrity_errors": 1}, {"local_link_integrity_errors": 0}, True),
        ({"port_rcv_data": 10**15}, {}, False),
    ],
)
def test_counters_far_above_the_others(
    tmp_path: Path, counters: Mapping[str, int], usual: Mapping[str, int], is_found: bool
) -> None:
    fleet(tmp_path, num_nodes=4)
    for n in range(4):
        for nic in NICS:
            port(tmp_path / f"node-{n}", nic, counters=usual)
    port(tmp_path / "node-1", "mlx5_4", counters=counters)
    found, _, _ = diagnosed(tmp_path)
    assert [suspects(d) for d in found] == ([["node-1"]] if is_found else [])
    for d in found:
        [name] = counters
        assert f"port mlx5_4/1: {name} {counters[name]}" in d.because and d.settle == SETTLE_COUNTS
        assert (", its maximum" in d.because) == (counters[name] == 65535)


def test_counters_without_peers_cannot_be_reported(tmp_path: Path) -> None:
    port(tmp_path / "node-1", counters={"symbol_error": 5000})
    found, remarks, code = diagnosed(tmp_path)
    assert (found, code) == ([], 0)
    assert remarks == ("cannot tell whether symbol_error of port mlx5_0/1 is high: one copy, and fewer than 3 peers",)


@pytest.mark.parametrize(
    ("name", "before", "after", "seconds", "is_found"),
    [
        ("link_downed", 3, 4, 60.0, True),
        ("link_downed", 3, 3, 60.0, False),
        ("link_downed", 3, 1, 60.0, True),  # began anew, and counted one since
        ("symbol_error", 5000, 5003, 60.0, False),
        ("symbol_error", 5000, 5100, 60.0, True),
        ("symbol_error", 5000, 5100, 7200.0, False),
        ("roce_slow_restart", 0, 700, 60.0, True),
        ("roce_slow_restart", 0, 500, 60.0, False),
        ("port_rcv_errors", 0, 700, 60.0, True),
        ("port_rcv_errors", 0, 500, 60.0, False),
        ("port_xmit_discards", 0, 7000, 60.0, True),
        ("port_xmit_discards", 0, 5000, 60.0, False),
        ("local_ack_timeout_err", 0, 70, 60.0, True),
        ("local_ack_timeout_err", 0, 50, 60.0, False),
        ("link_error_recovery", 0, 6, 60.0, True),
        ("link_error_recovery", 0, 6, 600.0, False),
        ("rnr_nak_retry_err", 0, 1, 3600.0, True),
        ("np_cnp_sent", 0, 10**9, 60.0, False),  # no one to compare it with
    ],
)
def test_two_copies_show_current_growth(
    tmp_path: Path, name: str, before: int, after: int, seconds: float, is_found: bool
) -> None:
    for copy, count, at in (("first", before, 1000.0), ("second", after, 1000.0 + seconds)):
        fleet(tmp_path / copy, num_nodes=2)
        port(tmp_path / copy / "node-1", "mlx5_4", counters={name: count})
        made_at(tmp_path / copy, at)
    found, remarks, _ = diagnosed(tmp_path)
    assert [suspects(d) for d in found] == ([["node-1"]] if is_found else []) and remarks == ()
    for d in found:
        assert f"port mlx5_4/1: {name} grew by" in d.because and (d.onset, d.detected_at) == (1000.0, 1000.0 + seconds)


def test_counters_that_peers_may_cause_have_less_confidence(tmp_path: Path) -> None:
    for copy, at in (("first", 1000.0), ("second", 1060.0)):
        fleet(tmp_path / copy, num_nodes=2)
        grown = 900 if copy == "second" else 0
        port(tmp_path / copy / "node-0", "mlx5_4", counters={"symbol_error": grown})
        port(tmp_path / copy / "node-1", "mlx5_4", counters={"local_ack_timeout_err": grown})
        made_at(tmp_path / copy, at)
    own, of_others = sorted((d for d in diagnosed(tmp_path)[0]), key=lambda d: d.suspects[0].node)
    assert (own.confidence, own.settle) == (0.8, "")
    assert of_others.confidence == 0.5 and "the same counter of its communication peers" in of_others.settle


@pytest.mark.parametrize(
    ("mine", "usual", "is_found"),
    [
        (2_000_000, 1_000, True),  # 33,333 a second
        (2_000_000, 300_000, False),  # a fabric that is busy everywhere
        (30_000, 0, False),  # 500 a second are none
    ],
)
def test_congestion_is_a_matter_of_peers(tmp_path: Path, mine: int, usual: int, is_found: bool) -> None:
    for copy, at in (("first", 1000.0), ("second", 1060.0)):
        for n in range(5):
            sent = (mine if n == 1 else usual) if copy == "second" else 0
            port(tmp_path / copy / f"node-{n}", "mlx5_0", link_layer="Ethernet", counters={"np_cnp_sent": 7 + sent})
        made_at(tmp_path / copy, at)
    found, remarks, _ = diagnosed(tmp_path)
    assert [suspects(d) for d in found] == ([["node-1"]] if is_found else []) and remarks == ()
    for d in found:
        assert "it sent congestion notifications (CNP) to its senders" in d.because
        assert "the median of 5 ports is 17 a second" in d.because
        assert d.confidence == 0.4 and "PFC pauses" in d.settle


def test_a_single_copy_shows_no_congestion(tmp_path: Path) -> None:
    for n in range(5):
        port(tmp_path / f"node-{n}", "mlx5_0", counters={"np_cnp_sent": 10**9 if n == 1 else 0})
    assert diagnosed(tmp_path)[:2] == ([], ())


def test_names_of_nodes(tmp_path: Path) -> None:
    port(tmp_path / "node-1" / "infiniband", "mlx5_0")
    port(tmp_path / "gpu07" / "sys" / "class" / "infiniband", "mlx5_0")
    port(tmp_path / "gpu08", "mlx5_0")
    found = diagnosing.search([tmp_path])
    assert sorted(p.node for p in read(found.devices)) == ["gpu07", "gpu08", "node-1"]


def test_links_and_devices_that_are_named(tmp_path: Path) -> None:
    """`/sys/class/infiniband` itself holds only links."""
    device = port(tmp_path / "devices", "mlx5_0").parents[1]
    (tmp_path / "class" / "infiniband").mkdir(parents=True)
    (tmp_path / "class" / "infiniband" / "mlx5_0").symlink_to(device)
    (tmp_path / "class" / "infiniband" / "gone").symlink_to(tmp_path / "nowhere")
    assert len(diagnosing.search([tmp_path / "class"]).devices) == 1
    assert diagnosing.search([device]).devices == [device]


def test_nodes_of_one_name_are_distinguished_by_their_ports(tmp_path: Path) -> None:
    for rack, count in (("rack-1", 5), ("rack-2", 900)):
        folder = port(tmp_path / rack / "node-1", "mlx5_0", counters={"link_downed": count})
        (folder / "gids").mkdir()
        (folder / "gids" / "0").write_text(f"fe80:0000:0000:0000:0000:0000:0000:{count:04d}\n")
        made_at(tmp_path / rack, 1000.0 + count)
    ports = read(diagnosing.search([tmp_path]).devices)
    assert [p.node for p in ports] == ["rack-1/node-1", "rack-2/node-1"]
    assert diagnosed(tmp_path)[0] == []  # no count has grown


def test_two_lanes_alone_cannot_be_reported(tmp_path: Path) -> None:
    port(tmp_path, rate="100 Gb/sec (2X HDR)")
    found, [remark], code = diagnosed(tmp_path)
    assert (found, code) == ([], 0) and remark.startswith("cannot tell whether port mlx5_0/1 should run on four lanes")


def test_random_trees_do_no_harm(tmp_path: Path, rng: random.Random) -> None:
    texts = ("4: ACTIVE", "1: DOWN", "9: What", "", "N/A", "7", "9" * 30, "\0\x7f", "100 Gb/sec (1X EDR)")
    for round_ in range(20):
        folder = tmp_path / str(round_)
        port(folder / "node-9", "mlx5_9")
        for n in range(6):
            port(
                folder / f"node-{n}",
                f"mlx5_{rng.randrange(3)}",
                state=rng.choice(texts),
                phys_state=rng.choice(texts),
                rate=rng.choice(texts),
                link_layer=rng.choice(texts),
                counters={name: rng.choice(texts) for name in COUNTERS},
            )
        for d in diagnosed(folder)[0]:
            assert d.because and 0.0 < d.confidence <= 1.0


@pytest.mark.parametrize("state", ["", "UP", "on\n4: ACTIVE", "4"])
def test_folders_that_resemble_a_tree_are_ignored(tmp_path: Path, state: str) -> None:
    folder = port(tmp_path, state=state)
    assert not is_device(folder.parents[1])
    found = diagnosing.search([tmp_path])
    assert not found.devices and found.unknown_only == {tmp_path}


def test_damage_leaves_out_what_it_hides(tmp_path: Path) -> None:
    folder = port(tmp_path, rate="fast", counters={"symbol_error": "N/A", "link_downed": 2**64 - 1})
    (folder / "phys_state").unlink()
    os.mkfifo(folder / "counters" / "local_link_integrity_errors")
    [found] = read([folder.parents[1]])
    assert (found.rate, found.physical, found.counters) == (None, None, {})
    assert diagnosed(tmp_path)[0] == []


def test_other_kinds_in_the_same_folder_are_found_too(tmp_path: Path) -> None:
    fleet(tmp_path, num_nodes=1)
    (tmp_path / "notes.txt").write_text("nothing\n")
    answer = diagnosing.diagnose([tmp_path], [])
    assert [i.kind for i in answer.inputs] == ["infiniband trees", "folder"]


def test_shared_faults_of_two_kinds_stay_two(tmp_path: Path) -> None:
    fleet(tmp_path)
    for n in range(8):
        port(tmp_path / f"node-{n}", "mlx5_2", **DOWN)
        port(tmp_path / f"node-{n}", "mlx5_3", counters={"symbol_error": 9000})
    found, _, _ = diagnosed(tmp_path)
    assert {d.because.split(" on ")[0] for d in found} == {
        "port mlx5_2/1 is down",
        "port mlx5_3/1 counts symbol_error",
    }
