"""Who may act: the file, its tokens, and the door."""

import os
import stat
from pathlib import Path

import pytest

from rolecall.core.errors import CommandRefused, UnreadableInput
from rolecall.dashboards.users import (
    FAILURE_SECONDS,
    FAILURES_MAX,
    IDLE_SECONDS,
    Authenticator,
    SignedInUser,
    SignInRefused,
    add,
    fingerprint,
    read_users,
    remove,
)

NOW = 1_700_000_000.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "users.yaml"


def test_an_operator_is_the_name_beside_the_hash_of_the_token(file: Path) -> None:
    anna, bert = add(file, "anna"), add(file, "Bert Ö")
    door = Authenticator(file)
    first, second = door.sign_in(anna, NOW), door.sign_in(bert, NOW)
    assert isinstance(first, SignedInUser)
    assert isinstance(second, SignedInUser)
    assert (first.name, second.name) == ("anna", "Bert Ö")


def test_the_file_holds_no_token_and_is_for_its_owner_alone(file: Path) -> None:
    token = add(file, "anna")
    assert token not in file.read_text()
    assert fingerprint(token) in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_a_session_keeps_shows_no_token_and_no_hash(file: Path) -> None:
    token = add(file, "anna")
    held = Authenticator(file).sign_in(token, NOW)
    assert token not in repr(held)
    assert "sha256" not in repr(held)


@pytest.mark.parametrize("token", ["", "wrong", "x" * 100_000, "ä" * 50])
def test_a_wrong_token_is_refused_without_a_word_of_it(file: Path, token: str) -> None:
    add(file, "anna")
    answer = Authenticator(file).sign_in(token, NOW)
    assert isinstance(answer, SignInRefused)
    assert not token or token not in answer.because


def test_who_is_removed_is_out_at_the_next_look(file: Path) -> None:
    token = add(file, "anna")
    add(file, "bert")
    door = Authenticator(file)
    held = door.sign_in(token, NOW)
    assert isinstance(held, SignedInUser)
    assert door.rejection(held, NOW) == ""
    remove(file, "anna")
    assert "is no longer a user" in door.rejection(held, NOW)
    assert isinstance(door.sign_in(token, NOW), SignInRefused)


def test_a_new_token_under_the_same_name_ends_the_old_one(file: Path) -> None:
    token = add(file, "anna")
    door = Authenticator(file)
    held = door.sign_in(token, NOW)
    assert isinstance(held, SignedInUser)
    remove(file, "anna")
    add(file, "anna")
    assert "is no longer a user" in door.rejection(held, NOW)


def test_a_file_that_is_gone_lets_no_one_act(file: Path) -> None:
    held = Authenticator(file)
    token = add(file, "anna")
    who = held.sign_in(token, NOW)
    assert isinstance(who, SignedInUser)
    file.unlink()
    assert "No such file" in held.rejection(who, NOW)


def test_idleness_ends_it(file: Path) -> None:
    door = Authenticator(file)
    held = door.sign_in(add(file, "anna"), NOW)
    assert isinstance(held, SignedInUser)
    assert door.rejection(held, NOW + IDLE_SECONDS) == ""
    assert "without activity" in door.rejection(held, NOW + IDLE_SECONDS + 1)


def test_who_guesses_is_reported_of_and_keeps_no_one_out(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = add(file, "anna")
    door = Authenticator(file)
    for i in range(3 * FAILURES_MAX):
        answer = door.sign_in("guess", NOW)
        assert isinstance(answer, SignInRefused)
        assert "no user" in answer.because
        assert len(caplog.records) == (i + 1) // FAILURES_MAX
    assert "possible attack" in caplog.text and token not in caplog.text
    assert isinstance(door.sign_in(token, NOW), SignedInUser)


def test_few_wrong_tokens_over_time_are_no_one_guessing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(file, "anna")
    door = Authenticator(file)
    for i in range(3 * FAILURES_MAX):
        door.sign_in("typo", NOW + i * FAILURE_SECONDS)
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_can_read_is_refused_with_what_to_do(file: Path, mode: int) -> None:
    token = add(file, "anna")
    file.chmod(mode)
    with pytest.raises(UnreadableInput, match="chmod 600"):
        read_users(file)
    assert isinstance(Authenticator(file).sign_in(token, NOW), SignInRefused)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "must map names"),
        ("anna: secret-token", "must be sha256"),
        ("anna: 5", "must be sha256"),
        ("anna: [", "is not valid YAML"),
        ("? [a, b]\n: c", "is no"),
        ("5: sha256:" + "0" * 64, "is not a name"),
        ('"a\\nb": sha256:' + "0" * 64, "printable"),
        (f"{'n' * 65}: sha256:" + "0" * 64, "printable"),
        (f"anna: sha256:{'0' * 64}\nbert: sha256:{'0' * 64}", "same token"),
        ("a: " + "x" * 300_000, "larger than"),
        ("\x00\x01", "is not valid YAML"),
    ],
)
def test_a_file_that_is_something_else_says_what_and_quotes_no_secret(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(UnreadableInput, match=says) as caught:
        read_users(file)
    assert "secret-token" not in str(caught.value)


def test_an_empty_file_is_no_one(file: Path) -> None:
    file.touch(mode=0o600)
    assert read_users(file) == {}


def test_a_folder_and_a_pipe_are_no_users_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UnreadableInput, match=r"regular file|directory"):
            read_users(path)


def test_a_name_is_taken_once_and_must_be_one(file: Path) -> None:
    add(file, "anna")
    with pytest.raises(CommandRefused, match="already"):
        add(file, "anna")
    for name in ("", " ", "a\nb", "n" * 65):
        with pytest.raises(CommandRefused):
            add(file, name)
    with pytest.raises(CommandRefused, match="users: anna"):
        remove(file, "bert")
