"""The page of a run with many trajectories in a real Chromium: how long it is busy without a pause while one reads in it.

    python tests/soak/large_report.py [--trajectories 10000] [--tokens 36] [--longest-ms 1000] [--screenshots FOLDER]

Makes a run's folder with a journal of its own, writes its report, and opens the page: every part, filters, a search in
the text, a choice, a prompt through time, curves. Prints the longest task of the browser's main thread and the time of
each action, from the action until the page has painted again. Fails where a task is longer than `--longest-ms`, where
the page has an error, or where a trajectory is missing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "browser"), str(ROOT / "tests" / "support")]

from chromium import Browser, program
from report_runs import add_metrics, make_run

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import write_token_gaps
from gspo_mega.report.page import make_report

GROUP_SIZE, GROUPS_PER_STEP, NUM_PROMPTS = 8, 32, 400
# Tasks above 50 ms are told by the browser itself. The page cannot see them before it is loaded.
WATCH = (
    "window.tasks = []; new PerformanceObserver((list) => list.getEntries().forEach((one) => tasks.push(one.duration)))"
    ".observe({type: 'longtask', buffered: true}); true"
)
PAINTED = "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(true))))"
SEARCH = "byId('f-text').value = '{}'; byId('f-text').dispatchEvent(new Event('input', {{bubbles: true}}))"
ACTIONS = (
    ("unpack and list all trajectories", "choosePart('trajectories')"),
    ("search in all texts", SEARCH.format("answer 7")),
    ("the same, one letter more", SEARCH.format("answer 77")),
    ("clear the filters", "byId('filters').reset()"),
    ("choose one, beside its group", "next(1)"),
    ("the next one", "next(1)"),
    ("colour by mismatch", "colouring = 'mismatch'; showDetail()"),
    ("the next hundred", "byId('later').click()"),
    ("a prompt through time", "choosePart('prompt')"),
    ("curves", "choosePart('curves')"),
    ("smoothing", "byId('smooth').value = '0.8'; byId('smooth').dispatchEvent(new Event('input'))"),
    ("zoom", "zoom(3, 30)"),
    ("the other colours", "setTheme(!isDark())"),
)


def make_large_run(path: Path, num_trajectories: int, num_tokens: int, seed: int = 0) -> None:
    folder, chance = RunFolder(make_run(path)), random.Random(seed)
    num_steps = -(-num_trajectories // (GROUP_SIZE * GROUPS_PER_STEP))
    for step in range(13, num_steps + 1):
        add_metrics(path, step)
    journal, left = Journal(folder.journal_dir), num_trajectories
    for step in range(num_steps):
        groups = []
        for number in range(GROUPS_PER_STEP):
            if left > 0:
                groups.append(_group(step, number, min(left, GROUP_SIZE), num_tokens, chance))
                left -= GROUP_SIZE
        batch = RolloutBatch(step, groups)
        with journal.begin(step, step, GROUP_SIZE, {group.group_id: group for group in groups}) as writer:
            writer.finish(batch, {})
        rows = np.repeat(np.arange(len(batch.trajectories), dtype=np.int32), num_tokens)
        places = np.tile(np.arange(num_tokens, dtype=np.int32) + 2, len(batch.trajectories))
        gaps = np.random.default_rng(step).normal(0, 0.03, len(rows)).astype(np.float16)
        write_token_gaps(folder.journal_dir, batch, [{"rows": rows, "places": places, "gaps": gaps}])


def _group(step: int, number: int, size: int, num_tokens: int, chance: random.Random) -> Group:
    name = (step * GROUPS_PER_STEP + number) % NUM_PROMPTS
    prompt = Prompt(f"train:{name}", "train", (1, 2), f"question {name} " * 8, answer=str(name))
    rows = [
        one_turn_row(
            *(f"step{step:06d}-g{number:05d}-s{sample:03d}", number, prompt),
            *([chance.randrange(5, 150) for _ in range(num_tokens)], [1] * num_tokens),
            *([-chance.expovariate(3) for _ in range(num_tokens)], [step] * num_tokens, "stop"),
            " ".join(f"answer {chance.randrange(1000)}" for _ in range(num_tokens // 3)),
            reward=float(sample % 2),
        )
        for sample in range(size)
    ]
    return Group.from_rows(number, prompt, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=36, help="of each response")
    parser.add_argument("--longest-ms", type=float, default=1000.0, help="a longer task counts as freezing")
    parser.add_argument("--screenshots", type=Path, help="folder for a picture of each part")
    args = parser.parse_args()
    if program() is None:
        print("Chromium is not installed (Debian: apt-get install chromium)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="large-report-") as root:
        make_large_run(Path(root, "run"), args.trajectories, args.tokens)
        began = time.monotonic()
        file = Path(root, "report.html")
        file.write_text(make_report([Path(root, "run")]), encoding="utf-8")
        print(f"report: {file.stat().st_size / 1e6:.2f} MB in {time.monotonic() - began:.1f} s")
        with Browser() as browser:
            return _read_in(browser, file, args)


def _read_in(browser: Browser, file: Path, args: argparse.Namespace) -> int:
    longest = 0.0
    browser.open(file)
    browser.run(WATCH)
    for name, action in ACTIONS:
        began = time.monotonic()
        browser.run(f"(async () => {{ await ({{run: async () => {{ {action}; }}}}).run(); return true; }})()")
        if name.startswith("unpack"):
            browser.until("document.querySelectorAll('#list tbody tr').length === 100", seconds=60)
        browser.run(PAINTED)
        seconds, tasks = time.monotonic() - began, browser.run("tasks.splice(0)")
        longest = max([longest, *tasks])
        print(f"{name:35} {1000 * seconds:7.0f} ms, longest task {max(tasks, default=0):5.0f} ms", flush=True)
        if args.screenshots:
            args.screenshots.mkdir(parents=True, exist_ok=True)
            browser.screenshot(args.screenshots / f"{name.replace(' ', '_').replace(',', '')}.png")
    found = browser.run("store.all.length")
    print(
        f"{found} of {args.trajectories} trajectories, longest task {longest:.0f} ms, errors {json.dumps(browser.errors)}"
    )
    return int(found != args.trajectories or longest > args.longest_ms or bool(browser.errors))


if __name__ == "__main__":
    sys.exit(main())
