"""The report in a real browser.

Without Chromium and its driver these tests are skipped, except in CI, where they fail.
"""

import json
import math
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ompq.allocation.problem import Allocation
from ompq.budgets import Budget
from ompq.report.explorer import STEPS
from ompq.report.page import write_report
from reports import CLOSING, HOSTILE, every_section, hostile_plan, toy_plan

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-prefers-reduced-motion",  # no smooth scrolling under a click
    "--window-size=1280,900",
)
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _program(variable, names):
    found = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), "")
    if not found:
        stop = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        stop(f"no {names[0]} found; run scripts/install or set {variable}")
    return found


@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_a_missing_browser_fails_in_ci_and_skips_elsewhere(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    monkeypatch.delenv("OMPQ_CHROMIUM", raising=False)
    with pytest.raises(outcome, match="no such-browser found; run scripts/install"):
        _program("OMPQ_CHROMIUM", ("such-browser",))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    service = pytest.importorskip("selenium.webdriver.chrome.service")
    options = webdriver.ChromeOptions()
    options.binary_location = _program("OMPQ_CHROMIUM", _NAMES)
    for argument in _ARGUMENTS:
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(
        options=options,
        service=service.Service(_program("OMPQ_CHROMEDRIVER", ("chromedriver",))),
    )
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def plan():
    return replace(toy_plan(), score_name="orm")


@pytest.fixture(scope="module")
def address(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "toy.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ompq.report.page.STEPS", STEPS)
        write_report(path, plan, results=every_section(), title="A toy")
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    """The opened page; whatever a test does, the console must stay silent."""
    browser.get(address)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    yield browser
    assert browser.get_log("browser") == []


@contextmanager
def screen(page, width):
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def by_id(page, name):
    return page.find_element("id", name)


def move_to(page, step):
    script = """const slider = document.getElementById("budget");
        slider.value = arguments[0];
        slider.dispatchEvent(new Event("input", {bubbles: true}));
        return Number(document.getElementById("limit").dataset.limit);"""
    return page.execute_script(script, step)


def shown_bits(page):
    script = """return Array.from(document.querySelectorAll("#bars .col"),
        (column) => [column.ariaLabel.split(": ")[0], column.dataset.bits,
                     column.querySelector(".up b").textContent]);"""
    return page.execute_script(script)


def shown_totals(page):
    script = """return Array.from(document.querySelectorAll("#totals tr"),
        (row) => [row.dataset.total, Number(row.dataset.value)]);"""
    return dict(page.execute_script(script))


def solved(plan, limit):
    return plan.with_budget(f"{limit / 1024!r}KiB")  # exact: 1024 is a power of two


def test_the_slider_shows_what_with_budget_gives(page, plan):
    last = int(by_id(page, "budget").get_attribute("max"))
    assert last >= 99
    seen = set()
    for step in (0, 1, last // 3, last // 2, last - 1, last):
        expected = solved(plan, move_to(page, step))
        bits = {name: choice for name, choice, _ in shown_bits(page)}
        assert bits == {name: str(c) for name, c in expected.allocation.items()}
        labels = {name: text for name, _, text in shown_bits(page)}
        assert labels == {n: str(c.weight) for n, c in expected.allocation.items()}
        totals = shown_totals(page)
        for cost in ("bytes", "bit_ops", "weight_bits"):
            assert totals[cost] == expected.totals[cost]
        assert totals["damage"] == pytest.approx(expected.damage, rel=1e-12)
        seen.add(tuple(bits.values()))
    assert len(seen) > 3


def test_the_page_opens_on_the_plan(page, plan):
    assert {n: c for n, c, _ in shown_bits(page)} == {
        name: str(choice) for name, choice in plan.allocation.items()
    }
    assert float(by_id(page, "limit").get_attribute("data-limit")) == 3.9 * 1024
    assert by_id(page, "other-head").text == "the plan"


def test_arrow_keys_move_the_slider(page):
    slider = by_id(page, "budget")
    before = shown_totals(page)
    slider.send_keys("\ue00e" * 4)  # page up: a tenth of the range each
    after = shown_totals(page)
    assert after["bytes"] > before["bytes"]
    assert after["damage"] < before["damage"]


def test_a_pinned_budget_stays_beside_the_slider(page, plan):
    pinned = solved(plan, move_to(page, 20))
    by_id(page, "pin").click()
    move_to(page, 90)
    cells = page.find_elements("css selector", "#totals tr[data-total=bytes] td")
    assert cells[1].text == f"{pinned.totals['bytes'] / 1024:.2f} KiB"
    assert by_id(page, "other-head").text.startswith("pinned ")
    lower = page.find_elements("css selector", ".down b")
    assert [b.get_property("textContent") for b in lower] == [
        str(choice.weight) for choice in pinned.allocation.values()
    ]
    by_id(page, "reset").click()
    assert by_id(page, "other-head").text == "the plan"


def test_uniform_bits_can_be_compared(page):
    by_id(page, "compare").send_keys("all W4A8")
    lower = page.find_elements("css selector", ".down b")
    assert {b.get_property("textContent") for b in lower} == {"4"}


def test_copy_gives_an_allocation(page, plan):
    grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.execute_cdp_cmd("Browser.grantPermissions", grant)
    expected = solved(plan, move_to(page, 33)).allocation
    by_id(page, "copy").click()
    text = page.execute_async_script(
        """const done = arguments[0];
        setTimeout(() => navigator.clipboard.readText().then(done, done), 100);"""
    )
    assert Allocation.from_json(json.loads(text)) == expected
    assert json.loads(text) == expected.to_json()
    assert by_id(page, "copied").text.startswith("Copied: 11 layers")


@pytest.mark.parametrize("works", [True, False])
def test_copy_without_a_clipboard_falls_back(page, plan, works):
    page.execute_script(
        """Object.defineProperty(navigator, "clipboard", {value: undefined});
        document.execCommand = () => arguments[0];""",
        works,
    )
    expected = solved(plan, move_to(page, 60)).allocation
    by_id(page, "copy").click()
    area = by_id(page, "copy-text")
    assert json.loads(area.get_property("value")) == expected.to_json()
    assert area.is_displayed() is not works
    words = "Copied" if works else "Press Ctrl+C"
    assert by_id(page, "copied").text.startswith(words)


def test_layers_are_reached_by_keyboard_and_explained(page, plan):
    move_to(page, 40)
    page.find_element("css selector", ".col[tabindex='0']").send_keys("\ue011")  # home
    assert by_id(page, "why").text.startswith(plan.graph.names[0])
    page.switch_to.active_element.send_keys("\ue014")  # right
    focused = page.switch_to.active_element
    assert focused.get_attribute("aria-selected") == "true"
    text = by_id(page, "why").text
    assert text.startswith(plan.graph.names[1])
    rows = page.find_elements("css selector", "#why tbody tr")
    assert len(rows) == len(plan.choices)
    chosen = page.find_element("css selector", "#why tr.chosen th").text
    assert chosen == focused.get_attribute("data-bits")
    damage = plan.scores.damage[1]
    assert float(rows[0].text.split()[1]) == pytest.approx(damage[0], rel=0.01)


def test_the_exchange_is_that_of_explain(page, plan):
    told = 0
    for unit, name in enumerate(plan.graph.names):
        by_id(page, f"unit-{unit}").click()
        exchange = plan.explain(name).exchange
        words = by_id(page, "why").text
        if exchange is None:
            assert "No exchange" in words
            continue
        told += 1
        pair = f"{exchange.choice} here and {exchange.after} instead of "
        assert f"{pair}{exchange.before} for {exchange.unit}" in words
        added = re.search(r"would add (\S+) damage, so it was refused", words).group(1)
        assert float(added) == pytest.approx(exchange.damage, rel=0.006)
    assert told > 5


def test_the_matrix_is_read_by_keyboard(page, plan):
    by_id(page, "orm-map").send_keys("\ue015\ue015\ue014")  # down, down, right
    text = by_id(page, "orm-read").text
    assert text.startswith(f"{plan.scores.orm[2, 1]:.3f}")
    assert plan.scores.orm_labels[2] in text
    assert plan.scores.orm_labels[1] in text


def boxes(page, selector):
    """Return left, top, right and bottom of the elements, in pixels."""
    script = """return Array.from(document.querySelectorAll(arguments[0]),
        (element) => element.getBoundingClientRect()).map(
        (box) => [box.left, box.top, box.right, box.bottom]);"""
    return page.execute_script(script, selector)


@pytest.mark.parametrize("width", [390, 1280])
def test_each_row_of_the_matrix_is_named_beside_it(page, plan, width):
    with screen(page, width):
        names = page.find_elements("css selector", ".heat-names span")
        assert [name.text for name in names] == list(plan.scores.orm_labels)
        ((left, top, _, bottom),) = boxes(page, ".heat")
        row = (bottom - top) / len(names)
        places = boxes(page, ".heat-names span")
        for number, (_, upper, right, lower) in enumerate(places):
            assert right <= left
            assert (upper + lower) / 2 == pytest.approx(
                top + row * (number + 0.5), abs=0.5
            )
            assert lower - upper < row + 1  # no name covers the next


def test_charts_beside_the_matrix_have_their_titles_above(page):
    titles = page.find_elements("css selector", ".orm .chart-title")
    assert [title.text.partition("\n")[0] for title in titles] == [
        "ORM",
        "gamma",
        "importance",
    ]
    ((_, top, _, _),) = boxes(page, ".heat")
    assert all(bottom <= top for *_, bottom in boxes(page, ".orm .chart-title"))


def test_on_a_phone_choices_and_remarks_fit(page):
    wide = """return Array.from(document.querySelectorAll(arguments[0]),
        (box) => box.scrollWidth > box.clientWidth);"""
    with screen(page, 390):
        found = page.execute_script(wide, "#why .scroll, #skipped .scroll")
    assert found == [False, False]


def test_a_box_fades_where_it_hides_more_and_names_stay(page):
    with screen(page, 390):
        (before, *_), *_ = boxes(page, ".layers tbody th")
        # Events of scrolling come with the next frame.
        fades = """const [left, done] = arguments;
            const table = document.querySelector("#layers .scroll");
            table.scrollLeft = left;
            requestAnimationFrame(() => requestAnimationFrame(
                () => done(table.classList.contains("more"))));"""
        assert page.execute_async_script(fades, 0)
        assert not page.execute_async_script(fades, 10_000)
        (after, *_), *_ = boxes(page, ".layers tbody th")
        assert 0 <= after <= before


def test_tables_sort(page, plan):
    button = page.find_element("xpath", "//th/button[text()='MACs']")
    for order in (1, -1):
        button.send_keys("\ue007")
        names = [
            cell.get_property("textContent")
            for cell in page.find_elements("css selector", ".layers tbody th")
        ]
        macs = [order * plan.graph[name].macs for name in names]
        assert macs == sorted(macs)


def test_dark_and_light_can_be_chosen(page):
    colour = "return getComputedStyle(document.body).backgroundColor"
    before = page.execute_script(colour)
    by_id(page, "theme").click()
    assert page.execute_script(colour) != before
    by_id(page, "theme").click()
    assert page.execute_script(colour) == before


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen(page, width):
    with screen(page, width):
        wide = page.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width


def test_several_limits_have_an_axis_each(browser, tmp_path):
    several = toy_plan("3.9KiB,0.004GBOPs")
    browser.get(write_report(tmp_path / "several.html", several).as_uri())
    buttons = browser.find_elements("css selector", "#axes button")
    assert [b.text for b in buttons] == ["Size", "Bit operations", "Average bits"]
    buttons[1].click()
    limit = move_to(browser, 50)
    expected = several.with_budget(Budget(bit_ops=limit))
    assert {n: c for n, c, _ in shown_bits(browser)} == {
        name: str(choice) for name, choice in expected.allocation.items()
    }
    assert browser.get_log("browser") == []


def test_average_bits_have_an_axis_of_their_own(page, plan):
    page.find_element("css selector", "#axes [data-cost=weight_bits]").click()
    weights = plan.problem.costs["weight_bits"].reference
    for step in (0, 40, 90):
        limit = move_to(page, step)
        # A last bit more, since dividing may have taken one away.
        budget = Budget(average_bits=math.nextafter(limit / weights, math.inf))
        expected = plan.with_budget(budget)
        assert {n: c for n, c, _ in shown_bits(page)} == {
            name: str(choice) for name, choice in expected.allocation.items()
        }
        assert shown_totals(page)["weight_bits"] <= limit


def test_other_plans_can_stand_beside(browser, plan, tmp_path):
    others = {"half of it": plan.with_budget("3.5KiB")}
    path = write_report(tmp_path / "others.html", plan, others=others)
    browser.get(path.as_uri())
    assert by_id(browser, "other-head").text == "half of it"
    lower = browser.find_elements("css selector", ".down b")
    assert [b.get_property("textContent") for b in lower] == [
        str(choice.weight) for choice in others["half of it"].allocation.values()
    ]
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [360, 1280])
def test_names_in_tables_stay_in_few_lines(page, width):
    with screen(page, width):
        rows = boxes(page, "tbody th")
    assert max(bottom - top for _, top, _, bottom in rows) < 90


def test_hostile_names_are_shown_as_text(browser, tmp_path):
    path = tmp_path / "hostile.html"
    sections = every_section(HOSTILE)
    browser.get(
        write_report(
            path, replace(hostile_plan(), score_name="orm"), results=sections
        ).as_uri()
    )
    for unit, name in enumerate((HOSTILE, CLOSING)):
        by_id(browser, f"unit-{unit}").click()
        assert by_id(browser, "why").text.startswith(name)
    by_id(browser, "orm-map").send_keys("\ue015")
    assert HOSTILE in by_id(browser, "orm-read").text
    assert len(browser.find_elements("css selector", "img")) == 1
    assert len(browser.find_elements("css selector", "body script")) == 2
    cells = browser.find_elements("css selector", ".layers tbody th")
    assert [cell.text for cell in cells] == [HOSTILE, CLOSING]
    assert browser.get_log("browser") == []


def test_the_matrix_of_a_score_without_orm_is_folded_away(browser, tmp_path):
    plan = replace(toy_plan(), score_name="weight_noise")
    browser.get(write_report(tmp_path / "plain.html", plan).as_uri())
    assert not by_id(browser, "orm-map").is_displayed()
    browser.find_element("css selector", "a[href='#orm']").click()
    assert by_id(browser, "orm-map").is_displayed()


def test_all_rows_of_the_table_of_layers_are_shown(page):
    box = page.find_element("css selector", "#layers .scroll")
    hidden = "return arguments[0].scrollHeight - arguments[0].clientHeight"
    assert page.execute_script(hidden, box) <= 20  # a horizontal scroll bar
