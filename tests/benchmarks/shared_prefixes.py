"""What computing a group's prompt once saves of a training step on a CPU: tokens, FLOPs, time and memory.

    python tests/benchmarks/shared_prefixes.py
    python tests/benchmarks/shared_prefixes.py --branches 2 3 4
    python tests/benchmarks/shared_prefixes.py --run RUN --steps 1 60

For each size of groups and prompts, one rank runs the old pass and the forward and backward pass of a mini-batch of two
groups, in turns with whole rows and with `batch.share_prefixes: prompts`, and the fewest seconds of processor time of
each count: other processes then matter little. The ideal is every prompt computed once, with attention to its own rows
only. With `--branches` the rows are those of episodes with a tool, as long as the calculator's: a mini-batch of eight
groups of eight episodes, each with so many branches, which part after two turns. `prompts` and `full` are compared with
whole rows, and the ideal is that of `full`; so with `--run`, whose rows are those of steps (from 0) of a run's journal and
whose model the run began with. FLOPs are counted from the packs: 6 per parameter of the layers and token, and 12 x heads x head size per layer
for each pair of tokens that attend, three quarters of which are backward passes. Memory is the peak above what the process
holds between passes.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gspo_mega.engine  # noqa: F401  the CPU backend comes before torch.distributed and Megatron

sys.path.append(str(Path(__file__).parents[1] / "support"))

import numpy as np
import torch
import torch.distributed as dist
from run_configs import make_config

from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import MicroBatch, Prompt
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config import load_config
from gspo_mega.config.schema import Config
from gspo_mega.data.journal.journal import Journal
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import layer_flops
from gspo_mega.plan import resolve_layout
from gspo_mega.train.batches import MiniBatch, assemble, fill_advantages
from gspo_mega.verify.certify.program import make_random_folder

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
RESPONSE, BUDGET, GROUPS = 128, 8192, 2
# An episode's prompt, and a turn with the tool's answer: sampled tokens and the template's. Turns before the branches
# part and after, and what a pack holds: those of configs/calculator.yaml.
TASK, SAID, TOLD, BEFORE, AFTER, EPISODES, EPISODE_GROUPS, EPISODE_BUDGET = 24, 9, 13, 2, 1, 8, 8, 4096


def rollout_batch(group_size: int, prompt_tokens: int) -> RolloutBatch:
    """Two groups of random tokens, whose responses have half to all of `RESPONSE` tokens."""
    rng = np.random.default_rng((group_size, prompt_tokens))
    groups = []
    for g in range(GROUPS):
        prompt = Prompt(f"b:{g}", "b", tuple(rng.integers(0, SHAPE["vocab_size"], prompt_tokens).tolist()), "")
        rows = []
        for k in range(group_size):
            length = int(rng.integers(RESPONSE // 2, RESPONSE + 1))
            rows.append(
                one_turn_row(
                    trajectory_id=f"{g}:{k}",
                    group_id=g,
                    prompt=prompt,
                    response_token_ids=rng.integers(0, SHAPE["vocab_size"], length).tolist(),
                    response_mask=[1] * length,
                    rollout_log_probs=[-7.0] * length,
                    weight_versions=[0] * length,
                    finish_reason="length",
                    reward=float(k % 2),
                )
            )
        groups.append(Group.from_rows(g, prompt, rows))
    return RolloutBatch(0, groups)


def branched_batch(num_branches: int) -> RolloutBatch:
    """Groups of episodes whose branches have the first turns in common. A row trains these if it is the first, and its
    own turns, the last of which is an answer.
    """
    rng = np.random.default_rng(num_branches)

    def draw(number: int) -> list[int]:
        return rng.integers(0, SHAPE["vocab_size"], number).tolist()

    groups = []
    for g in range(EPISODE_GROUPS):
        prompt = Prompt(f"b:{g}", "b", tuple(draw(TASK)), "")
        rows = []
        for e in range(EPISODES):
            history, turn = draw(BEFORE * (SAID + TOLD)), [1] * SAID + [0] * TOLD
            for branch in range(num_branches):
                own = int(rng.integers(SAID // 2, SAID + 1))
                mask = [trains * (branch == 0) for trains in BEFORE * turn] + AFTER * turn + own * [1]
                tokens = history + draw(AFTER * (SAID + TOLD) + own)
                rows.append(
                    one_turn_row(
                        trajectory_id=f"{g}:{e}:{branch}",
                        group_id=g,
                        prompt=prompt,
                        response_token_ids=tokens,
                        response_mask=mask,
                        rollout_log_probs=[-7.0] * len(tokens),
                        weight_versions=[0] * len(tokens),
                        finish_reason="stop",
                        reward=float(e % 2),
                    )
                )
        groups.append(Group.from_rows(g, prompt, rows))
    return RolloutBatch(0, groups)


def flops(spec: ModelSpec, packs: list[MicroBatch]) -> float:
    """What the layers compute in a forward and a backward pass of these packs, recomputation left out."""
    tokens = sum(pack.num_computed for pack in packs)
    pairs = 0
    for pack in packs:
        depths = pack.position_ids[pack.first_rows()] + 1  # a token attends to itself and all before it
        pairs += int(depths.sum())
    return 3 * layer_flops(spec, tokens, pairs)


class Peak:
    """The peak of this process's memory since the last `reset`, in bytes."""

    def reset(self) -> None:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else the memory of the pass before would still be held
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._read("VmRSS")

    def above(self) -> int:
        return self._read("VmHWM") - self.before

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class Bench:
    """One engine; measures a mini-batch with and without sharing."""

    def __init__(self, folder: str, repeats: int) -> None:
        self.folder, self.repeats = folder, repeats
        self.spec = read_model_spec(folder)
        self.engine = PolicyEngine(self.config(4, 64, "off"), self.spec, create_groups(), num_optimizer_steps=1)
        import_huggingface(folder, self.spec, self.engine.groups, self.engine.chunks)
        self.engine.after_weights_loaded()

    def config(self, group_size: int, prompt_tokens: int, mode: str, budget: int = BUDGET) -> Config:
        sizes: dict[str, Any] = dict(prompts_per_step=GROUPS, group_size=group_size, micro_batch_tokens=budget)
        return make_config(
            model=dict(path=self.folder),
            batch=sizes | dict(num_mini_batches=1, share_prefixes=mode),
            data=dict(max_prompt_tokens=prompt_tokens),
            rollout=dict(max_new_tokens=RESPONSE),
            mismatch=dict(correction="none"),
        )

    def mini_batch(self, batch: RolloutBatch, prompt_tokens: int, mode: str, budget: int) -> MiniBatch:
        config = self.config(len(batch.trajectories) // len(batch.groups), prompt_tokens, mode, budget)
        fill_advantages(batch, config, 0)
        return assemble(batch, config, resolve_layout(config, self.spec), 0)[0][0]

    def run(self, mini: MiniBatch) -> tuple[float, int]:
        """(processor seconds, bytes above the start) of the old pass and a forward and backward pass."""
        settings = objective_settings("gspo", self.engine.config.objective)
        peak = Peak()
        peak.reset()
        start = time.process_time()
        old = self.engine.old_pass(mini.micro_batches)
        self.engine.policy_gradients(mini.micro_batches, settings, mini.denominator, old)
        return time.process_time() - start, peak.above()

    def measure(self, head: str, batch: RolloutBatch, prompt_tokens: int, budget: int, modes: Sequence[str]) -> None:
        """Print a row of the table for each of `modes` after `off`, the last of which has the ideal."""
        minis = {mode: self.mini_batch(batch, prompt_tokens, mode, budget) for mode in ("off", *modes)}
        seconds: dict[str, list[float]] = {mode: [] for mode in minis}
        memory = dict.fromkeys(minis, 0)
        for repeat in range(self.repeats + 1):
            for mode, mini in minis.items():
                spent, above = self.run(mini)
                if repeat:  # the first warms up
                    seconds[mode].append(spent)
                    memory[mode] = max(memory[mode], above)
        packs = {mode: mini.micro_batches for mode, mini in minis.items()}
        tokens = {mode: sum(pack.num_computed for pack in own) for mode, own in packs.items()}
        work = {mode: flops(self.spec, own) for mode, own in packs.items()}
        ideal = flops(self.spec, self.mini_batch(batch, prompt_tokens, modes[-1], 10**7).micro_batches)
        times = {mode: min(values) for mode, values in seconds.items()}
        ratio = work["off"] / ideal
        for mode in modes:
            gained = times["off"] / times[mode]
            print(
                f"| {head} |{f' {mode} |' if len(modes) > 1 else ''} {tokens['off']} | {tokens[mode]} | {ratio:.2f} |"
                f" {work['off'] / work[mode] / ratio:.2f} | {times['off']:.2f} | {times[mode]:.2f} | {gained:.2f} |"
                f" {gained / ratio:.2f} | {memory['off'] / 2**20:.0f} | {memory[mode] / 2**20:.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=[64, 512, 4096])
    parser.add_argument("--branches", type=int, nargs="*", default=[])
    parser.add_argument("--run")
    parser.add_argument("--steps", type=int, nargs="*", default=[0])
    parser.add_argument("--groups", type=int, nargs="*", default=[8, 16])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        columns = "tokens, rows | tokens, shared | ideal | reached | s, rows | s, shared | ratio | of the ideal |"
        columns += " MiB, rows | MiB, shared |"
        if arguments.run:
            run = RunFolder(arguments.run)
            bench = Bench(load_config(run.config_file).config.model.path, arguments.repeats)
            print(f"| step | mode | {columns}\n|{'---|' * 12}")
            for step in arguments.steps:
                batch = Journal(run.journal_dir).read(step).batch.scored()
                bench.measure(f"{step}", batch, TASK, EPISODE_BUDGET, ("prompts", "full"))
            return
        shape = Path(folder) / "shape.json"
        shape.write_text(json.dumps(SHAPE))
        bench = Bench(str(make_random_folder(shape, Path(folder) / "model", 0)), arguments.repeats)
        if arguments.branches:
            print(f"| branches | mode | {columns}\n|{'---|' * 12}")
            for number in arguments.branches:
                bench.measure(f"{number}", branched_batch(number), TASK, EPISODE_BUDGET, ("prompts", "full"))
            return
        print(f"| group | prompt | {columns}\n|{'---|' * 12}")
        for size, prompt_tokens in itertools.product(arguments.groups, arguments.prompts):
            batch = rollout_batch(size, prompt_tokens)
            bench.measure(f"{size} | {prompt_tokens}", batch, prompt_tokens, BUDGET, ("prompts",))


if __name__ == "__main__":
    main()
