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
    """A Hub.

    Attributes:
        repos: Files of each repository.
        seen: Requests, with the range that was asked for.
        gated: Repositories that want a token, and refuse every one but ``TOKEN``.
        faults: By name of a file, or of a repository for what is said about it: what the next requests get: a status,
            or "cut": half of what is left of the file, and a closed connection.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.history: dict[tuple[str, str], dict[str, bytes]] = {}
        self.seen: list[str] = []
        self.gated: set[str] = set()
        self.faults: dict[str, list[int | str]] = {}

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

    def _refused(self, repo: str, name: str) -> bool:
        """Answer with what was planned for this request, if anything was; "cut" is for the file itself."""
        token = self.headers.get("Authorization")
        if repo in self.server.gated and token != f"Bearer {TOKEN}":
            message = "Access to this repository is restricted"
            self._answer({"error": message}, 403 if token else 401, X_Error_Code="GatedRepo", X_Error_Message=message)
            return True
        faults = self.server.faults.get(name, [])
        if not faults or (faults[0] == "cut" and self.command == "HEAD"):
            return False
        fault = faults.pop(0)
        if isinstance(fault, int):
            self._answer({"error": "as planned"}, fault)
            return True
        self._cut = True
        return False

    def _file(self, raw: bytes, **headers: str) -> None:
        """A file, or the rest of it that was asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked else 0
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(raw) - 1}/{len(raw)}"
        rest = raw[start:]
        if not self._cut:
            return self._answer(rest, 206 if asked else 200, **headers)
        self.send_response(206 if asked else 200)
        for name, value in {"Content-Length": str(len(rest)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(rest[: len(rest) // 2])
        self.close_connection = True
        return None

    def do_GET(self) -> None:
        self._cut = False
        path = unquote(urlsplit(self.path).path)
        self.server.seen.append(f"{self.command} {path} {self.headers.get('Range') or ''}".strip())
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.*|/tree/.*)?", path):
            repo, rest = found.groups()
            if self._refused(repo, repo):
                return None
            if repo not in self.server.repos:
                return self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            files, commit = self.server.repos[repo], self.server.commit(repo)
            revision = (rest or "").removeprefix("/revision/").removeprefix("/tree/")
            if revision not in ("", "main") and (repo, revision) not in self.server.history:
                return self._answer({"error": "Revision Not Found"}, 404, X_Error_Code="RevisionNotFound")
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
            if self._refused(repo, name):
                return None
            files = self.server.history.get((repo, revision)) or self.server.repos.get(repo, {})
            raw = files.get(name)
            if raw is None:
                return self._answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            tag = hashlib.sha1(raw).hexdigest()
            commit = revision if (repo, revision) in self.server.history else self.server.commit(repo)
            return self._file(raw, ETag=f'"{tag}"', X_Repo_Commit=commit)
        return self._answer({"error": "unknown"}, 404)

    do_HEAD = do_GET
