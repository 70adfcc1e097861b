"""The built-in reward `reasoning_gym`: what the package's own scorer gives for an answer.

Owns the process that asks the package (`reasoning_gym_worker.py`). It belongs to the scoring process, which is ended
with everything that it started.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.base.line_process import LineProcess
from gspo_mega.rewards.blame import is_own_end

_WORKER = Path(__file__).with_name("reasoning_gym_worker.py")
_ANSWERS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SCORERS: dict[str, Scorer] = {}


class Scorer:
    """A running worker of one Python."""

    def __init__(self, python: str) -> None:
        """Raises RewardError: the Python cannot be started, or lacks the package."""
        self._python = python
        try:
            self.process = LineProcess([python, "-P", str(_WORKER)])
        except OSError as error:
            raise RewardError(f"reward reasoning_gym: {python} cannot be started: {error}") from error
        if "ready" not in self.process.greeting:
            raise RewardError(
                f"reward reasoning_gym: {python}: {self.process.greeting['error']}; make a venv with it (pip install"
                " reasoning-gym) and name its Python in reward.functions' option `python`"
            )

    def score(self, place: dict[str, Any], answer: str) -> float:
        """Raises ValueError: the package's scorer failed, or made its process crash; RuntimeError: the process ended
        otherwise. Where it has ended it is started again the next time.
        """
        reply = self.process.ask({"score": place, "answer": answer})
        code = self.process.exit_code
        if code is not None:
            _SCORERS.pop(self._python, None)
        if "score" not in reply:
            raise (
                RuntimeError(reply["error"])
                if code is not None and not is_own_end(code)
                else ValueError(reply["error"])
            )
        return reply["score"]


def start(python: str | None = None, **options: Any) -> None:
    """Start the worker of a Python before the first scoring has a deadline. Raises RewardError."""
    python = python or sys.executable
    if python not in _SCORERS:
        _SCORERS[python] = Scorer(python)


def reasoning_gym(
    *, prompt: str, response: str, answer: Any, metadata: dict[str, Any], python: str | None = None
) -> dict[str, float | bool]:
    """The score of reasoning-gym's own scorer, from 0 to 1; right where it is 1.

    The answer is what stands in the last <answer> tags of the response, or else the whole response without the white
    space around it. `metadata` names the item, as rows of `data.reasoning_gym` do. `python`: the one that has the
    package; this one when absent.

    Raises ValueError: the row is none of `data.reasoning_gym`, or the package's scorer failed; RuntimeError: its
    process ended for another reason.
    """
    place = metadata.get("reasoning_gym")
    if not isinstance(place, dict):
        raise ValueError("the row has no `reasoning_gym`; the reward of that name is for prompts of data.reasoning_gym")
    start(python)
    tagged = _ANSWERS.findall(response)
    score = _SCORERS[python or sys.executable].score(place, (tagged[-1] if tagged else response).strip())
    return {"reward": score, "correct": score == 1.0}
