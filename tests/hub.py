"""A stand-in for the Hub, on this machine: repositories in memory, uploads in commits, downloads by revision."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_may_write"
PAUSE = 1.5
"""Seconds that a slow answer takes."""


class Hub(ThreadingHTTPServer):
    """A Hub.

    Attributes:
        repos: Files of each repository; the names of those with samples begin with ``datasets/``.
        seen: Requests, with the range that was asked for.
        gated: Repositories that want a token, and refuse every one but ``TOKEN``.
        large: Names of files that lie elsewhere: who asks for them is sent there, to an address that takes no token.
        faults: By name of a file, or of a repository for what is said about it: what the next requests get: a status,
            "cut": half of what is left of the file, and a closed connection, or "slow": nothing for a while.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.history: dict[tuple[str, str], dict[str, bytes]] = {}
        self.seen: list[str] = []
        self.gated: set[str] = set()
        self.large: set[str] = set()
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

    def handle_error(self, *_: Any) -> None:
        """A client may leave whenever it wants to."""


@contextmanager
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _entry(name: str, raw: bytes) -> dict[str, Any]:
    """A file as a listing has it."""
    return {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}


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
        if found := re.fullmatch(r"/api/(datasets/[^/]+/[^/]+)/paths-info/[^/]+", path):
            asked = body.decode().replace("paths=", "").split("&") if b"paths=" in body else json.loads(body)["paths"]
            files = self.server.repos.get(found[1], {})
            return self._answer([_entry(name, files[name]) for name in map(unquote, asked) if name in files])
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
        if not faults or (isinstance(faults[0], str) and self.command == "HEAD"):
            return False
        fault = faults.pop(0)
        if isinstance(fault, int):
            self._answer({"error": "as planned"}, fault)
            return True
        self._cut = fault == "cut"
        if fault == "slow":
            Event().wait(PAUSE)  # the tests leave no time to sleep
        return False

    def _file(self, raw: bytes, **headers: str) -> None:
        """A file, or the rest of it that was asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(asked[1]) if asked else 0
        rest = raw[start : int(asked[2]) + 1] if asked and asked[2] else raw[start:]
        if asked:
            headers["Content-Range"] = f"bytes {start}-{start + len(rest) - 1}/{len(raw)}"
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
        for pattern, answer in (
            (r"/lfs/([^/]+)", self._elsewhere),
            (r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(/revision/.*|/tree/.*)?", self._about),
            (r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.*)", self._resolve),
        ):
            if found := re.fullmatch(pattern, path):
                return answer(*found.groups())
        return self._answer({"error": "unknown"}, 404)

    def _elsewhere(self, name: str) -> None:
        """A large file, at an address that is signed."""
        if self._refused("", name):
            return None
        if "Authorization" in self.headers:
            return self._answer({"error": "a signed address takes no token"}, 400)
        return self._file(next(files for files in self.server.repos.values() if name in files)[name])

    def _about(self, repo: str, rest: str | None) -> None:
        """What a repository holds, at a revision."""
        if self._refused(repo, repo):
            return None
        if repo not in self.server.repos:
            return self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        files, commit = self.server.repos[repo], self.server.commit(repo)
        _, kind, revision, below, *_ = [*(rest or "").split("/", 3), "", "", "", ""]
        if revision not in ("", "main") and (repo, revision) not in self.server.history:
            return self._answer({"error": "Revision Not Found"}, 404, X_Error_Code="RevisionNotFound")
        if (repo, revision) in self.server.history:
            files, commit = self.server.history[repo, revision], revision
        if kind == "tree":
            return self._answer([_entry(name, raw) for name, raw in files.items() if name.startswith(below)])
        siblings = [{"rfilename": name} for name in files]
        return self._answer({"id": repo.removeprefix("datasets/"), "sha": commit, "siblings": siblings})

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        """A file, or where it is."""
        elsewhere = name in self.server.large
        if self._refused(repo, "" if elsewhere else name):
            return None
        files = self.server.history.get((repo, revision)) or self.server.repos.get(repo, {})
        raw = files.get(name)
        if raw is None:
            return self._answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
        tag = hashlib.sha1(raw).hexdigest()
        commit = revision if (repo, revision) in self.server.history else self.server.commit(repo)
        if elsewhere:
            there = f"http://localhost:{self.server.server_address[1]}/lfs/{name}"  # another host than the Hub's
            linked = {"X_Linked_ETag": f'"{tag}"', "X_Linked_Size": str(len(raw)), "Location": there}
            return self._answer(b"", 302, X_Repo_Commit=commit, **linked)
        return self._file(raw, ETag=f'"{tag}"', X_Repo_Commit=commit)

    do_HEAD = do_GET
