"""A headless Chromium driven over its own protocol: open pages, ask, take pictures."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """The path of an installed Chromium, None without one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine alone; yields the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Chrome:
    """One browser with one tab."""

    def __init__(self, program: str) -> None:
        import websocket

        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [
            program,
            "--headless=new",
            "--no-sandbox",  # CI runs as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
            "--remote-allow-origins=*",
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        port = self._port()
        import urllib.request

        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            targets = json.load(answer)
        page = next(t for t in targets if t["type"] == "page")
        self._socket = websocket.create_connection(
            page["webSocketDebuggerUrl"], timeout=60
        )
        self._last = 0
        self.requests: list[str] = []
        self.failures: list[str] = []
        self._loaded = False
        for domain in ("Network", "Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def _port(self) -> int:
        path = Path(self._profile.name) / "DevToolsActivePort"
        for _ in range(300):
            if self._process.poll() is not None:
                raise RuntimeError("the browser ended at its start")
            if path.exists() and (text := path.read_text().splitlines()):
                return int(text[0])
            time.sleep(0.1)
        raise RuntimeError("the browser did not start within 30 s")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer, noting events on the way."""
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Network.responseReceived":
            response = parameters["response"]
            if response["status"] >= 400:
                self.failures.append(f"{response['status']} {response['url']}")
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            error = details.get("exception", {}).get("description", details["text"])
            self.failures.append(error.splitlines()[0])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(
        self, url: str, width: int = 1280, height: int = 900, scheme: str = "light"
    ) -> None:
        """Open a page in a window of this width; scheme is "light" or "dark"."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._width = width
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        self._loaded = False
        self.send("Page.navigate", url=url)
        for _ in range(200):
            self.evaluate("1")  # reads what has happened meanwhile
            if self._loaded and self.evaluate("document.readyState") == "complete":
                break
            time.sleep(0.05)
        else:
            raise RuntimeError(f"{url} did not load within 10 s")
        self.evaluate(
            "(async () => { if (window.MathJax && MathJax.startup)"
            " await MathJax.startup.promise; })()"
        )

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page (promises are awaited)."""
        result = self.send(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["text"])
        return result["result"].get("value")

    def screenshot(self, path: Path, top: int = 0, height: int | None = None) -> None:
        """Write a PNG of the page from `top` on, all of it by default."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        height = height or int(size["height"]) - top
        # A window that is high enough: capturing beyond it would resize the page anew.
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=self._width,
            height=top + height,
            deviceScaleFactor=1,
            mobile=self._width < 600,
        )
        time.sleep(0.5)  # until the theme's transitions have ended
        clip = {"x": 0, "y": top, "width": self._width, "height": height, "scale": 1}
        picture = self.send("Page.captureScreenshot", clip=clip)
        Path(path).write_bytes(base64.b64decode(picture["data"]))

    def elsewhere(self, base: str) -> list[str]:
        """The requests that went to another host than `base`."""
        own = urlsplit(base).netloc
        outside = ("http", "https", "ws", "wss", "ftp")
        return [
            url
            for url in self.requests
            if urlsplit(url).scheme in outside and urlsplit(url).netloc != own
        ]

    def close(self) -> None:
        """End the browser that this object started."""
        with contextlib.suppress(Exception):
            self.send("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        self._profile.cleanup()


def main() -> None:
    """chrome.py FOLDER PAGE OUT.png [width] [light|dark] [top] [height]: a picture."""
    import sys

    folder, page, out = sys.argv[1:4]
    width = int(sys.argv[4]) if len(sys.argv) > 4 else 1280
    scheme = sys.argv[5] if len(sys.argv) > 5 else "light"
    top = int(sys.argv[6]) if len(sys.argv) > 6 else 0
    height = int(sys.argv[7]) if len(sys.argv) > 7 else None
    browser = Chrome(os.environ.get("CHROME", find_browser() or "chromium"))
    try:
        with serve(Path(folder)) as base:
            browser.open(f"{base}/{page}", width, scheme=scheme)
            browser.screenshot(Path(out), top, height)
            print("elsewhere:", browser.elsewhere(base), "failures:", browser.failures)
    finally:
        browser.close()


if __name__ == "__main__":
    main()
