"""A stand-in for the Hub, on this machine: repositories in memory, uploads in commits, downloads by revision."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_may_write"


class Hub(ThreadingHTTPServer):
    """Attributes: repos: Files of each repository; seen: Requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.history: dict[tuple[str, str], dict[str, bytes]] = {}
        self.seen: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, repo: str) -> str:
        """Name of what a repository holds."""
        content = json.dumps({name: hashlib.sha1(raw).hexdigest() for name, raw in sorted(self.repos[repo].items())})
        name = hashlib.sha1(content.encode()).hexdigest()
        self.history[repo, name] = dict(self.repos[repo])
        return name


@contextmanager
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, content: Any, status: int = 200, **headers: str) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        self.server.seen.append(f"POST {path}")
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "no write access"}, 403)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.server.repos.setdefault(name, {".gitattributes": b""})
            return self._answer({"url": f"{self.server.endpoint}/{name}", "id": name})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if found is None:
            return self._answer({"error": "unknown"}, 404)
        repo, what = found.groups()
        if what == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.server.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.server.repos[repo][value["path"]]
        commit = self.server.commit(repo)
        return self._answer({"commitUrl": f"{self.server.endpoint}/{repo}/commit/{commit}", "commitOid": commit})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.seen.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.*|/tree/.*)?", path):
            repo, rest = found.groups()
            if repo not in self.server.repos:
                return self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            files, commit = self.server.repos[repo], self.server.commit(repo)
            revision = (rest or "").removeprefix("/revision/")
            if (repo, revision) in self.server.history:
                files, commit = self.server.history[repo, revision], revision
            if rest and rest.startswith("/tree/"):
                listed = [
                    {"type": "file", "path": n, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                    for n, raw in files.items()
                ]
                return self._answer(listed)
            siblings = [{"rfilename": name} for name in files]
            return self._answer({"id": repo, "sha": commit, "siblings": siblings})
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
            repo, revision, name = found.groups()
            files = self.server.history.get((repo, revision)) or self.server.repos.get(repo, {})
            raw = files.get(name)
            if raw is None:
                return self._answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            tag = hashlib.sha1(raw).hexdigest()
            commit = revision if (repo, revision) in self.server.history else self.server.commit(repo)
            return self._answer(raw, ETag=f'"{tag}"', X_Repo_Commit=commit)
        return self._answer({"error": "unknown"}, 404)

    do_HEAD = do_GET
