"""A small hub for tests: the part of its HTTP interface that huggingface_hub uses to push and to fetch, on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"
STATUS = {"RepoNotFound": 404, "RevisionNotFound": 404, "EntryNotFound": 404, "GatedRepo": 403}
PATH = re.compile(
    r"(?:/api/models)?/(?P<name>[^/]+/[^/]+?)(/(?P<what>resolve|tree|revision)/(?P<rev>[^/]+)/?(?P<file>.*))?"
)


@dataclass
class Repo:
    """The commits of a repository, the newest last: an id and its files by name; and what goes wrong with it."""

    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    private: bool = False
    gated: bool = False
    status: int = 0  # the answer to all that is asked of it
    broken: set[str] = field(default_factory=set)  # files whose transfer breaks off

    def commit(self, files):
        """Add a commit with these files, and return its id."""
        oid = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()  # noqa: S324
        self.commits.append((oid, dict(files)))
        return oid

    def at(self, revision):
        """The id and the files of a revision; None if there is none."""
        rows = {oid: (oid, files) for oid, files in self.commits}
        return self.commits[-1] if revision == "main" and self.commits else rows.get(revision)


class Hub:
    """The repositories by name, the large files by their SHA-256, and what was asked for."""

    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.log: list[tuple[str, str]] = []
        self.url = ""

    def add(self, name, files):
        """Make a repository, or another commit in it, and return the id of the commit."""
        return self.repos.setdefault(name, Repo()).commit(files)

    def asked(self, name):
        """The files of a repository that were asked for."""
        return {path.split("/resolve/")[1].partition("/")[2] for _, path in self.log if path.startswith(f"/{name}/resolve/")}


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def answer(self, status=200, body=None, **headers):
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, code, status=0):
        self.answer(status or STATUS[code], {"error": code}, X_Error_Code=code, X_Error_Message=f"said {code}")

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append((self.command, path))
        match = PATH.fullmatch(path)
        repo = self.repo(match["name"])
        if repo is None:
            return
        found = repo.at(match["rev"] or "main")
        if found is None:
            self.refuse("RevisionNotFound")
        elif match["what"] == "resolve":
            self.send_file(repo, *found, match["file"])
        elif match["what"] == "tree":
            rows = [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in found[1].items()]
            self.answer(body=[row for row in rows if "recursive=True" in self.path or "/" not in row["path"]])
        else:
            self.answer(body={"id": match["name"], "sha": found[0], "siblings": [{"rfilename": one} for one in found[1]]})

    def repo(self, name):
        """The repository, if it may be seen; else that is said."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            self.refuse("RepoNotFound", 404 if repo is None else 401)
        elif repo.gated:
            self.refuse("GatedRepo")
        elif repo.status:
            self.answer(repo.status)
        else:
            return repo
        return None

    def send_file(self, repo, oid, files, name):
        if name not in files:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=oid)
            return
        data = files[name]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X_Repo_Commit": oid}
        if name in repo.broken and self.command == "GET":
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.answer(body=data, **headers)

    def do_PUT(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.hub.objects[oid] = data
        self.answer()

    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append((self.command, path))
        if path == "/api/validate-yaml":
            self.answer(body={"errors": [], "warnings": []})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."}, X_Error_Message="Invalid username or password.")
        elif path == "/api/repos/create":
            self.create(json.loads(data))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = json.loads(data)["files"]
            rows = [(one["path"], "lfs" if one["path"].endswith(".safetensors") else "regular") for one in files]
            if self.repo(match[1]):
                self.answer(body={"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in rows]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(data)["objects"]
            action = {"upload": {"href": f"{self.hub.url}/lfs/"}}
            rows = [{**one, "actions": {"upload": {"href": action["upload"]["href"] + one["oid"]}}} for one in objects]
            self.answer(body={"transfer": "basic", "objects": rows}, Content_Type="application/vnd.git-lfs+json")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self.commit(match[1], [json.loads(line) for line in data.splitlines()])

    def create(self, asked):
        name = f"{asked['organization'] or 'user'}/{asked['name']}"
        known = name in self.hub.repos
        if not known:
            self.hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.answer(409 if known else 200, {"url": f"{self.hub.url}/{name}"})

    def commit(self, name, rows):
        repo = self.repo(name)
        if repo is None:
            return
        files = dict(repo.commits[-1][1])
        for row in rows:
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif row["key"] == "deletedFile":
                del files[value["path"]]
        oid = repo.commit(files)
        self.answer(body={"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})


@contextmanager
def serving():
    """A `Hub` that answers at its `url` for as long as the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
