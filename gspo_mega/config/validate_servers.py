"""The rules of servers that need no model: SGLang's arguments in `server.options`, and speculative decoding.

`validate_server_options` refuses arguments that follow from another key, and those that would run foreign code, open
the server, or break what a run relies on; the tables hold the reasons. Whether the installed SGLang knows an argument
is checked where SGLang runs. `validate_sampling_masks` has the rules of truncated sampling, and `validate_delta` says
with what `publish.full_every` does not go. `validate_speculative` has the rules between the keys of
`server.speculative`; the functions after it give SGLang's names for them. What a draft takes of a GPU's memory is in
`plan/servers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import Violation
from gspo_mega.config.derived import has_sampling_masks
from gspo_mega.config.precision import publishes, publishes_adapters
from gspo_mega.config.schema import Config, Model, Rollout, Server

CONTEXT_SLACK = 8
"""Tokens of context beyond the longest sequence: SGLang ends a response two tokens before its context is full, and
refuses a prompt whose length is within six of it.
"""

OWN_ARGUMENTS = {
    "model_path": "model.path",
    "host": "server.host",
    "port": "(chosen at start)",
    "api_key": "(made for each attempt)",
    "tp_size": "server.tensor",
    "nnodes": "server.num_nodes",
    "node_rank": "server.num_nodes",
    "dist_init_addr": "server.num_nodes",
    "ep_size": "server.expert",
    "moe_a2a_backend": "server.expert_dispatcher",
    "attn_dp_size": "server.attention_data",
    "enable_dp_attention": "server.attention_data",
    "speculative_algorithm": "server.speculative",
    "speculative_draft_model_path": "server.speculative",
    "speculative_num_steps": "server.speculative",
    "speculative_eagle_topk": "server.speculative",
    "speculative_num_draft_tokens": "server.speculative",
    "dtype": "server.dtype",
    "quantization": "server.quantization",
    "kv_cache_dtype": "server.kv_cache",
    "context_length": "server.context_tokens",
    "max_total_tokens": "server.max_total_tokens",
    "mem_fraction_static": "server.memory_fraction",
    "max_running_requests": "rollout.max_concurrent_requests",
    "log_level": "server.log_level",
    "log_level_http": "server.log_level",
    "attention_backend": "server.attention_backend",
    "weight_version": "(kept by the run)",
    "random_seed": (
        "run.seed, with the attempt, the server and the number of its start: no start repeats the samples of another"
    ),
    "enable_return_routed_experts": "rollout.return_routed_experts",
    "incremental_streaming_output": "(how responses are read)",
    "skip_tokenizer_init": "(token ids in, token ids out)",
    "disable_shared_experts_fusion": "(publishing names every expert)",
    "enable_memory_saver": "cluster.colocated",
    "enable_weights_cpu_backup": "cluster.colocated",
}
"""The arguments that this package sets, and the key or rule that each follows from."""

_CODE = "runs code that a file, a module or a request names"

_OPENS = "makes the server listen or answer beyond its one address with the run's API key"

_WEIGHTS = "makes the server hold other weights than were published, and every verification of a publish fail"

_READS = (
    "has weights read from elsewhere, or in a form that may hold code; servers load safetensors from the folder that"
    " the run names"
)

_SAMPLES = "samples from another distribution than the returned log-probs describe"

_SPREADS = "spreads one server over machines, pipelines or replicas, which publishing does not reach"

_REASONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        _CODE,
        (
            "trust_remote_code",
            "custom_weight_loader",
            "enable_custom_logit_processor",
            "forward_hooks",
            "sidecar",
            "sidecar_args",
            "stat_loggers",
            "custom_sigquit_handler",
            "tool_server",
            "trust_request_chat_template",
            "hicache_storage_backend",
            "hicache_storage_backend_extra_config",
            "unified_cache_external_linker_backend",
            "unified_cache_external_linker_config",
            "enable_lmcache",
            "lmcache_config_file",
            "enable_flexkv",
            "flexkv_config_file",
        ),
    ),
    (
        _OPENS,
        (
            "admin_api_key",
            "grpc_mode",
            "smg_grpc_mode",
            "grpc_port",
            "smg_http_sidecar_port",
            "enable_metrics",
            "fastapi_root_path",
            "ssl_keyfile",
            "ssl_certfile",
            "ssl_ca_certs",
            "ssl_keyfile_password",
            "enable_ssl_refresh",
            "enable_trace",
            "otlp_traces_endpoint",
            "kv_events_config",
            "load_publish_endpoint",
            "engine_info_bootstrap_port",
            "remote_instance_weight_loader_start_seed_via_transfer_engine",
            "weight_cache_mode",
            "weight_cache_socket",
            "disaggregation_mode",
            "disaggregation_bootstrap_port",
            "encoder_bootstrap_port",
            "decoupled_spec_bind_endpoint",
        ),
    ),
    (
        _WEIGHTS,
        (
            "quantize_and_serve",
            "quantization_param_path",
            "rl_quant_profile",
            "modelopt_quant",
            "modelopt_checkpoint_restore_path",
            "enforce_shared_experts_fusion",
            "kt_weight_path",
        ),
    ),
    (
        _READS,
        (
            "load_format",
            "speculative_draft_load_format",
            "model_loader_extra_config",
            "remote_instance_weight_loader_backend",
            "remote_instance_weight_loader_seed_instance_ip",
            "modelexpress_config",
            "decrypted_config_file",
            "delete_ckpt_after_loading",
            "checkpoint_engine_wait_weights_before_ready",
        ),
    ),
    (
        _SAMPLES,
        (
            "enable_watermark",
            "preferred_sampling_params",
            "speculative_accept_threshold_single",
            "speculative_accept_threshold_acc",
        ),
    ),
    (
        _SPREADS,
        (
            "nccl_port",
            "gated_launch_port",
            "use_ray",
            "pp_size",
            "dp_size",
            "ep_join_mode",
        ),
    ),
)

REFUSED_ARGUMENTS: dict[str, str] = {name: why for why, names in _REASONS for name in names}
"""The arguments that are refused, and why."""

_KEY = "server.speculative"

# Algorithms with a model of their own in `draft_path`. `nextn` takes layers of the policy's own checkpoint.
_WITH_DRAFT = ("eagle", "eagle3", "standalone")


def validate_server_options(options: dict[str, Any]) -> Iterator[Violation]:
    """Yield a violation for each option that may not be set."""
    for name in options:
        if name in OWN_ARGUMENTS:
            yield Violation(
                f"server.options.{name}", f"set by this package from {OWN_ARGUMENTS[name]}; leave it out here"
            )
        elif name in REFUSED_ARGUMENTS:
            yield Violation(f"server.options.{name}", f"{REFUSED_ARGUMENTS[name]}; leave it out")


# SGLang's default of `sampling_mask_max_tokens`.
MOST_KEPT_TOKENS = 4096

# Products of experts that choose the experts themselves. SGLang 0.5.23 records only what its own top-k chose
# (`layers/moe/topk.py`), so a response would carry what the buffer held before.
CHOOSES_UNSEEN = ("flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4", "triton_kernel")


def validate_returned_experts(rollout: Rollout, server: Server) -> Iterator[Violation]:
    """Yield a violation if servers are to return each token's experts and are told to use kernels that hide them."""
    chosen = server.options.get("moe_runner_backend")
    if rollout.return_routed_experts and chosen in CHOOSES_UNSEEN:
        yield Violation(
            "server.options.moe_runner_backend",
            f"{chosen} chooses experts where SGLang does not see it, and `rollout.return_routed_experts` is true;"
            " valid: triton, or false there",
        )


def validate_sampling_masks(config: Config) -> Iterator[Violation]:
    """Yield what does not fit a truncated sampling distribution, whose sets of kept tokens the servers must return."""
    rollout, options = config.rollout, config.server.options
    most = options.get("sampling_mask_max_tokens", MOST_KEPT_TOKENS)
    if rollout.top_k == 0:
        yield Violation("rollout.top_k", "0 leaves no token to sample; valid: -1 (all tokens) or at least 2")
    elif rollout.top_k == 1:
        yield Violation(
            "rollout.top_k",
            "1 leaves one token, which is sampled with probability 1 whatever the weights are, so nothing could be"
            " learned; valid: -1 (all tokens) or at least 2",
        )
    elif rollout.top_k == -1:
        for key, value, plain in (("top_p", rollout.top_p, 1), ("min_p", rollout.min_p, 0)):
            if value != plain:
                yield Violation(
                    f"rollout.{key}",
                    f"{value:g} without a finite `rollout.top_k`: SGLang returns the set of kept tokens, over which"
                    f" log-probs must be normalised, only with one; valid: `rollout.top_k` from 2 to {most} (20 is"
                    f" usual), or {key} {plain}",
                )
    elif type(most) is int and rollout.top_k > most:
        yield Violation(
            "rollout.top_k",
            f"{rollout.top_k}: SGLang returns sets of at most {most} kept tokens; valid: -1 (all tokens), 2 to {most},"
            " or a larger server.options.sampling_mask_max_tokens",
        )
    if not has_sampling_masks(rollout):
        return
    with_sets = f"with `rollout.top_k: {rollout.top_k}`"
    if config.server.speculative is not None:
        yield Violation(
            _KEY,
            f"{with_sets}: SGLang does not return the set of kept tokens with `{config.server.speculative.algorithm}`;"
            " valid: null, or `rollout.top_k: -1`",
        )
    if config.engine.batch_invariant:
        yield Violation(
            "engine.batch_invariant",
            f"true {with_sets}: SGLang normalises over the kept tokens in an order of its own, which is not repeated"
            " here to the bit; valid: false, or `rollout.top_k: -1`",
        )
    if options.get("sampling_backend") == "ascend":
        yield Violation(
            "server.options.sampling_backend",
            f"ascend {with_sets}: it does not return the set of kept tokens; valid: pytorch, flashinfer",
        )


def validate_speculative(config: Config) -> Iterator[Violation]:
    """Yield settings that SGLang would refuse or change silently, or with which it would change the draft."""
    speculative = config.server.speculative
    if speculative is None:
        return
    algorithm = speculative.algorithm
    sizes = {"num_steps": speculative.num_steps, "eagle_topk": speculative.eagle_topk}
    if algorithm in _WITH_DRAFT and speculative.draft_path is None:
        yield Violation(f"{_KEY}.draft_path", f"missing; {algorithm} needs the folder of a draft model")
    if algorithm == "ngram":
        given = [name for name, value in {**sizes, "draft_path": speculative.draft_path}.items() if value is not None]
        for name in given:
            yield Violation(
                f"{_KEY}.{name}", "ngram drafts from the tokens of earlier responses and has no such size; leave it out"
            )
    else:
        yield from _validate_draft_sizes(config.server)
    if algorithm == "standalone" and config.server.attention_data > 1:
        yield Violation(
            f"{_KEY}.algorithm",
            f"standalone with `server.attention_data: {config.server.attention_data}`, which SGLang refuses; valid:"
            " `attention_data: 1`, or another algorithm",
        )
    if config.rollout.return_routed_experts:
        yield Violation(
            _KEY,
            "with `rollout.return_routed_experts: true`: nobody has shown that the returned experts are those of the"
            " accepted tokens; valid: null, or false there",
        )
    if algorithm != "ngram" and publishes(config.train, config.sft) and config.publish.method == "disk":
        yield Violation(
            f"{_KEY}.algorithm",
            f"{algorithm} with `publish.method: disk`: SGLang loads what is published into the draft as well; valid:"
            " `publish.method: distributed`, or ngram",
        )


def validate_delta(config: Config) -> Iterator[Violation]:
    """Yield what contradicts `publish.full_every` above 1: publishes that send only what changed."""
    every = config.publish.full_every
    if every == 1 or not publishes(config.train, config.sft):
        return
    refused = (
        (
            publishes_adapters(config),
            "`publish.lora: adapter`: adapters are sent whole, and are small",
            "`publish.lora: merged`",
        ),
        (
            config.cluster.colocated,
            "`cluster.colocated: true`: servers on the ranks' own GPUs would need a second copy of the weights in the"
            " memory of the same nodes, where the ranks' state already goes",
            "`colocated: false`",
        ),
        (
            config.server.num_nodes > 1,
            f"`server.num_nodes: {config.server.num_nodes}`: a copy of the weights on each of a server's nodes was not"
            " tested",
            "`num_nodes: 1`",
        ),
        (
            config.server.speculative is not None,
            "`server.speculative`: a draft that shares SGLang's weight updates was not tested",
            "`speculative: null`",
        ),
        (
            config.publish.method == "disk" and config.eval is not None and not config.eval.blocking,
            "`eval.blocking: false` and `publish.method: disk`: an evaluation that a restart interrupted loads its"
            " version's folder, which has only changes",
            "`eval.blocking: true`, or `method: distributed`",
        ),
    )
    for is_so, what, valid in refused:
        if is_so:
            yield Violation("publish.full_every", f"{every} with {what}; valid: 1, or {valid}")


def _validate_draft_sizes(server: Server) -> Iterator[Violation]:
    """Yield contradictions between num_steps, eagle_topk and num_draft_tokens."""
    speculative = server.speculative
    assert speculative is not None
    steps, topk, drafted = speculative.num_steps, speculative.eagle_topk, speculative.num_draft_tokens
    given = [value is not None for value in (steps, topk, drafted)]
    if any(given) and not all(given):
        yield Violation(
            f"{_KEY}.num_steps",
            "num_steps, eagle_topk and num_draft_tokens belong together; give all three, or none for SGLang's choice",
        )
    elif steps is not None and topk == 1 and drafted != steps + 1:
        yield Violation(
            f"{_KEY}.num_draft_tokens",
            f"{drafted} with `eagle_topk: 1` and `num_steps: {steps}`, where SGLang takes num_steps + 1; valid:"
            f" {steps + 1}",
        )


def draft_folder(server: Server, model: Model) -> str | None:
    """Return the folder with the draft's weights; None if no model drafts."""
    speculative = server.speculative
    if speculative is None or speculative.algorithm == "ngram":
        return None
    return speculative.draft_path or model.path


def speculative_arguments(server: Server, model: Model) -> dict[str, Any]:
    """Return SGLang's arguments for `server.speculative`; empty without it."""
    speculative, folder = server.speculative, draft_folder(server, model)
    if speculative is None:
        return {}
    found = {
        "speculative_algorithm": speculative.algorithm.upper(),
        "speculative_draft_model_path": None if folder is None else str(Path(folder).absolute()),
        "speculative_num_steps": speculative.num_steps,
        "speculative_eagle_topk": speculative.eagle_topk,
        "speculative_num_draft_tokens": speculative.num_draft_tokens,
    }
    return {name: value for name, value in found.items() if value is not None}
