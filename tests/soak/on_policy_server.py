"""What SGLang's own model computes of given tokens on a CPU, operation by operation: a process of `on_policy_operations`.

SGLang's model runner is built in this process with the arguments of this package's servers. Each sequence's prompt is
prefilled, all together, and the rest is decoded token by token with the given tokens, so that the rows of an operation
come from the calls that a server makes. Everything is written to one safetensors file, in the order of the sequences
one after another: `embed`, and of layer l `l/hidden`, `l/norm1`, `l/qkv`, `l/q_norm`, `l/q_rot`, `l/k_norm`, `l/k_rot`,
`l/attn`, `l/out`, `l/middle`, `l/norm2`, `l/gate_up`, `l/act`, `l/down`, then `last`, `final_norm`, `logits`,
`log_probs`.
"""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gspo_mega.rollout.server import entry  # first: it makes SGLang importable
from gspo_mega.rollout.server.spec import ServerSpec

# The functions of `sglang_cpu_layers.layers_forward` in the order of their calls, of a layer and after the last.
_LAYER = ("norm1", "qkv", "q_norm", "q_rot", "k_norm", "k_rot", "out", "norm2", "gate_up", "silu", "down")
_INPUTS = {"norm1": "hidden", "out": "attn", "norm2": "middle", "down": "act"}


def runner_of(spec: ServerSpec) -> Any:
    """SGLang's model runner, as `sglang.benchmark.one_batch` makes it."""
    arguments = entry.server_arguments(spec)
    from sglang.benchmark import one_batch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish
    from sglang.srt.server_args import PortArgs

    arguments.resolve_once()
    entry.use_private_rendezvous(spec)
    one_batch._set_envs_and_config(arguments)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    ports = PortArgs.init_new(arguments)
    model_config = ModelConfig.from_server_args(arguments)
    bootstrap.init_parallel_runtime(server_args=arguments, device=get_device().device, dist_port=ports.nccl_port)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=spec.memory_fraction,
        gpu_id=0,
        nccl_port=ports.nccl_port,
        server_args=arguments,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


class Tape:
    """Rows of operations in the order in which they are computed; `take` hands out those of one forward pass."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Any]] = {}

    def put(self, name: str, value: Any) -> None:
        self.rows.setdefault(name, []).append(value.detach().clone().flatten(1))

    def take(self) -> dict[str, list[Any]]:
        taken, self.rows = self.rows, {}
        return taken


def record_functions(tape: Tape, num_layers: int, batch_invariant: bool) -> None:
    """Record what `layers_forward` computes: its functions are wrapped, and known by the order of their calls."""
    from gspo_mega.cpu import batch_invariant as row_operations
    from gspo_mega.cpu import sglang_layers

    names = [f"{layer}/{name}" for layer in range(num_layers) for name in _LAYER] + ["final_norm"]
    state = {"next": 0}

    def wrapped(function: Any) -> Any:
        def call(x: Any, *rest: Any) -> Any:
            name = names[state["next"]]
            state["next"] = (state["next"] + 1) % len(names)
            layer, _, what = name.rpartition("/")
            if what in _INPUTS:
                tape.put(f"{layer}/{_INPUTS[what]}", x)
            elif name == "final_norm":
                tape.put("last", x)
            result = function(x, *rest)
            if what != "silu":  # its product with `up` is made in place: it is the input of `down`
                tape.put(name, result)
            return result

        return call

    if batch_invariant:
        own = {name: wrapped(getattr(row_operations, name)) for name in ("linear", "rotate", "silu")}
        sglang_layers.rows = SimpleNamespace(**{**vars(row_operations), **own})
        sglang_layers.rms_norm = wrapped(sglang_layers.rms_norm)
        return
    for name in ("linear", "rms_norm", "rotate", "silu"):
        setattr(sglang_layers, name, wrapped(getattr(sglang_layers, name)))


def record_modules(tape: Tape, model: Any) -> None:
    """Record what SGLang's own modules compute."""

    def after(name: str, module: Any, take: Any = lambda output: output) -> None:
        module.register_forward_hook(lambda _m, _i, output: tape.put(name, take(output)))

    def norm(module: Any, entering: str, name: str) -> None:
        def hook(_module: Any, inputs: Any, output: Any) -> None:
            normed, added = output if isinstance(output, tuple) else (output, inputs[0])
            tape.put(entering, added)
            tape.put(name, normed)

        module.register_forward_hook(hook)

    def rotary(module: Any, prefix: str) -> None:
        def hook(_module: Any, inputs: Any, output: Any) -> None:
            for name, before, rotated in zip(("q", "k"), inputs[1:3], output, strict=True):
                tape.put(f"{prefix}/{name}_norm", before)
                tape.put(f"{prefix}/{name}_rot", rotated)

        return hook

    current = {"layer": 0}
    for index, layer in enumerate(model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        norm(layer.input_layernorm, f"{index}/hidden", f"{index}/norm1")
        after(f"{index}/qkv", attention.qkv_proj, lambda output: output[0])
        attention.register_forward_pre_hook(lambda *_args, index=index: current.update(layer=index))
        after(f"{index}/attn", attention.attn)
        after(f"{index}/out", attention.o_proj, lambda output: output[0])
        norm(layer.post_attention_layernorm, f"{index}/middle", f"{index}/norm2")
        after(f"{index}/gate_up", mlp.gate_up_proj, lambda output: output[0])
        after(f"{index}/act", mlp.act_fn)
        after(f"{index}/down", mlp.down_proj, lambda output: output[0])
    norm(model.norm, "last", "final_norm")
    shared = model.layers[0].self_attn.rotary_emb  # one module of all layers
    shared.register_forward_hook(lambda *args: rotary(shared, str(current["layer"]))(*args))


def run(runner: Any, sequences: list[list[int]], prompts: list[int], tape: Tape) -> dict[str, Any]:
    """The rows of every operation for all tokens but the last of each sequence, sequence after sequence."""
    import torch
    from sglang.benchmark.one_batch import TreeCacheNamespace
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.runtime_context import get_schedule
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    requests = []
    for index, (tokens, length) in enumerate(zip(sequences, prompts, strict=True)):
        request = Req(
            rid=str(index),
            origin_input_text="",
            origin_input_ids=array("q", tokens[:length]),
            sampling_params=SamplingParams(temperature=1.0, max_new_tokens=len(tokens)),
            vocab_size=512,
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = length
        requests.append(request)
    runner.model.model.embed_tokens.register_forward_hook(lambda _m, _i, output: tape.put("embed", output))
    runner.sampler.output_logprob_processor.compute_logprobs = lambda log_probs, *_rest: (
        tape.put("log_probs", log_probs),
        SimpleNamespace(write_output_to=lambda _output: None),
    )[1]

    def step(batch: Any) -> dict[str, Any]:
        forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        output = runner.forward(forward_batch).logits_output
        tape.put("logits", output.next_token_logits)
        size = len(batch.reqs)
        runner.sampler(output, forward_batch.sampling_info, True, [0] * size, [[]] * size, forward_batch.positions)
        return {name: torch.cat(values) for name, values in tape.take().items()}

    with torch.no_grad():
        batch = ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=TreeCacheNamespace(
                page_size=get_schedule().page_size,
                device=runner.device,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            ),
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu
            batch.prefill_input_ids_cpu = None
        parts: dict[str, list[list[Any]]] = {}

        def keep(rows: dict[str, Any], counts: list[int]) -> None:
            for name, values in rows.items():
                each = counts if len(values) == sum(counts) else [1] * len(counts)
                lists = parts.setdefault(name, [[] for _ in counts])
                for own, values_of_one in zip(lists, values.split(each), strict=True):
                    own.append(values_of_one)

        keep(step(batch), prompts)
        for place in range(len(sequences[0]) - 1 - prompts[0]):  # as many of every sequence
            tokens = [tokens[length + place] for tokens, length in zip(sequences, prompts, strict=True)]
            batch.input_ids = torch.tensor(tokens)
            batch.prepare_for_decode()
            keep(step(batch), [1] * len(tokens))
    return {name: torch.cat([row for one in lists for row in one]) for name, lists in parts.items()}


def main() -> None:
    """Arguments: a JSON file of `spec`, `sequences`, `prompts`; the file to write."""
    from safetensors.torch import save_file

    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    spec = ServerSpec(**job["spec"])
    runner = runner_of(spec)
    from gspo_mega.cpu.sglang_layers import is_plain_model

    tape = Tape()
    if spec.batch_invariant or is_plain_model(runner.model.model):
        record_functions(tape, len(runner.model.model.layers), spec.batch_invariant)
    else:
        record_modules(tape, runner.model.model)
    rows = run(runner, job["sequences"], job["prompts"], tape)
    save_file({name: values.contiguous() for name, values in rows.items()}, sys.argv[2])


if __name__ == "__main__":
    main()
