"""Make runs with the code of an older commit, for `test_old_runs.py`, which continues and replays them with today's.

    git worktree add /tmp/then 201f4514
    python tests/recovery/make_old_run.py /tmp/then tests/recovery/data/old_runs_201f4514.tar.xz

The older commit's own commands make the runs: `python -m gspo_mega train`, with a real SGLang server on the CPU. The
Python that runs this script needs the packages that the commit pins in launch/env. For 201f4514 these include
torchvision 0.28.0, which today's set-up leaves out: `pip install --no-deps --target FOLDER torchvision==0.28.0`, and
name the folder in PYTHONPATH.

The archive holds a working folder. All paths in its configurations are relative, so that a command that is started in
the folder finds everything there, wherever the folder is; the tests rewrite nothing.

    files/moe, files/dense    two tiny models with random weights and a tokenizer of 64 tokens
    files/train.jsonl         additions; the reward is share.py
    gspo.yaml   runs/gspo     GSPO on the MoE model with routing replay (R3): 4 steps, sampled from a server
    ahead.yaml  runs/ahead    GSPO on the dense model: 4 steps, sampled up to one step ahead (max_staleness 1)
    ppo.yaml    runs/ppo      PPO with a critic on the dense model: 4 steps, trained on the rollouts of runs/ahead
    expected.json             what each run reached without an interruption: its lines of metrics, and digests of the
                              tensors that it exported at its end, of the tensors that the commit's megatron_to_hf
                              makes of the checkpoint of step 2, and of what its journal holds; also the commit and
                              what is known of the machine

Each run ended after step 4, with checkpoints of steps 2 and 4. The checkpoint of step 4 and the export are left out, so
that a run continues after step 2. Also left out, for their size or because they belong to a machine: published weights,
logs, plans, versions, locks, heartbeats, the API key and the addresses of servers. In the console log and result.json
the working folder is called /then. Megatron's .metadata still names the temporary folder that the run was made in.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

RUNS = ("gspo", "ahead", "ppo")
CHECKPOINT = "step_00000002"
VOCAB_SIZE = 64
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 1,
    "pad_token_id": 0,
}
DENSE = {
    **{name: value for name, value in MOE.items() if "expert" not in name and "moe" not in name},
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
}
for _name in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef"):
    del DENSE[_name]
# No warm-up of the learning rate, no loss or norm whose definition has changed since.
COMMON = {
    "precision": "fp32",
    "batch": {"prompts_per_step": 4, "group_size": 4, "num_mini_batches": 2, "micro_batch_tokens": 256},
    "optimizer": {"lr": 1e-3, "schedule": "constant", "weight_decay": 0.01, "clip_grad": 1.0},
    "train": {"num_steps": 4},
    "data": {"path": "files/train.jsonl", "chat_template": False, "max_prompt_tokens": 16},
    "reward": {"functions": [{"function": "share:share"}], "num_workers": 1},
    "rollout": {"max_new_tokens": 16, "max_concurrent_requests": 16},
    "server": {"max_total_tokens": 2048, "start_deadline_seconds": 600.0},
    "metrics": {"sinks": ["jsonl"]},
    "checkpoint": {"every_steps": 2, "keep_last": 5},
}
CONFIGS = {
    "gspo": {
        **COMMON,
        "run": {"name": "gspo", "dir": "runs"},
        "model": {"path": "files/moe"},
        "algorithm": "gspo",
        "objective": {"clip_low": 3e-3, "clip_high": 4e-3},
        "moe": {"routing_replay": "R3"},
        "rollout": {**COMMON["rollout"], "return_routed_experts": True},
        "diagnostics": {"token_mismatch": True},
    },
    "ahead": {
        **COMMON,
        "run": {"name": "ahead", "dir": "runs"},
        "model": {"path": "files/dense"},
        "algorithm": "gspo",
        "objective": {"clip_low": 3e-3, "clip_high": 4e-3},
        "rollout": {**COMMON["rollout"], "max_staleness": 1},
    },
    "ppo": {
        **COMMON,
        "run": {"name": "ppo", "dir": "runs"},
        "model": {"path": "files/dense"},
        "algorithm": "ppo",
        "critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 1},
        "train": {**COMMON["train"], "from_rollouts": "runs/ahead"},
    },
}
REWARD = '''"""The reward of these runs: the share of digits in a response."""


def share(*, prompt, response, answer, metadata):
    return sum(character.isdigit() for character in response) / 16
'''
# Files of a run folder that a run on another machine does not need.
LEFT_OUT = ("weights", "hf", "lock", "lease", "checkpoints/step_00000004", "report.html")
LEFT_OUT_OF_ATTEMPTS = ("api_key", "beats", "logs", "servers", "errors", "software", "plan.txt", "versions.txt")


def main() -> int:
    checkout, archive = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    commit = _git(checkout, "rev-parse", "HEAD")
    if _git(checkout, "status", "--porcelain", "--untracked-files=no"):
        raise SystemExit(f"{checkout} has changes: what is made would not be of {commit}")
    with tempfile.TemporaryDirectory(prefix="old-runs-") as folder:
        root = Path(folder)
        make_files(root)
        for name in RUNS:
            train(checkout, root, name)
        expected = {
            "made_by": {"commit": commit, **machine()},
            "runs": {name: reached(checkout, root, name) for name in RUNS},
        }
        (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        for name in RUNS:
            leave_out(root, root / "runs" / name)
        archive.parent.mkdir(parents=True, exist_ok=True)
        pack(root, archive)
    print(f"{archive}: {archive.stat().st_size} bytes")
    return 0


def _git(checkout: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", checkout, *words], check=True, capture_output=True, text=True).stdout.strip()


def make_files(root: Path) -> None:
    """Models, data, reward and configurations."""
    files = root / "files"
    files.mkdir()
    for name, config in (("moe", MOE), ("dense", DENSE)):
        make_model(files / name, config)
    rows = [(17 * n % 89 + 10, 31 * n % 83 + 10) for n in range(1, 33)]
    lines = [json.dumps({"prompt": f"{one}+{two}=", "answer": str(one + two)}) for one, two in rows]
    (files / "train.jsonl").write_text("\n".join(lines) + "\n")
    (root / "share.py").write_text(REWARD)
    for name, config in CONFIGS.items():
        (root / f"{name}.yaml").write_text(json.dumps(config, indent=2) + "\n")


def make_model(folder: Path, config: dict) -> None:
    """A Hugging Face folder: config, random weights, a tokenizer of single characters."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(ends) + "\n")

    characters = "0123456789+=-*/#., abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQ"
    special = ["<|endoftext|>", "<|im_end|>"]
    alphabet = [character if character != " " else "\u0120" for character in characters]
    vocab = {token: number for number, token in enumerate([*special, *alphabet])}
    assert len(vocab) == VOCAB_SIZE, len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[1], "pad_token": special[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(words) + "\n")

    generator = torch.Generator().manual_seed(config["num_attention_heads"] + len(config))
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (VOCAB_SIZE, hidden), "lm_head": (VOCAB_SIZE, hidden), "model.norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        shapes |= {f"{start}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{start}.self_attn.{name}_norm": (head,) for name in "qk"}
        shapes |= {
            f"{start}.self_attn.q_proj": (heads * head, hidden),
            f"{start}.self_attn.o_proj": (hidden, heads * head),
        }
        shapes |= {f"{start}.self_attn.{name}_proj": (kv_heads * head, hidden) for name in "kv"}
        parts = {f"{start}.mlp": config["intermediate_size"]}
        if "num_experts" in config:
            experts = range(config["num_experts"])
            parts = {f"{start}.mlp.experts.{number}": config["moe_intermediate_size"] for number in experts}
            shapes[f"{start}.mlp.gate"] = (config["num_experts"], hidden)
        for part, width in parts.items():
            shapes |= {f"{part}.{name}_proj": (width, hidden) for name in ("gate", "up")}
            shapes[f"{part}.down_proj"] = (hidden, width)
    tensors = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else 0.15 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def environment(checkout: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def python(checkout: Path, root: Path, *arguments: str) -> str:
    """The output of Python with the older commit's package, in the working folder."""
    process = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment(checkout), capture_output=True, text=True
    )
    if process.returncode:
        raise SystemExit(f"{arguments}: exit code {process.returncode}\n{process.stdout}\n{process.stderr}")
    return process.stdout


def train(checkout: Path, root: Path, name: str) -> None:
    """`gspo-mega train` of the older commit."""
    found = python(checkout, root, "-c", "import gspo_mega; print(gspo_mega.__file__)").strip()
    if not Path(found).is_relative_to(checkout):
        raise SystemExit(f"{found} is imported instead of the package of {checkout}")
    print(python(checkout, root, "-m", "gspo_mega", "train", f"{name}.yaml"), flush=True)


def reached(checkout: Path, root: Path, name: str) -> dict:
    """What a run reached, as its commit's own code reads it."""
    run = root / "runs" / name
    model = CONFIGS[name]["model"]["path"]
    converted = root / "converted"
    tool = str(checkout / "tools/megatron_to_hf.py")
    python(checkout, root, tool, str(run / "checkpoints" / CHECKPOINT), str(converted), "--described-by", model)
    found = {
        "metrics": [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "exported": tensor_digests(run / "hf"),
        "converted": tensor_digests(converted),
        "journal": json.loads(python(checkout, root, "-c", READ_JOURNAL, str(run / "journal"))),
    }
    shutil.rmtree(converted)
    return found


# Digests of what a journal holds, by step: run with the older commit's code and with today's.
READ_JOURNAL = """
import hashlib, json, sys
from pathlib import Path
from gspo_mega.journal.journal import Journal

journal = Journal(Path(sys.argv[1]))
found = {}
for step in journal.steps():
    rows = []
    for one in journal.read(step).batch.trajectories:
        experts = None if one.routed_experts is None else one.routed_experts.tolist()
        rows.append([one.trajectory_id, one.prompt.prompt_id, one.prompt.text, one.prompt.answer,
                     list(one.prompt.token_ids), list(one.response_token_ids), list(one.response_mask),
                     list(one.rollout_log_probs), list(one.weight_versions), one.finish_reason, one.response_text,
                     one.reward, one.reward_parts, experts])
    found[str(step)] = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
print(json.dumps(found))
"""


def tensor_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every tensor's bytes, with its type and shape, in a Hugging Face folder."""
    import torch
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            found[name] = digest.hexdigest()
    return dict(sorted(found.items()))


def machine() -> dict[str, str]:
    """What decides the last bits of sums: numbers can only be expected to be equal where all this is."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    wanted = ("vendor_id", "cpu family", "model", "flags")
    processor = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    text = json.dumps([processor.get(name, "").strip() for name in wanted])
    # Earlier commits have no such module: all their fp32 products are torch's own.
    of_onednn = (
        importlib.util.find_spec("gspo_mega.cpu.products") is not None
        and importlib.import_module("gspo_mega.cpu.products").uses_onednn()
    )
    return {
        **({"fp32 products": "oneDNN"} if of_onednn else {}),
        "processor": hashlib.sha256(text.encode()).hexdigest()[:16],
        "machine": platform.machine(),
        "torch": torch.__version__,
        "megatron-core": importlib.metadata.version("megatron-core"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def leave_out(root: Path, run: Path) -> None:
    """Remove what the archive does not have, and name the working folder `/then` in what the commands said."""
    attempts = [path for path in (run / "attempts").iterdir() if path.is_dir() and not path.is_symlink()]
    places = [run / name for name in LEFT_OUT] + [one / name for one in attempts for name in LEFT_OUT_OF_ATTEMPTS]
    for place in places:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    for name in ("console.log", "result.json"):
        for file in run.glob(f"attempts/*/{name}"):
            file.write_text(file.read_text().replace(str(root), "/then"))
    (run / "checkpoints" / "latest").write_text(CHECKPOINT + "\n")


def pack(root: Path, archive: Path) -> None:
    """All of the working folder, with the times of its files: `gspo-mega status` shows them."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.isdir() else 0o644
        return entry

    with tarfile.open(archive, "w:xz", preset=9) as out:
        for path in sorted(root.iterdir()):
            if path.name != "__pycache__":
                out.add(path, arcname=path.name, filter=plain)


if __name__ == "__main__":
    sys.exit(main())
