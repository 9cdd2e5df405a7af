"""A local server that answers as the Hub does, and breaks as downloads break."""

import hashlib
import json
import socket
import struct
import threading
import time
import urllib.parse
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """Serves files as datasets' repositories, counts what it gave, fails on demand.

    A file of the repository "" is served at its plain path.
    """

    def __init__(self):
        self.files = {}  # (repo, path): bytes
        self.given = Counter()  # (repo, path): bytes of bodies
        self.requests = []  # (path, Range header, "HEAD" or "")
        self.wrong = Counter()  # path: answers with a flipped byte
        self.broken = Counter()  # path: answers that break off in the middle
        self.reset = False  # and the connection is reset, not closed
        self.busy = Counter()  # path: answers 503
        self.ranges, self.pause = True, 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_POST(self):
                outer.list(self)

            def do_GET(self):
                outer.give(self)

            def do_HEAD(self):
                outer.give(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def list(self, request):
        repo = request.path.removeprefix("/api/datasets/").removesuffix(
            "/paths-info/main"
        )
        body = request.rfile.read(int(request.headers["Content-Length"])).decode()
        entries = []
        for path in urllib.parse.parse_qs(body)["paths"]:
            data = self.files.get((repo, path))
            if data is not None:
                lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
                kind = {"type": "file", "path": path, "size": len(data), "oid": "0"}
                entries.append({**kind, "lfs": lfs})
        data = json.dumps(entries).encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def give(self, request):
        repo, found, path = request.path.removeprefix("/datasets/").partition(
            "/resolve/main/"
        )
        if not found:
            repo, path = "", request.path.removeprefix("/")
        head = request.command == "HEAD"
        self.requests.append((path, request.headers.get("Range", "HEAD" * head)))
        data = self.files.get((repo, path))
        if data is None or self.busy[path] > 0:
            self.busy[path] -= data is not None
            request.send_error(404 if data is None else 503)
            return
        whole, start, middle = len(data), 0, len(data) // 2
        if self.wrong[path] > 0 and not head:
            self.wrong[path] -= 1
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        asked = request.headers.get("Range")
        if asked and self.ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
        else:
            request.send_response(200)
        request.send_header("Content-Length", str(whole - start))
        request.end_headers()
        if head:
            return
        stop = whole
        if self.broken[path] > 0:
            self.broken[path] -= 1
            stop = start + (whole - start) // 2
        for at in range(start, stop, 1 << 14):
            block = data[at : min(at + (1 << 14), stop)]
            try:
                request.wfile.write(block)
            except OSError:
                return
            self.given[repo, path] += len(block)
            time.sleep(self.pause)
        if stop < whole and self.reset:
            request.wfile.flush()
            time.sleep(0.05)  # what was sent arrives before the reset
            now = struct.pack("ii", 1, 0)
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
            request.connection.close()
        request.close_connection = True


@contextmanager
def serving():
    """Give a Hub that answers until the end."""
    hub = Hub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()
