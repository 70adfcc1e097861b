"""The report in a real Chromium: it renders without an error, filters, shows numbers on hover, and a model's text stays
text.
"""

import json

import pytest
from chromium import Browser, program
from report_runs import HOSTILE, add_gaps, add_held_out, add_metrics, make_run

from gspo_mega.report.page import make_report

pytestmark = pytest.mark.skipif(
    program() is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
)
ROWS = "document.querySelectorAll('#list tbody tr').length"


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of two runs."""
    folder = tmp_path_factory.mktemp("report")
    file, runs = folder / "report.html", [make_run(folder / "one"), make_run(folder / "two")]
    add_gaps(runs[0], 0)
    for step, marks in ((0, [False, True, None]), (12, [True, True, False])):
        add_held_out(runs[0], step, marks)
    file.write_text(make_report(runs), encoding="utf-8")
    return file


@pytest.fixture
def page(browser, report):
    """It, opened from disk."""
    browser.errors.clear()
    browser.open(report)
    yield browser
    assert browser.errors == []
    assert browser.run("window.broken === undefined")


def enter(page, field, value):
    page.run(
        f"(() => {{ const field = byId({json.dumps(field)}); field.value = {json.dumps(value)};"
        " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_summary_and_curves(page):
    text = page.run("byId('summary').innerText")
    assert (
        "learns: reward" in text
        and "objective.clip_low" in text
        and "rank 0: lost" in text
        and "torch 2.11" not in text
    )
    above = page.run("[...document.querySelectorAll('#overview .chart')].map((one) => one.innerText)")
    assert len(above) == 1 and above[0].startswith("Reward"), "this run has no held-out problems"
    last = page.run("number(DATA.runs[0].series['reward/mean'].findLast((value) => value !== null))")
    assert last in above[0], "the legend has the last value where no pointer is"
    page.run("byId('tab-curves').click()")
    page.until("document.querySelectorAll('#charts .uplot canvas').length >= 4")
    labels = page.run("[...document.querySelectorAll('#charts .uplot')].map((one) => one.ariaLabel).join()")
    assert "one: reward/mean" in labels and "two: reward/mean" in labels
    page.run("document.querySelector('#charts .u-over').scrollIntoView()")
    page.hover("#charts .u-over")
    page.until("/reward.mean:?\\s*0\\.\\d/.test(document.querySelector('#charts .u-legend').innerText)")
    page.run("byId('mean').click()")
    page.until("document.querySelector('#charts .uplot').ariaLabel.includes('mean of 2')")
    assert page.run("tickLabels([0.99991, 0.99992, 0.99993])") == ["0.99991", "0.99992", "0.99993"]
    assert page.run("tickLabels([null, 0.5, 1234567])") == ["", "0.5", "1234567"]
    page.run("byId('log').click()")
    assert "of 0 or below" not in page.run("byId('charts').innerText")
    page.run("zoom(3, 6)")
    assert page.run("Math.round(drawn[0].scales.x.min * 10)") == 30
    page.run("document.querySelector('.chart details summary').click()")
    page.until("document.querySelectorAll('.chart details table tbody tr').length === 12")
    for dark in (True, False):
        page.run(f"setTheme({json.dumps(dark)})")
        assert page.run("document.querySelectorAll('.uplot canvas').length >= 4")


def test_a_verdict_leads_to_its_curve(page):
    page.run("[...document.querySelectorAll('#summary .verdicts button')][0].click()")
    page.until("!byId('curves').hidden && document.activeElement.dataset.metrics === 'reward/mean'")


def test_a_run_that_collapsed_is_marked_and_sparse_or_small_values_are_not_lost(browser, tmp_path):
    folder = make_run(tmp_path / "one")
    (folder / "metrics.jsonl").unlink()
    for step in range(1, 61):
        held_out = {"eval/accuracy": step / 60, "eval/accuracy_standard_error": 0.01} if step % 20 == 0 else {}
        of_step = {"reward/mean": 0.6 if step < 30 else 0.0, "policy/clip_fraction": 0.0, "mismatch/budget_share": 0.1}
        add_metrics(folder, step, **of_step, **held_out)
    file = tmp_path / "report.html"
    file.write_text(make_report([folder]), encoding="utf-8")
    browser.errors.clear()
    browser.open(file)
    assert "What to try\nsmaller updates" in browser.run("byId('summary').innerText")
    browser.run("byId('tab-curves').click()")
    browser.until("document.querySelectorAll('.uplot canvas').length >= 4")
    assert browser.run("DATA.runs[0].marks.map((mark) => [mark.step, mark.text])") == [[30, "collapse"]]
    scale = (
        "(name) => { const of = charts.find((one) => one.plot && one.content.found[0].label === name).plot.scales.y;"
    )
    assert browser.run(f"({scale} return [of.min, of.max]; }})('policy/clip_fraction')") == [0, 1]
    assert "mismatch.budget 0.5" in browser.run("document.body.innerHTML")
    browser.run("byId('smooth').value = 0.9; byId('smooth').dispatchEvent(new Event('input'))")
    made = "charts.find((one) => one.plot && one.content.found.some((line) => line.label === name)).content.found"
    labels = f"((name) => {made}.map((line) => line.label))"
    assert browser.run(f"{labels}('reward/mean')") == ["reward/mean, raw", "reward/mean"]
    assert browser.run(f"{labels}('eval/accuracy')") == ["eval/accuracy"]
    browser.run("byId('log').click()")
    assert "of 0 or below are not on a log scale" in browser.run("byId('charts').innerText")
    assert browser.errors == []


def test_the_prompts_through_time_are_searched(page):
    page.run("byId('tab-prompt').click()")
    page.until("document.querySelectorAll('#through-time .card').length === 4")
    assert page.run("byId('p-count').innerText") == "1 of 1 prompts; 1 of them have answers at several steps"
    enter(page, "p-find", "nothing like it")
    page.until("byId('through-time').innerText === 'No prompt matches.'")


def test_trajectories_are_filtered_and_shown_token_by_token(page):
    page.run("byId('tab-trajectories').click()")
    page.until(f"{ROWS} === 8")
    for field, value, left in (
        *(("f-run", "1", 4), ("f-step-low", "2", 4), ("f-reward-low", "0.5", 4), ("f-text", "TWO 1", 2)),
        *(("f-finish", "length", 2), ("f-version", "1", 4), ("f-length-high", "1", 0), ("f-prompt", "train:7", 8)),
    ):
        enter(page, field, value)
        page.until(f"{ROWS} === {left}")
        page.run("byId('filters').reset()")
        page.until(f"{ROWS} === 8")
    steps = page.run("[...document.querySelectorAll('#list tbody tr')].map((row) => Number(row.cells[0].innerText))")
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 2, "the newest step is first"
    page.until("document.querySelectorAll('#detail .card').length === 2 && chosen === matching[0]")
    assert page.run("document.querySelector('#detail .card pre.response').innerText === chosen.n[0].x")
    for verdict, shown in ((True, "✓ correct"), (False, "✗ not correct"), (None, "")):
        page.run(f"chosen.c = {json.dumps(verdict)}; listPage(); showDetail()")
        assert page.run("document.querySelector('#detail .chosen h3 .verdict')?.innerText.trim() || ''") == shown
    page.key("j")
    page.until("chosen === matching[1]")
    page.run("choose(store.all[0])")
    page.hover("#detail .tokens span:nth-child(2)")
    page.until("!byId('token').hidden")
    text = page.run("byId('token').innerText")
    assert "id 6" in text and "log-prob -0.500" in text and "advantage -1.000" in text and "weight version 0" in text
    assert "trainer - server -0.2" in page.run("factText(factsOf(chosen.n[0], chosen, {})[0])")
    assert "largest mismatch of a token 0.2" in page.run("document.querySelector('#detail .card').innerText")
    for colouring in ("advantage", "mask", "version", "mismatch"):
        page.run(f"byId('colouring').value = {colouring!r}; byId('colouring').dispatchEvent(new Event('change'))")
        assert page.run("document.querySelector('#detail .tokens span').style.backgroundColor !== ''")


def test_held_out_answers_before_and_after_are_beside_each_other(page):
    page.key("5")
    page.until("!byId('answers').hidden")
    text = page.run("byId('answers').innerText")
    assert "one: gsm8k" in text and "two: No held-out answers are recorded" in text
    assert "3 prompts kept of the set; correct: 1 at step 0, 2 at step 12." in text
    pairs = page.run(
        "[...document.querySelectorAll('#answers .pair')].map((pair) => [...pair.children].map((one) =>"
        " [one.className, one.querySelector('h3').innerText, one.querySelector('pre').innerText]))"
    )
    before, after = pairs[0]
    assert before == ["card wrong", "step 0✗ not correct", f"{HOSTILE} 0"], "what was learnt is first"
    assert after == ["card right", "step 12✓ correct", f"{HOSTILE} 12"]
    tops = page.run("[...document.querySelectorAll('#answers .pair')[0].children].map((one) => one.offsetTop)")
    assert tops[0] == tops[1], "next to each other"
    assert pairs[1][0][0] == "card right" and pairs[2][0][1] == "step 0not scored"
    assert page.run("document.querySelectorAll('main img, main script, main b').length") == 0


def test_what_a_model_wrote_stays_text(page):
    page.run("byId('tab-trajectories').click()")
    page.until(f"{ROWS} === 8")
    assert page.run("document.querySelector('#list tbody td.text').innerText") == HOSTILE
    page.run("byId('tab-prompt').click()")
    page.until("document.querySelectorAll('#through-time .card').length === 4")
    assert page.run("document.querySelectorAll('main img, main script, main b').length") == 0
    assert page.run("document.querySelector('#through-time pre').innerText") == "1 + 1 = <b>"


def test_the_keyboard_alone(page):
    page.run("byId('tab-summary').focus()")
    page.key("ArrowRight")
    page.until("!byId('curves').hidden && document.activeElement.id === 'tab-curves'")
    page.key("3")
    page.until(f"!byId('trajectories').hidden && {ROWS} === 8")
    unnamed = "[...document.querySelectorAll('input, select')].filter((one) => !one.labels.length).map((one) => one.id)"
    assert page.run(unnamed) == []
