"""A hundred thousand hostile messages and torn pages: each is refused with a reason, none is believed, none hurts."""

import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.collectors.process.exits import ExitWatch
from rolecall.agent.events import EventLog
from rolecall.agent.processes.state_pages import PageUnreadable, parse_page
from rolecall.agent.registration_socket import RegistrationServer
from rolecall.agent.registry import Registry
from rolecall.agent.reporter.page_layout import PAGE_BYTES
from rolecall.agent.reporter.reporter import _Page
from rolecall.core.clock import FakeClock
from tests.agent.processes import NODE, TOKEN, secret

NUM_MESSAGES, NUM_MESSAGES_LONG = 20_000, 100_000
NUM_PAGES = 20_000
PEER = 4_000_000
"""No process has this number here: pid_max is below."""
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**63,
    10**40,
    1e308,
    -0.0,
    "",
    "\x00",
    "../../etc/passwd",
    "rollout/1",
    "\ud800",
    "x" * 5000,
    [],
    {},
    [[[[]]]],
    {"a": {"b": {}}},
)


def _message(rng: random.Random) -> bytes:
    """Anything from noise to a claim that is nearly right."""
    claim: dict[Any, Any] = {
        "kind": rng.choice(("register", "exception", "finished")),
        "pid": PEER,
        "start_ticks": 5,
        "replica": "rollout/1",
        "rank": 0,
        "incarnation": 1,
        "secret": secret("rollout/1"),
        "number": 1,
        "detail": {"type": "E"},
    }
    for _ in range(rng.randrange(4)):
        claim[rng.choice((*claim, "more"))] = rng.choice(ODD)
    if rng.random() < 0.3:
        claim.pop(rng.choice(tuple(claim)), None)
    raw = bytearray(json.dumps(claim).encode())
    how = rng.random()
    if how < 0.2:
        for _ in range(rng.randrange(1, 6)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    elif how < 0.3:
        del raw[rng.randrange(len(raw)) :]
    elif how < 0.35:
        raw = bytearray(rng.randbytes(rng.randrange(200)))
    elif how < 0.36:
        raw = bytearray(b"[" * 5000)
    return bytes(raw).replace(b"\n", b" ")


@pytest.mark.parametrize("num_messages", [NUM_MESSAGES, pytest.param(NUM_MESSAGES_LONG, marks=pytest.mark.long)])
def test_no_message_is_believed_and_none_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_messages: int
) -> None:
    clock = FakeClock()
    events = EventLog(tmp_path / "events.jsonl", NODE, clock)
    registry = Registry(node=NODE, data_dir=tmp_path, token=TOKEN, events=events, exits=ExitWatch(), clock=clock)
    answerers = {"register": registry.register, "exception": registry.exception, "finished": registry.finished}
    intake = RegistrationServer(tmp_path / "agent.sock", answerers, clock)
    rng = random.Random(11)
    reasons: dict[str, int] = {}
    with caplog.at_level(logging.ERROR):
        for _ in range(num_messages):
            answer = intake._result(PEER, _message(rng))
            assert answer["ok"] is False and "retry" not in answer, answer
            json.dumps(answer).encode()
            reasons[answer["reason"][:20]] = reasons.get(answer["reason"][:20], 0) + 1
    assert not caplog.records
    assert len(reasons) > 12, "the messages got to many places"
    assert registry.num_live() == 0
    assert len(events.after(0).events) == 1, "one event, and no flood: the clock is constant"
    intake.stop()
    events.close()


def test_no_page_hurts_its_reader(tmp_path: Path) -> None:
    rng = random.Random(12)
    good = bytes(_Page().raw)
    read = 0
    for _ in range(NUM_PAGES):
        raw = bytearray(good)
        for _ in range(rng.randrange(1, 40)):
            place = rng.randrange(PAGE_BYTES) if rng.random() < 0.5 else rng.randrange(600)
            raw[place] = rng.randrange(256)
        if rng.random() < 0.1:
            del raw[rng.randrange(len(raw)) :]
        try:
            state = parse_page(bytes(raw))
        except PageUnreadable as e:
            assert str(e)
            continue
        read += 1
        texts = (state.phase, state.replica, state.finish_reason)
        assert all(isinstance(t, str) and len(t) < PAGE_BYTES for t in texts)
        assert isinstance(state.progress, int) and isinstance(state.phase_since, float)
        json.dumps([state.progress, *texts])
        assert state.loss == state.loss or math.isnan(state.loss)
    assert read > NUM_PAGES / 20, "not all were refused at the first byte"
