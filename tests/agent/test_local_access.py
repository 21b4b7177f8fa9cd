"""The token of this machine's agent is used for that agent only."""

import json
from pathlib import Path

import pytest

from rolecall.agent.data_dir import token_of
from rolecall.agent.local_access import local_authorization, own_authorization, reached


@pytest.mark.parametrize(
    ("served", "watched", "used"),
    [
        ("http://127.0.0.1:9477", "http://127.0.0.1:9477", True),
        ("http://127.0.0.1:9477", "http://localhost:9477/", True),
        ("http://0.0.0.0:9477", "http://127.0.0.1:9477", True),
        ("https://[::]:9477", "https://[::1]:9477", True),
        ("http://127.0.0.1:9477", "http://127.0.0.1:9478", False),  # may be forwarded to another machine
        ("http://127.0.0.1:9477", "https://127.0.0.1:9477", False),
        ("http://127.0.0.1:9477", "http://node-2:9477", False),
        ("http://10.0.0.5:9477", "http://127.0.0.1:9477", False),
        ("", "http://127.0.0.1:9477", False),
    ],
)
def test_only_the_agent_of_this_machine_gets_it(tmp_path: Path, served: str, watched: str, used: bool) -> None:
    token_of(tmp_path)
    if served:
        (tmp_path / "agent.json").write_text(json.dumps({"url": served}))
    found = local_authorization(watched, [tmp_path / "none", tmp_path])
    assert found == (own_authorization(tmp_path) if used else "") and own_authorization(tmp_path)


def test_a_token_that_this_user_cannot_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_text(json.dumps({"url": "http://127.0.0.1:9477"}))
    assert local_authorization("http://127.0.0.1:9477", [tmp_path]) == ""


def test_reached() -> None:
    assert (
        reached("http://0.0.0.0:9477") == "http://127.0.0.1:9477"
        and reached("http://10.0.0.5:1") == "http://10.0.0.5:1"
    )
