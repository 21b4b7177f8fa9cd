"""A strict stand-in of Grafana's HTTP API (11.x), as far as rolecall asks it: over real HTTP, on loopback.

It checks what a real one checks (token and role, content type, versions, titles) and refuses more: a field or a
parameter that the API does not have is an answer 400, so that a misspelt one does not pass. It is no Grafana: no
migration of dashboards, no permissions by folder, no organisations.
"""

import contextlib
import copy
import itertools
import json
import re
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

Json = dict[str, Any]
EDITOR, VIEWER = "glsa_editor_0123456789", "glsa_viewer_0123456789"
BODY_BYTES_MAX = 8 << 20
NOW = "2026-11-22T12:00:00Z"


class Refused(Exception):
    def __init__(self, code: int, message: str, **more: Any) -> None:
        self.code, self.body = code, {"message": message, **more}


class FakeGrafana:
    """The server's state. Methods are its routes; `people_*` do what an operator would do in the browser."""

    def __init__(self) -> None:
        self.folders: list[Json] = []
        self.dashboards: dict[str, Json] = {}
        self.annotations: dict[int, Json] = {}
        self.datasources: list[Json] = [
            {"name": "Prometheus", "uid": "prom-1", "type": "prometheus", "id": 1},
            {"name": "Logs / all", "uid": "loki-1", "type": "loki", "id": 2},
        ]
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.before: Callable[[str, str], None] = lambda method, path: None
        """Called before each request is answered: to change something at just that moment."""
        self.url = ""
        self._ids = itertools.count(1)

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [r for r in self.requests if r[0] != "GET"]

    def people_edit(self, uid: str, **changes: Any) -> None:
        """As somebody who saves the dashboard in the browser."""
        kept = self.dashboards[uid]
        self._save(uid, {**kept["dashboard"], **changes}, kept["folderUid"], "", "anna")

    # --- routes ---------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: list[tuple[str, str]], body: Any) -> Any:
        for wanted, pattern, route in self._routes():
            if wanted == method and (found := re.fullmatch(pattern, path)):
                return route(query, body, *map(unquote, found.groups()))
        raise Refused(404, "Not found")

    def _routes(self) -> tuple[tuple[str, str, Callable[..., Any]], ...]:
        return (
            ("GET", r"/api/health", self._health),
            ("GET", r"/api/folders", self._list_folders),
            ("POST", r"/api/folders", self._make_folder),
            ("GET", r"/api/datasources", self._list_sources),
            ("GET", r"/api/datasources/name/([^/]+)", self._source),
            ("GET", r"/api/dashboards/uid/([^/]+)", self._dashboard),
            ("GET", r"/api/dashboards/uid/([^/]+)/versions", self._versions),
            ("POST", r"/api/dashboards/db", self._save_dashboard),
            ("GET", r"/api/annotations", self._find_annotations),
            ("POST", r"/api/annotations", self._add_annotation),
            ("PATCH", r"/api/annotations/(\d+)", self._change_annotation),
        )

    def _health(self, query: Any, body: Any) -> Json:
        return {"database": "ok", "version": "11.6.0", "commit": "0000000"}

    def _list_folders(self, query: list[tuple[str, str]], body: Any) -> list[Json]:
        asked = _only(dict(query), {"limit", "page", "parentUid"})
        return self.folders[: int(asked.get("limit", 1000))]

    def _make_folder(self, query: Any, body: Any) -> Json:
        sent = _only(_object(body), {"title", "uid", "parentUid", "description"})
        if not sent.get("title"):
            raise Refused(400, "folder title cannot be empty")
        if any(f["title"] == sent["title"] for f in self.folders):
            raise Refused(409, "a folder with the same name already exists in the current location")
        number = next(self._ids)
        made = {"id": number, "uid": sent.get("uid") or f"folder-{number}", "title": sent["title"]}
        self.folders.append(made)
        return made

    def _list_sources(self, query: Any, body: Any) -> list[Json]:
        return self.datasources

    def _source(self, query: Any, body: Any, name: str) -> Json:
        for source in self.datasources:
            if source["name"] == name:
                return source
        raise Refused(404, "Data source not found")

    def _dashboard(self, query: Any, body: Any, uid: str) -> Json:
        kept = self._kept(uid)
        newest = kept["versions"][-1]
        meta = {
            "version": newest["version"],
            "folderUid": kept["folderUid"],
            "updated": newest["created"],
            "updatedBy": newest["createdBy"],
            "provisioned": kept["provisioned"],
        }
        return {"dashboard": copy.deepcopy(kept["dashboard"]), "meta": meta}

    def _versions(self, query: list[tuple[str, str]], body: Any, uid: str) -> Json:
        asked = _only(dict(query), {"limit", "start"})
        newest_first = self._kept(uid)["versions"][::-1]
        return {"continueToken": "", "versions": newest_first[: int(asked.get("limit", 1000))]}

    def _kept(self, uid: str) -> Json:
        if uid not in self.dashboards:
            raise Refused(404, "Dashboard not found")
        return self.dashboards[uid]

    def _save_dashboard(self, query: Any, body: Any) -> Json:
        sent = _only(_object(body), {"dashboard", "folderUid", "message", "overwrite"})
        dashboard = _object(sent.get("dashboard"))
        folder, overwrite = sent.get("folderUid", ""), sent.get("overwrite", False)
        if not isinstance(overwrite, bool):
            raise Refused(400, "bad request data")
        if not dashboard.get("title"):
            raise Refused(400, "Dashboard title cannot be empty", status="empty-name")
        uid = dashboard.get("uid") or f"d-{next(self._ids)}"
        if len(uid) > 40 or not re.fullmatch(r"[A-Za-z0-9_-]+", uid):
            raise Refused(400, "uid contains illegal characters or is too long")
        if folder and folder not in {f["uid"] for f in self.folders}:
            raise Refused(400, "folder not found")
        if "id" in dashboard and dashboard["id"] not in (
            None,
            *(d["dashboard"]["id"] for d in self.dashboards.values()),
        ):
            raise Refused(404, "Dashboard not found", status="not-found")
        before = self.dashboards.get(uid)
        if before is not None and before["provisioned"]:
            raise Refused(400, "Cannot save provisioned dashboard")
        if before is not None and not overwrite and dashboard.get("version") != before["dashboard"]["version"]:
            message = "The dashboard has been changed by someone else"
            raise Refused(412, message, status="version-mismatch")
        for other, kept in self.dashboards.items():
            same = kept["dashboard"]["title"] == dashboard["title"] and kept["folderUid"] == folder
            if same and other != uid and not overwrite:
                message = "A dashboard with the same name in the folder already exists"
                raise Refused(412, message, status="name-exists")
        kept = self._save(uid, dashboard, folder, sent.get("message", ""), "sa-rolecall")
        stored = kept["dashboard"]
        url = f"/d/{uid}/x"
        return {
            "id": stored["id"],
            "uid": uid,
            "url": url,
            "status": "success",
            "version": stored["version"],
            "slug": "x",
        }

    def _save(self, uid: str, dashboard: Json, folder: str, message: str, by: str) -> Json:
        before = self.dashboards.get(uid)
        version = before["dashboard"]["version"] + 1 if before else 1
        number = before["dashboard"]["id"] if before else next(self._ids)
        made = {"version": version, "created": NOW, "createdBy": by, "message": message}
        self.dashboards[uid] = kept = {
            "dashboard": {**copy.deepcopy(dashboard), "id": number, "uid": uid, "version": version},
            "folderUid": folder,
            "provisioned": False,
            "versions": [*(before["versions"] if before else ()), made],
        }
        return kept

    def _find_annotations(self, query: list[tuple[str, str]], body: Any) -> list[Json]:
        _only(dict(query), {"tags", "limit", "type", "from", "to", "matchAny", "dashboardUID"})
        tags = {v for k, v in query if k == "tags"}
        limit = int(dict(query).get("limit", 100))  # as Grafana's own default
        found = [a for a in self.annotations.values() if tags <= set(a["tags"])]
        return copy.deepcopy(sorted(found, key=lambda a: -int(a["time"]))[:limit])

    def _add_annotation(self, query: Any, body: Any) -> Json:
        sent = _only(_object(body), {"dashboardUID", "panelId", "time", "timeEnd", "tags", "text"})
        if not sent.get("text"):
            raise Refused(400, "text field should not be empty")
        _checked(sent)
        number = next(self._ids)
        start = sent["time"]
        self.annotations[number] = {
            "id": number,
            "time": start,
            "timeEnd": sent.get("timeEnd") or start,
            "tags": list(sent["tags"]),
            "text": sent["text"],
        }
        return {"message": "Annotation added", "id": number}

    def _change_annotation(self, query: Any, body: Any, number: str) -> Json:
        sent = _only(_object(body), {"time", "timeEnd", "tags", "text"})
        if int(number) not in self.annotations:
            raise Refused(404, "Could not find annotation to update")
        _checked(sent)
        self.annotations[int(number)].update({k: v for k, v in sent.items() if v is not None})
        return {"message": "Annotation patched"}


def _checked(sent: Json) -> None:
    for key in ("time", "timeEnd"):
        if sent.get(key) is not None and (type(sent[key]) is not int or sent[key] < 10**12):
            raise Refused(400, f"{key}: milliseconds since 1970 as a whole number")
    if not all(isinstance(t, str) and 0 < len(t) <= 100 for t in sent.get("tags", [])):
        raise Refused(400, "tags: short texts")


def _only(sent: Json, known: set[str]) -> Json:
    if unknown := set(sent) - known:
        raise Refused(400, f"bad request data: unknown {sorted(unknown)}")
    return sent


def _object(body: Any) -> Json:
    if not isinstance(body, dict):
        raise Refused(400, "bad request data")
    return body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    grafana: FakeGrafana

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        self.grafana.requests.append((self.command, parts.path))
        self.grafana.headers.append(dict(self.headers))
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(min(length, BODY_BYTES_MAX))
        try:
            self.grafana.before(self.command, parts.path)
            self._send(200, self._admitted(parts.path, parse_qsl(parts.query, keep_blank_values=True), raw))
        except Refused as e:
            self._send(e.code, e.body)

    def _admitted(self, path: str, query: list[tuple[str, str]], raw: bytes) -> Any:
        if path != "/api/health":  # the only one that asks for no token
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            if scheme != "Bearer" or token not in (EDITOR, VIEWER):
                raise Refused(401, "Invalid API key", messageId="api-key.invalid")
            if token == VIEWER and self.command != "GET":
                raise Refused(403, "You'll need additional permissions to perform this action", accessErrorId="ACE01")
        body = None
        if self.command != "GET":
            if self.headers.get("Content-Type", "").partition(";")[0] != "application/json":
                raise Refused(415, "unsupported content type")
            try:
                body = json.loads(raw)
            except ValueError:
                raise Refused(400, "bad request data") from None
        return self.grafana.answer(self.command, path, query, body)

    def _send(self, code: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Threads(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that does not trust the certificate hangs up


@contextlib.contextmanager
def fake_grafana(tls: ssl.SSLContext | None = None) -> Iterator[FakeGrafana]:
    """One that answers at `url`; with `tls` over https, as localhost."""
    grafana = FakeGrafana()
    handler = type("Handler", (_Handler,), {"grafana": grafana})
    server = _Threads(("127.0.0.1", 0), handler)
    grafana.url = f"http://127.0.0.1:{server.server_address[1]}"
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        grafana.url = f"https://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield grafana
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def raw_server(*parts: bytes, hold: bool = False) -> Iterator[str]:
    """One that sends `parts` to whoever asks, whatever was asked, and then closes, or `hold`s on in silence."""
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.recv(65536)
                for part in parts:
                    self.request.sendall(part)
                while hold and not ended.wait(0.05):
                    self.request.sendall(parts[-1] if parts else b"")

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
