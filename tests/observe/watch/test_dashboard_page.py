"""The page in a real browser: its numbers, reconnects, many processes, narrow screens, colours, hostile names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.extras import imported
from support.made_history import BEGIN, MadeJob, append, write
from support.scripts.launching import SOON, TINY, forked_fleetrun, run_dir, wait_until

from torchfleet.observe.dashboard.dashboard_server import Dashboard
from torchfleet.observe.dashboard.job_record import JobRecord
from torchfleet.observe.dashboard.run_folders import RunFolders
from torchfleet.observe.watch.history import HistoryReader

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("FLEET_TEST_CHROMIUM") or shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs Chromium: make test-browser installs it, FLEET_TEST_CHROMIUM=PATH"
    ),
]
PATIENCE = 30_000  # milliseconds for what should come
SERVE = """
import sys, threading
from torchfleet.observe.dashboard.dashboard_server import Dashboard
from torchfleet.observe.dashboard.run_folders import RunFolders
print(Dashboard(RunFolders([sys.argv[1]]), port=int(sys.argv[2])).port, flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = imported("playwright.sync_api")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextlib.contextmanager
def opened(browser: Browser, url: str, complaints: int = 0, **options: Any) -> Iterator[Page]:
    """A page that has drawn the job once. It sends requests to its server alone, and logs no error."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    own = url.partition("#")[0]
    page.on("request", lambda asked: None if asked.url.startswith(own) else problems.append(f"asks {asked.url}"))
    page.goto(url)
    page.wait_for_selector("body[data-drawn]")
    yield page
    context.close()
    assert len(problems) <= complaints, problems


@contextlib.contextmanager
def served(folder: Path, compared: Path | None = None, **options: Any) -> Iterator[str]:
    dashboard = Dashboard(RunFolders([folder], compared), port=0, **options)
    try:
        yield dashboard.url
    finally:
        dashboard.close(patience=0.5)


def expected_store(folder: Path) -> dict[str, Any]:
    """What a page has to hold, from the record alone."""
    record = JobRecord()
    for each in HistoryReader(folder).records():
        record.take(each)
    found: dict[str, Any] = json.loads(json.dumps(record.snapshot()))
    return found


def store_of(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(
        """() => { const { grid, head, job, events, saves, roles } = dashboard.store;
        const plain = [...roles].map(([key, { key: _, ...role }]) => [key, role]);
        return { grid, head, job, events, saves, roles: Object.fromEntries(plain) }; }"""
    )
    return found


def tile(page: Page, name: str) -> float:
    return float(page.get_attribute(f"[data-tile='{name}'] .value", "data-value") or "nan")


def test_numbers_on_the_page_are_those_of_a_real_job(browser: Browser, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    script = (TINY, "--mode", "async", "--steps", "100000", "--pause", "0.02", "--until", str(until))
    fleet = ("--dashboard", "0", "--server_num", "2", "--worker_num", "2")
    with forked_fleetrun(tmp_path / "log", *fleet, *script) as job:
        job.wait_for("dashboard: http://127.0.0.1:")
        found = re.search(r"dashboard: (\S+)", job.output)
        assert found
        with opened(browser, found[1], complaints=20) as page:  # it goes on asking after the end
            page.wait_for_selector("#state[data-state=running]")
            page.wait_for_selector("[data-tile='metric.loss']")
            page.wait_for_selector("[data-chart=job] canvas")
            page.wait_for_selector("#link[data-state=live]")
            until.touch()
            assert job.wait() == 0
            page.wait_for_selector("#state[data-state=finished]")
            page.wait_for_selector("#notice:has-text('fleet dashboard')")
            folder = run_dir(tmp_path / "log")
            assert store_of(page) == expected_store(folder)
            last = {each["key"]: each for each in HistoryReader(folder).records() if each["kind"] == "role"}
            workers = [last[f"worker.{index}"]["status"] for index in range(2)]
            assert tile(page, "steps") == sum(worker["steps"] for worker in workers)
            logs = [(folder / f"workerlog.{index}").read_text() for index in range(2)]
            losses = [float(re.findall(r"ends with loss ([\d.]+)", log)[-1]) for log in logs]
            assert tile(page, "metric.loss") == pytest.approx(sum(losses) / 2, abs=2e-4)
            rows = sum(last[f"server.{index}"]["status"]["rows"]["words"] for index in range(2))
            assert tile(page, "rows") == rows == 16


def test_a_page_whose_server_was_killed_says_so_and_catches_up(browser: Browser, tmp_path: Path) -> None:
    job = MadeJob(seconds=60)
    folder = write(tmp_path / "run", job, until=20)
    with contextlib.ExitStack() as stack:
        process, port = stack.enter_context(server_process(folder, 0))
        with opened(browser, f"http://127.0.0.1:{port}/", complaints=50) as page:
            assert store_of(page) == expected_store(folder)
            append(folder, job.second(20))
            wait_until(lambda: store_of(page) == expected_store(folder), SOON, "new second on the page")
            process.send_signal(signal.SIGKILL)
            process.wait(SOON)
            page.wait_for_selector("#link[data-state=lost]")
            assert "server" in page.inner_text("#notice")
            for second in range(21, 40):
                append(folder, job.second(second))
            with server_process(folder, port):
                page.wait_for_selector("#link[data-state=live]")
                append(folder, job.second(40))
                wait_until(lambda: store_of(page) == expected_store(folder), SOON, "whole record on the page")
                assert page.is_hidden("#notice")


@contextlib.contextmanager
def server_process(folder: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", SERVE, str(folder), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_a_hundred_processes_are_drawn_soon_sorted_and_filtered(browser: Browser, tmp_path: Path) -> None:
    job = MadeJob(num_servers=4, num_workers=96, seconds=40)
    folder = write(tmp_path / "run", job, until=30)
    with served(folder) as url, opened(browser, url) as page:
        assert page.locator("#role-tables tbody tr").count() == 100
        assert "median of 96" in page.inner_text("[data-chart=samples_per_s] .legend")
        page.click("tr[data-role='worker.5']")
        page.locator("[data-chart=samples_per_s]").scroll_into_view_if_needed()
        page.wait_for_selector("[data-chart=samples_per_s] .legend li:has-text('worker 5')")
        page.click("th button:has-text('samples/s')")
        assert page.get_attribute("th:has(button:has-text('samples/s'))", "aria-sort") == "descending"
        speeds = page.evaluate("[...dashboard.store.workers].map((role) => [role.status.samples_per_s, role.key])")
        assert page.get_attribute("tbody tr[data-role^=worker]", "data-role") == max(speeds)[1]
        page.fill("#role-filter", "worker 5")
        page.wait_for_selector("#role-count:has-text('11 of 100')")  # 5 and 50 to 59
        drawn = int(page.get_attribute("body", "data-drawn") or 0)
        append(folder, job.second(30))
        page.wait_for_selector(f"body[data-drawn='{drawn + 1}']")
        assert float(page.get_attribute("body", "data-draw-ms") or "inf") < 1000


def test_narrow_screens_do_not_scroll_sideways_and_texts_can_be_read_in_light_and_dark(
    browser: Browser, tmp_path: Path
) -> None:
    folder = write(tmp_path / "run", MadeJob(seconds=50))
    with served(folder) as url:
        for scheme, width in (("light", 380), ("dark", 1280)):
            view = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
            with opened(browser, url, **view) as page:
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                lightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] > 128")
                assert lightness == (scheme == "light")
                assert page.evaluate(LOW_CONTRAST) == []
        with opened(browser, url, color_scheme="light") as page:
            page.click("#theme")
            page.click("#theme")
            assert page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 50")
            assert page.evaluate(LOW_CONTRAST) == []


# Texts whose contrast with what is behind them is below 4.5, by the rule of WCAG.
LOW_CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const part = (value) => (value /= 255, value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = parse(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.matches("option, .skip, .sr, noscript")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${node.tagName}.${node.className}: ${node.textContent.slice(0, 40)}`);
  }
  return low;
}"""

WIDER_THAN_PAPER = """() => [...document.querySelectorAll("table")]
  .filter((table) => table.getBoundingClientRect().right > 794).map((table) => table.textContent.slice(0, 40))"""
SHARES_OF_CARDS = """() => [...document.querySelectorAll(".plot canvas")]
  .map((canvas) => canvas.clientWidth / canvas.closest(".plot").clientWidth)"""

NASTY = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def test_on_paper_charts_fill_their_cards_and_tables_are_whole(browser: Browser, tmp_path: Path) -> None:
    """The charts were drawn on a wide screen. A sheet of A4 has 794 pixels."""
    run = write(tmp_path / "run", MadeJob())
    with served(run) as url, opened(browser, url, viewport={"width": 1400, "height": 900}) as page:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        page.set_viewport_size({"width": 794, "height": 1123})
        assert not page.locator(".sections").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 794
        assert page.evaluate(WIDER_THAN_PAPER) == []
        shares = page.evaluate(SHARES_OF_CARDS)
        assert len(shares) >= 12
        assert min(shares) > 0.95
        assert max(shares) <= 1.001


EMPTY = """() => [...document.querySelectorAll('.chart')].filter((card) => {
    const canvas = card.querySelector('canvas');
    if (!canvas?.width) return true;
    const blank = Object.assign(document.createElement('canvas'), { width: canvas.width, height: canvas.height });
    return canvas.toDataURL() === blank.toDataURL();
}).length"""


def test_charts_out_of_sight_are_drawn_also_after_a_change_of_width_or_colours(
    browser: Browser, tmp_path: Path
) -> None:
    run = write(tmp_path / "run", MadeJob())
    with served(run) as url, opened(browser, url, viewport={"width": 1300, "height": 400}) as page:
        wait_until(lambda: page.locator(".chart").count() > 5, SOON, "charts")
        wait_until(lambda: page.evaluate(EMPTY) == 0, SOON, "all charts are drawn")
        page.set_viewport_size({"width": 800, "height": 400})
        wait_until(lambda: page.evaluate(EMPTY) == 0, SOON, "all charts are drawn at another width")
        page.click("#theme")
        wait_until(lambda: page.evaluate(EMPTY) == 0, SOON, "all charts are drawn in other colours")


def test_before_its_server_answers_the_page_says_that_it_connects(browser: Browser, tmp_path: Path) -> None:
    run = write(tmp_path / "run", MadeJob())
    with served(run) as url:
        context = browser.new_context()
        page = context.new_page()
        held: list[Any] = []

        def hold(route: Any) -> None:
            held.append(route)

        page.route("**/events?*", hold)
        page.goto(url)
        page.wait_for_selector("#waiting")
        assert not page.is_visible("#settings")
        assert page.inner_text("#waiting")
        for route in held:
            route.continue_()
        page.wait_for_selector("#settings")
        assert not page.is_visible("#waiting")
        context.close()


def test_names_and_lines_from_the_job_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = MadeJob(num_servers=1, num_workers=1, seconds=30)
    job.tables = {NASTY: 1000.0, "__proto__": 500.0}
    write(folder, job, until=10)
    worker = next(each for each in job.second(10) if each["key"] == "worker.0")
    worker["status"]["metrics"] = {NASTY: 1.0, "constructor": float("nan"), "loss": 0.5}
    worker["status"]["host"] = NASTY
    append(folder, [worker, {"time": BEGIN + 10, "kind": "event", "text": NASTY}])
    (folder / "workerlog.0").write_text(f"{NASTY}\n</pre><b>bold</b>\n")
    with served(folder) as url, opened(browser, url) as page:
        page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
        page.wait_for_selector(f"#event-list >> text={NASTY}")
        assert page.locator("[data-tile^='metric.']").count() == 3
        assert page.inner_text("[data-tile='metric.constructor'] .value") == "nan"
        page.locator("#logs").scroll_into_view_if_needed()
        page.wait_for_selector("#log-text:has-text('bold')")
        assert page.inner_text("#log-text") == f"{NASTY}\n</pre><b>bold</b>\n"
        page.locator("[data-chart=rows]").scroll_into_view_if_needed()
        assert page.locator("[data-chart=rows] .legend .label").first.inner_text() == NASTY
        assert page.locator("main img, main script, pre b").count() == 0


def test_logs_follow_search_and_go_back(browser: Browser, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", MadeJob(num_servers=1, num_workers=2, seconds=10), until=5)
    log = folder / "workerlog.1"
    log.write_text("".join(f"line {number:06d}\n" for number in range(10_000)))
    with served(folder) as url, opened(browser, url) as page:
        page.locator("#logs").scroll_into_view_if_needed()
        page.select_option("#log-role", "worker.1")
        page.wait_for_selector("#log-text:has-text('line 009999')")
        assert "line 000000" not in page.inner_text("#log-text")
        with open(log, "a") as file:
            file.write("the last line\n")
        page.wait_for_selector("#log-text:has-text('the last line')")
        page.click("#log-earlier")
        page.wait_for_selector("#log-text:has-text('line 000000')")
        assert page.inner_text("#log-text") == log.read_text()
        page.fill("#log-search", "LINE 00777")
        page.wait_for_selector("#log-about:has-text('10 lines in the whole log')")
        assert page.inner_text("#log-text").split() == [w for n in range(7770, 7780) for w in ("line", f"{n:06d}")]


def test_a_token_in_the_address_becomes_a_cookie_and_runs_can_be_chosen(browser: Browser, tmp_path: Path) -> None:
    for name, workers in (("2026-11-16_1", 1), ("2026-11-15_1", 3)):
        write(tmp_path / "log" / name, MadeJob(num_servers=1, num_workers=workers, seconds=9))
    with served(tmp_path / "log", token="a-token-of-sixteen") as url:
        with opened(browser, url) as page:
            assert "token" not in page.url
            assert page.context.cookies()[0]["httpOnly"]
            assert page.locator("tr[data-role^=worker]").count() == 1
            page.select_option("#run", "2026-11-15_1")
            page.wait_for_selector("tr[data-role='worker.2']")
        context = browser.new_context()
        page = context.new_page()
        page.goto(url.partition("#")[0])
        page.wait_for_selector("#notice:has-text('token is needed')", timeout=PATIENCE)
        context.close()


def test_another_run_and_smoothed_lines_have_their_numbers_in_the_legend(browser: Browser, tmp_path: Path) -> None:
    names = ("2026-11-15_1", "2026-11-16_1")
    jobs = [MadeJob(num_servers=1, num_workers=1, seconds=20, seed=seed) for seed in (0, 1)]
    folders = [write(tmp_path / "log" / name, job) for name, job in zip(names, jobs, strict=True)]
    before, now = (losses_of(folder) for folder in folders)
    with served(tmp_path / "log", compared=folders[0]) as url, opened(browser, url) as page:
        page.wait_for_selector(in_legend(names[0], before[-1]))
        page.wait_for_selector(in_legend("worker 0", now[-1]))
        page.fill("#smoothing", "0.8")
        assert page.inner_text("#smoothing-weight") == "0.80"
        for name, losses in ((names[0], before), ("worker 0", now)):
            weights = [0.8**age for age in reversed(range(len(losses)))]
            mean = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
            page.wait_for_selector(in_legend(name, mean))


def in_legend(name: str, loss: float) -> str:
    """Where a line of this name has this number."""
    return f"[data-chart='metrics.loss'] .legend li:has([title='{name}']):has-text('{loss:.4f}')"


def losses_of(folder: Path) -> list[float]:
    """What its one worker has reported, second by second."""
    told = [each["status"] for each in HistoryReader(folder).records() if each.get("key") == "worker.0"]
    return [status["metrics"]["loss"] for status in told if status]
