"""The report in a real browser, at a desk and on a phone: what must be seen at once is seen, and nothing sticks out.

The page is shown in a frame of exactly the asked size (Chromium's own window has a least width), by a page of ours
that measures it and says what it found.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from parity.page import write_page
from parity.tests.reports import finding, invented, passing

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome")
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
SCHEMES = {"light": 1, "dark": 0}
SEEN_AT_ONCE = {
    "verdict": "#verdict", "culprit": "#culprit-1", "diagnosis": ".culprit .fault", "command": ".culprit .command",
}  # fmt: skip
LEAST_CONTRAST = 4.5
"""WCAG AA, for text of ordinary size."""
MEASURE = """<!doctype html><body><pre id="said"></pre><iframe id="frame"></iframe><script>
const luminance = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const rgb = text => text.match(/[\\d.]+/g).map(Number);
function contrast(view, element) {
  const ink = luminance(rgb(view.getComputedStyle(element).color).slice(0, 3));
  let paper = [255, 255, 255];
  for (let at = element; at; at = at.parentElement) {
    const colour = rgb(view.getComputedStyle(at).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) { paper = colour.slice(0, 3); break; }
  }
  const [low, high] = [ink, luminance(paper)].sort((a, b) => a - b);
  return (high + .05) / (low + .05);
}
const frame = document.getElementById("frame");
const question = JSON.parse(decodeURIComponent(location.hash.slice(1)));
frame.style.cssText = `border:0;width:${question.width}px;height:${question.height}px`;
frame.onload = () => {
  const view = frame.contentWindow, page = frame.contentDocument, root = page.documentElement, boxes = {};
  for (const [name, selector] of Object.entries(question.selectors)) {
    const element = page.querySelector(selector);
    if (!element) continue;
    const { left, top, right, bottom } = element.getBoundingClientRect();
    boxes[name] = { left, top, right, bottom, text: element.textContent.trim().replace(/\\s+/g, " ") };
  }
  const written = [...page.body.querySelectorAll("*")].filter(e => !e.closest("svg") && e.checkVisibility() &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  const least = written.map(e => [contrast(view, e), e.className + " " + e.textContent.slice(0, 40)])
    .sort((a, b) => a[0] - b[0])[0];
  document.getElementById("said").textContent = JSON.stringify({
    width: view.innerWidth, height: view.innerHeight, scroll: root.scrollWidth, boxes, least,
    background: luminance(rgb(view.getComputedStyle(page.body).backgroundColor).slice(0, 3)),
    fetched: view.performance.getEntriesByType("resource").map(e => e.name) });
};
frame.src = question.page;
</script></body>"""

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """The page of a failing run, made by the command line, of a passing one and of one with many culprits."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "wrong_port.py").write_text(
        "from parity.faults import FaultyPort, fault\n"
        "from parity.ports import load_port\n"
        "PORT = FaultyPort(load_port('mlx'), 'port', [fault('F01'), fault('F02')])\n"
        "PORT.name = 'wrong_port:PORT'\n"
    )
    checks = [word for name in ("modules", "layers", "end_to_end", "vision") for word in ("--check", name)]
    done = subprocess.run(
        [sys.executable, "-m", "parity.cli.main", "check", "--port", "wrong_port:PORT", "--case", "mini", *checks,
         "--report", str(folder / "failing.html")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    write_page(folder / "passing.html", passing())
    modules = ("mlp", "router", "experts", "kda.recurrence", "a.module.with.a.very.long.name.that.nobody.would.choose")
    wrong = [
        finding(module=m, status="fail", error=0.5, inputs_agree=True, case=f"c{i}") for i, m in enumerate(modules)
    ]
    write_page(folder / "many.html", invented(*wrong))
    (folder / "measure.html").write_text(MEASURE)
    return folder


@pytest.fixture(scope="module")
def site(pages: Path):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=pages))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def chromium(profile: Path, *arguments: str) -> str:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    assert browser, f"none of {', '.join(BROWSERS)} is installed; on Debian: apt-get install chromium"
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", *arguments],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def measured(site: str, tmp_path: Path):
    def measure(name: str, size: str, scheme: str = "light") -> dict:
        width, height = SIZES[size]
        question = {"page": f"{name}.html", "width": width, "height": height, "selectors": SEEN_AT_ONCE}
        said = chromium(
            tmp_path,
            "--window-size=1400,1000",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            f"{site}/measure.html#{json.dumps(question).replace(' ', '%20')}",
        )
        text = said.partition('<pre id="said">')[2].partition("</pre>")[0]
        assert text, said[:2000]
        found = json.loads(unescape(text))
        assert (found["width"], found["height"]) == (width, height)
        return found

    return measure


@pytest.mark.parametrize("size", SIZES)
def test_a_failing_run_is_understood_without_scrolling(measured, size: str):
    found = measured("failing", size)
    width, height = SIZES[size]
    boxes = found["boxes"]
    assert boxes.keys() == SEEN_AT_ONCE.keys()
    for name, box in boxes.items():
        assert 0 <= box["left"] < box["right"] <= width, (name, box)
        assert 0 <= box["top"] < box["bottom"] <= height, (name, box)
    assert boxes["verdict"]["text"] == "✗ wrong_port:PORT disagrees with the reference"
    assert "kda.gate K3.md §4.4" in boxes["culprit"]["text"]
    assert boxes["diagnosis"]["text"] == "F01 + F02"
    assert boxes["command"]["text"].startswith("k3-parity check --port wrong_port:PORT --check modules")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["failing", "passing", "many"])
def test_nothing_sticks_out_and_nothing_is_fetched(measured, name: str, size: str):
    found = measured(name, size)
    assert found["scroll"] <= SIZES[size][0]
    assert found["boxes"]["verdict"]["bottom"] < SIZES[size][1]
    assert found["fetched"] == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["failing", "passing"])
def test_every_word_can_be_read_in_light_and_dark(measured, name: str, scheme: str):
    found = measured(name, "desktop", scheme)
    assert (found["background"] > 0.5) == (scheme == "light")
    assert found["least"][0] >= LEAST_CONTRAST, found["least"]
