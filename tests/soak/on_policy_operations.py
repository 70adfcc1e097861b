"""In which operations do the trainer's and the server's log-probs differ on a CPU, and by how much?

    python tests/soak/on_policy_operations.py --folder runs/on-policy        # a table for each precision, in Markdown

Both engines are the real ones: SGLang's model runner with this package's arguments (`on_policy_server.py`, a process of
its own, which prefills prompts of several lengths together and decodes the rest), and the Megatron policy of one rank
without tensor parallelism. The weights are random, in the shape of a file in `configs/models`. Each of the trainer's
modules is then given the very input that the server's had, packed, and the outputs are compared to the bit: so a row
of the table is one operation's own difference, not what the ones before it left. "All" is the trainer's own pass over
the same tokens against the server's. `--batch-invariant` does the same with `engine.batch_invariant`.

A difference in units in the last place (ulp) is that of the two numbers' places among the numbers of the server's
dtype; the mean is over all numbers, the equal ones too. Prefilled and decoded rows are counted apart: decoding calls
an operation with as many rows as there are sequences (`--sequences`), prefilling with all prompts' tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from gspo_mega.config import Config, load_config
from gspo_mega.rollout.registration import ensure_secret
from gspo_mega.rollout.server.spec import spec_from_config
from gspo_mega.verify.certify.program import make_random_folder

HERE = Path(__file__).parent
RESPONSE_TOKENS = 21

# What a row of the table calls an operation, and the name of its output on the tape.
OPERATIONS = (
    ("embedding", "embed"),
    ("norm", "norm1"),
    ("linear, query key value", "qkv"),
    ("norm of queries", "q_norm"),
    ("norm of keys", "k_norm"),
    ("rotary positions, queries", "q_rot"),
    ("rotary positions, keys", "k_rot"),
    ("attention", "attn"),
    ("linear, attention's output", "out"),
    ("residual addition", "middle"),
    ("norm before the MLP", "norm2"),
    ("linear, gate and up", "gate_up"),
    ("SwiGLU", "act"),
    ("linear, down", "down"),
    ("last norm", "final_norm"),
    ("LM head", "logits"),
    ("log-softmax of its logits", "log_probs"),
    ("all", "all"),
)


@dataclasses.dataclass
class Tokens:
    """Sequences of random tokens, of which the first `prompts` tokens each are prefilled."""

    sequences: list[list[int]]
    prompts: list[int]

    @classmethod
    def drawn(cls, count: int, vocabulary: int) -> Tokens:
        rng = np.random.default_rng(0)
        prompts = [int(n) for n in rng.integers(3, 60, count)]
        return cls([rng.integers(3, vocabulary, n + RESPONSE_TOKENS).tolist() for n in prompts], prompts)

    @property
    def lengths(self) -> list[int]:
        """Of each sequence without its last token, which nothing is computed for."""
        return [len(tokens) - 1 for tokens in self.sequences]

    def decoded(self) -> torch.Tensor:
        """[T] bool: the packed rows that the server decodes."""
        return torch.cat([torch.arange(n) >= p for n, p in zip(self.lengths, self.prompts, strict=True)])

    def scored(self) -> torch.Tensor:
        """[N] int64: the packed rows that have logits, one for each token of the responses."""
        rows, start = [], 0
        for length, prompt in zip(self.lengths, self.prompts, strict=True):
            rows.append(torch.arange(start + prompt - 1, start + length))
            start += length
        return torch.cat(rows)

    def labels(self) -> torch.Tensor:
        """[N, 1] int64: the tokens behind those rows."""
        return torch.tensor([t for s, p in zip(self.sequences, self.prompts, strict=True) for t in s[p:]])[:, None]


def config_of(folder: Path, model: Path, precision: str, batch_invariant: bool) -> Config:
    """A run's configuration with this model on both sides."""
    sections = {
        "run": {"name": "run", "dir": str(folder)},
        "model": {"path": str(model)},
        "precision": precision,
        "batch": {"prompts_per_step": 8, "group_size": 4, "micro_batch_tokens": 4096},
        "optimizer": {"lr": 1e-4},
        "train": {"num_steps": 1},
        "data": {"path": str(folder / "none.jsonl"), "max_prompt_tokens": 64},
        "reward": "exact_match",
        "rollout": {"max_new_tokens": 64, "max_concurrent_requests": 64},
        "server": {"memory_fraction": 0.1, "max_total_tokens": 16384},
    }
    if batch_invariant:
        sections["engine"] = {"batch_invariant": True}
    path = folder / f"config_{precision}.yaml"
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return load_config(path).config


def serve(config: Config, folder: Path, tokens: Tokens, again: bool) -> dict[str, torch.Tensor]:
    """The server's rows of every operation; with `again` those that an earlier call left in the folder."""
    name = config.precision + ("_invariant" if config.engine.batch_invariant else "")
    key, store, job, rows = (folder / f"{name}.{kind}" for kind in ("key", "store", "json", "safetensors"))
    if again:
        return load_file(rows)
    ensure_secret(key)
    store.unlink(missing_ok=True)
    spec = spec_from_config(
        config,
        model_path=config.model.path,
        weight_version=None,
        port=30123,
        api_key_file=key,
        attempt="one",
        index=0,
        generation=1,
        store=store,
    )
    what = {"spec": dataclasses.asdict(spec), "sequences": tokens.sequences, "prompts": tokens.prompts}
    job.write_text(json.dumps(what), encoding="utf-8")
    with (folder / f"{name}.log").open("wb") as log:
        subprocess.run(
            [sys.executable, HERE / "on_policy_server.py", job, rows],
            check=True,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        )
    return load_file(rows)


class Trainer:
    """The policy of one rank, whose modules are given what the server's operations were given."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        from gspo_mega.engine.process_groups import device
        from gspo_mega.verify.mismatch.ranks import build_engine

        self.engine, self.config, self.tokens = build_engine(config), config, tokens
        (self.chunk,) = self.engine.chunks
        self.chunk.eval()
        bounds = torch.tensor([0, *np.cumsum(tokens.lengths).tolist()], dtype=torch.int32, device=device())
        from megatron.core.packed_seq_params import PackedSeqParams

        longest = max(tokens.lengths)
        self.packed = PackedSeqParams("thd", bounds, bounds, bounds, bounds, longest, longest)
        self.ids = torch.tensor([t for tokens in tokens.sequences for t in tokens[:-1]])[None]
        self.positions = torch.cat([torch.arange(n) for n in tokens.lengths])[None]

    def outputs(self, server: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name on the tape, the trainer's output for the server's input), operation by operation."""
        yield "embed", self.chunk.embedding.word_embeddings(self.ids)[0]
        layers = self.chunk.decoder.layers
        for index, layer in enumerate(layers):
            own = {name.partition("/")[2]: rows for name, rows in server.items() if name.startswith(f"{index}/")}
            for name, rows in self._layer(layer, own):
                yield f"{index}/{name}", rows
            following = f"{index + 1}/hidden" if index + 1 < len(layers) else "last"
            yield following, own["middle"] + own["down"]
        yield "final_norm", self.chunk.decoder.final_layernorm(server["last"])
        head, labels = self.chunk.head_weight(), self.tokens.labels()
        yield "logits", self._logits(server["final_norm"][self.tokens.scored()], head)
        # A product with the unit matrix leaves the server's logits as they are.
        scores = server["logits"].float()
        yield "log_probs", self._log_probs(scores, torch.eye(scores.size(1)), torch.arange(len(labels)), labels)
        hidden = self.chunk(self.ids, self.positions, None, packed_seq_params=self.packed)[:, 0]
        yield "all", self._log_probs(hidden, head, self.tokens.scored(), labels)

    def _layer(self, layer, own: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

        attention, spec = layer.self_attention, self.engine.spec
        heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim

        def apply(module, rows: torch.Tensor) -> torch.Tensor:
            output = module(rows[:, None])
            return (output[0] if isinstance(output, tuple) else output)[:, 0]

        yield "norm1", layer.input_layernorm(own["hidden"])
        mixed = apply(attention.linear_qkv, own["norm1"]).view(-1, groups, heads // groups + 2, dim)
        yield (
            "qkv",
            torch.cat([part.flatten(1) for part in (mixed[:, :, :-2], mixed[:, :, -2], mixed[:, :, -1])], dim=1),
        )
        query, key, value = (
            part.unflatten(1, (-1, dim)) for part in own["qkv"].split([heads * dim, groups * dim, groups * dim], dim=1)
        )
        yield "q_norm", attention.q_layernorm(query)
        yield "k_norm", attention.k_layernorm(key)
        angles = self.chunk.rotary_pos_emb(max(self.tokens.lengths), packed_seq=True)
        for name in ("q", "k"):
            before = own[f"{name}_norm"].unflatten(1, (-1, dim))
            yield (
                f"{name}_rot",
                apply_rotary_pos_emb(
                    before, angles, layer.config, self.packed.cu_seqlens_q, cp_group=self.engine.groups.context.group
                ),
            )
        query, key = (own[f"{name}_rot"].unflatten(1, (-1, dim)) for name in ("q", "k"))
        yield "attn", attention.core_attention(query, key, value, None, packed_seq_params=self.packed)
        yield "out", apply(attention.linear_proj, own["attn"])
        yield "middle", own["hidden"] + own["out"]
        yield "norm2", layer.pre_mlp_layernorm(own["middle"])
        yield "gate_up", apply(layer.mlp.linear_fc1, own["norm2"])
        yield "act", self._activation(layer.mlp, own["gate_up"])
        yield "down", apply(layer.mlp.linear_fc2, own["act"])

    def _activation(self, mlp, gate_up: torch.Tensor) -> torch.Tensor:
        """What the MLP makes of the first linear layer's output, caught before the second."""
        caught = []
        hooks = (
            mlp.linear_fc1.register_forward_hook(lambda *_: (gate_up[:, None], None)),
            mlp.linear_fc2.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0][:, 0])),
        )
        mlp(gate_up.new_zeros(len(gate_up), 1, self.engine.spec.hidden_size))
        for hook in hooks:
            hook.remove()
        return caught[0]

    def _logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        from gspo_mega.engine.log_probs import _Head

        made = _Head(hidden, head, self.tokens.labels()[:, 0], 0, 1.0, 10**9, self.config.engine.batch_invariant)
        ((_, logits),) = made.chunks()
        return logits

    def _log_probs(
        self, hidden: torch.Tensor, head: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        from gspo_mega.engine.log_probs import token_log_probs

        found, _ = token_log_probs(
            hidden[:, None],
            head,
            rows,
            labels[:, 0],
            vocab_size=head.size(0),
            temperature=1.0,
            tensor_group=self.engine.groups.tensor,
            sequence_parallel=False,
            chunk_rows=self.config.batch.log_prob_chunk_tokens,
            with_entropy=False,
            batch_invariant=self.config.engine.batch_invariant,
        )
        return found[:, None]


def places(values: torch.Tensor) -> torch.Tensor:
    """The place of each number among those of its dtype, ascending: int64, of any shape."""
    bits = values.view(torch.int32 if values.dtype == torch.float32 else torch.int16).long()
    sign = 2 ** (31 if values.dtype == torch.float32 else 15)
    return torch.where(bits < 0, -sign - bits, bits)


def difference(trainer: list[torch.Tensor], server: list[torch.Tensor]) -> str:
    """Cells of the table: rows that are not equal to the bit, largest and mean difference in ulp and absolute."""
    mine, theirs = (torch.cat([part.flatten() for part in parts]) for parts in (trainer, server))
    if not len(mine):
        return "- | - | -"
    dtype = theirs.dtype if mine.dtype != torch.bfloat16 else mine.dtype
    gap, ulp = (
        (mine.double() - theirs.double()).abs(),
        (places(mine.to(dtype)) - places(theirs.to(dtype))).abs().double(),
    )
    if not gap.any():
        return "yes | 0 | 0"
    share = f"{(gap > 0).double().mean():.1%}"
    return f"no ({share}) | {gap.max():.1e}, {gap.mean():.1e} | {ulp.max():.0f}, {ulp.mean():.2g}"


def table(config: Config, folder: Path, tokens: Tokens, again: bool) -> None:
    """Print the rows of one precision."""
    server = serve(config, folder, tokens, again)
    labels, decoded = tokens.labels(), tokens.decoded()
    server["log_probs"] = server["all"] = server["log_probs"].gather(1, labels)
    found: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    trainer = Trainer(config, tokens)
    with torch.no_grad():
        for name, rows in trainer.outputs(server):
            what = {"hidden": "middle", "last": "middle"}.get(name.rpartition("/")[2], name.rpartition("/")[2])
            mine, theirs = found.setdefault(what, ([], []))
            mine.append(rows.reshape(len(rows), -1))
            theirs.append(server[name])
    print("| operation | prefilled: equal | max, mean | in ulp | decoded: equal | max, mean | in ulp |")
    print("|---|---|---|---|---|---|---|")
    of_scored = decoded[tokens.scored()]
    for title, name in OPERATIONS:
        mine, theirs = found[name]
        cells = []
        for wanted in (False, True):
            rows = [(decoded if len(m) == len(decoded) else of_scored) == wanted for m in mine]
            cells.append(difference([m[r] for m, r in zip(mine, rows)], [t[r] for t, r in zip(theirs, rows)]))
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for weights, jobs and logs")
    parser.add_argument("--shape", default="quickstart_wide", help="a file of configs/models, without .json")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--sequences", type=int, default=12)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--again", action="store_true", help="take the server's rows of an earlier call")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    shape = HERE.parents[1] / "configs" / "models" / f"{arguments.shape}.json"
    model = make_random_folder(shape, arguments.folder / arguments.shape, seed=1)
    tokens = Tokens.drawn(arguments.sequences, json.loads(shape.read_text())["vocab_size"])
    print(f"{arguments.shape}, {arguments.sequences} sequences, torch {torch.__version__}, {platform.processor()}")
    for precision in arguments.precision:
        print(f"\n{precision}{', engine.batch_invariant' if arguments.batch_invariant else ''}\n")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        config = config_of(arguments.folder, model, precision, arguments.batch_invariant)
        table(config, arguments.folder, tokens, arguments.again)
        from gspo_mega.engine.process_groups import destroy_groups

        destroy_groups()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
