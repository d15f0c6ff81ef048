"""A stand-in of the Hugging Face hub on the loopback: what huggingface_hub asks of it to upload a model.

Repositories, branches, the choice of how each file is uploaded, git LFS, commits and the sizes of files.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import yaml

TOKEN = "hf_secret"


class Hub:
    """What was uploaded."""

    def __init__(self) -> None:
        self.url = ""
        self.private: dict[str, bool | None] = {}
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}  # by repository and branch
        self.blobs: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.loses = ""  # the name of a file that it truncates

    def answer(self, method: str, path: str, query: dict, body: bytes) -> tuple[int, Any]:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if path == "/api/repos/create":
            asked = json.loads(body)
            repository = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if repository in self.private else 200
            self.private.setdefault(repository, {"private": True, "public": False}.get(asked.get("visibility")))
            self.files.setdefault((repository, "main"), {})
            return status, {"url": f"{self.url}/{repository}"}
        if path == "/api/validate-yaml":
            front = json.loads(body)["content"].split("---\n")[1]
            fields = yaml.safe_load(front)
            known = isinstance(fields, dict) and isinstance(fields.get("tags"), list)
            return 200, {"errors": [] if known else [{"message": f"what is {front}?"}], "warnings": []}
        if parts[0] == "lfs":
            self.blobs[parts[1]] = body
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**item, "actions": {"upload": {"href": f"{self.url}/lfs/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        assert parts[:2] == ["api", "models"], path
        repository, what, branch = "/".join(parts[2:4]), parts[4], parts[5]
        if repository not in self.private:
            return 404, {"error": "Repository not found"}
        return self.in_repository(repository, what, branch, body)

    def in_repository(self, repository: str, what: str, branch: str, body: bytes) -> tuple[int, Any]:
        if what == "branch":
            self.files.setdefault((repository, branch), {})
            return 200, {}
        files = self.files[repository, branch]
        if what == "preupload":
            modes = [
                {
                    "path": item["path"],
                    "uploadMode": "lfs" if item["path"].endswith((".safetensors", ".gguf")) else "regular",
                    "shouldIgnore": False,
                }
                for item in json.loads(body)["files"]
            ]
            return 200, {"files": modes}
        if what == "commit":
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "header":
                    self.messages.append(item["value"]["summary"])
                elif item["key"] == "file":
                    files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
                else:
                    files[item["value"]["path"]] = self.blobs[item["value"]["oid"]]
            oid = hashlib.sha1(body).hexdigest()
            return 200, {"commitUrl": f"{self.url}/{repository}/commit/{oid}", "commitOid": oid}
        assert what == "paths-info"
        return 200, [
            {"type": "file", "path": name, "size": len(files[name]) - (name == self.loses), "oid": "0" * 40}
            for name in parse_qs(body.decode())["paths"]
            if name in files
        ]


@contextmanager
def stand_in() -> Iterator[Hub]:
    """Run a hub until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            url = urlparse(self.path)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" and not url.path.startswith("/lfs/"):
                status, answer = 401, {"error": "Invalid username or password."}
            else:
                status, answer = hub.answer(self.command, url.path, parse_qs(url.query), body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = handle_any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
