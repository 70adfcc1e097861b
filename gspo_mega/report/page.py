"""The report of one or several runs as one HTML file. Everything is inside it, and it fetches nothing.

Text from the data never becomes HTML: it is JSON in a script tag of a type that no browser runs, with `<` escaped, and
the page's code only sets text. The scripts and styles are in `assets/`.
"""

from __future__ import annotations

import base64
import html
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gspo_mega import __version__
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.held_out_responses import before_and_after
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.report.learning_verdicts import marks_of
from gspo_mega.report.run_record import RunRecord, read_run
from gspo_mega.report.sampled_episodes import Sample, sample_run
from gspo_mega.report.verdicts import as_json, phase_seconds, verdicts_of

_ASSETS = Path(__file__).parent / "assets"
_STYLES = ("uPlot.min.css", "report.css")
# In this order, because each script uses those before it.
_SCRIPTS = (
    "uPlot.iife.min.js",
    "data.js",
    "charts.js",
    "curves.js",
    "tokens.js",
    "trajectories.js",
    "answers.js",
    "main.js",
)
# Comes after the others if the page is served while the run goes on.
LIVE_SCRIPT = "live.js"
# The most bytes that the compressed episodes of a page take. With curves and code the page stays below 5 MB.
MOST_EPISODE_BYTES = 3_600_000
_MOST_TOKENS = 1_200_000
# The most characters of held-out prompts and responses. A page that is watched asks for them again at every change.
_MOST_ANSWER_CHARACTERS = 400_000


def make_report(paths: Sequence[str | Path]) -> str:
    """The HTML of the report of one or several run folders. Raises ConfigError and DataError as `read_run`."""
    records = [read_run(path) for path in paths]
    samples, packed = make_episodes([RunFolder(record.path) for record in records])
    return make_page(make_data(records, samples), packed)


def make_episodes(folders: Sequence[RunFolder], after: Sequence[int] | None = None) -> tuple[list[Sample], str]:
    """The runs' episodes, so many that they fit into a page, and their compressed text. `after`: for a page to which
    more steps are added later, a step of each run; then only later steps that the trainer has taken are read.
    """
    most = _MOST_TOKENS
    while True:
        starts = after or [0] * len(folders)
        samples = [
            sample_run(folder, most // len(folders), after=start, consumed=after is not None)
            for folder, start in zip(folders, starts, strict=True)
        ]
        packed = pack(samples)
        if len(packed) <= MOST_EPISODE_BYTES or most < 1000:
            return samples, packed
        most = int(most * min(0.7, 0.95 * MOST_EPISODE_BYTES / len(packed)))


def pack(samples: Sequence[Sample]) -> str:
    """The samples as JSON, deflated and in base64, which a browser can unpack."""
    value = [
        {"episodes": sample.episodes, "prompts": sample.prompts, "vocabulary": sample.vocabulary} for sample in samples
    ]
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    # A lone surrogate, which a broken tokenizer may leave in a text, cannot be encoded as UTF-8.
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode()


def make_data(records: Sequence[RunRecord], samples: Sequence[Sample]) -> dict[str, Any]:
    """Everything that the page shows except the trajectories, as JSON types."""
    room = _MOST_ANSWER_CHARACTERS // max(1, len(records))
    data = {
        "version": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": [_run_data(record, sample, room) for record, sample in zip(records, samples, strict=True)],
        "metrics": _metric_meanings(records),
    }
    return _finite(data)


def make_page(data: dict[str, Any], packed: str, scripts: Sequence[str] = (), *, connects: bool = False) -> str:
    """The HTML of a page. `scripts`: assets that come after those of every page. `connects`: the page may send requests
    to its own server.
    """
    own = "; connect-src 'self'" if connects else ""
    title = "gspo-mega report: " + ", ".join(run["name"] for run in data["runs"])
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Nothing may be fetched from elsewhere, even if a text asks for it.
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';"
            f" script-src 'unsafe-inline'; img-src data:{own}\">",
            *(f"<style>{_asset(name)}</style>" for name in _STYLES),
            "</head><body>",
            _asset("body.html"),
            f'<script type="application/json" id="data">{embedded(data)}</script>',
            f'<script type="text/plain" id="episodes">{packed}</script>',
            *(f"<script>{_asset(name)}</script>" for name in (*_SCRIPTS, *scripts)),
            "</body></html>\n",
        ]
    )


def embedded(value: Any) -> str:
    """The value as JSON that cannot end the script tag that holds it."""
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return safe.encode("utf-8", "replace").decode()


def _finite(value: Any) -> Any:
    """The value with NaN and infinite numbers replaced by None, because JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def _run_data(record: RunRecord, sample: Sample, room: int) -> dict[str, Any]:
    answers, unread = _answers(record.path, room)
    return {
        "name": record.name,
        "path": str(record.path),
        "command": record.command,
        "seed": record.settings.get("run.seed"),
        "steps": record.steps,
        "times": record.times,
        "series": {name: [_rounded(value) for value in values] for name, values in record.series.items()},
        "verdicts": as_json(verdicts_of(record)),
        "marks": marks_of(record),
        "limits": {"mismatch.budget": record.settings.get("mismatch.budget")},
        "changed": record.changed,
        "attempts": [asdict(attempt) for attempt in record.attempts],
        "versions": record.versions,
        "layout": record.layout,
        "phases": sorted(phase_seconds(record), key=phase_seconds(record).__getitem__, reverse=True),
        "notes": _notes(record, sample) + unread,
        "answers": answers,
        "has_mismatch": sample.has_gaps or bool(record.settings.get("diagnostics.token_mismatch")),
    }


def _answers(path: Path, room: int) -> tuple[list[dict[str, Any]], list[str]]:
    """What the model answered to held-out prompts at first and at last, for each set, with at most `room` characters in
    all but at least one prompt of each set. Second value: what could not be read, as lines for the user.
    """
    changes, problems = before_and_after(RunFolder(path))
    found = []
    for change in changes:
        left, shown = room // len(changes), []
        for one in change.prompts:
            prompt = asdict(one) | {side: _answer(getattr(one, side)) for side in ("before", "after")}
            size = len(json.dumps(prompt, default=str))
            if shown and size > left:
                break
            left -= size
            shown.append(prompt)
        found.append(asdict(change) | {"prompts": shown, "num_prompts": len(change.prompts)})
    return found, problems


def _answer(row: dict[str, Any] | None) -> dict[str, Any] | None:
    keys = ("response", "correct", "reward", "num_tokens", "is_truncated", "failure", "num_scored", "num_correct")
    return None if row is None else {key: row.get(key) for key in keys}


def _notes(record: RunRecord, sample: Sample) -> list[str]:
    notes = [*record.problems, *sample.problems]
    if record.every > 1:
        notes.append(f"curves show one of {record.every} steps")
    if not sample.is_whole:
        notes.append(
            f"trajectories are a sample: {len(sample.episodes)} of {sample.num_recorded} in"
            f" {sample.num_steps_shown} of the {sample.num_steps} steps with trajectories; all: gspo-mega inspect"
        )
    return notes


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _metric_meanings(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """[unit, meaning] of every metric that occurs. If the catalogue does not know it, it is from another release."""
    found: dict[str, list[str]] = {}
    for name in sorted({name for record in records for name in record.series}):
        try:
            metric = find_metric(name)
            found[name] = [metric.unit, metric.description]
        except ValueError:
            found[name] = ["", "from another release"]
    return found


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
