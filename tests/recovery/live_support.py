"""A real SGLang server for the recovery tests, which outlives the trainers that are killed: what they left in it is
there.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from recovery_support import REPOSITORY, Ranks

sys.path.insert(0, str(REPOSITORY / "tests/integration"))

from run_support import ScoreLog, make_quickstart
from servers import Serve

from gspo_mega.base.run_folder import Attempt
from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.pool import ServerPool

NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 3, 3, 2
BATCH = NUM_GROUPS * GROUP_SIZE


class LiveRuns:
    """Runs of `ranks` that sample from one server. A run's attempt finds it where its supervisor's would be."""

    def __init__(self, ranks: Ranks, root: Path) -> None:
        self.ranks, self.root = ranks, root
        files = make_quickstart(root / "files")
        self.scores = ScoreLog(root / "scores")
        self.config_file = root / "live.yaml"
        config = {
            "run": {"name": "run", "dir": str(root / "server")},
            "model": {"path": str(files / "model")},
            "precision": "fp32",
            "batch": {
                "prompts_per_step": NUM_GROUPS,
                "group_size": GROUP_SIZE,
                "num_mini_batches": 2,
                "micro_batch_tokens": 256,
            },
            # So large that weights of two versions cannot be taken for each other.
            "optimizer": {"lr": 3e-3},
            "train": {"num_steps": NUM_STEPS},
            "data": {"path": str(files / "data/train.jsonl"), "max_prompt_tokens": 64},
            "reward": {
                "functions": [{"function": "run_support:score", "options": {"log": str(self.scores.path)}}],
                "num_workers": 1,
            },
            "rollout": {"max_new_tokens": 16, "max_concurrent_requests": 2, "no_server_deadline_seconds": 1500.0},
            "metrics": {"sinks": ["jsonl"]},
            "server": {"max_total_tokens": 4096, "start_deadline_seconds": 1200.0},
            "checkpoint": {"every_steps": 1, "keep_last": 1},
            "publish": {"keep_last": 10},
        }
        self.config_file.write_text(json.dumps(config))
        self.serve = Serve(self.config_file, root / "server" / "run", forked=True)
        try:
            self.serve.wait_for("ready")
        except BaseException:
            self.serve.stop()
            raise

    def train(
        self, name: str, fault: str = "", *overrides: str, num_ranks: int = 1, kill_after: float | None = None
    ) -> list[int]:
        return self.ranks.train(
            name,
            fault,
            *overrides,
            num_ranks=num_ranks,
            kill_after=kill_after,
            config_file=self.config_file,
            prepare=self._give_server,
        )

    def _give_server(self, attempt: Attempt) -> None:
        attempt.servers_dir.rmdir()
        attempt.servers_dir.symlink_to(self.serve.attempt.servers_dir)
        shutil.copy(self.serve.attempt.api_key_file, attempt.api_key_file)

    def checksums(self) -> dict[str, str]:
        """The server's own hash of every tensor that it holds now."""
        config = load_config(self.config_file).config
        with ServerPool(config.rollout, read_model_spec(config.model.path), self.serve.attempt) as pool:
            pool.wait_ready(1, deadline_seconds=60)
            (control,) = pool.controls()
            (held,) = control.checksums(deadline_seconds=60)
            return held

    def close(self) -> None:
        self.serve.stop()
