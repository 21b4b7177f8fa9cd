"""Ports of InfiniBand and RoCE, as sysfs shows them: links that flap, NICs that go, counters that begin anew."""

import os
import random
import shutil
from pathlib import Path

import pytest

from rolecall.agent.collectors.base import CollectorReading
from rolecall.agent.collectors.counters import MonotonicCounters, OpenFileCache, number_of
from rolecall.agent.collectors.network.infiniband import NUM_PORTS_MAX, InfinibandCollector
from rolecall.agent.collectors.network.links import FLAP_WINDOW_SECONDS, LinkWatch
from rolecall.core.ids import NodeId
from rolecall.core.telemetry import AgentEventKind
from rolecall.formats.infiniband import GIGABIT_BYTES, Rate, parse_rate, parse_state
from tests.infiniband_tree import port

NODE = NodeId("node-1")


def collector(root: Path) -> InfinibandCollector:
    return InfinibandCollector(NODE, root=root, counters_every_seconds=0.0)


def values(reading: CollectorReading) -> dict[tuple[str, ...], float]:
    """By name without `rolecall_infiniband_`, and labels without the node."""
    return {(v.metric.name.removeprefix("rolecall_infiniband_"), *v.labels[1:]): v.value for v in reading.values}


def facts(reading: CollectorReading) -> list[tuple[AgentEventKind, str, str]]:
    return [(f.kind, f.detail["what"], f.detail["flaps"]) for f in reading.facts]


def test_a_port_and_all_its_counters(tmp_path: Path) -> None:
    counters = {"port_rcv_data": 1000, "port_xmit_data": 2**40, "symbol_error": 0, "link_downed": 1, "VL15_dropped": 0}
    hw_counters = {"np_cnp_sent": 7, "roce_slow_restart": 0, "rx_atomic_requests": 0, "lifespan": 10}
    port(tmp_path, counters=counters, hw_counters=hw_counters)
    found = values(collector(tmp_path).read(0.0))
    assert found == {
        ("up", "mlx5_0", "1"): 1.0,
        ("physical_state", "mlx5_0", "1", "LinkUp"): 1.0,
        ("rate_bytes_per_second", "mlx5_0", "1"): 50e9,
        ("downs_total", "mlx5_0", "1"): 0.0,
        ("received_bytes_total", "mlx5_0", "1"): 4000.0,
        ("sent_bytes_total", "mlx5_0", "1"): 4.0 * 2**40,
        ("events_total", "mlx5_0", "1", "symbol_error"): 0.0,
        ("events_total", "mlx5_0", "1", "link_downed"): 1.0,
        ("events_total", "mlx5_0", "1", "np_cnp_sent"): 7.0,
        ("events_total", "mlx5_0", "1", "roce_slow_restart"): 0.0,
        ("saturated", "mlx5_0", "1"): 0.0,
    }


def test_unreadable_values_are_left_out_and_earlier_ones_stay(tmp_path: Path) -> None:
    folder = port(tmp_path, counters={"symbol_error": 5, "link_downed": "N/A", "port_rcv_errors": 2**64 - 1})
    (folder / "counters" / "a_folder").mkdir()
    (folder / "counters" / "b a d").write_text("1\n")
    (folder / "counters" / "negative").write_text("-3\n")
    it = collector(tmp_path)
    found = {k[-1]: v for k, v in values(it.read(0.0)).items() if k[0] == "events_total"}
    assert found == {"symbol_error": 5.0}
    (folder / "counters" / "symbol_error").unlink()
    assert values(it.read(1.0))["events_total", "mlx5_0", "1", "symbol_error"] == 5.0


def test_counters_of_a_driver_that_is_reloaded_continue(tmp_path: Path) -> None:
    port(tmp_path, counters={"symbol_error": 40, "port_rcv_data": 100})
    it = collector(tmp_path)
    seen = []
    for at, (symbol_error, data) in enumerate([(40, 100), (50, 200), (3, 10), (3, 10), (9, 30)]):
        port(tmp_path, counters={"symbol_error": symbol_error, "port_rcv_data": data})
        found = values(it.read(float(at)))
        seen.append(
            (found["events_total", "mlx5_0", "1", "symbol_error"], found["received_bytes_total", "mlx5_0", "1"])
        )
    assert seen == [(40, 400), (50, 800), (53, 840), (53, 840), (59, 920)]


def test_a_missing_nic_keeps_its_totals_and_is_gone_at_the_third_poll(tmp_path: Path) -> None:
    port(tmp_path, counters={"symbol_error": 40, "link_downed": 0})
    port(tmp_path, "mlx5_1")
    it = collector(tmp_path)
    it.read(0.0)
    shutil.rmtree(tmp_path / "mlx5_0")
    assert [facts(it.read(at)) for at in (1.0, 2.0)] == [[], []]
    third = it.read(3.0)
    assert facts(third) == [(AgentEventKind.LINK_DOWN, "gone", "1")]
    assert third.facts[0].detail == {"nic": "mlx5_0", "port": "1", "what": "gone", "flaps": "1"}
    found = values(third)
    assert found["up", "mlx5_0", "1"] == 0.0 and found["up", "mlx5_1", "1"] == 1.0
    assert found["events_total", "mlx5_0", "1", "symbol_error"] == 40.0
    assert facts(it.read(4.0)) == []
    port(tmp_path, counters={"symbol_error": 2, "link_downed": 9})  # what was counted while it was away is no flap
    back = it.read(5.0)
    assert facts(back) == [(AgentEventKind.LINK_UP, "back", "1")]
    assert values(back)["events_total", "mlx5_0", "1", "symbol_error"] == 42.0


def test_a_flapping_link_is_reported_with_its_flaps(tmp_path: Path) -> None:
    folder = port(tmp_path, counters={"link_downed": 3})
    (folder / "gid_attrs" / "ndevs").mkdir(parents=True)
    (folder / "gid_attrs" / "ndevs" / "0").write_text("eth4\n")
    it = collector(tmp_path)
    assert facts(it.read(0.0)) == []
    port(tmp_path, state="1: DOWN", phys_state="2: Polling", counters={"link_downed": 4})
    down = it.read(1.0)
    assert facts(down) == [(AgentEventKind.LINK_DOWN, "down", "1")]
    assert down.facts[0].detail["interface"] == "eth4"
    assert values(down)["physical_state", "mlx5_0", "1", "Polling"] == 1.0
    assert ("rate_bytes_per_second", "mlx5_0", "1") not in values(down)
    port(tmp_path)
    assert facts(it.read(2.0)) == [(AgentEventKind.LINK_UP, "up", "1")]
    port(tmp_path, counters={"link_downed": 5})  # down and up again between two polls
    between = it.read(3.0)
    assert facts(between) == [
        (AgentEventKind.LINK_DOWN, "down between two polls", "2"),
        (AgentEventKind.LINK_UP, "up", "2"),
    ]
    assert values(between)["downs_total", "mlx5_0", "1"] == 2.0


def test_a_port_that_was_never_up_is_no_event(tmp_path: Path) -> None:
    port(tmp_path, state="1: DOWN", phys_state="3: Disabled")
    it = collector(tmp_path)
    assert [facts(it.read(at)) for at in (0.0, 1.0)] == [[], []]
    port(tmp_path)
    assert facts(it.read(2.0)) == [(AgentEventKind.LINK_UP, "up", "0")]


def test_a_state_that_is_nonsense_is_a_port_that_is_missing(tmp_path: Path) -> None:
    port(tmp_path)
    it = collector(tmp_path)
    it.read(0.0)
    port(tmp_path, state="", phys_state="17: What")
    assert [facts(it.read(float(at))) for at in (1, 2, 3)] == [[], [], [(AgentEventKind.LINK_DOWN, "gone", "1")]]


def test_counters_are_read_every_few_seconds_and_when_a_link_changes(tmp_path: Path) -> None:
    port(tmp_path, counters={"symbol_error": 1})
    it = InfinibandCollector(NODE, root=tmp_path, counters_every_seconds=5.0)

    def symbol_errors(at: float) -> float:
        return values(it.read(at))["events_total", "mlx5_0", "1", "symbol_error"]

    assert symbol_errors(0.0) == 1.0
    port(tmp_path, counters={"symbol_error": 2})
    assert (symbol_errors(4.9), symbol_errors(5.0)) == (1.0, 2.0)
    port(tmp_path, state="1: DOWN", counters={"symbol_error": 3})
    assert symbol_errors(6.0) == 3.0


def test_counters_of_several_ports_are_read_in_different_polls(tmp_path: Path) -> None:
    for n in range(5):
        port(tmp_path, f"mlx5_{n}", counters={"symbol_error": 1})
    it = InfinibandCollector(NODE, root=tmp_path, counters_every_seconds=5.0)
    it.read(0.0)
    for n in range(5):
        port(tmp_path, f"mlx5_{n}", counters={"symbol_error": 2})
    changed = list[float]()
    for second in range(1, 11):
        now = values(it.read(float(second)))
        changed.append(sum(now["events_total", f"mlx5_{n}", "1", "symbol_error"] == 2.0 for n in range(5)))
    assert changed == [0, 0, 0, 0, 1, 2, 3, 4, 5, 5]


def test_saturated_counters_are_counted(tmp_path: Path) -> None:
    port(tmp_path, counters={"symbol_error": 65535, "link_downed": 255, "port_rcv_errors": 255})
    assert values(collector(tmp_path).read(0.0))["saturated", "mlx5_0", "1"] == 2.0


def test_old_kernels_keep_64_bits_elsewhere_and_efa_counts_bytes(tmp_path: Path) -> None:
    folder = port(tmp_path, counters={"port_rcv_data": 2**32 - 1})
    (folder / "counters_ext").mkdir()
    (folder / "counters_ext" / "port_rcv_data_64").write_text(f"{2**33}\n")
    port(tmp_path, "efa_0", hw_counters={"rx_bytes": 500, "tx_bytes": 600})
    found = values(collector(tmp_path).read(0.0))
    assert found["received_bytes_total", "mlx5_0", "1"] == 4.0 * 2**33
    assert found["saturated", "mlx5_0", "1"] == 0.0
    assert (found["received_bytes_total", "efa_0", "1"], found["sent_bytes_total", "efa_0", "1"]) == (500.0, 600.0)


def test_another_device_in_place_of_one_is_its_driver_reloaded(tmp_path: Path) -> None:
    port(tmp_path / "old", counters={"symbol_error": 2**32 - 5, "link_downed": 3})
    port(tmp_path / "young", counters={"symbol_error": 6, "link_downed": 0})
    root = tmp_path / "class"
    root.mkdir()
    (root / "mlx5_0").symlink_to(tmp_path / "old" / "mlx5_0")
    it = collector(root)
    it.read(0.0)
    (root / "mlx5_0").unlink()
    (root / "mlx5_0").symlink_to(tmp_path / "young" / "mlx5_0")
    reading = it.read(1.0)
    assert [what for _, what, _ in facts(reading)] == ["driver reloaded", "up"]
    assert values(reading)["events_total", "mlx5_0", "1", "symbol_error"] == 2**32 - 5 + 6
    assert it.read(2.0).facts == ()


def test_ports_are_bounded_and_those_that_are_gone_make_room(tmp_path: Path) -> None:
    for n in range(NUM_PORTS_MAX + 2):
        port(tmp_path, f"mlx5_{n}", counters={"symbol_error": n})
    it = collector(tmp_path)

    def nics(at: float) -> set[str]:
        return {v.labels[1] for v in it.read(at).values}

    assert nics(0.0) == {f"mlx5_{n}" for n in range(NUM_PORTS_MAX)}
    shutil.rmtree(tmp_path / "mlx5_3")
    shutil.rmtree(tmp_path / "mlx5_4")
    for at in (1.0, 2.0, 3.0):
        assert f"mlx5_{NUM_PORTS_MAX}" not in nics(at)
    assert nics(4.0) == {f"mlx5_{n}" for n in range(NUM_PORTS_MAX + 2)} - {"mlx5_3", "mlx5_4"}


def test_random_trees_do_no_harm(tmp_path: Path, rng: random.Random) -> None:
    texts = ("", "4: ACTIVE", "1: DOWN", "N/A", "-1", "7", "65535", "9" * 30, "\0\x7f", "5: LinkUp", "0 Gb/sec (4X)")
    it = collector(tmp_path)
    totals = dict[tuple[str, ...], float]()
    for at in range(300):
        nic = f"mlx5_{rng.randrange(3)}"
        if rng.random() < 0.1:
            shutil.rmtree(tmp_path / nic, ignore_errors=True)
        else:
            names = rng.choices(("symbol_error", "link_downed", "port_rcv_data", "odd name"), k=2)
            port(
                tmp_path,
                nic,
                state=rng.choice(texts[:3]),
                phys_state=rng.choice(texts),
                rate=rng.choice(texts),
                counters={name: rng.choice(texts) for name in names},
            )
        found = values(it.read(float(at)))
        for key, value in found.items():
            if key[0].endswith("_total"):
                assert value >= totals.get(key, 0.0), key
                totals[key] = value
    assert totals


def test_a_node_without_infiniband_has_no_values(tmp_path: Path) -> None:
    assert collector(tmp_path / "nowhere").read(0.0) == CollectorReading()


def test_this_machine_is_read_without_harm() -> None:
    it = InfinibandCollector(NODE)
    for at in (0.0, 1.0):
        for v in it.read(at).values:
            assert len(v.labels) == len(v.metric.labels)


def test_a_pipe_among_the_counters_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert OpenFileCache().text(str(tmp_path / "pipe")) is None


# --- counters, links, texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("17", 17),
        ("0", 0),
        (None, None),
        ("", None),
        ("N/A", None),
        ("-1", None),
        ("1.5", None),
        ("18446744073709551615", None),
        ("18446744073709551614", 2**64 - 2),
        ("99999999999999999999", None),
        ("٣", None),
    ],
)
def test_numbers(text: str | None, number: int | None) -> None:
    assert number_of(text) == number


@pytest.mark.parametrize(
    ("readings", "totals"),
    [
        ([5, 9, 9], [5, 9, 9]),
        ([5, 9, 2, 4], [5, 9, 11, 13]),
        ([2**32 - 10, 6, 20], [2**32 - 10, 2**32 + 6, 2**32 + 20]),  # goes round
        ([2**31, 6], [2**31, 2**31 + 6]),  # too far from its end: begins anew
        ([2**40, 6], [2**40, 2**40 + 6]),
        ([5, None, 7, None], [5, 5, 7, 7]),
        ([None, 3], [None, 3]),
    ],
)
def test_totals(readings: list[int | None], totals: list[int | None]) -> None:
    it = MonotonicCounters()
    assert [it.add(("k",), r) for r in readings] == totals


def test_totals_after_a_load_do_not_go_round_and_have_bounds() -> None:
    it = MonotonicCounters(num_series_max=1)
    it.add(("k",), 2**32 - 10)
    assert it.add(("k",), 6, reloaded=True) == 2**32 - 4
    assert it.add(("other",), 1) is None


def test_the_count_of_downs_may_come_late_or_not_at_all() -> None:
    late = LinkWatch()
    late.poll(0.0, True, 0)
    assert [c.up for c in late.poll(1.0, False, 0)] == [False]
    assert [c.up for c in late.poll(2.0, True, 1)] == [True]  # the count holds what was seen already
    never = LinkWatch()
    never.poll(0.0, True)
    assert [c.up for c in never.poll(1.0, False)] == [False]
    assert late.num_downs == never.num_downs == 1


def test_two_downs_while_it_is_down_are_two(tmp_path: Path) -> None:
    it = LinkWatch()
    it.poll(0.0, True, 0)
    changes = it.poll(1.0, False, 3)
    assert [(c.up, c.num_flaps) for c in changes] == [(False, 1), (False, 2), (False, 3)]


def test_a_driver_reloaded_between_two_polls_is_a_flap() -> None:
    it = LinkWatch()
    it.poll(0.0, True, 7)
    changes = it.poll(1.0, True, 0, reloaded=True)
    assert [(c.up, c.what) for c in changes] == [(False, "driver reloaded"), (True, "up")]


def test_old_flaps_are_forgotten() -> None:
    it = LinkWatch()
    it.poll(0.0, True)
    it.poll(1.0, False)
    it.poll(2.0, True)
    [change] = it.poll(3.0 + FLAP_WINDOW_SECONDS, False)
    assert (change.num_flaps, it.num_downs) == (1, 2)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400 Gb/sec (4X NDR)", Rate(400 * GIGABIT_BYTES, 4, "NDR")),
        ("2.5 Gb/sec (1X SDR)", Rate(2.5 * GIGABIT_BYTES, 1, "SDR")),
        ("10 Gb/sec (4X)", Rate(10 * GIGABIT_BYTES, 4)),
        ("100 Gb/sec", Rate(100 * GIGABIT_BYTES)),
        ("0 Gb/sec (4X)", None),
        ("fast", None),
        (None, None),
    ],
)
def test_rates(text: str | None, rate: Rate | None) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "state"),
    [("4: ACTIVE", 4), ("7: Phy Test", 7), ("4", None), ("", None), (None, None), ("4: A\n5: B", None)],
)
def test_states(text: str | None, state: int | None) -> None:
    assert parse_state(text) == state
