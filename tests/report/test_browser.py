"""The pages in headless Chromium: layout on a phone and on a desk, contrast, and what axe-core finds."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report.samples import LONG, make_full, make_report

from latte_convert.report.html import render_comparison, render_html

pytestmark = pytest.mark.slow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (390, 1280)

# Frames stand in for screens: media queries see the width of their frame. What is measured ends up in a <pre>.
HARNESS = """<!DOCTYPE html><html lang="en"><head><title>harness</title></head><body>
%(frames)s
<script>
const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
const parse = color => color.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => [r, g, b]
  .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
function background(view, element) {
  for (let e = element; e; e = e.parentElement) {
    const color = parse(view.getComputedStyle(e).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
  }
  return [255, 255, 255];
}
function measure(view) {
  const doc = view.document, faint = [];
  doc.querySelectorAll("details").forEach(d => d.open = true);
  const walker = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("title, desc, style")) continue;
    const style = view.getComputedStyle(element);
    const ink = parse(element.closest("svg") ? style.fill : style.color);
    const contrast = ratio(luminance(ink), luminance(background(view, element)));
    texts += 1;
    if (contrast < 4.5) faint.push([walker.currentNode.data.trim(), contrast]);
  }
  const loose = [...doc.querySelectorAll("main *, header *")].filter(e =>
    !e.closest(".scroll, .defs") && e.tagName !== "wbr" && e.getBoundingClientRect().right > view.innerWidth + 1);
  return {
    width: view.innerWidth, scroll: doc.documentElement.scrollWidth, texts, faint,
    loose: loose.map(e => e.outerHTML.slice(0, 120)),
    unlabelled: [...doc.querySelectorAll("[role=img]")]
      .filter(e => !e.getAttribute("aria-label") && !e.querySelector("title")).length,
    images: doc.querySelectorAll("img:not([alt])").length,
    requests: view.performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:")),
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
  };
}
addEventListener("load", async () => {
  const results = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const view = frame.contentWindow, result = measure(view);
    if (view.axe) result.axe = (await view.axe.run(view.document, {
      iframes: false, rules: {"color-contrast": {enabled: false}},  // slow, and measured above
    })).violations
      .map(v => [v.id, v.nodes.map(n => n.html.slice(0, 120))]);
    results.push(result);
  }
  const pre = document.createElement("pre");
  pre.id = "results";
  pre.textContent = JSON.stringify(results);
  document.body.append(pre);
});
</script></body></html>
"""


def pages() -> dict[str, str]:
    full = make_full()
    many = make_full(sites=24, convert=16, pattern=LONG)
    return {
        "full": render_html(full),
        "many sites": render_html(many),
        "scored": render_html(make_report(fidelity=False)),
        "comparison": render_comparison({"near-far": full, "a-rather-long-name-of-an-artifact": many}),
    }


def axe() -> str:
    """The script of axe-core as a page can hold it, or nothing where the package is not installed."""
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        return ""
    source = (Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    return "<script>" + source.replace("</script", "<\\/script") + "</script>"


def run(tmp_path: Path, scheme: str, script: str) -> dict[tuple[str, int], dict[str, Any]]:
    """What was measured, by page and width."""
    shown = {(name, width): page for name, page in pages().items() for width in WIDTHS}
    frames = "\n".join(
        f'<iframe title="{i}" style="width: {width}px; height: 900px; border: 0" '
        f'srcdoc="{html.escape(page.replace("</body>", script * (width == WIDTHS[0]) + "</body>"))}"></iframe>'
        for i, ((_, width), page) in enumerate(shown.items())
    )
    path = tmp_path / "harness.html"
    path.write_text(HARNESS % {"frames": frames}, encoding="utf-8")
    command = [
        CHROMIUM or "", "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
        f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="results">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    return dict(zip(shown, json.loads(html.unescape(found[1])), strict=True))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[tuple[str, int], dict[str, Any]]]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    known: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}

    def measure(scheme: str) -> dict[tuple[str, int], dict[str, Any]]:
        if scheme not in known:
            known[scheme] = run(tmp_path_factory.mktemp("browser"), scheme, axe() if scheme == "light" else "")
        return known[scheme]

    return measure


def test_pages_fit_their_screen(measured) -> None:
    for (name, width), result in measured("light").items():
        assert result["width"] == width
        assert result["scroll"] <= width, (name, width)
        assert result["loose"] == [], (name, width)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(measured, scheme: str) -> None:
    for place, result in measured(scheme).items():
        assert result["dark"] == (scheme == "dark")
        assert result["texts"] > 50, place
        assert result["faint"] == [], place


def test_nothing_is_requested_and_every_image_has_words(measured) -> None:
    for place, result in measured("light").items():
        assert result["requests"] == [], place
        assert (result["unlabelled"], result["images"]) == (0, 0), place


def test_axe_finds_no_violation(measured) -> None:
    if not axe():
        pytest.skip("axe-core-python is not installed")
    for (name, width), result in measured("light").items():
        if width == WIDTHS[0]:
            assert result["axe"] == [], name
