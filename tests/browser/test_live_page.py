"""The page of `gspo-mega watch` in a real Chromium: steps come while one reads, and nothing that one chose is lost."""

import threading

import pytest
from chromium import Browser, program
from report_runs import add_metrics, add_trajectories, make_run

from gspo_mega.report.live_page import LiveReport, LiveServer

pytestmark = pytest.mark.skipif(
    program() is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
)
ROWS = "document.querySelectorAll('#list tbody tr').length"


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


@pytest.fixture
def page(run):
    with LiveServer(LiveReport([run])) as server, Browser() as browser:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            browser.visit(server.url)
            yield browser
            assert browser.errors == []
        finally:
            server.shutdown()
            thread.join()


def test_new_steps_come_to_what_is_open(page, run):
    page.run("byId('tab-curves').click()")
    page.until("document.querySelectorAll('.uplot canvas').length >= 3")
    page.run("zoom(3, 6); window.first_chart = drawn[0]; document.querySelector('.chart details summary').click()")
    page.until("document.querySelectorAll('.chart details table tbody tr').length === 12")
    add_metrics(run, 13)
    page.until("drawn[0].data[0].length === 13")
    assert page.run("window.first_chart === drawn[0] && Math.round(drawn[0].scales.x.min * 10)") == 30
    page.until("document.querySelectorAll('.chart details table tbody tr').length === 13")
    page.run("byId('unzoom').click()")
    page.until("drawn[0].scales.x.max === 13")
    add_metrics(run, 14)
    page.until("drawn[0].scales.x.max === 14")
    assert "steps 1 to 14" in page.run("byId('summary').textContent")


def test_trajectories_are_added_behind_filters_and_choice(page, run):
    page.run("byId('tab-trajectories').click()")
    page.until(f"{ROWS} === 4")
    page.run("byId('f-reward-low').value = '0.5'; applyFilters(); next(1)")
    page.until(f"{ROWS} === 2 && document.querySelectorAll('#detail .card').length === 2")
    chosen = page.run("chosen.i")
    page.run("document.querySelector('#list tbody tr').focus()")
    add_trajectories(run, 2, consumed=False)
    add_metrics(run, 13)
    page.until("DATA.runs[0].steps.length === 13")
    assert page.run(ROWS) == 2, "a step whose episodes are still coming is not shown"
    add_trajectories(run, 3)
    page.until(f"{ROWS} === 3")
    assert page.run("chosen.i") == chosen and page.run("byId('f-reward-low').value") == "0.5"
    assert page.run("[...byId('list').tBodies[0].rows].indexOf(document.activeElement)") == 1, (
        "one newer row is above it"
    )
    page.run("byId('tab-prompt').click()")
    page.until("document.querySelectorAll('#through-time .card').length === 6")
    add_trajectories(run, 4)
    page.until("document.querySelectorAll('#through-time .card').length === 8")


def test_the_page_says_when_nobody_answers_and_keeps_what_it_has(run):
    with Browser() as browser:
        with LiveServer(LiveReport([run])) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            browser.visit(server.url)
            browser.until("looks > 0 && byId('live').textContent === 'live'")
            server.shutdown()
            thread.join()
        browser.until("byId('live').textContent.startsWith('not live')")
        assert "learns" in browser.run("byId('summary').textContent")
