"""A pretrained model through the product's commands: `python tests/soak/pretrained.py MODEL [--work DIR] [PART ...]`.

MODEL: a Hugging Face folder whose tokenizer has a chat template, such as runs/models/smollm2 of `launch/quickstart.sh
--model smollm2`. Everything is kept in DIR (default: runs/pretrained-soak); a part that has its line in DIR/rows.jsonl
is not run again. A line per part; exit code 1 where one failed. On two cores the whole takes about an hour.

    convert   Hugging Face -> Megatron -> Hugging Face: every tensor equal bit for bit
    logits    server and trainer against transformers, fp32: log-probs of the same sampled tokens
    resume    killed (SIGKILL, every process) and continued = its rollouts replayed without a server, bit for bit
    generate  the exported folder in transformers: the text of a greedy `gspo-mega eval`
    precision a step in bf16, in FP8 with per-tensor scales, and with FP8 servers
    lora      adapters: published as adapters, exported merged
    episode   several turns with a tool
    doctor    the chat template
    certify   layouts (configs/certify_smollm2.yaml)
    gradient  a certificate's reference against transformers in fp64, and what fp32 does to this model
    mismatch  every cause, with the FP8 server's
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gspo_mega.base.processes import living_below
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import TokenGaps
from gspo_mega.metrics.writer import read_metrics

CONFIG = str(ROOT / "configs/smollm2_json.yaml")
LOG_PROB_TOLERANCE = 1e-4  # nats per token in fp32, over some thirty layers; each library adds in an order of its own
FEW = (
    "batch.prompts_per_step=4",
    "batch.group_size=4",
    "rollout.max_new_tokens=24",
    "server.max_total_tokens=8192",
    "eval.num_prompts=8",
    "eval.every_steps=1000",
)
FP8 = ("precision=fp8", "fp8.recipe=tensorwise")
FP8_SERVER = ("precision=bf16", "server.quantization=fp8")


class Soak:
    def __init__(self, model: Path, work: Path, few: tuple[str, ...] = FEW) -> None:
        """`few`: overrides that make every run small."""
        self.model, self.work, self.few = model.resolve(), work.resolve(), few
        self.data = self.work / "data"
        self.work.mkdir(parents=True, exist_ok=True)
        if not self.data.exists():
            self.tool("make_short_task", self.data)

    def run(self, name: str, *command: object, ok: tuple[int, ...] = (0,)) -> str:
        """Run a command; its output goes to DIR/NAME.log, too. Raises AssertionError for another exit code."""
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        (self.work / f"{name}.log").write_text(done.stdout)
        assert done.returncode in ok, f"{name}: exit code {done.returncode}: {done.stdout[-1500:]}"
        return done.stdout

    def tool(self, name: str, *arguments: object) -> str:
        return self.run(name, sys.executable, ROOT / "tools" / f"{name}.py", *arguments)

    def product(self, name: str, *arguments: object, ok: tuple[int, ...] = (0,)) -> str:
        return self.run(name, sys.executable, "-m", "gspo_mega", *arguments, ok=ok)

    def overrides(self, name: str, *more: str) -> list[str]:
        return [
            f"model.path={self.model}",
            f"run.dir={self.work}",
            f"run.name={name}",
            f"data.path={self.data / 'train.jsonl'}",
            f"eval.path={self.data / 'heldout.jsonl'}",
            *self.few,
            *more,
        ]

    def train(self, name: str, *more: str, steps: int = 1, options: tuple[str, ...] = ()) -> RunFolder:
        self.product(name, "train", CONFIG, *options, *self.overrides(name, f"train.num_steps={steps}", *more))
        return RunFolder(self.work / name)


def convert(soak: Soak) -> dict[str, Any]:
    there, back = soak.work / "megatron", soak.work / "hf"
    soak.tool("hf_to_megatron", soak.model, there)
    soak.tool("megatron_to_hf", there, back)
    said = soak.tool("verify_checkpoint", soak.model, back)
    soak.tool("verify_checkpoint", soak.model, there)
    return {"verified": said.strip().splitlines()[-1]}


def logits(soak: Soak) -> dict[str, Any]:
    """Server, trainer and transformers score the same tokens; the trainer begins with the converted checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    if not (soak.work / "megatron").exists():
        soak.tool("hf_to_megatron", soak.model, soak.work / "megatron")
    run = soak.train(
        "logits", "precision=fp32", f"model.weights={soak.work / 'megatron'}", "diagnostics.token_mismatch=true"
    )
    model = AutoModelForCausalLM.from_pretrained(soak.model, dtype=torch.float32).eval()
    journal = Journal(run.journal_dir)
    record, gaps = journal.read(0), TokenGaps(run.journal_dir, 0)
    assert record is not None and record.batch is not None
    of_server, of_trainer, count = 0.0, 0.0, 0
    for episode in record.batch.episodes:
        gap = gaps.of(episode)
        (turn,) = episode.turns
        prompt = list(episode.prompt.token_ids)
        ids = torch.tensor([[*prompt, *turn.token_ids]])
        with torch.no_grad():
            scores = model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        wanted = scores.gather(1, ids[0, len(prompt) :, None])[:, 0]
        served = torch.tensor(turn.log_probs, dtype=torch.float64)
        trained = served + torch.from_numpy(gap[turn.node_id]).double()
        of_server = max(of_server, float((served - wanted).abs().max()))
        of_trainer = max(of_trainer, float((trained - wanted).abs().max()))
        count += len(wanted)
    assert count > 50 and of_server <= LOG_PROB_TOLERANCE and of_trainer <= LOG_PROB_TOLERANCE, (of_server, of_trainer)
    return {"tokens": count, "server": of_server, "trainer": of_trainer}


def resume(soak: Soak) -> dict[str, Any]:
    settings = ("precision=fp32", "checkpoint.every_steps=1")
    command = [sys.executable, "-m", "gspo_mega", "train", CONFIG]
    command += soak.overrides("resume", "train.num_steps=3", *settings)
    folder = RunFolder(soak.work / "resume")
    with (soak.work / "killed.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 1800
        while not folder.metrics_file.exists() or len(read_metrics(folder.metrics_file)) < 2:
            assert process.poll() is None and time.monotonic() < deadline, (soak.work / "killed.log").read_text()[
                -1500:
            ]
            time.sleep(0.2)
        for pid in (process.pid, *living_below(process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    soak.train("resume", *settings, steps=3)
    assert len(folder.attempts()) == 2
    soak.train("replay", *settings, steps=3, options=("--from-rollouts", str(folder.path)))
    soak.tool("verify_checkpoint", folder.path / "hf", soak.work / "replay" / "hf")
    rewards = [line.get("reward/mean") for line in read_metrics(folder.metrics_file)]
    return {"attempts": 2, "rewards": rewards, "equal": "bit for bit"}


def generate(soak: Soak) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = soak.work / "generate" / "hf"
    soak.train("generate", "precision=fp32")
    out = soak.work / "greedy.jsonl"
    greedy = soak.overrides("greedy", "precision=fp32", "eval.temperature=0", "eval.num_prompts=4")
    greedy = [one for one in greedy if not one.startswith("model.path=")]
    soak.product("greedy", "eval", folder, "--config", CONFIG, *greedy, "--out", out)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = [json.loads(line) for line in out.read_text().splitlines()]
    prompts = {}
    for line in (soak.data / "heldout.jsonl").read_text().splitlines():
        prompts[json.loads(line)["prompt"]] = None
    same = 0
    for sample in samples:
        asked = next(prompt for prompt in prompts if prompt in sample["prompt"])
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
        same += tokenizer.decode(made, skip_special_tokens=True) == sample["response"]
    assert same == len(samples) > 0, f"{same} of {len(samples)}"
    return {"equal": f"{same} of {len(samples)}"}


def precision(soak: Soak) -> dict[str, Any]:
    found = {}
    for name, settings in (("bf16", ("precision=bf16",)), ("fp8", FP8), ("fp8_server", FP8_SERVER)):
        (line,) = read_metrics(soak.train(f"precision_{name}", *settings).metrics_file)[-1:]
        found[name] = {"k3": line["mismatch/k3"], "grad_norm": line["optimizer/grad_norm"]}
    return found


def lora(soak: Soak) -> dict[str, Any]:
    run = soak.train("lora", "precision=fp32", "lora={rank: 8, alpha: 16}", "optimizer.lr=2e-4", steps=2)
    lines = [line for line in read_metrics(run.metrics_file) if "mismatch/k3" in line]
    assert all(line["mismatch/k3"] < 1e-8 for line in lines), "the servers have the adapters of the trainer"
    assert (run.path / "hf" / "model.safetensors").exists()
    return {"k3": [line["mismatch/k3"] for line in lines]}


def episode(soak: Soak) -> dict[str, Any]:
    sums = soak.work / "sums.jsonl"
    rows = [{"prompt": f"What is {a} times {a + 7}?", "answer": str(a * (a + 7))} for a in range(11, 60)]
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        "rollout.episode=tool_loop",
        "rollout.tools=[gspo_mega.data.calculator:calculator]",
        "episodes={tool_format: brackets, max_turns: 3, max_tokens: 256}",
        f"data.path={sums}",
        "eval=null",
        "reward=gsm8k",
        "precision=fp32",
    )
    overrides = [one for one in soak.overrides("episode") if not one.startswith(("eval.", "data.path"))]
    soak.product("episode", "train", CONFIG, *overrides, "train.num_steps=1", *settings)
    (line,) = read_metrics(RunFolder(soak.work / "episode").metrics_file)[-1:]
    return {key: line[key] for key in sorted(line) if key.startswith("episodes/") or key == "mismatch/k3"}


def doctor(soak: Soak) -> dict[str, Any]:
    said = soak.product("doctor", "doctor", "--tokenizer", soak.model, ok=(0, 1))
    return {"said": said.strip().splitlines()[-1]}


def certify(soak: Soak) -> dict[str, Any]:
    config = ROOT / "configs/certify_smollm2.yaml"
    said = soak.product("certify", "certify", config, f"model.path={soak.model}", f"run.dir={soak.work}")
    return {"said": said.strip().splitlines()[-1]}


def gradient(soak: Soak) -> dict[str, Any]:
    """GSPO's gradient on the recorded batch of a certificate, by transformers and autograd: [relative L2 of the tensor
    where it is largest] of ours and of transformers in fp32, from transformers in fp64.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from gspo_mega.config import load_config
    from gspo_mega.verify.certify.batch import Draws, recorded_batch

    given = [f"model.path={soak.model}", f"run.dir={soak.work}", "run.name=gradient", "certify.num_steps=1"]
    given.append("certify.cases=[{name: packs shuffled, packing: shuffled}]")
    file = ROOT / "configs/certify_smollm2.yaml"
    soak.product("gradient", "certify", file, *given, ok=(0, 1))  # what is compared here is the reference
    config = load_config(file, given, "certify").config
    (folder,) = (soak.work / "gradient-certify" / "reference").iterdir()
    vocabulary = json.loads((soak.model / "config.json").read_text())["vocab_size"]
    draws = Draws(**json.loads((folder / "draws.json").read_text()))
    rows = recorded_batch(config, vocabulary, draws).trajectories
    ends = np.cumsum([row.num_response_tokens for row in rows])
    old = np.split(np.load(folder / "recorded.npy"), ends[:-1])
    low, high = 1 - (config.objective.clip_low or 0.0), 1 + (config.objective.clip_high or 0.0)
    num_active = sum(any(row.response_mask) for row in rows)

    def gradients(dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], float]:
        model = AutoModelForCausalLM.from_pretrained(soak.model, dtype=dtype).eval()
        log_probs, largest = [], 0.0
        for row, recorded in zip(rows, old, strict=True):
            prompt, mask = list(row.prompt.token_ids), torch.tensor(row.response_mask, dtype=dtype)
            if not mask.any():
                continue
            ids = torch.tensor([[*prompt, *row.response_token_ids]])
            out = model(ids, output_hidden_states=True)
            largest = max(largest, *(float(states.detach().abs().max()) for states in out.hidden_states))
            scores = out.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            found = scores.gather(1, ids[0, len(prompt) :, None])[:, 0]
            log_probs.append((found * mask).detach().double())
            ratio = (((found - torch.tensor(recorded, dtype=dtype)) * mask).sum() / mask.sum()).exp()
            assert row.advantage is not None
            term = torch.minimum(ratio * row.advantage, ratio.clamp(low, high) * row.advantage)
            (-term / num_active).backward()
        grads = {name: tensor.grad.double() for name, tensor in model.named_parameters() if tensor.grad is not None}
        return grads, log_probs, largest

    want, exact, largest = gradients(torch.float64)
    rounded, single, _ = gradients(torch.float32)
    ours = {name: torch.from_numpy(np.load(folder / "gradient" / f"{name}.npy")).double() for name in want}
    # Ours is of the sum that the denominator divides; one factor for all tensors.
    factor = sum(float((ours[name] * want[name]).sum()) for name in want)
    factor /= sum(float(want[name].square().sum()) for name in want)
    errors = {
        name: max(float((found[key] / by - want[key]).norm() / want[key].norm()) for key in want)
        for name, found, by in (("ours", ours, factor), ("transformers_fp32", rounded, 1.0))
    }
    assert abs(abs(factor) - 1) < 1e-4 and errors["ours"] < 1e-4, (factor, errors)
    gap = max(float((a - b).abs().max()) for a, b in zip(exact, single, strict=True))
    return {**errors, "fp32_nats": gap, "largest_activation": round(largest)}


def mismatch(soak: Soak) -> dict[str, Any]:
    out = soak.work / "mismatch.json"
    settings = ("budget.num_prompts=8", "budget.samples_per_prompt=2", *FP8_SERVER)
    said = soak.product(
        "mismatch", "mismatch", CONFIG, "--quick", "--json", out, *soak.overrides("mismatch", *settings)
    )
    return {"said": said.strip().splitlines()[-1]}


PARTS: dict[str, Callable[[Soak], dict[str, Any]]] = {
    part.__name__: part
    for part in (convert, logits, resume, generate, precision, lora, episode, doctor, certify, gradient, mismatch)
}


def main() -> int:
    parser = argparse.ArgumentParser(description="A pretrained model through the product's commands.")
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--work", type=Path, default=Path("runs/pretrained-soak"), metavar="DIR")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; valid: {', '.join(PARTS)}")
    soak, failed = Soak(options.model, options.work), 0
    rows = soak.work / "rows.jsonl"
    done = {json.loads(line)["part"] for line in rows.read_text().splitlines()} if rows.exists() else set()
    for name in options.parts or PARTS:
        if name in done:
            continue
        began = time.monotonic()
        try:
            row = {"part": name, **PARTS[name](soak), "seconds": round(time.monotonic() - began)}
        except AssertionError as error:
            failed += 1
            print(f"{name:<10} FAILED {error}", flush=True)
            continue
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
