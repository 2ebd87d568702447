"""The page in a real browser: quiet, self-contained, readable on a screen and a phone, in the light and the dark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason='the page is drawn with matplotlib: pip install "nan-detector[report]"')
pytest.importorskip("jinja2", reason='the page is made with jinja2: pip install "nan-detector[report]"')

import _logs
from _browser import Opened, browser, need_browser, open_page, screenshot
from _logs import digest, evil_log
from nan_detector._render.page import page
from nan_detector._render.palette import DARK, LIGHT


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    need_browser()
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    further = [replace(_logs.RUN, rank=1), replace(_logs.EVENT, event_id="e2", rank=1, severity="silent")]
    path.write_text(page(digest(_logs.records(), further), "runs/1"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evil") / "report.html"
    path.write_text(page(evil_log(), _logs.EVIL), encoding="utf-8")
    return path


def is_quiet(opened: Opened, path: Path) -> None:
    assert opened.console == []
    assert opened.requests == [path.as_uri()]


def rgb(color: str) -> str:
    return f"rgb({', '.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))})"


SIDEWAYS = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("width", [1200, 375])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_opens_quietly_and_fits(driver: Any, whole: Path, dark: bool, width: int, tmp_path: Path):
    opened = open_page(driver, whole, dark=dark, width=width)
    is_quiet(opened, whole)
    assert opened.run(SIDEWAYS) == 0
    colors = DARK if dark else LIGHT
    style = "return getComputedStyle(document.querySelector('{}')).{}"
    assert opened.run(style.format("body", "backgroundColor")) == rgb(colors["ground"])
    assert opened.run(style.format("body", "color")) == rgb(colors["ink"])
    assert opened.run(style.format("svg .stroke-line1", "stroke")) == rgb(colors["line1"])
    assert opened.run(style.format("article h2", "color")) == rgb(colors["bad"])
    for words in (
        "NaN born at step 87, in the forward pass",
        "encoder.norm2 (CustomNorm)",
        "torch.sqrt(var) * self.gain",
        "square root of a negative number",
        "torch.var(x, -1, correction=0)",
        "weights are clean",
        "on rank 1",
        "What was tried",
        "born here",
        "Headroom",
        "event at step 87",
    ):
        assert words in opened.text, words
    size = opened.run(
        "return Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"
    )
    assert size > 8, "the pictures' letters can be read"
    screenshot(driver, tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000


@pytest.mark.parametrize("width", [1200, 375])
def test_a_strangers_log_does_nothing(driver: Any, evil: Path, width: int):
    opened = open_page(driver, evil, width=width)
    is_quiet(opened, evil)
    assert opened.run(SIDEWAYS) == 0, "long words are broken or scroll in their own box"
    assert opened.run("return document.querySelectorAll('script, img').length") == 0
    assert "<img src=x onerror=alert(1)>" in opened.text


def test_what_is_folded_opens_with_the_keyboard(driver: Any, whole: Path):
    from selenium.webdriver.common.keys import Keys

    opened = open_page(driver, whole)
    assert "spread" not in opened.text.split("The whole record")[0].split("How it spread")[1]
    summary = driver.find_element("css selector", "summary")
    summary.send_keys(Keys.ENTER)
    assert opened.run("return document.querySelector('details').open") is True
    assert "models/net.py:12" in opened.text
    driver.find_element("css selector", "nav a[href='#event-2']").send_keys(Keys.ENTER)
    assert opened.run("return Math.abs(document.querySelector('#event-2').getBoundingClientRect().top) < 900")
    assert opened.run("return location.hash") == "#event-2"


def test_the_policy_stops_what_escaping_would_have_missed(driver: Any, whole: Path, tmp_path: Path):
    """The second wall: the same page with a script, a picture and a style smuggled in."""
    path = tmp_path / "report.html"
    smuggled = "<script>document.title = 'owned'</script><img src='http://192.0.2.1/x.png'><p style='color: red'>x</p>"
    path.write_text(whole.read_text(encoding="utf-8").replace("<main>", f"<main>{smuggled}"), encoding="utf-8")
    opened = open_page(driver, path)
    assert "owned" not in driver.title
    assert len([line for line in opened.console if "Content Security Policy" in line]) == 3
    assert opened.requests == [path.as_uri()] and opened.stopped == 1


def test_without_a_browser_the_tests_say_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("NAN_DETECTOR_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"apt-get install chromium|pip install"):
        need_browser()
    monkeypatch.setenv("NAN_DETECTOR_BROWSER", "required")
    with pytest.raises(pytest.fail.Exception, match=r"apt-get install chromium|pip install"):
        need_browser()
