"""What the GPU parts share: one rank, engines of several precisions with the same weights, batches, tables.

Runs on a CPU too, in fp32 and bf16 and with the tiny shapes, so that all but the GPU's own code is tried everywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]
warnings.filterwarnings("ignore")

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from run_configs import make_config

import gspo_mega.engine  # noqa: F401  the CPU backend comes before torch.distributed and Megatron
from gspo_mega.base import versions as two_pythons
from gspo_mega.base.records import MicroBatch
from gspo_mega.checkpoint.quantized import filled
from gspo_mega.config.schema import Config
from gspo_mega.data.packing import build_micro_batch
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.precision import describe_backends, transformer_engine_version
from gspo_mega.engine.process_groups import ParallelGroups, create_groups, destroy_groups
from gspo_mega.launcher.prepare import free_port
from gspo_mega.models.parameter_names import canonical_parameters
from gspo_mega.models.spec import ModelSpec, MoeSpec
from gspo_mega.plan.layout import alignment_tokens
from gspo_mega.plan.validate_precision import precision_problem

CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def _shape(
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    vocab: int,
    moe: MoeSpec | None = None,
    tied: bool = False,
    head_dim: int = 128,
    kv_heads: int | None = None,
) -> ModelSpec:
    return ModelSpec(
        family="qwen3" if moe is None else "qwen3_moe",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads or heads // 4,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        qk_norm=True,
        attention_bias=False,
        torch_dtype="bfloat16",
        eos_token_ids=(2,),
        moe=moe,
    )


# tiny: for a CPU. small: precision on a GPU. large: with fp32 gradients, main parameters and moments (18 bytes a
# parameter) and an 8192-token pack they fill most of one H200: Qwen3-4B, and 6 of the layers of Qwen3-30B-A3B. medium:
# the same for a GPU of 80 GB: Qwen3-1.7B, and 4 of those layers.
SHAPES = {
    "tiny-dense": _shape(2, 64, 4, 128, 512, head_dim=16),
    "tiny-moe": _shape(2, 64, 4, 128, 512, MoeSpec(8, 2, 32), head_dim=16),
    "small-dense": _shape(12, 1024, 8, 3072, 32768),
    "small-moe": _shape(8, 1024, 8, 3072, 32768, MoeSpec(32, 4, 512)),
    "medium-dense": _shape(28, 2048, 16, 6144, 151936, tied=True, kv_heads=8),
    "medium-moe": _shape(4, 2048, 32, 6144, 151936, MoeSpec(128, 8, 768)),
    "large-dense": _shape(36, 2560, 32, 9728, 151936, tied=True, kv_heads=8),
    "large-moe": _shape(6, 2048, 32, 6144, 151936, MoeSpec(128, 8, 768)),
}


def arguments(description: str | None, **defaults: object) -> argparse.Namespace:
    """`--device`, and an option for each default. Exits with 77 where a GPU is asked for and there is none. SIGTERM
    ends the part from here on as an exception does, so that what it started ends with it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device")
        raise SystemExit(77)
    if args.device == "cpu" and torch.cuda.is_available():
        raise SystemExit("--device cpu: this machine has a GPU, and the engine takes it")
    return args


@contextmanager
def one_rank() -> Iterator[None]:
    """The default process group of a single rank."""
    port = str(free_port())
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        for line in describe_backends():
            print(line)
        yield
    finally:
        dist.destroy_process_group()


def precision_config(precision: str, **sections: object) -> Config:
    """`precision`: fp32, bf16, or fp8-<recipe>."""
    name, _, recipe = precision.partition("-")
    own: dict = dict(
        precision=name,
        batch=dict(micro_batch_tokens=8192),
        data=dict(max_prompt_tokens=1024),
        rollout=dict(max_new_tokens=1024),
        optimizer=dict(lr=1e-6),
        mismatch=dict(correction="none"),
    )
    if recipe:
        own["fp8"] = dict(recipe=recipe)
    return make_config(**own | sections)


def precisions(only: str = "") -> list[str]:
    """What this machine can compute in, and of it what `only` names, separated by commas; the first is the reference,
    which always stays. Says why a recipe is left out.
    """
    found = _all_precisions()
    return found if not only else [name for name in found if name == found[0] or name in only.split(",")]


def _all_precisions() -> list[str]:
    if not torch.cuda.is_available():
        print("left out: FP8: without a GPU the distributed tests compute it, with Transformer Engine over CPU kernels")
        return ["fp32", "bf16"]
    capability = torch.cuda.get_device_capability()
    found = []
    for name in ("fp32", "bf16", *(f"fp8-{recipe}" for recipe in RECIPES)):
        problem = precision_problem(
            precision_config(name), capability, torch.version.cuda, transformer_engine_version()
        )
        if problem is None:
            found.append(name)
        else:
            print(f"left out: {name}: {problem}")
    return found


@contextmanager
def engine(spec: ModelSpec, config: Config, *, same_weights: bool) -> Iterator[PolicyEngine]:
    """An engine over one rank's groups. `same_weights`: random ones that every precision holds exactly."""
    # The engine before went out of use after this function's end; Megatron's hooks hold it in cycles. What was compiled
    # for it goes, too, as if each engine had a process of its own.
    gc.collect()
    torch._dynamo.reset()
    started = time.perf_counter()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    groups = create_groups()
    try:
        policy = PolicyEngine(config, spec, groups, num_optimizer_steps=1000)
        if same_weights:
            _fill(policy, spec, groups)
            policy.after_weights_loaded()
        kind = f"fp8-{config.fp8.recipe}" if config.precision == "fp8" else config.precision
        print(f"{kind}: an engine after {time.perf_counter() - started:.1f} s", flush=True)
        yield policy
        print(f"{kind}: done after {time.perf_counter() - started:.1f} s", flush=True)
    finally:
        destroy_groups()


@torch.no_grad()
def _fill(policy: PolicyEngine, spec: ModelSpec, groups: ParallelGroups) -> None:
    for name, parameter in canonical_parameters(spec, groups, policy.chunks).items():
        device = parameter.device  # every precision of a run has the same numbers there
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        values = 1 + 0.1 * noise if parameter.dim() == 1 else noise / parameter.size(-1) ** 0.5
        with filled(parameter) as target:
            target.copy_(values.bfloat16())


def recorded_batch(
    spec: ModelSpec, config: Config, lengths: Sequence[int], per_pack: int, *, prompt: int = 1
) -> list[MicroBatch]:
    """Random sequences of these lengths, `per_pack` a micro-batch, advantages of both signs; all after `prompt` is
    response.
    """
    rng = np.random.default_rng(0)
    rows = []
    for index, length in enumerate(lengths):
        tokens = rng.integers(3, spec.vocab_size, length)
        rows.append(
            dict(
                prompt_token_ids=tokens[:prompt],
                response_token_ids=tokens[prompt:],
                response_mask=np.ones(length - prompt),
                rollout_log_probs=np.full(length - prompt, -np.log(spec.vocab_size)),
                advantage=(-1.3, 0.7, -0.4, 1.6)[index % 4],
                group_size=1,
            )
        )
    starts = range(0, len(rows), per_pack)
    keys, align = ("advantage", "group_size"), alignment_tokens(config.parallel, config.precision, config.fp8)
    return [build_micro_batch(rows, list(range(s, min(s + per_pack, len(rows)))), 1, keys, align) for s in starts]


class Rows(list[dict]):
    """A part's rows. Each is printed when it is added, so that a part that is cut has said what it found."""

    def append(self, row: dict) -> None:
        super().append(row)
        print(" ".join(f"{name}={_cell(value)}" for name, value in row.items()), flush=True)


def finish(part: str, rows: list[dict], failures: list[str]) -> None:
    """Print the table and end the part: 1 with failures, or 0. Where $OUT is set, `<part>.json` goes there, and the
    table is added to `<part>.md` with date, versions and command. $PART: another name for the part.
    """
    part = os.environ.get("PART", part)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    for failure in failures:
        print(f"FAILED {part}: {failure}")
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"{part}.json").write_text(
            json.dumps(dict(backends=describe_backends(), rows=rows, failures=failures), indent=1)
        )
        with Path(os.environ["OUT"], f"{part}.md").open("a", encoding="utf-8") as file:
            file.write("\n".join([_origin(), "", *_markdown(cells), *(f"FAILED: {f}" for f in failures), "", ""]))
    raise SystemExit(1 if failures else 0)


def _origin() -> str:
    """Date, machine, versions and command of a table, as tests/benchmarks/RESULTS.md has them."""
    versions = two_pythons.own_versions()
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    on_gpu = torch.cuda.is_available()
    machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if on_gpu else "no GPU"
    names = ("python", "torch", "CUDA", "NCCL", "driver", "megatron-core", "transformer-engine", "sglang")
    found = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
    command = " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]])
    return f"{datetime.now():%Y-%m-%d %H:%M}, {machine}, commit {commit or '-'}, {found}: `{command}`"


def _markdown(cells: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return [lines[0], "|" + "---|" * len(cells[0]), *lines[1:]] if cells[0] else []


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
