"""A hub on this machine: it takes commits and gives files back, in as much of the protocol as is spoken here."""

import base64
import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "a" * 40


@contextmanager
def hub():
    """Its address and what repositories hold: {repo: {path: bytes}}."""
    held = {}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, body=b"", status=200, **headers):
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {
                "Content-Length": str(len(body)),
                "Content-Type": "application/json",
                **headers,
            }.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_POST(self):
            given = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[-1] == "create":
                name = json.loads(given)["name"]
                held.setdefault(f"me/{name}", {})
                return self.answer({"url": f"http://{self.headers['Host']}/me/{name}"})
            if parts[-1] == "validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            repo = "/".join(parts[2:4])
            if "preupload" in parts:
                files = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in json.loads(given)["files"]
                ]
                return self.answer({"files": files})
            for line in map(json.loads, given.splitlines()):
                if line["key"] == "file":
                    held[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/{repo}/commit/{COMMIT}"
            return self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url})

        def do_GET(self):
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[0] == "api":
                if parts[1:2] == ["whoami-v2"]:
                    return self.answer({"name": "me", "type": "user"})
                repo = "/".join(parts[2:4])
                if repo not in held:
                    return self.answer({"error": "no"}, 404, X_Error_Code="RepoNotFound")
                if "tree" in parts:
                    files = [
                        {"type": "file", "path": name, "size": len(x), "oid": COMMIT} for name, x in held[repo].items()
                    ]
                    return self.answer(files)
                siblings = [{"rfilename": name} for name in held[repo]]
                return self.answer({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
            repo, name = "/".join(parts[:2]), "/".join(parts[4:])
            if name not in held.get(repo, {}):
                code = "EntryNotFound" if repo in held else "RepoNotFound"
                return self.answer(b"", 404, X_Error_Code=code, X_Repo_Commit=COMMIT)
            body = held[repo][name]
            return self.answer(body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", held
    finally:
        server.shutdown()
        server.server_close()
