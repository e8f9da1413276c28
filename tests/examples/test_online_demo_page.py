"""The page of `make demo-online` in a real browser."""

from __future__ import annotations

import os
import shutil

import pytest
from support.extras import imported
from test_online_demo import PATIENCE, url

CHROMIUM = os.environ.get("FLEET_TEST_CHROMIUM") or shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs Chromium: make test-browser installs it, FLEET_TEST_CHROMIUM=PATH"
    ),
]
__all__ = ["url"]  # a fixture
VALUE = "Number(document.getElementById('prediction').dataset.value)"


def test_the_prediction_moves_when_users_stop_clicking(url: str) -> None:
    api = imported("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith(url) else problems.append(f"asks {sent.url}"))
        page.set_default_timeout(1000 * PATIENCE)
        page.goto(url)
        page.wait_for_function(f"{VALUE} > 0.8")
        page.click("#ignored")
        page.wait_for_function(f"{VALUE} < 0.4")
        assert page.get_attribute("#ignored", "aria-pressed") == "true"
        assert page.get_attribute("#line", "points").count(",") > 2
        browser.close()
    assert not problems
