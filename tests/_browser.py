"""A headless Chromium for tests of the page: Debian's, through selenium, which downloads nothing.

Without one the tests skip and say why; where they must not (in CI, or with NAN_DETECTOR_BROWSER=required) they fail.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
)


def missing() -> str:
    """Why there is no browser; "" where there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install -e '.[dev]'"
    gone = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(gone)} is not there: apt-get install chromium chromium-driver" if gone else ""


def need_browser() -> None:
    """Skip the test without a browser, or fail it where there must be one."""
    if not (why := missing()):
        return
    if os.environ.get("CI") or os.environ.get("NAN_DETECTOR_BROWSER") == "required":
        pytest.fail(why)
    pytest.skip(why)


@dataclass(frozen=True)
class Opened:
    """A page in the browser, and what happened while it was loaded."""

    driver: Any
    console: list[str]
    requests: list[str]
    stopped: int  # requests that the page's own policy refused

    def run(self, script: str) -> Any:
        """What a script of the test's, which no policy of the page binds, returns."""
        return self.driver.execute_script(script)

    @property
    def text(self) -> str:
        """The text that a reader sees."""
        return str(self.run("return document.body.innerText"))


@contextmanager
def browser() -> Iterator[Any]:
    """A browser with a profile of its own, which is gone afterwards."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    os.environ["SE_OFFLINE"] = "true"
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    profile = tempfile.mkdtemp(prefix="nan-detector-browser-")
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


def open_page(driver: Any, path: Path, *, dark: bool = False, width: int = 1200, height: int = 900) -> Opened:
    """Open a file, as a phone or a screen of that width in CSS pixels, in the light or the dark."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    driver.get("about:blank")
    for kind in ("browser", "performance"):
        driver.get_log(kind)  # what was before
    driver.get(path.as_uri())
    console = [entry["message"] for entry in driver.get_log("browser")]
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    # What the page's policy stops is announced as well, and never sent.
    failed = [m["params"] for m in messages if m["method"] == "Network.loadingFailed"]
    stopped = {f["requestId"] for f in failed if f.get("blockedReason") == "csp"}
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    requests = [p["request"]["url"] for p in sent if p["requestId"] not in stopped]
    return Opened(driver, console, requests, len(stopped))


def screenshot(driver: Any, path: Path) -> None:
    """The whole page as a picture."""
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    path.write_bytes(base64.b64decode(taken["data"]))
