"""Pictures of the dashboard for the documents: `make screens`.

A real job of about half a minute is looked at while it runs, in light and dark and on a narrow screen. The picture of a
hundred processes is that of a made record (made_history.py): few machines have room for that many.
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
POINTS = 20  # seconds of training that the pictures have
PATIENCE = 300.0  # seconds until they are there
WIDE, NARROW = {"width": 1400, "height": 1180}, {"width": 380, "height": 1500}


def main() -> None:
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("FLEET_TEST_CHROMIUM") or shutil.which("chromium")
    SCREENS.mkdir(exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with running_job(Path(folder)) as url:
            pages = [opened(browser, url, scheme, size) for scheme, size in (("light", WIDE), ("dark", WIDE))]
            pages.append(opened(browser, url, "light", NARROW))
            wait_for_training(pages[0])
            for page, name in zip(pages, ("light", "dark", "narrow"), strict=True):
                take(page, name)
        made = MadeJob(num_servers=4, num_workers=96, seconds=240, begin=time.time() - 170)
        run = write(Path(folder) / "made", made, until=170)
        dashboard = Dashboard(RunFolders([run]), port=0)
        page = opened(browser, dashboard.url, "light", {"width": 1400, "height": 1100})
        page.locator("#roles h2").scroll_into_view_if_needed()
        page.click("tr[data-role='worker.1']")
        page.evaluate("scrollTo(0, 0)")
        take(page, "100_roles")
        dashboard.close(patience=0.5)
        browser.close()


@contextlib.contextmanager
def running_job(folder: Path) -> Iterator[str]:
    """The address of its dashboard."""
    command = [sys.executable, "-m", "torchfleet.launch", "--log_dir", str(folder), "--dashboard", *JOB]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            assert job.stdout
            yield next(found[1] for line in job.stdout if (found := re.search(r"dashboard: (\S+)", line)))
        finally:
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
