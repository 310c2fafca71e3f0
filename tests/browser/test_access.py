"""For everybody: axe-core finds nothing in any of our parts and themes, and the keyboard alone is enough."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from jupyter_torchdist.testing import FakeJob
from tests.browser.frontend import Jupyter, Notebook
from tests.browser.test_output import FRONT_ENDS, an_output
from tests.lacking import lacking
from tests.leaks import wait_until

AXE = Path(__file__).parents[2] / "labextension" / "node_modules" / "axe-core" / "axe.min.js"

THEMES = ["JupyterLab Light", "JupyterLab Dark", "JupyterLab Dark High Contrast"]

WIDTHS = [320, 480, 700, 1280]

TABS = ["Curves", "Logs", "Ranks", "Communication", "Receipt"]

COLOURS = "".join(f"\x1b[{code}mcolour {code}\x1b[0m " for code in [*range(30, 38), *range(90, 98)])
GROUNDS = "".join(f"\x1b[{code}mground {code}\x1b[0m " for code in [*range(40, 48), *range(100, 108)])
LOOKS = " ".join(
    f"\x1b[{code}mlook {code}\x1b[0m"
    for code in ["1", "2", "2;31", "3", "4", "7", "9", "7;31", "31;40", "34;40", "37;47", "30;107", "93;103"]
)
PALETTE = ["".join(f"\x1b[38;5;{n}m{n:4d}\x1b[0m" for n in range(first, first + 24)) for first in range(16, 256, 24)]
EXACT = (
    "\x1b[38;2;10;0;80mnearly black\x1b[0m \x1b[38;2;255;255;200mnearly white\x1b[0m \x1b[48;5;52mon dark red\x1b[0m"
)

PAIR = "\x1b[38;2;90;0;0;48;2;0;0;0mdark red on black\x1b[0m"
LINES = [
    *[*PALETTE, COLOURS, GROUNDS, LOOKS, EXACT, PAIR, "bell \x07 and NUL \x00", "a very " + "long " * 2000],
    "https://pytorch.org and \x1b[31mhttps://example.org/red\x1b[0m",
]

LOG_CONTRAST = """selector => {
    // axe gives up on lines in a list that scrolls: their contrast is measured here, as WCAG 2 defines it.
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgba = colour => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].map((value, at) => at < 3 ? value : value / 255);
    };
    const over = ([r, g, b, alpha], ground) => [r, g, b].map((value, at) => value * alpha + ground[at] * (1 - alpha));
    const light = colour => {
        const [r, g, b] = colour.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const groundOf = element => {
        const own = element === null ? [255, 255, 255, 1] : rgba(getComputedStyle(element).backgroundColor);
        return own[3] === 1 ? own.slice(0, 3) : over(own, groundOf(element.parentElement));
    };
    const contrast = element => {
        const ground = groundOf(element);
        const style = getComputedStyle(element);
        const ink = rgba(style.color);
        ink[3] *= Number(style.opacity);
        const [low, high] = [light(ground), light(over(ink, ground))].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const texts = [...document.querySelectorAll(`${selector} .td-log-row *`)].filter(each =>
        [...each.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim()));
    const low = texts.map(each => [each, contrast(each)]).filter(([, ratio]) => ratio < 4.5);
    const told = low.map(([each, ratio]) => `${ratio.toFixed(2)} ${each.outerHTML.slice(0, 120)}`);
    return {looked: texts.length, low: told};
}"""


RUN_AXE = """async ([selectors, rules]) => {
    // JupyterLab's body has no height, so axe takes all that is in it for hidden, and looks at no colour.
    document.body.style.minHeight = '100vh';
    const {violations, passes} = await axe.run({include: selectors.map(each => [each])}, {iframes: false, ...rules});
    const short = (node, messages) => [node.html.slice(0, 160), messages.map(one => one.message.slice(0, 200)).join()];
    return {
        found: violations.map(each => ({
            rule: each.id,
            count: each.nodes.length,
            nodes: each.nodes.slice(0, 6).map(node => short(node, [...node.any, ...node.all, ...node.none]))
        })),
        coloured: (passes.find(each => each.id === 'color-contrast')?.nodes ?? []).length
    };
}"""


@pytest.fixture(autouse=True)
def axe() -> None:
    if not AXE.exists():
        lacking("axe-core is not installed: cd labextension && npm ci")


def check(page: Page, where: str, *selectors: str, least: int = 8, colours: bool = False) -> None:
    """Nothing is wrong in these elements, of whose texts the colours of ``least`` were looked at.

    ``colours``: at nothing else.
    """
    for selector in selectors:
        expect(page.locator(selector).first).to_be_visible()
    if not page.evaluate("() => 'axe' in window"):
        # As a script of its own it would be taken for a module of RequireJS, which Jupyter's pages have.
        page.evaluate(f"() => {{ const define = undefined; {AXE.read_text()} }}")
    # The level of our heading is right or wrong by the headings that the notebook's author writes above the cell.
    rules: dict[str, Any] = {"rules": {"heading-order": {"enabled": False}}}
    told = page.evaluate(RUN_AXE, [list(selectors), {"runOnly": ["color-contrast"]} if colours else rules])
    assert not told["found"], (where, told["found"])
    assert told["coloured"] >= least, (where, "axe has looked at hardly anything")


def check_log(page: Page, where: str, view: str) -> None:
    """Every text in the lines on the screen can be read, selected or not."""
    for words in ("", "selected"):
        if words:
            page.locator(f"{view} .td-logs-scroll").press("Control+a")
            expect(page.locator(f"{view} .td-log-row[aria-selected='true']").first).to_be_visible()
        told = page.evaluate(LOG_CONTRAST, view)
        assert not told["low"], (where, words, told["low"])
        assert told["looked"] > 200, where
    page.locator(f"{view} .td-logs-scroll").press("Escape")


def rich(job: FakeJob, lines: list[str] = LINES) -> None:
    """Something to see on each tab."""
    for rank in (0, 1):
        job.rank(rank).prints("".join(f"{line}\n" for line in lines))
        job.rank(rank).prints("a warning\n", "err")
        job.rank(rank).prints("[display 1: text/html] a table\n")
        job.rank(rank).displays({"number": 1, "data": {"text/html": "<table><tr><th>loss</th></tr></table>"}})
        job.rank(rank).records(*(a_log(step, loss=1 / (step + 1)) for step in range(9)))


def a_log(step: int, **values: Any) -> dict[str, Any]:
    return {"t": 1.0 + step, "k": "log", "step": step, "v": values}


def a_failed_job(label: str) -> FakeJob:
    job = FakeJob(now=time.time() - 30, label=label, source="a = 1\nraise ValueError('no good')\n")
    with job:
        job.running()
        rich(job, LINES[-3:])
        job.rank(1).failed()
        job.rank(0).interrupted()
        job.ended("failed", "rank 1 failed", 1)
    return job


def test_nothing_is_wrong_in_any_theme(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    rich(running_job)
    failed = a_failed_job("Cell In[2]")
    with FakeJob(now=time.time() - 60, label="Cell In[3]") as ended:
        ended.running().ended()
    jobs = [running_job, failed, ended]
    outputs = {number: [an_output(job.spec.job)] for number, job in enumerate(jobs)}
    path = server.write("access.ipynb", "1", "2", "3", outputs=outputs)
    page.set_viewport_size({"width": 1500, "height": 2200})  # axe looks at no colour that is scrolled out of sight
    notebook = Notebook.open(page, server, "lab", path)
    page.get_by_role("tab", name="Distributed Jobs").click()
    expect(page.locator(".td-row")).to_have_count(3)
    views = [notebook.view(number) for number in range(len(jobs))]
    places = [f".jp-Notebook .jp-CodeCell:nth-child({number} of .jp-CodeCell) .td-view" for number in (1, 2, 3)]
    for theme in THEMES:
        colours = theme != THEMES[0]  # nothing else is another theme's
        notebook.in_theme(theme)
        for view, words in zip(views, ("running", "failed", "succeeded"), strict=True):
            expect(view).to_contain_text(words)
            is_shown(view, "Logs")
        running, failed_view, _ = views
        running.get_by_role("button", name="Fold alike").click()
        check_log(page, theme, places[0])
        running.get_by_role("button", name="Side by side").click()
        expect(running.get_by_role("grid", name="lines of rank")).to_have_count(2)
        check(page, f"{theme}: side by side", places[0], least=20, colours=colours)
        running.get_by_role("button", name="Side by side").click()
        running.get_by_role("button", name="Cancel", exact=True).click()
        page.locator(".td-row").first.hover()
        # In one go, because axe looks at all of JupyterLab each time.
        check(page, f"{theme}: logs", ".lm-Widget.td-panel", ".td-status-button", *places, least=60, colours=colours)
        notebook.picture(f"{theme}-logs".replace(" ", "-"))
        running.get_by_role("button", name="Keep running").click()
        for tab in (each for each in TABS if each != "Logs"):
            is_shown(failed_view, tab)
            check(page, f"{theme}: failed, {tab}", places[1], colours=colours)
    assert not notebook.errors


def test_a_narrow_view_leaves_room_for_lines(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    """What is seldom used stands behind one button there; what is in force stays in sight."""
    rich(running_job)
    page.set_viewport_size({"width": 700, "height": 700})
    outputs = {0: [an_output(running_job.spec.job)]}
    notebook = Notebook.open(page, server, "lab", server.write("narrow.ipynb", "1", outputs=outputs))
    page.get_by_role("tab", name="Distributed Jobs").click()
    view = notebook.view(0)
    is_shown(view, "Logs")
    bar, search = view.locator(".td-logs-bar"), view.get_by_role("searchbox")
    follow, case, rest = (view.get_by_role("button", name=name) for name in ("Follow", "match upper", "more choices"))
    expect(search).to_be_visible()
    expect(follow).to_be_hidden()
    assert height(bar) < 3 * height(search)
    notebook.picture("narrow")
    rest.click()
    expect(follow).to_be_visible()
    case.click()
    check(page, "all choices of a narrow view", ".td-view")
    rest.click()
    expect(follow).to_be_hidden()
    expect(case).to_be_visible()
    page.get_by_role("tab", name="Distributed Jobs").click()
    page.set_viewport_size({"width": 1280, "height": 700})
    expect(follow).to_be_visible()
    expect(rest).to_be_hidden()
    assert not notebook.errors


@pytest.mark.soak
def test_nothing_is_wrong_at_any_width_of_a_view(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    """A narrow view hides words that stand beside its controls: they keep their names."""
    rich(running_job)
    failed = a_failed_job("Cell In[2]")
    outputs = {number: [an_output(job.spec.job)] for number, job in enumerate((running_job, failed))}
    page.set_viewport_size({"width": 1700, "height": 1500})
    notebook = Notebook.open(page, server, "lab", server.write("widths.ipynb", "1", "2", outputs=outputs))
    views = [notebook.view(number) for number in range(2)]
    for tab in TABS:
        for view in views:
            is_shown(view, tab)
            if tab == "Logs":
                view.get_by_role("button", name="Show display 1 of rank").first.click()
                expect(view.get_by_role("region", name="display 1")).to_contain_text("loss")
        for width in WIDTHS:
            page.add_style_tag(content=f".jp-Notebook .td-view {{ width: {width}px }}")
            expect(views[0]).to_have_css("width", f"{width}px")
            check(
                page,
                f"{tab}, {width} pixels",
                *(f".jp-Notebook .jp-CodeCell:nth-child({n} of .jp-CodeCell) .td-view" for n in (1, 2)),
            )
    assert not notebook.errors


def test_one_tab_looks_selected_in_forced_colours(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    """As where Windows has a contrast theme."""
    outputs = {0: [an_output(running_job.spec.job)]}
    notebook = Notebook.open(page, server, "lab", server.write("forced.ipynb", "1", outputs=outputs))
    view = notebook.view(0)
    is_shown(view, "Ranks")
    page.emulate_media(forced_colors="active")
    notebook.picture("forced")
    lines = view.get_by_role("tab").evaluate_all(SEEN_LINES)
    assert lines == [tab == "Ranks" for tab in TABS]
    assert not notebook.errors


def test_facts_stand_beside_their_names(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    """JupyterLab lets the names and values of lists in outputs float."""
    outputs = {0: [an_output(running_job.spec.job)]}
    notebook = Notebook.open(page, server, "lab", server.write("facts.ipynb", "1", outputs=outputs))
    view = notebook.view(0)
    is_shown(view, "Receipt")
    page.add_style_tag(content=".jp-Notebook .td-view { width: 640px }")
    expect(view).to_have_css("width", "640px")
    facts = view.locator("dl").last.locator("dt, dd")
    expect(facts.first).to_be_visible()
    edges = facts.evaluate_all("all => all.map(e => e.getBoundingClientRect().left)")
    assert len(set(edges[::2])) == len(set(edges[1::2])) == 1 and edges[0] < edges[1]


SEEN_LINES = """tabs => tabs.map(tab => {
    const ground = getComputedStyle(tab.closest('.td-view')).backgroundColor;
    return getComputedStyle(tab).borderBottomColor !== ground;
})"""


def height(element: Locator) -> float:
    box = element.bounding_box()
    assert box
    return box["height"]


@FRONT_ENDS
def test_keys_in_a_view_are_not_the_notebooks(
    front_end: str, server: Jupyter, page: Page, running_job: FakeJob
) -> None:
    rich(running_job)
    outputs = {0: [an_output(running_job.spec.job)]}
    notebook = Notebook.open(page, server, front_end, server.write("keys.ipynb", "1", "2", outputs=outputs))
    view = notebook.view(0)
    expect(view).to_contain_text("running")
    is_shown(view, "Logs")
    view.get_by_role("tab", name="Logs").focus()
    page.keyboard.press("ArrowRight")
    expect(view.get_by_role("tab", name="Ranks")).to_be_focused()
    page.keyboard.press("Home")
    expect(view.locator("canvas").first).to_be_visible()

    plot = view.get_by_role("figure", name="loss")
    plot.focus()
    for key in ("+", "ArrowRight"):
        shown = str(plot.get_attribute("aria-label"))
        page.keyboard.press(key)
        expect(plot).not_to_have_attribute("aria-label", shown)
        expect(plot).to_be_focused()

    is_shown(view, "Logs")
    lines, chosen = view.get_by_role("grid"), view.locator(".td-log-row[aria-selected='true']")
    lines.focus()
    for key in ("Home", "ArrowDown", "Shift+ArrowDown", "Control+a", "x", "b"):
        page.keyboard.press(key)
        expect(lines).to_be_focused()
    expect(chosen).not_to_have_count(2)
    assert chosen.count() > 2
    expect(page.locator(".jp-Notebook .jp-Cell")).to_have_count(2)
    file = server.root / "keys.ipynb"
    before = file.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    assert wait_until(lambda: file.stat().st_mtime_ns != before)
    assert not notebook.errors


def test_nothing_is_wrong_in_notebook(server: Jupyter, page: Page, running_job: FakeJob) -> None:
    """Which has other styles, and the panel at another place."""
    rich(running_job)
    path = server.write("access.ipynb", "1", outputs={0: [an_output(running_job.spec.job)]})
    page.set_viewport_size({"width": 1500, "height": 1200})
    notebook = Notebook.open(page, server, "notebook", path)
    view = notebook.view(0)
    expect(view).to_contain_text("running")
    page.get_by_role("menuitem", name="View").click()
    notebook.picture("menu")
    page.get_by_role("menuitem", name="Show Distributed Jobs").click()
    for tab in TABS:
        is_shown(view, tab)
        check(page, f"Notebook: {tab}", ".jp-Notebook .td-view", ".lm-Widget.td-panel")
    is_shown(view, "Logs")
    check_log(page, "Notebook", ".jp-Notebook .td-view")
    notebook.picture("notebook")
    notebook.in_theme(THEMES[1])
    for tab in ("Logs", "Curves"):
        is_shown(view, tab)
        check(page, f"Notebook, dark: {tab}", ".jp-Notebook .td-view", ".lm-Widget.td-panel", colours=True)
    notebook.picture("notebook-dark")
    assert not notebook.errors


def is_shown(view: Locator, tab: str) -> None:
    """The tab, once it is there."""
    view.get_by_role("tab", name=tab).click()
    expect(view.get_by_role("tabpanel", name=tab)).to_be_visible()
    if tab == "Curves":
        expect(view.locator("canvas").first).to_be_visible()


FOCUS = """() => {
    const element = document.activeElement;
    const {outlineStyle, outlineWidth, boxShadow} = getComputedStyle(element);
    const seen = (outlineStyle !== 'none' && parseFloat(outlineWidth) >= 1) || boxShadow !== 'none';
    const {width, height} = element.getBoundingClientRect();
    const ours = element.closest('.td-view, .td-panel.lm-Widget') !== null;
    return {ours, seen: seen && width > 0 && height > 0, what: element.outerHTML.slice(0, 200)};
}"""


def tab_to(page: Page, goal: Locator, key: str = "Tab") -> None:
    """Press the key until ``goal`` has the focus; where it stops on the way at a part of ours, that is to be seen."""
    for _ in range(100):
        page.keyboard.press(key)
        focus = page.evaluate(FOCUS)
        assert focus["seen"] or not focus["ours"], focus["what"]
        if goal.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"not reached: {focus['what']}")


def test_with_the_keyboard_alone(server: Jupyter, page: Page, home: Path) -> None:
    notebook = Notebook.open(page, server, "lab", server.write("keys.ipynb", "pass"))
    page.evaluate("() => window.jupyterapp.commands.execute('torchdist:show-jobs')")
    expect(page.get_by_label("Filter jobs")).to_be_focused()
    said = "No jobs yet. Run %load_ext jupyter_torchdist in a notebook, then a cell that begins with %%distribute."
    expect(page.locator(".td-panel")).to_contain_text(said)
    check(page, "the panel without a job", ".lm-Widget.td-panel", least=3)
    with FakeJob(now=time.time(), label="Cell In[7]") as job:
        job.running()
        rich(job)
        tab_to(page, page.get_by_role("button", name="Open Cell In[7]"))
        page.keyboard.press("Enter")
        view = page.locator(".td-main .td-view")
        expect(view).to_contain_text("running")
        tab_to(page, view.locator("[role=tab][aria-selected=true]"))
        page.keyboard.press("Home")
        expect(view.get_by_role("tabpanel", name="Curves")).to_be_visible()
        page.keyboard.press("ArrowRight")
        expect(view.get_by_role("tabpanel", name="Logs")).to_be_visible()

        tab_to(page, view.get_by_label("search the lines"))
        page.keyboard.type("ground 41")
        expect(view.get_by_role("group", name="search")).to_contain_text("1 of 1")
        tab_to(page, view.get_by_role("button", name="Only hits"))
        page.keyboard.press("Space")
        expect(view.locator(".td-log-row")).to_have_count(1)
        tab_to(page, view.get_by_role("grid"))
        page.keyboard.press("Home")
        expect(view.locator(".td-log-row[aria-selected='true']")).to_contain_text("ground 41")

        tab_to(page, view.get_by_role("button", name="Cancel", exact=True), "Shift+Tab")
        page.keyboard.press("Enter")
        expect(view).to_contain_text("Cancel this job?")
        expect(view.get_by_role("button", name="Cancel job", exact=True)).to_be_focused()
        check(page, "the tab, asking", ".td-main")
        page.keyboard.press("Escape")
        expect(view.get_by_role("button", name="Cancel", exact=True)).to_be_focused()
        job.ended()
    assert not notebook.errors
