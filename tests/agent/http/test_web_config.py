"""TLS and users of the agent's port, in the form that Prometheus' exporters take; and a server that keeps to them."""

import datetime
import http.client
import json
import logging
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.requests import Request
from starlette.responses import Response

from rolecall.agent.http.server import HttpServer, json_response
from rolecall.agent.http.web_config import BasicAuth, load_web_config
from rolecall.core.errors import ConfigError
from tests.support import eventually

PASSWORD = "scrape me: gently"
HASH = bcrypt.hashpw(PASSWORD.encode(), b"$2b$04$NrjLZreFPdF1CbiX4iFmlO").decode()
"""With a fixed salt: it is part of the names of tests, which must be the same in each process that collects them."""


def certificate(folder: Path) -> None:
    """node.crt and node.key: self-signed, for localhost."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, no = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "node.crt").write_bytes(made.public_bytes(pem))
    (folder / "node.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no))


def basic(name: str, password: str) -> str:
    return "Basic " + b64encode(f"{name}:{password}".encode()).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certificate(tmp_path)
    (tmp_path / "web.yml").write_text(
        f"tls_server_config:\n  cert_file: node.crt\n  key_file: node.key\nbasic_auth_users:\n  prometheus: {HASH}\n"
    )
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[HttpServer]:
    web = load_web_config(folder / "web.yml")
    assert web.auth is not None and web.tls is not None

    def hello(request: Request) -> Response:
        return json_response({"body": "hello"})

    made = HttpServer("127.0.0.1", 0, {"/hello": hello}, tls=web.tls.context, allows=web.auth.allows)
    made.start()
    yield made
    made.stop()


def get(server: HttpServer, folder: Path, authorization: str = "") -> tuple[int, dict[str, str], str]:
    context = ssl.create_default_context(cafile=folder / "node.crt")
    connection = http.client.HTTPSConnection("localhost", server.address[1], timeout=10, context=context)
    headers = {"Authorization": authorization} if authorization else {}
    connection.request("GET", "/hello", headers=headers)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body, answer.headers.get("WWW-Authenticate", "")


def test_a_client_with_certificate_and_password_is_accepted(server: HttpServer, folder: Path) -> None:
    assert server.url.startswith("https://")
    assert get(server, folder, basic("prometheus", PASSWORD))[:2] == (200, {"body": "hello"})


@pytest.mark.parametrize(
    "authorization",
    ["", basic("prometheus", "wrong"), basic("root", PASSWORD), "Basic !!!", "Basic", "Bearer " + HASH, "Basic 4oKs"],
)
def test_no_other_is(server: HttpServer, folder: Path, authorization: str) -> None:
    status, body, challenge = get(server, folder, authorization)
    assert status == 401 and "user" in body["error"] and challenge.startswith("Basic ")


def test_plain_http_and_silent_clients_delay_no_other(server: HttpServer, folder: Path) -> None:
    port = server.address[1]
    plain = http.client.HTTPConnection("localhost", port, timeout=10)
    plain.request("GET", "/hello")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()
    silent = [http.client.HTTPConnection("localhost", port, timeout=10) for _ in range(4)]
    for one in silent:
        one.connect()
    assert get(server, folder, basic("prometheus", PASSWORD))[0] == 200
    for one in silent:
        one.close()


def test_a_certificate_that_is_renewed_is_shown_to_the_next_connection(server: HttpServer, folder: Path) -> None:
    user = basic("prometheus", PASSWORD)
    assert get(server, folder, user)[0] == 200
    certificate(folder)  # cert and key of another pair: the old ones are no longer believed
    assert get(server, folder, user)[0] == 200
    key = (folder / "node.key").read_bytes()
    (folder / "node.key").write_bytes(b"half of a pair")
    assert get(server, folder, user)[0] == 200, "the one of before is kept"
    (folder / "node.key").write_bytes(key)
    assert get(server, folder, user)[0] == 200


def test_handshakes_that_fail_in_a_loop_fill_no_log(
    server: HttpServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        plain = http.client.HTTPConnection("localhost", server.address[1], timeout=10)
        plain.request("GET", "/hello")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
        plain.close()
    assert get(server, folder, basic("prometheus", PASSWORD))[0] == 200
    eventually(lambda: "handshake failed" in caplog.text, "the first is reported")
    assert caplog.text.count("handshake failed") == 1


def test_a_right_password_is_checked_once_and_a_wrong_one_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def checkpw(password: bytes, digest: bytes) -> bool:
        asked.append(password)
        return password == PASSWORD.encode()

    monkeypatch.setattr(bcrypt, "checkpw", checkpw)
    auth = BasicAuth({"prometheus": HASH})
    threads = [threading.Thread(target=auth.allows, args=(basic("prometheus", PASSWORD),))]
    for thread in threads:
        thread.start()
        thread.join()
    assert auth.allows(basic("prometheus", PASSWORD)) and len(asked) == 1
    assert not auth.allows(basic("prometheus", "no")) and not auth.allows(basic("prometheus", "no"))
    assert len(asked) == 3
    assert not auth.allows(basic("unknown", PASSWORD)) and len(asked) == 4  # as slow as for a known name


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tls_server_config: {cert_file: node.crt}", "tls_server_config.key_file: Field required"),
        ("tls_server_config: {cert_file: none.crt, key_file: node.key}", "none.crt"),
        ("tls_server_config: {cert_file: node.key, key_file: node.crt}", "tls_server_config: node.key"),
        ("tls_server_config: {cert_file: node.crt, key_file: node.key, min_version: TLS10}", "one of TLS12, TLS13"),
        ("tls_server_config: {cert_file: node.crt, key_file: node.key, client_auth_type: Maybe}", "client_auth_type"),
        (
            (
                "tls_server_config: {cert_file: node.crt, key_file: node.key, client_auth_type: "
                "RequireAndVerifyClientCert}"
            ),
            "client_ca_file",
        ),
        ("tls_server_config: {cert_file: node.crt, key_file: node.key, client_ca_file: node.crt}", "needs client_auth"),
        ("basic_auth_users: {prometheus: secret}", "basic_auth_users.prometheus: not a bcrypt hash"),
        (f"basic_auth_users: {{'a:b': {HASH}}}", "no user name"),
        ("rate_limit: {burst: 3}", "rate_limit: unknown key"),
        ("- a list", "expected a mapping"),
        ("{", "not YAML"),
    ],
)
def test_unstorable_values_are_rejected(folder: Path, text: str, problem: str) -> None:
    (folder / "web.yml").write_text(text)
    with pytest.raises(ConfigError, match=r"web\.yml: ") as e:
        load_web_config(folder / "web.yml")
    assert problem in str(e.value)


def test_without_the_file_nothing_is_assumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"web\.yml"):
        load_web_config(tmp_path / "web.yml")


def test_an_empty_file_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text("")
    web = load_web_config(tmp_path / "web.yml")
    assert web.tls is None and web.auth is None


def test_a_client_certificate_is_asked_for(folder: Path) -> None:
    (folder / "web.yml").write_text(
        "tls_server_config: {cert_file: node.crt, key_file: node.key, client_ca_file: node.crt,"
        " client_auth_type: RequireAndVerifyClientCert}"
    )
    web = load_web_config(folder / "web.yml")
    assert web.tls is not None and web.tls.context().verify_mode is ssl.CERT_REQUIRED and web.auth is None
