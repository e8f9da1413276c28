"""Pictures of the dashboard for the documents: `make screens`.

A real job of about half a minute is looked at while it runs, in light and dark and on a narrow screen. A second one
with another learning rate follows, for the picture of two runs beside each other and that of smoothed lines. The
picture of a hundred processes is that of a made record (made_history.py): few machines have room for that many.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.made_history import MadeJob, write
from support.paths import ROOT

from torchfleet.observe.dashboard.dashboard_server import Dashboard
from torchfleet.observe.dashboard.run_folders import RunFolders

SCREENS = ROOT / "docs" / "screens"
SCRIPT = ("examples/wide_deep/train.py", "--mode", "hybrid", "--batch_size", "256", "--rows", "400000", "--epochs", "3")
JOB = ("--server_num", "2", "--worker_num", "2", *SCRIPT)
SLOWER = ("--lr", "5e-4")  # a quarter of its rate
POINTS = 20  # seconds of training that the pictures have
PATIENCE = 300.0  # seconds until they are there
WIDE, NARROW, COMPARED = ({"width": w, "height": h} for w, h in ((1400, 1180), (380, 1500), (1400, 600)))


def main() -> None:
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("FLEET_TEST_CHROMIUM") or shutil.which("chromium")
    SCREENS.mkdir(exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take_running(browser, Path(folder) / "log")
        take_compared(browser, Path(folder) / "log")
        take_many(browser, Path(folder) / "made")
        browser.close()


def take_running(browser: Any, log_dir: Path) -> None:
    """A job while it runs."""
    with running_job(log_dir) as url:
        pages = [opened(browser, url, scheme, size) for scheme, size in (("light", WIDE), ("dark", WIDE))]
        pages.append(opened(browser, url, "light", NARROW))
        wait_for_training(pages[0])
        for page, name in zip(pages, ("light", "dark", "narrow"), strict=True):
            take(page, name)


def take_compared(browser: Any, log_dir: Path) -> None:
    """Another job beside the one that is recorded in `log_dir`, as it is and smoothed."""
    (before,) = (path.parent for path in log_dir.glob("2*/history.jsonl"))
    with running_job(log_dir, *SLOWER) as url:
        wait_for_training(opened(browser, url, "light", WIDE))
    with shown(RunFolders([log_dir], before)) as url:
        page = opened(browser, url, "light", COMPARED)
        page.wait_for_function("dashboard.other.times().length > 0")
        take(page, "compare")
        page.locator("#smoothing").fill("0.8")
        take(page, "smooth")


def take_many(browser: Any, folder: Path) -> None:
    """A hundred processes."""
    made = MadeJob(num_servers=4, num_workers=96, seconds=240, begin=time.time() - 170)
    with shown(RunFolders([write(folder, made, until=170)])) as url:
        page = opened(browser, url, "light", {"width": 1400, "height": 1100})
        page.locator("#roles h2").scroll_into_view_if_needed()
        page.click("tr[data-role='worker.1']")
        page.evaluate("scrollTo(0, 0)")
        take(page, "100_roles")


@contextlib.contextmanager
def shown(folders: RunFolders) -> Iterator[str]:
    """The address of a dashboard of these runs."""
    dashboard = Dashboard(folders, port=0)
    try:
        yield dashboard.url
    finally:
        dashboard.close(patience=0.5)


@contextlib.contextmanager
def running_job(log_dir: Path, *words: str) -> Iterator[str]:
    """The address of its dashboard; the job is waited for at the end. `words`: more for the script."""
    command = [sys.executable, "-m", "torchfleet.launch", "--log_dir", str(log_dir), "--dashboard", *JOB, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            assert job.stdout
            yield next(found[1] for line in job.stdout if (found := re.search(r"dashboard: (\S+)", line)))
            job.communicate(timeout=PATIENCE)
        finally:
            if job.poll() is None:
                job.terminate()
                job.communicate(timeout=30)


def opened(browser: Any, url: str, scheme: str, size: dict[str, int]) -> Any:
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    page.goto(url)
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    return page


def wait_for_training(page: Any) -> None:
    count = "() => dashboard.store.workers[0]?.series.values['metrics.loss']?.filter((v) => v !== null).length ?? 0"
    end = time.monotonic() + PATIENCE
    while page.evaluate(count) < POINTS:
        if time.monotonic() > end:
            raise TimeoutError(f"expected {POINTS} seconds of training within {PATIENCE:g} s")
        page.wait_for_timeout(500)


def take(page: Any, name: str) -> None:
    page.wait_for_timeout(1000)
    page.screenshot(path=str(SCREENS / f"dashboard_{name}.png"))
    print(SCREENS / f"dashboard_{name}.png", flush=True)


if __name__ == "__main__":
    main()
