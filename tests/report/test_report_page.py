"""The report in a real browser: every part that can be touched is touched.

Pictures of the page are left in build/screens, for people to look at.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser
from report.pages import other_run, run_folder
from shardwise.report import write_report

SCREENS = Path(__file__).parents[2] / "build" / "screens"

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run_folder(tmp_path_factory.mktemp("page")))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(shared: Browser, page: Path) -> Iterator[Browser]:
    """The page, freshly opened in a wide, light window; nothing may go wrong in it."""
    shared.window(1360, 1000)
    shared.open(page)
    shared.run("localStorage.clear()")
    shared.open(page)
    shared.complaints.clear()
    shared.requests.clear()
    yield shared
    assert shared.complaints == []
    assert [url for url in shared.requests if not url.startswith("file:")] == []


def block(browser: Browser, name: str) -> str:
    """The selector of the block that begins with a layer."""
    script = (
        "DATA.plan.drawing.blocks.findIndex"
        f"(([, , members]) => DATA.plan.layers[members[0]].name === '{name}')"
    )
    return f'[data-block="{browser.run(script)}"]'


def pixels(browser: Browser) -> str:
    return browser.run("document.querySelector('#canvas').toDataURL()")


def window(browser: Browser) -> tuple[float, float]:
    """What part of the step the timeline shows."""
    low, high = browser.run("[view.from / view.step.ticks, view.to / view.step.ticks]")
    return low, high


# -- the plan --------------------------------------------------------------------------------------


def test_a_click_on_a_layer_shows_its_costs_and_alternatives(browser: Browser) -> None:
    browser.click(block(browser, "left"))
    shown = browser.text("#layer")
    assert "left" in shown and "h=2 w=2" in shown and "share of cost" in shown
    assert browser.text("#alternatives .chosen td") == "h=2 w=2"
    assert browser.run("document.querySelectorAll('#alternatives tbody tr').length") >= 8
    assert browser.run(f"document.querySelector('{block(browser, 'left')}').ariaPressed") == "true"
    assert browser.run("document.querySelectorAll('.block[aria-pressed=true]').length") == 1


def test_layers_of_one_block_are_chosen_by_name(browser: Browser) -> None:
    browser.click(block(browser, "stem.0"))
    assert browser.text("#layer h3") == "stem.0"
    browser.click("#layer .chips button:nth-child(2)")
    assert browser.text("#layer h3") == "stem.1"
    assert browser.run("document.activeElement.textContent") == "batch_norm"


def test_the_pointer_over_a_layer_shows_a_tip(browser: Browser) -> None:
    browser.mouse("Moved", *browser.place(block(browser, "head.1")))
    assert not browser.run("tip.hidden")
    assert re.search(r"head\.1.*split c=4.*cost .* (ms|µs)", browser.text("#tip"))
    browser.mouse("Moved", 5, 5)
    assert browser.run("tip.hidden")


def test_keys_walk_through_the_layers(browser: Browser) -> None:
    browser.click(block(browser, "x"))
    browser.run("document.querySelector('.block[tabindex=\"0\"]').focus()")
    browser.key("ArrowDown")
    assert browser.text("#layer h3") == "stem.0"
    browser.key("ArrowDown")
    browser.key("ArrowUp")
    browser.key("Enter")
    assert browser.text("#layer h3") == "stem.0"
    assert browser.run("document.activeElement.dataset.block") == browser.run(
        f"document.querySelector('{block(browser, 'stem.0')}').dataset.block"
    )


def test_colours_are_those_of_the_splits(browser: Browser) -> None:
    for name, kind in (("stem.0", "n"), ("left", "spatial"), ("right.0", "f"), ("head.1", "c")):
        classes = browser.run(f"document.querySelector('{block(browser, name)}').classList.value")
        assert kind in classes.split()
    assert "fewer workers" in browser.text("#splits")
    assert browser.run("document.querySelectorAll('.edge.moves').length") > 0


def test_the_drawing_becomes_larger_and_smaller(browser: Browser) -> None:
    width = "Number(document.querySelector('#graph svg').getAttribute('width'))"
    before = browser.run(width)
    browser.click("#larger")
    assert browser.run(width) == pytest.approx(1.2 * before)
    browser.click("#smaller")
    assert browser.run(width) == pytest.approx(before)


# -- bars ------------------------------------------------------------------------------------------


def test_bars_are_sorted_as_asked_and_lead_to_the_layer(browser: Browser) -> None:
    names = "[...document.querySelectorAll('#bars .bar')].map((bar) => bar.dataset.layer)"
    slowest = browser.run(names)
    browser.run(
        "document.querySelector('#order').value = 'model';"
        "document.querySelector('#order').dispatchEvent(new Event('change'))"
    )
    assert browser.run(names) != slowest and browser.run(names)[0] == "stem.0"
    assert browser.run("document.querySelectorAll('#bars .bar:first-child .track').length") == 2
    browser.click("#bars .bar:first-child button")
    assert browser.text("#layer h3") == "stem.0"
    browser.mouse("Moved", *browser.place("#bars .bar:nth-child(2) .pair"))
    assert "predicted: forward" in browser.text("#tip") and "measured" in browser.text("#tip")


def test_all_layers_are_shown_when_asked_for(browser: Browser) -> None:
    # The net has few layers: as if a page showed fewer.
    count = "document.querySelectorAll('#bars .bar').length"
    total = browser.run("DATA.bars.layers.length")
    assert browser.run(count) == min(20, total)
    browser.run("while (DATA.bars.layers.length < 25) { DATA.bars.layers.push('more');"
                "for (const rows of Object.values(DATA.bars.seconds)) rows.push([0, 0, 0, 1e-6]); }"
                "drawBars()")  # fmt: skip
    assert browser.run(count) == 20
    browser.click("#all")
    assert browser.run(count) == 25
    browser.click("#all")
    assert browser.run(count) == 20


# -- the timeline ----------------------------------------------------------------------------------


def test_the_timeline_zooms_with_buttons_keys_wheel_and_double_click(browser: Browser) -> None:
    assert window(browser) == (0, 1)
    browser.click("#zoom-in")
    low, high = window(browser)
    assert high - low == pytest.approx(0.6)
    browser.click("#zoom-out")
    assert window(browser) == pytest.approx((0, 1))
    x, y = browser.place("#canvas")
    browser.mouse("Wheel", x, y, deltaX=0, deltaY=-100, modifiers=2)
    assert window(browser)[1] - window(browser)[0] < 0.7
    browser.click("#zoom-all")
    assert window(browser) == pytest.approx((0, 1))
    browser.click("#canvas", times=2)
    assert window(browser)[1] - window(browser)[0] == pytest.approx(0.4)
    browser.run("canvas.focus()")
    browser.key("0")
    assert window(browser) == pytest.approx((0, 1))
    browser.key("+")
    browser.key("+")
    browser.key("-")
    assert window(browser)[1] - window(browser)[0] == pytest.approx(0.6)


def test_the_timeline_moves_with_the_pointer_and_with_keys(browser: Browser) -> None:
    browser.click("#zoom-in")
    low, _ = window(browser)
    x, y = browser.place("#canvas")
    browser.mouse("Pressed", x, y, button="left", clickCount=1)
    browser.mouse("Moved", x - 100, y, button="left")
    browser.mouse("Released", x - 100, y, button="left", clickCount=1)
    dragged, _ = window(browser)
    assert dragged > low
    browser.run("canvas.focus()")
    browser.key("ArrowLeft")
    assert window(browser)[0] < dragged
    browser.key("ArrowRight")
    assert window(browser)[0] == pytest.approx(dragged)


def test_the_pointer_over_an_activity_says_its_name_and_time(browser: Browser) -> None:
    browser.place("#canvas")
    place = browser.run(
        "(() => { const row = view.rows[0], box = canvas.getBoundingClientRect();"
        "const span = row.spans.reduce((a, b) => (b.end - b.start > a.end - a.start ? b : a));"
        "return [box.left + toX((span.start + span.end) / 2), box.top + row.y + 5, span.name]; })()"
    )
    plain = pixels(browser)
    browser.mouse("Moved", place[0], place[1])
    assert not browser.run("tip.hidden")
    assert place[2] in browser.text("#tip")
    assert re.search(r"(forward|backward|update), [\d.]+ (ms|µs).*rank 0", browser.text("#tip"))
    assert pixels(browser) != plain


def test_keys_walk_through_the_activities(browser: Browser) -> None:
    browser.run("canvas.focus()")
    browser.key(".")
    assert "stem.0 · forward" in browser.text("#activity")
    browser.key("ArrowDown")
    assert "rank 1" in browser.text("#activity")
    first = browser.text("#activity")
    browser.key(".")
    assert browser.text("#activity") != first
    browser.key(",")
    assert browser.text("#activity") == first


def test_simulated_and_recorded_steps_are_both_there(browser: Browser) -> None:
    assert "A recorded step" in browser.text("#step-note")
    recorded = browser.run("view.step.seconds")
    browser.click("#steps button:first-child")
    assert "A simulated step" in browser.text("#step-note")
    assert browser.run("view.step.seconds") == pytest.approx(recorded / 1.25)
    browser.click("#timeline summary")
    assert browser.run("document.querySelector('#timeline details').open")
    assert browser.run("document.querySelectorAll('#ranks tbody tr').length") == 4


def test_activities_are_found_by_layer_and_kind(browser: Browser) -> None:
    plain = pixels(browser)
    browser.run(
        "find('#seek').value = 'stem.0';"
        "find('#seek').dispatchEvent(new Event('input')); find('#seek').focus()"
    )
    assert re.match(r"\d+ on rank 0, [\d.]+ (ms|µs)", browser.text("#found"))
    assert pixels(browser) != plain
    browser.key("Enter")
    assert "stem.0" in browser.text("#activity")
    low, high = window(browser)
    assert high - low < 1
    first = browser.text("#activity")
    browser.key("Enter")
    assert "stem.0" in browser.text("#activity") and browser.text("#activity") != first
    browser.run("find('#seek').value = 'nothing'; seek()")
    assert browser.text("#found") == "none"
    browser.key("Escape")
    assert browser.text("#found") == "" and browser.run("document.activeElement.id") == "canvas"


# -- curves, memory, rivals, settings --------------------------------------------------------------


def test_curves_are_read_with_pointer_and_keys(browser: Browser) -> None:
    assert browser.run("document.querySelectorAll('#training .chart').length") == 3
    reading = ".chart [role=status]"
    assert browser.text(reading).startswith("step 120: loss")
    browser.mouse("Moved", *browser.place(".chart svg"))
    middle = browser.text(reading)
    assert re.match(r"step [56]\d: loss", middle)
    browser.run("document.querySelector('.chart svg').focus()")
    browser.key("ArrowRight")
    assert browser.text(reading) != middle
    browser.key("ArrowLeft")
    assert browser.text(reading) == middle


def test_curves_are_smoothed_and_bent_as_asked(browser: Browser) -> None:
    curve = "document.querySelector('#training .curve:not(.raw)').getAttribute('points')"
    raw = browser.run(curve)
    browser.run("find('#smooth').value = 0.9; find('#smooth').dispatchEvent(new Event('input'))")
    assert browser.run(curve) != raw
    assert browser.run("document.querySelectorAll('#training .curve.raw').length") >= 3
    browser.run("find('#smooth').value = 0; find('#smooth').dispatchEvent(new Event('input'))")
    assert browser.run(curve) == raw
    browser.click("#logarithmic")
    assert browser.run(curve) != raw
    browser.click("#logarithmic")
    assert browser.run(curve) == raw


def test_shares_end_at_one_and_memory_has_a_curve_per_rank(browser: Browser) -> None:
    labels = "[...document.querySelectorAll('#training .chart:nth-child(2) text')]"
    numbers = browser.run(
        f"{labels}.filter((t) => t.getAttribute('text-anchor') === 'end')"
        ".map((t) => Number(t.textContent)).filter((n) => n < 5)"
    )
    assert max(numbers) <= 1
    assert browser.run("document.querySelectorAll('#memory .curve').length") == 4


def test_another_run_is_drawn_beside_it(browser: Browser, page: Path) -> None:
    other = other_run(page.parents[1])
    browser.open(write_report(page.parent, page.parent / "both.html", others=[other]))
    names = browser.run("DATA.charts[0].curves.map((curve) => curve.name)")
    assert len(names) == 2 and names[1] == "slower: loss"
    curves = "#training .chart:first-child .curve"
    assert browser.run(f"document.querySelectorAll('{curves}').length") == 2
    assert "slower" in browser.text("#runs")
    assert "lr 0.01 instead of 0.1" in browser.text("#differing")


def test_a_layer_is_found_by_name_and_an_alternative_says_why_not(browser: Browser) -> None:
    browser.run("find('#layer-name').value = 'head'; find('#layer-name').focus()")
    browser.key("Enter")
    assert browser.text("#layer h3").startswith("head")
    browser.run(
        "find('#layer-name').value = 'left'; find('#layer-name').dispatchEvent(new Event('input'))"
    )
    assert browser.text("#layer h3") == "left"
    browser.click("#alternatives tbody tr:not(.chosen) button")
    assert re.search(r"instead of h=2 w=2: [+\u2212][\d.]+ (ms|µs) \(", browser.text("#why"))


def test_comparisons_stand_one_above_the_other_on_a_phone(browser: Browser, page: Path) -> None:
    browser.window(360, 800)
    browser.open(page)
    assert browser.run("find('#rivals .wide').scrollWidth <= find('#rivals .wide').clientWidth")


def test_memory_rivals_and_settings_are_tables(browser: Browser) -> None:
    assert browser.run("document.querySelectorAll('#memory .bar').length") == 4
    assert "198 KiB" in browser.text("#memory .bar:last-child .value")
    rivals = browser.text("#rivals table")
    assert "this plan" in rivals and "sample (DDP)" in rivals and "moved in a step" in rivals
    assert "epochs" in browser.text("#settings table")


# -- the page as a whole ---------------------------------------------------------------------------


def test_the_contents_lead_to_every_part(browser: Browser) -> None:
    links = "[...document.querySelectorAll('#contents a')].map((link) => link.hash.slice(1))"
    assert browser.run(links) == [
        "plan",
        "rivals",
        "bars",
        "timeline",
        "training",
        "memory",
        "settings",
    ]
    browser.click("#contents a[href='#timeline']")
    browser.until("Math.abs(document.querySelector('#timeline').getBoundingClientRect().top) < 120")


CONTRAST = """
(() => {
  const parse = (text) => {
    const pen = document.createElement("canvas").getContext("2d");
    pen.fillStyle = text; pen.fillRect(0, 0, 1, 1);
    return pen.getImageData(0, 0, 1, 1).data;
  };
  const light = (text) => {
    const [r, g, b] = [...parse(text)].slice(0, 3)
      .map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (one) => {
    const colour = getComputedStyle(one).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? behind(one.parentElement) : colour;
  };
  const found = [];
  const texts = "h1, h2, p, td, th, dt, dd, nav a, button, li, .value span, .bar .name";
  for (const one of document.querySelectorAll(texts)) {
    if (!one.offsetParent || !one.textContent.trim()) continue;
    const [a, b] = [light(getComputedStyle(one).color), light(behind(one))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(`${one.tagName} ${one.textContent.slice(0, 30)}`);
  }
  return found;
})()
"""


def test_text_stands_out_in_light_and_in_dark(browser: Browser) -> None:
    assert browser.run(CONTRAST) == []
    browser.click("#theme")
    assert browser.run(CONTRAST) == []


def test_the_switch_changes_the_colours_and_is_remembered(browser: Browser, page: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light, drawn = browser.run(background), pixels(browser)
    browser.click("#theme")
    dark = browser.run(background)
    assert dark != light and pixels(browser) != drawn
    browser.open(page)
    assert browser.run(background) == dark
    assert browser.text("#theme") == "Light"
    browser.click("#theme")
    assert browser.run(background) == light


def test_the_colours_of_the_system_are_the_default(browser: Browser, page: Path) -> None:
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.window(1360, 1000, dark=True)
    browser.open(page)
    assert browser.run("getComputedStyle(document.body).backgroundColor") != light


@pytest.mark.parametrize("width", [360, 700, 1360])
def test_no_window_is_too_narrow(browser: Browser, page: Path, width: int) -> None:
    browser.window(width, 800)
    browser.open(page)
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_it_prints(browser: Browser) -> None:
    printed = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert printed.startswith(b"%PDF") and len(printed) > 20_000


def test_screens(browser: Browser, page: Path) -> None:
    for name, width, dark in (("light", 1360, False), ("dark", 1360, True), ("narrow", 400, False)):
        browser.window(width, 1000 if width > 600 else 850, dark)
        browser.open(page)
        for part in ("summary", "plan", "rivals", "bars", "timeline", "training", "memory"):
            path = SCREENS / f"{name}-{part}.png"
            browser.photograph(path, f"#{part}")
            assert path.stat().st_size > 5_000
