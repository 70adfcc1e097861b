"""ServerSpec: everything that one SGLang server process needs to know, as a JSON file from `serve` to the server entry.

The file holds the record, how it follows from the configuration, the checks, and its translation into SGLang's
arguments. Neither torch nor sglang is imported: `serve` stays light, and SGLang may be installed in another
environment. The record has the path of the API key's file, never the key.

`served_precision` asks a server, once per start, whether it computes in the precision that the configuration asks for.
SGLang falls back silently in some places: a checkpoint's own configuration, or a model's default, may change what an
argument says.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ConfigError, RankError
from gspo_mega.config.derived import episode_lengths, is_one_turn, taught_tokens
from gspo_mega.config.precision import (
    BLACKWELL,
    SERVER_DTYPES,
    WEIGHT_BLOCK,
    capability_problem,
    describe_server_precision,
    publishes,
    publishes_adapters,
    server_dtype,
)
from gspo_mega.config.schema import Config, Precision, Server
from gspo_mega.config.validate_servers import CONTEXT_SLACK, speculative_arguments, validate_server_options
from gspo_mega.models.delta_net import read_by_sglang
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.hf_fields import unsectioned_positions
from gspo_mega.models.huggingface import read_model_spec, text_values
from gspo_mega.models.low_rank import targets_of
from gspo_mega.rollout.registration import read_secret

# SGLang's names for formats. It recognizes the blocks of `fp8_block` by the checkpoint's own `quantization_config`.
_QUANTIZATION = {"fp8": "fp8", "fp8_block": "fp8", "int8": "w8a8_int8"}
_KV_CACHE = {"auto": "auto", "fp8": "fp8_e4m3"}


@dataclass(frozen=True)
class ServerSpec:
    """One start of one server.

    Attributes:
        weight_version: the version of the weights in `model_path`; None if they have none.
        tensor: how many ranks the server has on all of its `num_nodes` nodes; `node` is this one's number.
        store: the file through which the server's own processes find each other on one machine.
        rendezvous: host:port, where the parts of a server over several nodes find each other.
        is_published_to: it is sent new weights while it runs.
        holds_weights: it keeps a copy of what it was sent, to which a delta publish applies.
        releases_memory: it frees its GPU while the ranks train.
        classifies: its model scores texts, and generates nothing.
        forgets_answers: nobody continues a whole answer, so it does not stay in the prefix cache.
        batch_invariant: it computes a row as the trainer does with `engine.batch_invariant`.
        adapter_rank, adapter_targets: of the adapters that it is sent; a rank of 0 means none.
        speculative: SGLang's arguments for speculative decoding.
        options: further arguments for SGLang, from `server.options`.
    """

    model_path: str
    weight_version: int | None
    host: str
    port: int
    api_key_file: str
    tensor: int
    dtype: str
    context_tokens: int
    max_total_tokens: int | None
    memory_fraction: float
    max_concurrent_requests: int
    return_routed_experts: bool
    attention_backend: str | None
    log_level: str
    seed: int
    store: str
    quantization: str = "none"
    kv_cache: str = "auto"
    is_published_to: bool = True
    holds_weights: bool = False
    releases_memory: bool = False
    num_nodes: int = 1
    node: int = 0
    rendezvous: str | None = None
    expert: int = 1
    expert_dispatcher: str = "none"
    attention_data: int = 1
    classifies: bool = False
    forgets_answers: bool = False
    batch_invariant: bool = False
    adapter_rank: int = 0
    adapter_targets: list[str] = field(default_factory=list)
    speculative: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the spec as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ServerSpec:
        """Read a spec that `write` wrote."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def spec_from_config(
    config: Config,
    *,
    model_path: str,
    weight_version: int | None,
    port: int,
    api_key_file: Path,
    attempt: str,
    index: int,
    generation: int,
    store: Path,
    rendezvous: str | None = None,
) -> ServerSpec:
    """Return the spec of server `index` at its `generation`-th start in the attempt named `attempt`. Raises ConfigError
    for options or sizes that contradict each other.
    """
    server, rollout = config.server, config.rollout
    check_options_ours(server.options)
    context_tokens = server.context_tokens or max(
        episode_lengths(config).tokens, taught_tokens(config.teacher, config.rollout.max_new_tokens)
    )
    if server.max_total_tokens is not None and server.max_total_tokens < context_tokens + CONTEXT_SLACK:
        raise ConfigError(
            f"server.max_total_tokens: {server.max_total_tokens} cannot hold one request of {context_tokens} tokens;"
            f" at least {context_tokens + CONTEXT_SLACK}"
        )
    adapters: dict[str, Any] = {}
    if config.lora is not None and publishes_adapters(config):
        targets = config.lora.targets or targets_of(read_model_spec(model_path))
        adapters = {"adapter_rank": config.lora.rank, "adapter_targets": list(targets)}
    return ServerSpec(
        model_path=str(Path(model_path).absolute()),
        weight_version=weight_version,
        host=server.host,
        port=port,
        api_key_file=str(Path(api_key_file).absolute()),
        tensor=server.tensor,
        dtype=SERVER_DTYPES[server_dtype(config.server, config.precision)],
        context_tokens=context_tokens,
        max_total_tokens=server.max_total_tokens,
        memory_fraction=server.memory_fraction,
        max_concurrent_requests=rollout.max_concurrent_requests,
        return_routed_experts=rollout.return_routed_experts,
        attention_backend=server.attention_backend,
        log_level=server.log_level,
        seed=sampling_seed(config.run.seed, attempt, index, generation),
        store=str(Path(store).absolute()),
        quantization=server.quantization,
        kv_cache=server.kv_cache,
        is_published_to=publishes(config.train, config.sft),
        holds_weights=publishes(config.train, config.sft) and config.publish.full_every > 1,
        releases_memory=config.cluster.colocated,
        num_nodes=server.num_nodes,
        expert=server.expert,
        expert_dispatcher=server.expert_dispatcher,
        attention_data=server.attention_data,
        speculative=speculative_arguments(config.server, config.model),
        rendezvous=rendezvous,
        forgets_answers=is_one_turn(rollout),
        batch_invariant=config.engine.batch_invariant,
        options=dict(server.options),
        **adapters,
    )


def sampling_seed(run_seed: int, attempt: str, index: int, generation: int) -> int:
    """Return SGLang's sampling seed, below 2**31. It differs for each start of each server in each attempt.

    A continued run samples later steps than its earlier attempts. With the seeds of an earlier attempt it would draw
    the same random numbers again, and responses of different steps would be correlated.
    """
    name = f"{run_seed}/{attempt}/{index}/{generation}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") % 2**31


def check_gpu(spec: ServerSpec, capability: tuple[int, int]) -> None:
    """Raise ConfigError if SGLang cannot hold the requested quantization on a GPU of this compute capability."""
    if (problem := capability_problem(spec.quantization, capability, spec.is_published_to)) is not None:
        raise ConfigError(f"server.quantization: {problem}; valid here: none")


def experts_arguments(spec: ServerSpec, capability: tuple[int, int]) -> dict[str, str]:
    """Return the argument that keeps chosen experts visible on a GPU of this compute capability.

    SGLang 0.5.23 gives some models kernels that choose the experts themselves (`CHOOSES_UNSEEN`), and then returns
    experts that nobody chose: on sm100 DeepSeek's kind, Qwen3 and GLM, and on any GPU gpt-oss in bf16. The user's
    options override it (`validate_returned_experts`).
    """
    hides = spec.quantization == "none" or capability >= BLACKWELL
    # With a dispatcher, whose own kernels the experts need, SGLang chooses none of them.
    if not spec.return_routed_experts or not hides or spec.expert_dispatcher != "none":
        return {}
    return {} if "moe_runner_backend" in spec.options else {"moe_runner_backend": "triton"}


def check_batch_invariant(spec: ServerSpec, on_cpu: bool) -> None:
    """Raise ConfigError if a server cannot have the operations of `engine.batch_invariant`."""
    if spec.batch_invariant and not on_cpu:
        raise ConfigError("engine.batch_invariant: true, and this server sees a GPU; valid here: false")


def memory_saver_variables(spec: ServerSpec) -> dict[str, str]:
    """Return the environment variables of a server that frees its GPU. Its CUDA graphs stay there (`SERVER_PARTS` of
    `train/servers.py`): with the variable set, SGLang would end while it captures the first graph of a prefill.
    """
    return {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "false"} if spec.releases_memory else {}


def check_memory_saver(spec: ServerSpec, on_cpu: bool, is_installed: bool) -> None:
    """Raise ConfigError if servers are to free their GPUs and cannot."""
    if not spec.releases_memory:
        return
    if on_cpu:
        raise ConfigError("cluster.colocated: true, and this server sees no GPU that it could share; valid: false")
    if not is_installed:
        raise ConfigError(
            "cluster.colocated: true needs SGLang's memory saver, and its package torch_memory_saver is not installed"
            " in the servers' Python; install it there (launch/env/gpu-server.txt), or set false"
        )


def check_options_ours(options: dict[str, Any]) -> None:
    """Raise ConfigError for an option that this package sets itself or refuses. The configuration loader refuses it
    earlier, with its line in the file.
    """
    problems = [f"{violation.key}: {violation.text}" for violation in validate_server_options(options)]
    if problems:
        raise ConfigError("\n".join(problems))


def argument_names(sglang: Path) -> set[str]:
    """Return the names of ServerArgs' fields. They are read from the sources in `sglang`, the folder of the installed
    package, without importing it: ServerArgs consists of mixins with annotated fields.
    """
    sources = [*(sglang / "srt" / "arg_groups" / "fields").glob("*.py"), sglang / "srt" / "server_args.py"]
    return {
        name for path in sources for name in re.findall(r"^    (\w+): ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def check_options_sglang(options: dict[str, Any], valid: Iterable[str]) -> None:
    """Raise ConfigError, with the nearest name, for an option that the installed SGLang does not have."""
    valid = sorted(name for name in valid if not name.startswith("_"))
    problems = []
    for name in options:
        if name not in valid:
            near = get_close_matches(name, valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see the fields of sglang's ServerArgs"
            problems.append(f"server.options.{name}: the installed SGLang has no such argument; {hint}")
    if problems:
        raise ConfigError("\n".join(problems))


def sglang_arguments(spec: ServerSpec, *, on_cpu: bool, cpu_attention_backend: str) -> dict[str, Any]:
    """Return keyword arguments for SGLang's ServerArgs, without the API key. The user's options override all others."""
    arguments: dict[str, Any] = {
        "model_path": spec.model_path,
        "host": spec.host,
        "port": spec.port,
        "tp_size": spec.tensor,
        "ep_size": spec.expert,
        "moe_a2a_backend": spec.expert_dispatcher,
        # `dp_size` would make whole replicas, to which no weights can be broadcast.
        "attn_dp_size": spec.attention_data,
        "dtype": spec.dtype,
        "quantization": _QUANTIZATION.get(spec.quantization),
        "kv_cache_dtype": _KV_CACHE[spec.kv_cache],
        "context_length": spec.context_tokens + CONTEXT_SLACK,
        "max_total_tokens": spec.max_total_tokens,
        "mem_fraction_static": spec.memory_fraction,
        "max_running_requests": spec.max_concurrent_requests,
        "enable_return_routed_experts": spec.return_routed_experts,
        "weight_version": "unpublished" if spec.weight_version is None else str(spec.weight_version),
        "log_level": spec.log_level,
        "log_level_http": spec.log_level,
        "random_seed": spec.seed,
        # Token ids in, token ids out: the server needs no tokenizer, and published weights carry none for it.
        "skip_tokenizer_init": True,
        # A report has the new tokens of a response, not all of them.
        "incremental_streaming_output": True,
        # A fused shared expert would appear in `routed_experts`, and its checksums under another name.
        "disable_shared_experts_fusion": True,
        # A model folder is data: code in it is never run.
        "trust_remote_code": False,
        # By default SGLang reads pickles if a folder has no safetensors.
        "load_format": "safetensors",
    }
    arguments |= spec.speculative
    if spec.adapter_rank:
        # Two at a time: the policy's adapter, and none at all, which the proof of a publish asks for.
        arguments |= {"enable_lora": True, "max_loras_per_batch": 2, "lora_strict_loading": True}
        arguments |= {"max_lora_rank": spec.adapter_rank, "lora_target_modules": spec.adapter_targets}
    if spec.classifies:
        arguments |= {"is_embedding": True, "skip_tokenizer_init": False}
    if spec.releases_memory:
        # With a copy on the host, what was published survives a release: the ranks save their state in between.
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    if spec.num_nodes > 1:
        arguments |= {"nnodes": spec.num_nodes, "node_rank": spec.node, "dist_init_addr": spec.rendezvous}
    if spec.attention_backend is not None:
        arguments["attention_backend"] = spec.attention_backend
    if on_cpu:
        arguments |= {
            "device": "cpu",
            "sampling_backend": "pytorch",
            "attention_backend": spec.attention_backend or cpu_attention_backend,
            "disable_decode_cuda_graph": True,
            "disable_prefill_cuda_graph": True,
            # There is no device whose work scheduling could overlap; overlapping only adds copies and late results.
            "disable_overlap_schedule": True,
            "lora_backend": "torch_native",  # the one without GPU kernels
            # One cache for all layers, also for those with sliding windows: this package's attention reads no other.
            "disable_hybrid_swa_memory": True,
            # Otherwise an idle scheduler keeps a core busy that the trainer needs.
            "sleep_on_idle": True,
            # On a CPU, memory_fraction is of the whole machine's memory. Use what the open requests can fill instead.
            "max_total_tokens": (
                spec.max_total_tokens or spec.max_concurrent_requests * (spec.context_tokens + CONTEXT_SLACK)
            ),
        }
    return arguments | spec.options


def precision_arguments(server: Server, precision: Precision) -> dict[str, str | None]:
    """Return the arguments of SGLang, by name, that say what a server computes in, holds and caches."""
    return {
        "dtype": SERVER_DTYPES[server_dtype(server, precision)],
        "quantization": _QUANTIZATION.get(server.quantization),
        "kv_cache_dtype": _KV_CACHE[server.kv_cache],
    }


def draft_architectures(spec: ServerSpec, draft_config: dict[str, Any]) -> list[str]:
    """Return SGLang's names of the draft's model. If the draft's layers are in the policy's own checkpoint, that is the
    policy's name and NextN.
    """
    names = list(draft_config.get("architectures") or [])
    return [f"{name}NextN" for name in names] if spec.speculative.get("speculative_algorithm") == "NEXTN" else names


def missing_values(model_config: dict[str, Any]) -> dict[str, str]:
    """Return the argument for ServerArgs that adds the values which SGLang reads and `model_config` does not have, or
    has otherwise than the place that counts.

    Servers of a vision-language class hold its text part only (`language_model_only`): prompts have no images. Text
    has the same position in all sections of `mrope_section`, which are left out, because for them SGLang keeps a table
    among the weights.
    """
    names = model_config.get("architectures") or []
    families = [family for family in FAMILIES.values() if family.architecture in names]
    missing: dict[str, Any] = {
        key: value(model_config) if callable(value) else value
        for family in families
        for key, value in family.served.items()
        if key not in model_config
    }
    text, has_tower = text_values(model_config), any(family.text_part for family in families)
    of_text: dict[str, Any] = {}
    if any(family.delta_net for family in families):
        of_text = {key: value for key, value in read_by_sglang(text).items() if text.get(key) != value}
    if (positions := unsectioned_positions(text)) and families:
        of_text |= positions
        missing["language_model_only"] = True  # without it SGLang asks for a position in each section
    if has_tower:  # SGLang's Qwen3-VL without experts looks for the text part's values at the top
        missing |= positions | {"language_model_only": True} | ({"text_config": of_text} if of_text else {})
    else:
        missing |= of_text
    return {"json_model_override_args": json.dumps(missing)} if missing else {}


def check_checkpoint(spec: ServerSpec, model_config: dict[str, Any]) -> None:
    """Raise ConfigError if the folder's weights do not have the form that `server.quantization` starts from."""
    found = model_config.get("quantization_config")
    if spec.quantization == "fp8_block":
        block = (found or {}).get("weight_block_size")
        if found is None or found.get("quant_method") != "fp8" or list(block or ()) != list(WEIGHT_BLOCK):
            raise ConfigError(
                f"server.quantization: fp8_block, and the config.json of {spec.model_path} has no `quantization_config`"
                f" with quant_method fp8 and weight_block_size {list(WEIGHT_BLOCK)}; servers begin with weights that"
                " are quantized already"
            )
    elif found is not None:
        raise ConfigError(
            f"server.quantization: {spec.quantization}, and the weights in {spec.model_path} are quantized already"
            f" (quantization_config: {found.get('quant_method')}); valid: fp8_block, or a folder of plain weights"
        )


_ANSWER_SECONDS = 15.0
_TRIES = 3
_PAUSE_SECONDS = 1.0


def served_precision(server: Server, precision: Precision, address: str, api_key_file: Path) -> str:
    """Say what the server at `address` computes in. Raises ConfigError if that is not what the configuration asks for,
    and RankError if the server does not answer, repeatedly, or has died.

    If the configuration asks for nothing (`dtype: auto`, and neither quantization nor an FP8 cache), the server is not
    asked.
    """
    if (server.dtype, server.quantization, server.kv_cache) != ("auto", "none", "auto"):
        said = _server_info_with_retries(address, api_key_file)
        for name, wanted in precision_arguments(server, precision).items():
            if said.get(name) != wanted:
                raise ConfigError(
                    f"the server at {address} was started with {name} {wanted!r} and says that it has"
                    f" {said.get(name)!r}; see server.dtype, server.quantization, server.kv_cache"
                )
    return describe_server_precision(server, precision)


def _server_info_with_retries(address: str, api_key_file: Path) -> dict[str, object]:
    """Ask several times, because a server that has just become healthy may be busy."""
    for _ in range(_TRIES - 1):
        try:
            return _server_info(address, api_key_file)
        except RankError:
            time.sleep(_PAUSE_SECONDS)
    return _server_info(address, api_key_file)


def _server_info(address: str, api_key_file: Path) -> dict[str, object]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/server_info", headers={"Authorization": f"Bearer {read_secret(api_key_file)}"})
        answer = connection.getresponse()
        said = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise RankError(f"the server at {address} does not say what it computes in: {error!r}") from error
    finally:
        connection.close()
    if answer.status != 200 or not isinstance(said, dict):
        raise RankError(
            f"the server at {address} does not say what it computes in: /server_info answers {answer.status}"
        )
    return said
