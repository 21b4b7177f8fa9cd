"""`rolecall diagnose` as a user calls it: exit codes, sentences, JSON, pages, and inputs that cannot be read."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rolecall.cli import main
from rolecall.detector import recording
from rolecall.detector.panel import Panel
from tests.detector.panels import noise

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"


def faulty() -> Panel:
    panel = noise()
    values = panel.values.copy()
    values[1, 560:, 3] += 6.0
    return replace(panel, values=values)


def saved(folder: Path, panel: Panel, name: str = "r.parquet") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    recording.write(folder / name, [panel])
    return folder / name


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main(["diagnose", *map(str, argv)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_fault_is_a_sentence_with_evidence_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, saved(tmp_path, faulty()))
    assert code == 1
    assert "slow: trainer/3 (node n003) of role trainer" in out and "m1: " in out and "above" in out
    assert "1 diagnosis(es)" in out and "8 machine(s), 6 metric(s), 700 ticks of 1 s" in out
    assert "reading" in err and "reading" not in out


def test_a_healthy_recording_says_what_was_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, saved(tmp_path, noise()))
    assert code == 0 and out.startswith("healthy: nothing found in") and "8 machine(s)" in out


def test_json_is_one_object_of_the_agreed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, saved(tmp_path, faulty()), "--json")
    said = json.loads(out)
    assert code == 1 and err == ""
    [d] = said["diagnoses"]
    assert d["suspects"] == [{"node": "n003", "role": "trainer", "replica": "trainer/3", "rank": None, "gpu": None}]
    assert {"fault_class", "onset", "detected_at", "confidence", "because", "evidence", "advice"} <= set(d)
    assert [i["kind"] for i in said["inputs"]] == ["recording"]


def test_a_folder_is_searched_for_all_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "all" / "a", faulty())
    saved(tmp_path / "all" / "b" / "c", noise(seed=5), "other.bin")
    (tmp_path / "all" / "notes.txt").write_text("nothing\n")
    os.mkfifo(tmp_path / "all" / "pipe")
    code, out, _ = run(capsys, tmp_path / "all")
    assert code == 1 and "a/r.parquet" in out and "c/other.bin" in out and "2 file(s) of no known kind" in out


def test_explain_draws_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = run(capsys, saved(tmp_path, faulty()), "--explain", tmp_path / "why.html")
    page = (tmp_path / "why.html").read_text()
    assert code == 1 and page.count("<svg") >= 2 and "trainer/3" in page and "<script" not in page


def test_a_page_is_not_written_under_the_name_of_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, saved(tmp_path, noise()), "--explain", tmp_path / "why.png")
    assert code == 2 and "why.png" in err and ".html" in err
    assert not (tmp_path / "why.png").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.parquet", b"PAR1 and no more", "not a readable Parquet file"),
        ("r.txt", b"hello", "none of"),
        ("r.json", b'{"entries": [', "r.json"),
    ],
)
def test_what_was_named_and_cannot_be_read_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code, out, err = run(capsys, tmp_path / name)
    assert code == 2 and out == "" and said in err and name in err and "Traceback" not in err


def test_foreign_parquet_is_passed_over_in_a_folder_and_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, noise(ticks=50))
    pl.DataFrame({"timestamp": [1.0], "value": [2.0]}).write_parquet(tmp_path / "other.parquet")
    code, out, _ = run(capsys, tmp_path)
    assert code == 0 and "1 file(s) of no known kind" in out
    code, _, err = run(capsys, tmp_path / "other.parquet")
    assert code == 2 and "it has no column role, replica, node, metric" in err


def test_empty_folders_and_missing_paths_are_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, tmp_path)
    assert code == 2 and "holds nothing that can be diagnosed" in err
    code, _, err = run(capsys, tmp_path / "nowhere")
    assert code == 2 and "no such file or folder" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--detector", "nope"), "none of sequential"),
        (("--false-alarms", "0"), "not within"),
        (("--model", "m"), "only minder is fitted"),
    ],
)
def test_senseless_options_are_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, str], said: str
) -> None:
    code, _, err = run(capsys, saved(tmp_path, noise(ticks=40)), *options)
    assert code == 2 and said in err


@pytest.mark.parametrize("machines", [1, 2])
def test_too_few_machines_cannot_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], machines: int) -> None:
    code, out, _ = run(capsys, saved(tmp_path, noise(machines=machines, ticks=100)))
    assert code == 0 and "cannot tell" in out and "healthy" not in out


def test_names_from_a_recording_do_not_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    panel = faulty()
    evil = replace(panel.shape.machines[3], node="n\x1b[31m3\nfake line")
    shape = replace(panel.shape, machines=(*panel.shape.machines[:3], evil, *panel.shape.machines[4:]))
    _, out, _ = run(capsys, saved(tmp_path, replace(panel, shape=shape)))
    assert "\x1b" not in out and "\nfake line" not in out and "fake line" in out


@pytest.mark.skipif(not SHARED.exists(), reason="no real recordings beside the project")
def test_real_recordings_the_straggler_is_named_and_a_healthy_cluster_is_healthy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, SHARED / "straggler", "--json")
    assert code == 1 and {s["node"] for d in json.loads(out)["diagnoses"] for s in d["suspects"]} == {"m00"}
    code, out, _ = run(capsys, SHARED / "exathlon" / "healthy-1_0_100000_15-w0" / "recording.parquet")
    assert code == 0 and "healthy" in out


def test_what_was_said_of_a_recording_cut_short_is_the_beginning_of_what_is_said_of_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    panel = noise(ticks=1000)
    values = panel.values.copy()
    values[1, 560:620, 3] += 6.0
    values[4, 920:, 6] -= 9.0  # later than what the first one does to its neighbours
    whole = replace(panel, values=values)
    _, out, _ = run(capsys, saved(tmp_path, whole), "--json")
    told = json.loads(out)["diagnoses"]
    assert [d["suspects"][0]["node"] for d in told] == ["n003", "n006"]
    for end in (580, 900, 950):
        part = Panel(shape=whole.shape, at=whole.at[:end], values=np.ascontiguousarray(whole.values[:, :end]))
        _, out, _ = run(capsys, saved(tmp_path / str(end), part), "--json")
        assert json.loads(out)["diagnoses"] == [d for d in told if d["detected_at"] <= whole.at[end - 1]]


def dump(folder: Path, rank: int, *, enqueued: int, completed: int) -> Path:
    """A rank's status in a group of three, as NCCL's recorder has it."""
    status = {
        "last_enqueued_collective": enqueued,
        "last_started_collective": enqueued,
        "last_completed_collective": completed,
    }
    path = folder / f"nccl_trace_rank_{rank}"
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}
    value = {"version": "2.9", "rank": rank, "pg_config": {"0": group}, "pg_status": {"0": status}, "entries": []}
    path.write_bytes(pickle.dumps(value, protocol=2))
    return path


def test_flight_recorder_dumps_name_who_holds_up_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        dump(tmp_path, rank, enqueued=6 if rank == 2 else 7, completed=6)
    code, out, _ = run(capsys, tmp_path, "--json")
    said = json.loads(out)
    assert code == 1 and [s["rank"] for d in said["diagnoses"] for s in d["suspects"]] == [2]
    assert said["inputs"][0]["kind"] == "flight recorder dumps"


def test_a_dump_cut_short_is_a_remark_and_one_that_attacks_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        dump(tmp_path, rank, enqueued=7, completed=6)
    whole = dump(tmp_path, 2, enqueued=7, completed=6)
    whole.write_bytes(whole.read_bytes()[:40])
    code, out, _ = run(capsys, tmp_path, "--json")
    assert code in (0, 1) and "nccl_trace_rank_2" in json.loads(out)["inputs"][0]["remarks"][0]
    whole.write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    code, out, err = run(capsys, tmp_path, "--json")
    assert code == 2 and out == "" and "nccl_trace_rank_2" in err and "os.system" in err
