"""TLS and basic authentication of the agent's port, in the file format of Prometheus exporters
(`--web.config.file` of prometheus/exporter-toolkit, docs/web-configuration.md):

    tls_server_config: {cert_file: node.crt, key_file: node.key, client_auth_type: RequireAndVerifyClientCert,
                        client_ca_file: ca.crt, min_version: TLS12}
    basic_auth_users: {prometheus: $2y$10$...}        # bcrypt, as `htpasswd -nBC 10 "" | tr -d ':\\n'` writes it

Certificates and keys are reloaded when their files change, as in those exporters; the file itself is read once, at the
start. Paths are relative to the file. Unknown keys are errors: a limit that is not applied must not be relied on.
"""

import base64
import binascii
import hashlib
import logging
import secrets
import ssl
import threading
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rolecall.core.config.job import problems_of, read_yaml_file
from rolecall.core.errors import ConfigError
from rolecall.core.text import os_reason

logger = logging.getLogger(__name__)

NUM_VERIFIED_MAX = 100
"""Verified credentials to cache: bcrypt takes a tenth of a second by design, and scrapes repeat every few seconds."""

_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


class _Tls(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    cert_file: str
    key_file: str
    client_auth_type: str = "NoClientCert"
    client_ca_file: str = ""
    min_version: str = "TLS12"


class _Web(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    tls_server_config: _Tls | None = None
    basic_auth_users: dict[str, str] = Field(default_factory=dict)


class Tls:
    """TLS context that follows its files. `context()` may be called from several threads."""

    def __init__(self, tls: _Tls, folder: Path, context: ssl.SSLContext) -> None:
        self._tls, self._folder, self._context = tls, folder, context
        names = (tls.cert_file, tls.key_file, tls.client_ca_file)
        self._files = [folder / name for name in names if name]
        self._stamps = self._read_stamps()
        self._lock = threading.Lock()

    def _read_stamps(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._files:
            try:
                about = path.stat()
                stamps.append((about.st_ino, about.st_mtime_ns, about.st_size))
            except OSError:
                stamps.append((0, 0, 0))
        return stamps

    def context(self) -> ssl.SSLContext:
        """For the next connection. If the new files do not work, logs that and keeps the previous context."""
        with self._lock:
            stamps = self._read_stamps()
            if stamps != self._stamps:
                self._stamps = stamps
                problems = list[str]()
                fresh = _context(self._tls, self._folder, problems)
                if problems:
                    logger.warning("keeping the previous certificate: %s", "; ".join(problems))
                else:
                    self._context = fresh
            return self._context


class BasicAuth:
    """Checks `Authorization: Basic ...` against bcrypt hashes. May be called from several threads."""

    def __init__(self, users: dict[str, str]) -> None:
        self._users = {name: digest.encode() for name, digest in users.items()}
        self._salt = secrets.token_bytes(16)
        self._verified: set[bytes] = set()
        self._lock = threading.Lock()  # one check at a time: a flood of wrong passwords costs one core at most

    def allows(self, header: str) -> bool:
        """Whether the value of an `Authorization` header names a user and the right password."""
        kind, _, encoded = header.partition(" ")
        if kind.lower() != "basic":
            return False
        try:
            name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return False
        seen = hashlib.sha256(self._salt + f"{name}:{password}".encode()).digest()
        if seen in self._verified:
            return True
        with self._lock:
            right = bool(colon) and self._check(name, password)
            if right:
                if len(self._verified) >= NUM_VERIFIED_MAX:
                    self._verified.clear()
                self._verified.add(seen)
        return right

    def _check(self, name: str, password: str) -> bool:
        import bcrypt

        # An unknown name takes as long as a wrong password, so that names cannot be guessed by timing.
        digest = self._users.get(name) or next(iter(self._users.values()))
        try:
            fits = bcrypt.checkpw(password.encode(), digest)
        except ValueError:
            return False
        return fits and name in self._users


class WebConfig(NamedTuple):
    """`tls`: None for plain HTTP; `auth`: None without users."""

    tls: Tls | None = None
    auth: BasicAuth | None = None


def load_web_config(path: Path) -> WebConfig:
    """Raises ConfigError: the file, or a certificate or key that it names, is unusable: every problem found."""
    value = read_yaml_file(path)
    try:
        web = _Web.model_validate(value if value is not None else {})
    except ValidationError as e:
        raise ConfigError(problems_of(e), str(path)) from None
    problems = []
    for name, digest in web.basic_auth_users.items():
        if not digest.startswith(("$2a$", "$2b$", "$2y$")) or len(digest) != 60:
            problems.append(f"basic_auth_users.{name}: not a bcrypt hash ($2y$..., 60 characters)")
        if ":" in name or not name:
            problems.append(f"basic_auth_users: {name!r} is no user name")
    if web.basic_auth_users:
        try:
            import bcrypt  # noqa: F401
        except ImportError:
            problems.append("basic_auth_users: the package bcrypt is not installed (pip install bcrypt)")
    tls = None
    if web.tls_server_config is not None:
        tls = Tls(web.tls_server_config, path.parent, _context(web.tls_server_config, path.parent, problems))
    if problems:
        raise ConfigError(problems, str(path))
    return WebConfig(tls, BasicAuth(web.basic_auth_users) if web.basic_auth_users else None)


def _context(tls: _Tls, folder: Path, problems: list[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if tls.min_version in _VERSIONS:
        context.minimum_version = _VERSIONS[tls.min_version]
    else:
        problems.append(f"tls_server_config.min_version: one of {', '.join(_VERSIONS)}, not {tls.min_version!r}")
    try:
        context.load_cert_chain(folder / tls.cert_file, folder / tls.key_file)
    except (OSError, ssl.SSLError) as e:
        problems.append(f"tls_server_config: {tls.cert_file}, {tls.key_file}: {os_reason(e)}")
    mode = _CLIENT_AUTH.get(tls.client_auth_type)
    if mode is None:
        wanted = ", ".join(_CLIENT_AUTH)
        problems.append(f"tls_server_config.client_auth_type: one of {wanted}, not {tls.client_auth_type!r}")
    elif mode is not ssl.CERT_NONE:
        try:
            context.load_verify_locations(folder / tls.client_ca_file)
            context.verify_mode = mode
        except (OSError, ssl.SSLError) as e:
            problems.append(f"tls_server_config.client_ca_file: {tls.client_ca_file!r}: {os_reason(e)}")
    elif tls.client_ca_file:
        problems.append("tls_server_config.client_ca_file: needs client_auth_type")
    return context
