"""What must be true of a run that sampled ahead of its training beside a real server, however often it was killed."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from live_support import GROUP_SIZE, NUM_GROUPS
from log_check import check_log
from recovery_support import outcome
from router_ties import has_tie

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.stream import epoch_order
from gspo_mega.metrics.writer import read_metrics

NUM_ROWS = 64
SUMMARY_KEYS = ("mean", "sd", "min", "max", "p1", "p99")
RESUMED = re.compile(r"^resumed from step_\d+: step (\d+), weight version \1$", re.MULTILINE)
NOT_SPLIT = re.compile(
    r"^notice   diagnostics\.exact_staleness: no weights of version ([\d, ]+) are kept since this start of the run; step"
    r" (\d+) does not split its gap$",
    re.MULTILINE,
)


def due(step: int) -> dict[str, int]:
    """The prompts of a step from 0, by row, and how many samples each has in it."""
    places = (divmod(place, NUM_ROWS) for place in range(step * NUM_GROUPS, (step + 1) * NUM_GROUPS))
    rows = [epoch_order(NUM_ROWS, seed=1, source="train", epoch=epoch)[place] for epoch, place in places]
    return {text: count * GROUP_SIZE for text, count in Counter(f"train:{row}" for row in rows).items()}


def check_order(folder: RunFolder, num_steps: int, staleness: int) -> Counter[int]:
    """Every step trained on the prompts that were due, in whole groups and in their order, sampled by weights of the
    step or of at most `staleness` before; nothing recorded was sampled again or was of no use. Returns the number of
    tokens by how many versions old they were.
    """
    journal = Journal(folder.journal_dir)
    batches = [journal.read(step).batch for step in range(num_steps)]
    lags: Counter[int] = Counter()
    for step, batch in enumerate(batches):
        assert Counter(one.prompt.prompt_id for one in batch.episodes) == due(step), f"step {step + 1}"
        here = Counter(step - v for one in batch.episodes for turn in one.turns for v in turn.weight_versions)
        assert 0 <= min(here) <= max(here) <= staleness, f"step {step + 1}: {here}"
        lags += here
    numbers = [group.group_id for batch in batches for group in batch.groups]
    assert numbers == list(range(num_steps * NUM_GROUPS)), "in order of admission, each once"
    check_log(journal)
    assert not list(journal.folder.glob("*.old-*")), "nothing that was recorded was of no use"
    assert [line["step"] for line in read_metrics(folder.metrics_file)] == list(range(1, num_steps + 1))
    return lags


def check_ahead(live, name: str, num_steps: int, staleness: int, *more: str) -> Counter[int]:
    """What `check_order` does, and the run's journal replays to the same weights. `more`: further settings of the
    run.
    """
    folder = live.ranks.folder(name)
    lags = check_order(folder, num_steps, staleness)
    settings = [f"rollout.max_staleness={staleness}", f"train.num_steps={num_steps}", *more]
    assert live.train(f"{name}-replay", "", f"train.from_rollouts={folder.path}", *settings) == [0], live.ranks.log(
        f"{name}-replay"
    )
    replay = read_metrics(live.ranks.folder(f"{name}-replay").metrics_file)
    assert any(line["time/assemble/ahead_seconds"] > 0 for line in replay), "the next record was read, and made ready"
    check_same_end(live.ranks.folder(f"{name}-replay"), folder)
    return lags


def check_same_end(replay: RunFolder, folder: RunFolder) -> None:
    """Both ended with the same weights, optimizer state and record, to the bit."""
    want, got = outcome(replay), outcome(folder)
    for part in want.keys() | got.keys():
        if part.startswith(("checkpoint/megatron", "hf/", "journal")):
            assert want.get(part) == got.get(part), part


def check_parts(folder: RunFolder, num_steps: int) -> tuple[list[int], list[int]]:
    """What `diagnostics.exact_staleness` adds, with `mismatch.segment_tokens: 1`: every step's gap is split into parts
    that add up, unless it has tokens of a version from before its start of the run; that is said, and the parts left
    out. Returns the steps from 1 that split a gap with stale tokens, and those that did not split theirs.
    """
    journal, lines = Journal(folder.journal_dir), read_metrics(folder.metrics_file)
    consoles = [attempt.console_log.read_text() for attempt in folder.attempts()]
    begins = [int(found[1]) if (found := RESUMED.search(text)) else 0 for text in consoles]
    split, not_split = [], []
    for place, line in enumerate(lines):
        rows = [[set(turn.weight_versions) for turn in one.turns] for one in journal.read(place).batch.episodes]
        versions = [set().union(*turns) for turns in rows]
        present = set().union(*versions)
        # The start of the run that trained this step last, which wrote its line.
        start = max(index for index, begin in enumerate(begins) if begin <= place)
        missing = sorted(version for version in present if version < begins[start])
        said = {int(step): sorted(map(int, kept.split(", "))) for kept, step in NOT_SPLIT.findall(consoles[start])}
        assert said.get(place + 1, []) == missing, f"step {place + 1}: {consoles[start]}"

        def part(name: str, key: str, line: dict = line) -> float:
            return line[f"policy/log_ratio/{name}/{key}"]

        assert part("update", "mean") + part("gap", "mean") == pytest.approx(line["policy/log_ratio/mean"], abs=1e-12)
        judged = sum(map(len, versions))
        assert line.get("mismatch/num_segments", 0) == (judged if len(present) > 1 else 0), f"step {place + 1}"
        assert line.get("mismatch/num_segment_decisions", 0) <= len(versions)
        if missing:
            names = {
                name for name in line if name.startswith(("policy/log_ratio/staleness", "policy/log_ratio/mismatch"))
            }
            assert not names, f"step {place + 1}"
            not_split.append(place + 1)
            continue
        assert part("staleness", "mean") + part("mismatch", "mean") == pytest.approx(part("gap", "mean"), abs=1e-12)
        rounding = max(abs(part("mismatch", key)) for key in SUMMARY_KEYS)
        assert rounding > 0
        if rounding > 1e-4:
            assert has_tie(folder, place), (
                "fp32: of the same weights the two engines differ by rounding, and by no more"
            )
        moved = max(abs(part("staleness", key)) for key in SUMMARY_KEYS)
        # Behind a first gradient the optimizer's momentum moves the weights in every step.
        if present == {place} or not any(earlier["optimizer/grad_norm_max"] for earlier in lines[:place]):
            assert moved == 0, f"step {place + 1}: every token was sampled by weights as they are now"
        else:
            least = 10 * min(rounding, 1e-4)
            assert moved > least, f"step {place + 1}: {moved} nats of staleness, {rounding} of rounding"
            split.append(place + 1)
    return split, not_split
