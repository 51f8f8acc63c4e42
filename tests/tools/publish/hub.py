"""A small server with the part of the Hugging Face Hub's HTTP interface that uploads, by Git LFS, and downloads use."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import yaml

TOKEN = "hf_of_this_test"
#: Files that the Hub stores by Git LFS.
_LARGE = (".safetensors", ".bin", ".model")


@dataclass
class Repository:
    """`branches`: the commits of each, the newest last, as files by name."""

    private: bool = False
    branches: dict[str, list[dict[str, bytes]]] = field(
        default_factory=lambda: {"main": [{".gitattributes": b"*.safetensors filter=lfs\n"}]}
    )

    def sha(self, branch: str) -> str:
        digest = hashlib.sha1()
        for files in self.branches[branch]:
            for name, content in sorted(files.items()):
                digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """`requests`: method and path of each, in order. `before`: called for each, may raise Refused or Dropped.

    `objects`: contents of large files by SHA-256, also of those that no commit has.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda method, path: None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def files(self, repository: str, branch: str = "main") -> dict[str, bytes]:
        """The files of the newest commit."""
        return self.repositories[repository].branches[branch][-1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes the connection is none."""


class Refused(Exception):
    """An answer with an error status. `code`: the Hub's name of the error. `content`: of the answer, besides."""

    def __init__(self, status: int, message: str, code: str = "", **content: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.content = status, code, {"error": message, **content}


class Dropped(Exception):
    """The connection is closed without an answer."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Not on the terminal."""

    def _answer(self, method: str) -> None:
        path = unquote(self.path.partition("?")[0])
        body = self._body()
        self.server.requests.append((method, path))
        try:
            self.server.before(method, path)
            self._check_token(method, path)
            self._route(method, path, body)
        except Refused as refused:
            headers = {"X-Error-Message": str(refused), **({"X-Error-Code": refused.code} if refused.code else {})}
            self._send(json.dumps(refused.content).encode(), refused.status, headers)
        except Dropped:
            self.close_connection = True
            self.connection.close()

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _check_token(self, method: str, path: str) -> None:
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if path.startswith("/lfs/"):  # another host, which must not see the token; its addresses are signed
            assert "Authorization" not in self.headers
        elif not known and (method in ("POST", "PUT") or self.headers.get("Authorization")):
            raise Refused(401, "Invalid credentials in Authorization header")

    def _route(self, method: str, path: str, body: bytes) -> None:
        routes: dict[str, Callable[..., None]] = {
            r"POST /api/repos/create": self._create,
            r"POST /api/validate-yaml": self._validate,
            r"POST /api/models/([^/]+/[^/]+)/branch/(.+)": self._branch,
            r"POST /api/models/([^/]+/[^/]+)/preupload/(.+)": self._preupload,
            r"POST /api/models/([^/]+/[^/]+)/commit/(.+)": self._commit,
            r"GET /api/models/([^/]+/[^/]+)/revision/(.+)": self._info,
            r"GET /api/models/([^/]+/[^/]+)": self._info,
            r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": self._batch,
            r"PUT /lfs/(\w{64})": self._store,
            r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)": self._resolve,
        }
        for pattern, route in routes.items():
            if found := re.fullmatch(pattern, f"{method} {path}"):
                return route(body, *found.groups())
        raise Refused(404, f"no such address: {method} {path}")

    def _repository(self, name: str, branch: str = "main") -> Repository:
        repository = self.server.repositories.get(name)
        if repository is None:
            raise Refused(404, "Repository not found", "RepoNotFound")
        if branch not in repository.branches:
            raise Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        return repository

    def _create(self, body: bytes) -> None:
        given = json.loads(body)
        name = f"{given['organization']}/{given['name']}"
        if given["organization"] == "somebody-else":
            raise Refused(403, "You don't have the rights to create a model under this namespace")
        if name in self.server.repositories:
            raise Refused(409, "You already created this model repo", url=f"{self.server.url}/{name}")
        self.server.repositories[name] = Repository(private=given.get("visibility") == "private")
        self._json({"url": f"{self.server.url}/{name}", "id": name})

    def _validate(self, body: bytes) -> None:
        """The Hub's own rules are not known; these are some of them."""
        text = json.loads(body)["content"]
        metadata = yaml.safe_load(text.split("---\n")[1])
        if not isinstance(metadata.get("license", "mit"), str):
            raise Refused(400, "Bad request", errors=[{"message": '"license" must be a string'}])
        self._json({"errors": [], "warnings": []})

    def _branch(self, body: bytes, name: str, branch: str) -> None:
        repository = self._repository(name)
        if branch in repository.branches:
            raise Refused(409, "Reference already exists")
        repository.branches[branch] = [*repository.branches["main"]]
        self._json({})

    def _info(self, body: bytes, name: str, branch: str = "main") -> None:
        repository = self._repository(name, branch)
        files = [{"rfilename": file} for file in repository.branches[branch][-1]]
        self._json({"id": name, "sha": repository.sha(branch), "private": repository.private, "siblings": files})

    def _preupload(self, body: bytes, name: str, branch: str) -> None:
        there = self._repository(name, branch).branches[branch][-1]
        answers = []
        for file in json.loads(body)["files"]:
            large = file["path"].endswith(_LARGE)
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if (content := there.get(file["path"])) is not None:
                blob = b"blob %d\0" % len(content) + content
                answer["oid"] = hashlib.sha256(content).hexdigest() if large else hashlib.sha1(blob).hexdigest()
            answers.append(answer)
        self._json({"files": answers})

    def _batch(self, body: bytes, name: str) -> None:
        self._repository(name)
        objects = []
        for one in json.loads(body)["objects"]:
            answer = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.server.objects:
                answer["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def _store(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "not the content of this name")
        self.server.objects[oid] = body
        self._json({})

    def _commit(self, body: bytes, name: str, branch: str) -> None:
        repository = self._repository(name, branch)
        files = dict(repository.branches[branch][-1])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.objects:
                    raise Refused(400, f"{value['path']} was not uploaded")
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repository.branches[branch].append(files)
        sha = repository.sha(branch)
        self._json({"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})

    def _resolve(self, body: bytes, name: str, branch: str, file: str) -> None:
        repository = self._repository(name)
        if repository.private and "Authorization" not in self.headers:
            raise Refused(401, "Access to this model is restricted")
        branch = branch if branch in repository.branches else "main"  # else a commit, of which the newest is asked for
        content = self.server.files(name, branch).get(file)
        if content is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self._send(content, 200, {"ETag": etag, "X-Repo-Commit": repository.sha(branch)})

    def _json(self, content: Any) -> None:
        self._send(json.dumps(content).encode(), 200, {"Content-Type": "application/json"})

    def _send(self, content: bytes, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
