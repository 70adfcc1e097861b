"""What the parts share that start `gspo-mega` or its servers: a random model with a tokenizer, prompts, where ranks and
servers go on this machine, and a command with its output in a file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from gpu_engine import ROOT

from gspo_mega.base import versions
from gspo_mega.verify.certify.program import make_random_folder

CONFIG = ROOT / "configs/quickstart.yaml"
# tiny: the quickstart's. small and large have sizes that a GPU's attention kernels take; large is 1.5 GB in bf16.
_HEADS = dict(num_attention_heads=16, num_key_value_heads=4, head_dim=128, max_position_embeddings=4096)
SHAPES = {
    "tiny": {},
    "small": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, moe_intermediate_size=512, **_HEADS),
    "large": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=16, **_HEADS),
}


def prepared(folder: Path, shape: str, experts: bool) -> list[str]:
    """Make model and prompts in `folder`; returns the overrides of configs/quickstart.yaml that name them."""
    tool = [sys.executable, ROOT / "tools/make_quickstart.py", folder, "--num-train", "256", "--num-heldout", "16"]
    subprocess.run([*map(str, tool), *([] if experts else ["--dense"])], check=True, stdout=subprocess.DEVNULL)
    model, small = folder / "random", folder / "model"
    wanted = json.loads((small / "config.json").read_text()) | SHAPES[shape]
    shape_file = folder / "config.json"
    shape_file.write_text(json.dumps(wanted))
    make_random_folder(shape_file, model, 1)
    for file in small.iterdir():
        if not file.name.endswith(".safetensors") and file.name != "config.json":
            shutil.copy(file, model / file.name)
    return [f"model.path={model}", f"data.path={folder / 'data/train.jsonl'}", "eval=null", "run.name=run"]


def placement(devices: int) -> list[str]:
    """Overrides for one rank and one server: two GPUs, one GPU in turns, or none."""
    one = ["cluster.ranks_per_node=1", "parallel.expert=1", "server.memory_fraction=0.3"]
    one += [f"server.{key}={json.dumps(value)}" for key, value in server_keys().items()]
    if devices >= 2:
        return [*one, "publish.method=distributed", "precision=bf16"]
    return [*one, "publish.method=disk", *(["cluster.colocated=true", "precision=bf16"] if devices else [])]


def server_keys() -> dict:
    """Keys of the section `server` that this machine's servers need: $GSPO_GPU_SERVER, a YAML mapping."""
    return yaml.safe_load(os.environ.get("GSPO_GPU_SERVER", "{}"))


def server_python() -> str:
    """The servers' Python. Exits with 77 where it has no SGLang."""
    python = os.environ.get("GSPO_SERVER_PYTHON") or sys.executable
    if versions.versions_of(python, 120.0)["sglang"] is None:
        print(f"skipped: sglang is not installed for {python}; GSPO_SERVER_PYTHON names another Python for servers")
        raise SystemExit(77)
    return python


def devices(device: str) -> int:
    """GPUs that a part may use."""
    return torch.cuda.device_count() if device == "cuda" else 0


def gspo_mega(folder: Path, *words: str) -> str:
    """The output of a command. Exits where it fails, with the end of what it said; a part that is cut says it, too."""
    output = folder / "output"

    def end(lines: int) -> str:
        return "\n".join(output.read_text(errors="replace").splitlines()[-lines:])

    with output.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "gspo_mega", *words], stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except BaseException:
            print(f"cut; the end of what gspo-mega {words[0]} had said:\n{end(15)}", flush=True)
            process.terminate()
            process.wait()
            raise
    if code:
        raise SystemExit(f"gspo-mega {words[0]} ended with {code}:\n{end(30)}")
    return output.read_text(errors="replace")
