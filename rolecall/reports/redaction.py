"""Redaction of a run's text for a vendor's support ticket, which needs only the hardware's story.

Removed from every field: prompts, samples and exception messages (which quote both), passwords, tokens and keys,
environments, command lines, user names and home directories; of a URL only scheme, host and port remain. Node names and
addresses stay, or consistently become node-1, ip-1 and so on.

No rule recognises every secret. Secrets are detected by field name, by issuers' token formats and by randomness; UUIDs
stay, because they identify GPUs.
"""

import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from rolecall.core.faults import EvidenceKind
from rolecall.core.text import plain
from rolecall.detector.base.plain_pickle import MAGIC, loads

GONE = "***"
TEXT_CHARS_MAX = 16_384
"""Per string; longer ones are truncated. Bounds the cost of the patterns below."""
PHRASE_CHARS_MIN = 12
"""An exception message of this length is removed everywhere; a shorter one only after the exception's type."""
QUOTED_CHARS = (500, 200)
"""Quoted length of an exception message: by the reporter, and in a diagnosis."""
USER_CHARS_MIN = 3
LINE_CHARS_MAX = 16_384
STACKS = "stacks-"
"""Prefix of the files that hold stacks."""

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_SECRET_WORDS = frozenset(
    {"password", "passwd", "pwd", "passphrase", "secret", "secrets", "apikey", "credential", "credentials"}
    | {"authorization", "cookie", "cookies", "bearer", "webhook", "dsn"}
)
_KEY_OWNERS = frozenset({"api", "access", "private", "ssh", "signing", "encryption", "session", "account", "auth"})
_SAMPLE_WORDS = frozenset(
    {"prompt", "prompts", "completion", "completions", "response", "responses", "generated", "sample", "samples"}
)
_PROCESS_WORDS = frozenset({"env", "environ", "environment", "cmdline", "argv", "locals"})
_HIDING_WORDS = _SECRET_WORDS | _SAMPLE_WORDS | _PROCESS_WORDS
_HIDING_KEYS = frozenset({"command_line", "args", "input_ids", "token_ids", "output_ids", "messages"})
_USER_KEYS = frozenset({"user", "username", "login", "owner", "uname"})
_DIGEST_KEYS = frozenset({"hash", "digest", "sha256", "fingerprint"})
_NODE_KEYS = frozenset({"node", "host", "hostname", "nodes", "hosts"})
_SERVICE_USERS = frozenset(
    {"root", "ray", "ubuntu", "user", "users", "admin", "nobody", "runner", "app", "slurm", "work", "worker"}
)
"""Service accounts of images: not personal names, and common words in sentences."""

_PEM = re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL)
_URL = re.compile(r"\b([a-z][a-z0-9+.-]{1,30})://([^\s\"'<>()]*)", re.IGNORECASE)
_SCHEME_TOKEN = re.compile(r"\b(bearer|basic|digest|negotiate)\s+[^\s,;\"']+", re.IGNORECASE)
_VALUE = r"""(?:\\?"(?:[^"\\]|\\[^"])*\\?"?|\\?'(?:[^'\\]|\\[^'])*\\?'?|[^\s,;&}\])"']+)"""
_NAMED = re.compile(
    r"((?:password|passwd|pwd|\bpass|passphrase|secrets?|token|credentials?|authorization|cookie|webhook|dsn"
    r"|(?:api|access|private|ssh|account|secret|auth|session|signing|encryption)[_-]?key)(?:[_-](?:id|value|hash|url))?)"
    rf"(\\?[\"']?\s*[:=]\s*|\\?[\"']?\s+(?:is|was)\s+){_VALUE}",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"(?<![\w-])(--?(?:[a-z0-9]{{1,20}}-){{0,4}}(?:password|passwd|token|secret|key|credentials?|auth|user|env|prompt))(?:\s+|=){_VALUE}",
    re.IGNORECASE,
)
_ISSUED = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}"  # Amazon
    r"|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:hf|api_org)_[A-Za-z0-9]{16,}|nvapi-[\w-]{16,}|wandb_v\d_\w{16,}"
    r"|sk-[\w-]{16,}|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|(?:npm|dckr_pat|pypi)[_-][\w-]{16,}"
    r"|eyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)?"  # JWT
    r"|\$2[aby]\$\d\d\$[./A-Za-z0-9]{53}"  # bcrypt
    r")"
)
_LONG_HEX = re.compile(r"(?<![A-Za-z0-9])[0-9a-fA-F]{32,}(?![A-Za-z0-9])")
_LONG_WORD = re.compile(r"(?<![A-Za-z0-9+])[A-Za-z0-9+]{24,}={0,2}")
_ENVIRONMENT = re.compile(rf"\b([A-Z][A-Z0-9_]{{2,}})={_VALUE}")
_ENVIRONMENT_KEPT = ("NCCL_", "CUDA_", "UCX_", "NVIDIA_", "CONSTRAINT_")
"""Variables that vendors ask for; none holds a secret."""
_HOME = re.compile(r"(?:/[\w.+-]{1,64}){0,6}?/(?:home|[Uu]sers)/([^/\s:;'\",)\]}<>]+)")
_ROOT_HOME = re.compile(r"(?<![\w./-])/root(?![\w.-])")
_AT_HOST = re.compile(r"(?<![\w.+-])([A-Za-z_][\w.+-]{0,63})@([A-Za-z0-9][\w.-]*)")
_USER_SAID = re.compile(
    r"\b((?:acct|user(?:name)?|login|logname|owner)\\?[\"']?\s*[=:]\s*\\?[\"']?|(?:of|for|invalid) user [\"']?)"
    r"(?!(?:code|space|mode|process|memory|thread|slice|\d[\d.]*)\b)\w[\w.-]*",
    re.IGNORECASE,
)
"""Formats of login and audit messages in the kernel log."""
_SAMPLE_SAID = re.compile(
    r"\b((?:prompt|completion|generated_text|messages|input_ids|token_ids|output_ids)s?\\?[\"']?\s*[=:]\s*+)"
    r"(?!\d[\d.]*\s*(?:$|[,;)\]}])).+",
    re.IGNORECASE | re.DOTALL,
)
"""The end of a prompt is unknown: the rest of the text is removed. A number is a count and stays."""
_RAISED = re.compile(
    r"\b([A-Za-z_][\w.]{0,100}(?:Error|Exception|Interrupt|Exit)): (?!\(message)(.*?)(?= at \S+:\d+|\Z)", re.DOTALL
)
_DRIVERS_WORDS = re.compile(
    r"CUDA error: [a-z' -]{1,80}|CUDA out of memory|NCCL error|unhandled (?:system|cuda) error|"
    r"uncorrectable (?:NVLink|ECC) error(?: encountered)?"
)
"""Driver phrases that stay in exception messages."""
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:(?:\d{1,3}\.){3}\d{1,3})?(?![\w:])")
_MAC = re.compile(r"(?<![\w:])[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}(?![\w:])")


def _words(key: str) -> list[str]:
    return [w.lower() for w in _WORDS.findall(key)]


def _hides(key: str, value: Any) -> bool:
    """Whether the name `key` indicates a secret, a sample or an environment."""
    words = _words(key)
    if key.lower() in _HIDING_KEYS or not _HIDING_WORDS.isdisjoint(words):
        return True
    if "token" in words:  # `tokens` are counts
        return words[-1] == "token" or isinstance(value, str)
    return "key" in words and not _KEY_OWNERS.isdisjoint(words)


def left_of_message(message: str) -> str:
    """Replacement of an exception message."""
    kept = sorted({m.group() for m in _DRIVERS_WORDS.finditer(message)})
    return f"(message left out: {'; '.join(kept)})" if kept else "(message left out)"


class Redactor:
    """Call `learn` with everything first, then `value` or `text` with each part. Stateful only in the numbers it
    assigns."""

    def __init__(
        self,
        *,
        secrets: Iterable[str] = (),
        users: Iterable[str] = (),
        folders: Mapping[str, str] | None = None,
        nodes: Iterable[str] = (),
        anonymous: bool = False,
    ) -> None:
        """`secrets`, `users`: known values. `folders`: path -> replacement. `nodes`: get the first numbers, in this
        order; others follow by name."""
        self._secrets = sorted((s for s in secrets if s), key=len, reverse=True)
        self._users = set(users)
        self._folders = sorted((folders or {}).items(), key=lambda f: -len(f[0]))
        self._first_nodes = tuple(dict.fromkeys(nodes))
        self._nodes = set(self._first_nodes)
        self._roles: set[str] = set()
        self._messages: dict[str, str] = {}
        self._anonymous = anonymous
        self._given: dict[tuple[str, str], str] = {}
        self._known: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] | None = None
        self._memory: dict[str, str] = {}

    def learn(self, value: Any, key: str = "") -> None:
        """Collects exception messages, users and nodes from anywhere in `value`."""
        self._known = None
        self._memory.clear()
        if isinstance(value, Mapping):
            if isinstance(value.get("message"), str):
                self._note_message(str(value.get("type", "")), value["message"])
            for k, item in value.items():
                self.learn(item, str(k))
        elif isinstance(value, list | tuple):
            if key == "unreachable":
                self._nodes.update(str(item[0]) for item in value if isinstance(item, list | tuple) and item)
            for item in value:
                self.learn(item, key)
        elif isinstance(value, str):
            self._note(value, key)

    def _note(self, text: str, key: str) -> None:
        if key in _NODE_KEYS:
            self._nodes.add(text)
        if key == "role":
            self._roles.add(text)
        if key in _USER_KEYS:
            self._users.add(text)
        if key == "by":
            user, at, host = text.partition("@")
            self._users.add(user)
            if at:
                self._nodes.add(host)
        self._users.update(found.group(1) for found in _HOME.finditer(text[:TEXT_CHARS_MAX]))

    def _note_message(self, kind: str, message: str) -> None:
        left = left_of_message(message)
        for length in (len(message), *QUOTED_CHARS):
            quoted = message[:length].strip()
            if len(quoted) >= PHRASE_CHARS_MIN:
                self._messages[quoted] = left
            elif quoted and kind:
                self._messages[f"{kind}: {quoted}"] = f"{kind}: {left}"

    def value(self, value: Any, key: str = "") -> Any:
        """`value` (JSON) without what must not leave."""
        if isinstance(value, Mapping):
            return {self.text(str(k)): self._field(str(k), v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(v, key) for v in value]
        return self.text(value, key) if isinstance(value, str) else value

    def _field(self, key: str, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if _hides(key, value):
            return GONE
        if key == "message" and isinstance(value, str):
            return left_of_message(value)
        if key in _USER_KEYS and isinstance(value, str):
            return "user"
        return self.value(value, key)

    def text(self, text: str, key: str = "") -> str:
        """`text` without what must not leave. `key`: the name that it stands under; digests stay under theirs."""
        is_digest = bool(_DIGEST_KEYS.intersection(_words(key)))
        remembered = None if is_digest else self._memory.get(text)
        if remembered is None:
            remembered = self._redacted(text, is_digest)
            if not is_digest and len(text) < 200:
                self._memory[text] = remembered
        return remembered

    def _redacted(self, text: str, is_digest: bool) -> str:
        if len(text) > TEXT_CHARS_MAX:
            text = f"{text[:TEXT_CHARS_MAX]}… ({len(text)} characters)"
        for secret in self._secrets:
            text = text.replace(secret, GONE)
        text = _USER_SAID.sub(rf"\1{GONE}", text)
        for pattern, becomes in self._known_patterns():
            text = pattern.sub(becomes, text)
        text = _RAISED.sub(lambda m: f"{m[1]}: {left_of_message(m[2])}", text)
        text = _PEM.sub(GONE, text)
        text = _URL.sub(self._origin, text)
        text = _SCHEME_TOKEN.sub(rf"\1 {GONE}", text)
        text = _NAMED.sub(rf"\1\2{GONE}", text)
        text = _OPTION.sub(rf"\1 {GONE}", text)
        text = _SAMPLE_SAID.sub(rf"\1{GONE}", text)
        text = _ENVIRONMENT.sub(lambda m: m[0] if m[1].startswith(_ENVIRONMENT_KEPT) else f"{m[1]}={GONE}", text)
        text = _ISSUED.sub(GONE, text)
        text = _LONG_WORD.sub(lambda m: GONE if _looks_random(m[0]) else m[0], text)
        if not is_digest:
            text = _LONG_HEX.sub(GONE, text)
        text = _ROOT_HOME.sub("~", _HOME.sub("~", text))
        text = _AT_HOST.sub(lambda m: f"user@{self._host(m[2])}", text)
        return self._without_addresses(text) if self._anonymous else text

    def _known_patterns(self) -> list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]]:
        """What was learned, each kind as one pattern: a replacement is not scanned again."""
        if self._known is None:
            users = {u for u in self._users if len(u) >= USER_CHARS_MIN and u.lower() not in _SERVICE_USERS}
            kinds = [({k: v for k, v in self._folders}, False), (self._messages, False)]
            kinds.append((dict.fromkeys(users - self._nodes - self._roles, "user"), True))
            if self._anonymous:
                kinds.append((self.node_names(), True))
            self._known = [_replacing(words, whole) for words, whole in kinds if words]
        return self._known

    def node_names(self) -> dict[str, str]:
        """Node -> the name that stands for it when anonymous."""
        rest = sorted(n for n in self._nodes - set(self._first_nodes) if n and n != "localhost")
        return {name: f"node-{n}" for n, name in enumerate([*self._first_nodes, *rest], 1)}

    def _origin(self, match: re.Match[str]) -> str:
        """Scheme, host and port of a URL. A file's has no host: nothing but the scheme is left."""
        authority = re.split(r"[/?#]", match[2], maxsplit=1)[0].rpartition("@")[2]
        host, colon, port = authority.rpartition(":") if authority.rpartition(":")[2].isdigit() else (authority, "", "")
        return f"{match[1]}://{self._host(host)}{colon}{port}" if host else f"{match[1]}://{GONE}"

    def _host(self, host: str) -> str:
        known = host in ("localhost", GONE) or _IPV4.fullmatch(host) or ":" in host
        if not self._anonymous or known or host in self.node_names().values():
            return host
        return self._number("host", host)

    def _number(self, kind: str, text: str) -> str:
        return self._given.setdefault((kind, text), f"{kind}-{1 + sum(k == kind for k, _ in self._given)}")

    def _without_addresses(self, text: str) -> str:
        text = _MAC.sub(lambda m: self._number("mac", m[0].lower()), text)
        return _IPV6.sub(self._address, _IPV4.sub(self._address, text))

    def _address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]  # a PCI address, a time, a version
        return match[0] if address.is_loopback or address.is_unspecified else self._number("ip", str(address))


def _looks_random(word: str) -> bool:
    return sum(c.isdigit() for c in word) >= 2 and any(c.islower() for c in word) and any(c.isupper() for c in word)


def _replacing(words: Mapping[str, str], whole: bool) -> tuple[re.Pattern[str], Callable[[re.Match[str]], str]]:
    """One pass for all `words`, the longest first; `whole`: only where no letter or digit stands beside, in any
    case."""
    any_of = "|".join(re.escape(w) for w in sorted(words, key=lambda w: (-len(w), w)))
    if not whole:
        return re.compile(any_of), lambda m: words[m[0]]
    lowered = {w.lower(): v for w, v in words.items()}
    return re.compile(rf"(?<![A-Za-z0-9])(?:{any_of})(?![A-Za-z0-9])", re.IGNORECASE), lambda m: lowered[m[0].lower()]


def redacted(kind: EvidenceKind, body: bytes, known: Redactor, *, is_stopped: bool = False) -> bytes:
    """The part of an agent's response that is kept: JSON or lines, without secrets. `is_stopped`: the process of a
    stack was, by a signal or a debugger.

    Raises:
        UnsafePickle, ValueError, RecursionError: `body` is not of this kind.
    """
    if kind is EvidenceKind.STACKS:
        value = json.loads(body)
        if not isinstance(value, Mapping) or not isinstance(value.get("threads"), list):
            raise ValueError("no list of threads")
        return _json({**known.value(value), "one_of_some": True, "is_stopped": is_stopped})
    if kind is EvidenceKind.FLIGHT:
        value = loads(body) if MAGIC.match(body) else json.loads(body)
        if not isinstance(value, Mapping):
            raise ValueError("no dump")
        return _json(_names_kept(value, known))
    if kind is EvidenceKind.NCCL:
        with suppress(ValueError):  # NCCL before 2.29 writes invalid JSON, which the reader repairs: kept as lines
            return _json(_names_kept(json.loads(body), known))
    return _lines(body, known)


def redacted_again(name: str, content: bytes, known: Redactor) -> bytes:
    """Redact a stored file for an export. `known` may know more secrets by now, or replace node names."""
    with suppress(ValueError, RecursionError):
        if name.endswith(".json"):
            value = json.loads(content)
            return _json(known.value(value) if name.startswith(STACKS) else _names_kept(value, known))
    return _lines(content, known)


def _json(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()


def _lines(body: bytes, known: Redactor) -> bytes:
    lines = body.decode("utf-8", "replace").split("\n")
    return "".join(f"{plain(known.text(line), LINE_CHARS_MAX)}\n" for line in lines if line).encode()


def _names_kept(value: Any, known: Redactor) -> Any:
    """Redact texts; keep keys and hexadecimal names, which identify process groups and communicators."""
    seen: dict[str, str] = {}  # a dump repeats a few texts thousands of times

    def kept(value: Any) -> Any:
        if isinstance(value, str):
            if value not in seen:
                seen[value] = known.text(value, "digest")
            return seen[value]
        if isinstance(value, Mapping):
            return {k: kept(v) for k, v in value.items()}
        return [kept(v) for v in value] if isinstance(value, list | tuple) else value

    return kept(value)
