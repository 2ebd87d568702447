"""`examples/alert_webhook.py` against a real server."""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "alert_webhook.py"


@contextmanager
def server(status: int = 204) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on a free port, and what was posted to it."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append({"path": self.path, "type": self.headers["Content-Type"], **json.loads(body)})
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/alerts", posted
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("no_proxy", "*")
    return runpy.run_path(str(EXAMPLE))


def test_posted(example: dict[str, Any]) -> None:
    with server() as (url, posted):
        example["main"](url)
    [alert] = posted
    assert alert["path"] == "/alerts" and alert["type"] == "application/json"
    assert alert["step"] == 12 and alert["phase"] == "data" and alert["weights"] == "clean"
    assert "step 12" in alert["text"] and alert["cause"]
    assert alert["line"] is None or alert["line"].rpartition(":")[0].endswith("alert_webhook.py")


def test_a_server_that_refuses_stops_nothing(example: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with server(status=500) as (url, posted):
        example["main"](url)
    assert len(posted) == 1
    assert "the alert was not delivered" in capfd.readouterr().err


def test_no_server_stops_nothing(example: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with server() as (url, _):
        pass
    example["main"](url)
    assert "the alert was not delivered" in capfd.readouterr().err
