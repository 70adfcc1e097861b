"""A recorded run to replay, ranks that can be killed anywhere, and what must be the same in the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gspo_mega.base import failpoints
from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt, Trajectory
from gspo_mega.base.run_folder import Attempt, RunFolder
from gspo_mega.config import load_config
from gspo_mega.data.journal.journal import Journal
from gspo_mega.launcher.lease import hold
from gspo_mega.launcher.prepare import free_port, new_attempt
from gspo_mega.verify.certify.program import make_random_folder
from gspo_mega.verify.drill.outcome import digests

REPOSITORY = Path(__file__).parents[2]
NUM_STEPS, GROUP_SIZE, NUM_GROUPS = 3, 2, 3
KILLED = -9
# What of a run folder saves, the journal and publishes write.
WATCHED = ("checkpoints", "journal", "weights", "hf", "hf_steps")


def record(journal: Journal, step: int, groups: list[Group]) -> None:
    """Write a step that trained on `groups`, all of one size, of the prompts behind those of the step before."""
    batch = RolloutBatch(step, groups, phase_seconds={"generate": 0.5, "score": 0.1})
    batch.counts["num_trajectories"] = float(len(batch.episodes))
    with journal.begin(step, step, len(groups[0].episodes), {}) as writer:
        for episode in batch.episodes:
            writer.add(episode)
        order = {"seed": 1, "sources": {"train": {"epoch": 0, "position": (step + 1) * NUM_GROUPS, "num_rows": 64}}}
        writer.finish(batch, order)


def make_recording(root: Path) -> Path:
    """A tiny model, made-up rollouts of `NUM_STEPS` steps, and the configuration of a run that trains on them. Returns
    its file.
    """
    model = make_random_folder(REPOSITORY / "configs/models/certify_dense.json", root / "model", seed=3)
    journal = Journal(RunFolder(root / "recorded").journal_dir)
    rng = np.random.default_rng(5)
    for step in range(NUM_STEPS):
        record(journal, step, [_group(step, number, rng) for number in range(NUM_GROUPS)])
    config = {
        "run": {"name": "run"},
        "model": {"path": str(model)},
        "precision": "fp32",
        "batch": {
            "prompts_per_step": NUM_GROUPS,
            "group_size": GROUP_SIZE,
            "num_mini_batches": 2,
            "micro_batch_tokens": 64,
        },
        "optimizer": {"lr": 1e-3},
        "train": {"num_steps": NUM_STEPS, "from_rollouts": str(root / "recorded")},
        "data": {"path": "recorded.jsonl", "max_prompt_tokens": 16},
        "reward": {"functions": [{"function": "exact_match"}]},
        "rollout": {"max_new_tokens": 16},
        "metrics": {"sinks": ["jsonl"]},
        "journal": {"keep_last": 2},
        "diagnostics": {"token_mismatch": True},
        "checkpoint": {"every_steps": 1, "keep_last": 1, "export_every_steps": 1},
    }
    file = root / "config.yaml"
    file.write_text(json.dumps(config))
    return file


def _group(step: int, number: int, rng: np.random.Generator) -> Group:
    prompt = Prompt(
        f"train:{step}-{number}", "train", tuple(rng.integers(3, 500, 5).tolist()), f"prompt {number}", answer="1"
    )
    rows = []
    for sample in range(GROUP_SIZE):
        length = int(rng.integers(3, 12))
        rows.append(
            one_turn_row(
                trajectory_id=f"step{step:06d}-g{number:05d}-s{sample:03d}",
                group_id=number,
                prompt=prompt,
                response_token_ids=rng.integers(3, 500, length).tolist(),
                response_mask=[1] * length,
                rollout_log_probs=(-rng.random(length)).tolist(),
                weight_versions=[step] * length,
                finish_reason="stop",
                response_text="text",
                reward=float(sample),
                reward_parts={"exact_match": float(sample)},
            )
        )
    return Group.from_rows(number, prompt, rows)


class Ranks:
    """A `rank_server.py` process and the runs it makes. `killed_at`: the points at which an armed kill has ended a
    process. `variables`: of the process's environment.
    """

    def __init__(self, config_file: Path, **variables: str) -> None:
        self.config_file = config_file
        self.runs = config_file.parent / "runs"
        self.killed_at: set[str] = set()
        functions = str(REPOSITORY / "tests/integration")  # reward functions
        path = os.pathsep.join(filter(None, [functions, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        environment |= variables
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=config_file.parent,
        )

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.runs / name / "run")

    def copy(self, source: str, name: str) -> str:
        shutil.rmtree(self.runs / name, ignore_errors=True)
        shutil.copytree(self.runs / source, self.runs / name, symlinks=True)
        return name

    def train(
        self,
        name: str,
        fault: str = "",
        *overrides: str,
        num_ranks: int = 1,
        kill_after: float | None = None,
        kill_rank: int = 0,
        watch: Path | None = None,
        config_file: Path | None = None,
        prepare: Callable[[Attempt], None] = lambda attempt: None,
    ) -> list[int]:
        """`gspo-mega train` of run `name` without its supervisor; the ranks' exit codes, minus the signal of one that
        was killed.

        `kill_after`: seconds after which `kill_rank` is killed, if it still runs. `watch`: a file for what `cli/watch.py`
        notes of checkpoints, journal and exports. `prepare` is called with the attempt before its ranks start.
        """
        places = [f"run.dir={self.runs / name}", f"cluster.ranks_per_node={num_ranks}"]
        loaded = load_config(config_file or self.config_file, [*places, *overrides], "train")
        folder = self.folder(name)
        with hold(folder):
            attempt = new_attempt(folder, loaded, "train")
            prepare(attempt)
            arguments = ["--config", str(folder.config_file), "--attempt", str(attempt.path), "--command", "train"]
            common = {
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                failpoints.VARIABLE: fault,
            }
            job = {"module": "gspo_mega.train.worker", "arguments": arguments}
            if watch is not None:
                job["watch"] = {"folders": [str(folder.path / name) for name in WATCHED], "file": str(watch)}
            return self.call(
                [
                    {
                        **job,
                        "environment": {**common, "RANK": str(r), "LOCAL_RANK": str(r)},
                        "kill_after": kill_after if r == kill_rank else None,
                    }
                    for r in range(num_ranks)
                ]
            )

    def call(self, jobs: list[dict]) -> list[int]:
        self._server.stdin.write(json.dumps(jobs) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, "the rank server ended"
        answer = json.loads(line)
        assert answer["left"] == [], "processes of the attempt outlive its ranks"
        codes = answer["codes"]
        for rank, (job, code) in enumerate(zip(jobs, codes, strict=True)):
            fault = job["environment"].get(failpoints.VARIABLE)
            armed = failpoints.InjectedFault.parse(fault) if fault else failpoints.InjectedFault()
            if (
                code == KILLED
                and job.get("kill_after") is None
                and armed.point
                and armed.do == "kill"
                and armed.rank == rank
            ):
                self.killed_at.add(armed.point)
        return codes

    def log(self, name: str) -> str:
        attempt = self.folder(name).latest_attempt()
        return "\n".join(path.read_text()[-6000:] for path in sorted(attempt.logs_dir.glob("rank_*.log")))

    def error(self, name: str) -> dict:
        """What rank 0 of the latest attempt said it failed with."""
        return json.loads(self.folder(name).latest_attempt().error_file(0).read_text())

    def console(self, name: str) -> str:
        return self.folder(name).latest_attempt().console_log.read_text()

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(120)


def outcome(folder: RunFolder) -> dict[str, object]:
    """All that must not depend on where a run was interrupted: digests of weights and optimizer state, counters,
    exported folders, trained-on trajectories, and the metrics but for fields of time and speed.
    """
    (checkpoint,) = [entry for entry in folder.checkpoints_dir.iterdir() if entry.is_dir()]
    assert folder.latest_checkpoint_file.read_text().strip() == checkpoint.name
    # Megatron's .metadata is a pickle that holds the same in another order of references; all tensors are in other
    # files.
    apart = ("state.json", "megatron/.metadata", "critic/.metadata")
    found: dict[str, object] = {
        f"checkpoint/{name}": digest for name, digest in digests(checkpoint).items() if name not in apart
    }
    record = json.loads((checkpoint / "state.json").read_text())
    found["state"] = {**record["state"], "summary": _without_time(record["state"]["summary"].get("totals", {}))}
    for place in (folder.huggingface_dir, folder.path / "hf_steps"):
        found |= {f"{place.name}/{name}": digest for name, digest in digests(place).items()}
    journal = Journal(folder.journal_dir)
    found["journal"] = {
        step: [[_row(t) for t in g.trajectories] for g in journal.read(step).batch.groups] for step in journal.steps()
    }
    found |= {file.name: file.read_bytes() for file in folder.journal_dir.glob("*.gaps")}
    lines = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    found["metrics"] = [_without_time(line) for line in lines]
    return found


def _row(trajectory: Trajectory) -> dict:
    """Its values; masks and a teacher's scores as lists, which compare as a whole."""
    masks = trajectory.sampling_masks
    plain = None if masks is None else (masks.counts.tolist(), masks.codes.tolist())
    said = trajectory.teacher
    scores = None if said is None else [part.tolist() for part in (said.log_probs, said.top_ids, said.top_log_probs)]
    return {**asdict(trajectory), "sampling_masks": plain, "teacher": scores}


def _without_time(values: dict) -> dict:
    return {
        name: value for name, value in values.items() if name != "time" and not name.startswith(("time/", "speed/"))
    }


def leftovers(folder: RunFolder) -> list[str]:
    """Files and folders in a run folder that are not there after an uninterrupted run; attempts apart."""
    names = ("*.part", "*.writing", "*.replaced", "*.removed", "*.aside", "*.new", "*.damaged")
    found = (path for pattern in names for path in folder.path.rglob(pattern))
    return sorted(str(path.relative_to(folder.path)) for path in found if not path.is_relative_to(folder.attempts_dir))
