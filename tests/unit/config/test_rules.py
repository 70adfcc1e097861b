import json

import pytest
from config_refusals import refused

from gspo_mega.base.errors import DataError
from gspo_mega.config import load_config
from gspo_mega.config.prompt_sources import sources_of
from gspo_mega.config.schema import Data

SFT = "sft={max_steps: 1, sequences_per_step: 8, eval_every_steps: 1, stop_accuracy_low: 0.2, stop_accuracy_high: 0.5}"

# Every one of them is all addresses of the machine to the C library, or to a resolver.
WILDCARDS = (
    "::",
    "::0",
    "0:0:0:0:0:0:0:0",
    "::0.0.0.0",
    "::ffff:0.0.0.0",
    "000.0.0.0",
    "0",
    "0.0",
    "0x0",
    "00.00.00.00",
    "::%lo",
)


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["objective.clip_low=0.2"], "objective.clip_low", "algorithm: custom"),
        (["objective.clip_high=0.0501"], "objective.clip_high", "at most 0.05"),
        (["algorithm=gspo_token", "objective.clip_low=0.2"], "objective.clip_low", "`algorithm: gspo_token`"),
        (["objective.aggregation=token_mean"], "objective.aggregation", "algorithm: custom"),
        (["kl.coefficient=0.04"], "kl.coefficient", "algorithm: custom"),
        (["algorithm=gspo_token", "kl.coefficient=1e-3"], "kl.coefficient", "no KL term; valid: 0"),
        (["moe.load_balancing=aux_loss"], "moe.load_balancing_coefficient", "without effect"),
        (["moe.load_balancing_coefficient=1e-3"], "moe.load_balancing_coefficient", "`load_balancing: aux_loss`"),
        (["moe.routing_replay=R3"], "moe.routing_replay", "return_routed_experts: true"),
        (
            ["moe.routing_replay=R2", "batch.num_mini_batches=1"],
            "moe.routing_replay",
            "with `batch.num_mini_batches: 1` the policy has not moved since",
        ),
        (
            ["moe.routing_replay=R2", "old_log_probs=rollout"],
            "moe.routing_replay",
            "`old_log_probs: rollout` leaves that pass out",
        ),
        (["algorithm=custom"], "objective.ratio", "valid: sequence, sequence_token, token"),
        (["objective.ratio=sequence"], "objective.ratio", "leave it out"),
        (["algorithm=custom", "objective.ratio=token"], "objective.clip_low", "GRPO's: 0.2 and 0.27"),
        (
            ["algorithm=grpo", "objective.aggregation=sequence_mean_token_sum_norm"],
            "objective.norm_constant_tokens",
            "missing",
        ),
        (["objective.norm_constant_tokens=5"], "objective.norm_constant_tokens", "does not use it"),
        (["batch.num_mini_batches=17"], "batch.num_mini_batches", "at most 16"),
        (["optimizer.min_lr=1"], "optimizer.min_lr", "above lr"),
        (
            ["precision=bf16", "optimizer={lr: 1, moments_dtype: bf16, distributed: false}"],
            "optimizer.moments_dtype",
            "`optimizer.distributed: true`",
        ),
        (
            ["optimizer={lr: 1, cpu_offload_fraction: 0.5, distributed: false}"],
            "optimizer.cpu_offload_fraction",
            "`optimizer.distributed: true`",
        ),
        (["precision=fp32", "optimizer.moments_dtype=fp8"], "optimizer.moments_dtype", "`precision: fp32`"),
        (
            ["precision=bf16", "optimizer={lr: 1, moments_dtype: bf16, cpu_offload_fraction: 1}"],
            "optimizer.moments_dtype",
            "cpu_offload_fraction > 0",
        ),
        (
            ["precision=fp8", "fp8.parameters=true", "optimizer.cpu_offload_fraction=0.5"],
            "optimizer.cpu_offload_fraction",
            "FP8 parameters",
        ),
        (["data.path=null"], "data.path", "give `path`"),
        (["data.path="], "data.path", "give `path`"),
        (["data.path=''"], "data.path", "empty"),
        (["data.sources=[{name: a, path: x}]"], "data.path", "keep one"),
        (["data.path=null", "data.sources=[{name: a, path: x}, {name: a, path: y}]"], "data.sources", "'a'"),
        (
            [
                "data.path=null",
                "data.sources=[{name: a, path: x, reward: gsm8k}, {name: b, path: y, reward: exact_match}]",
                "eval={path: z}",
            ],
            "eval.reward",
            (
                "missing; the sources have different rewards of their own, and none has `reward`; valid: exact_match,"
                " gsm8k, or another"
            ),
        ),
        (["data.system_prompt=hi", "data.chat_template=false"], "data.system_prompt", "chat_template: true"),
        (["reward={functions: [{function: a}, {function: a}]}"], "reward.functions", "listed 2 times"),
        (["reward={functions: [{function: a, name: b}, {function: b}]}"], "reward.functions", "'b' is listed 2 times"),
        (
            ["reward={functions: [{function: a}, {function: b, only_if: a or b}]}"],
            "reward.functions.1.only_if",
            "'a or b' is no condition; valid: the name of a function above it",
        ),
        (
            ["reward={functions: [{function: a}, {function: b, only_if: [a, c > 1]}, {function: c}]}"],
            "reward.functions.1.only_if",
            "'c' is no function above this one; valid: a",
        ),
        (
            ["reward={functions: [{function: code}], deadline_seconds: 8}"],
            "reward.functions.0.options",
            "total_seconds is 8, and after reward.deadline_seconds (8) a scoring has failed",
        ),
        (
            ["reward={functions: [{function: a, only_if: a}]}"],
            "reward.functions.0.only_if",
            "this one is the first, so nothing is known before it",
        ),
        (
            ["precision=fp8", "fp8.parameters=true", "optimizer.distributed=false"],
            "fp8.parameters",
            "optimizer.distributed: true",
        ),
        (
            ["precision=fp8", "engine.transformer_engine=false"],
            "engine.transformer_engine",
            "contradicts `precision: fp8`",
        ),
        (["precision=fp32", "engine.transformer_engine=true"], "engine.transformer_engine", "valid: false"),
        (
            ["precision=fp8", "fp8.recipe=delayed", "algorithm=grpo", "kl.coefficient=0.1"],
            "fp8.recipe",
            "delayed with a KL term",
        ),
        (["precision=fp8", "fp8={parameters: true, recipe: mxfp8}"], "fp8.parameters", "valid: false"),
        (["rollout.top_k=0"], "rollout.top_k", "-1"),
        (["rollout.top_k=1"], "rollout.top_k", "valid: -1 (all tokens) or at least 2"),
        (["rollout.top_p=0.9"], "rollout.top_p", "0.9 without a finite `rollout.top_k`"),
        (["rollout.min_p=0.05"], "rollout.min_p", "valid: `rollout.top_k` from 2 to 4096 (20 is usual), or min_p 0"),
        (["rollout.top_k=4097"], "rollout.top_k", "sets of at most 4096 kept tokens"),
        (
            ["rollout.top_k=21", "server.options={sampling_mask_max_tokens: 20}"],
            "rollout.top_k",
            "at most 20 kept tokens",
        ),
        (
            ["rollout.top_k=20", "server.speculative={algorithm: ngram}"],
            "server.speculative",
            "kept tokens with `ngram`",
        ),
        (["rollout.top_k=20", "engine.batch_invariant=true"], "engine.batch_invariant", "with `rollout.top_k: 20`"),
        (
            ["rollout.top_k=20", "server.options={sampling_backend: ascend}"],
            "server.options.sampling_backend",
            "valid: pytorch, flashinfer",
        ),
        (
            ["cluster.num_rollout_nodes=2"],
            "cluster.num_rollout_nodes",
            "2 nodes for server.num_servers 1: some would have nothing to do; at most 1",
        ),
        (
            ["train={num_steps: 1, rollouts_only: true, from_rollouts: r}"],
            "train.rollouts_only",
            "contradicts train.from_rollouts",
        ),
        (["run.name=.."], "run.name", "folder"),
        (["server.host=0.0.0.0"], "server.host", "own address"),
        (["server.tensor=2", "publish.verify=tensors"], "publish.verify", "valid then: auto, replicas"),
        *(
            ([f"server.host={json.dumps(host)}"], "server.host", "opens the server to every network")
            for host in WILDCARDS
        ),
        (["server.host='127.1'"], "server.host", "'127.1' is another spelling of 127.0.0.1; write that"),
        (["server.host=224.0.0.1"], "server.host", "is no machine's address"),
        (["server.host=255.255.255.255"], "server.host", "is no machine's address"),
        (["server.host='[::1]'"], "server.host", "without brackets"),
        (["server.host='*'"], "server.host", "neither an IP address nor the name of a machine"),
        (["server.host=''"], "server.host", "neither an IP address nor the name of a machine"),
        (
            ["server.options.trust_remote_code=true"],
            "server.options.trust_remote_code",
            "runs code that a file, a module or a request names; leave it out",
        ),
        (["server.options.load_format=pt"], "server.options.load_format", "servers load safetensors"),
        (["server.options.admin_api_key=x"], "server.options.admin_api_key", "listen or answer beyond its one address"),
        (["server.options.quantization=fp8"], "server.options.quantization", "set by this package from server.quant"),
        (["server.options.kv_cache_dtype=fp8_e5m2"], "server.options.kv_cache_dtype", "from server.kv_cache"),
        (["server.options.dtype=half"], "server.options.dtype", "from server.dtype"),
        (["server.options.rl_quant_profile=x"], "server.options.rl_quant_profile", "every verification of a publish"),
        (["server.options.enable_watermark=true"], "server.options.enable_watermark", "another distribution"),
        (["server.options.dp_size=2"], "server.options.dp_size", "which publishing does not reach"),
        (["server.options.random_seed=1"], "server.options.random_seed", "set by this package from run.seed"),
        ([SFT.replace("0.2", "0.6")], "sft.stop_accuracy_low", "above stop_accuracy_high"),
        (
            ["train.num_steps=1", "train.keep_servers=true", "train.max_restarts=0"],
            "train.keep_servers",
            "no restart ever takes servers",
        ),
        (
            ["train.num_steps=1", "train.keep_servers=true", "cluster.colocated=true"],
            "train.keep_servers",
            "a restart's ranks begin on the GPUs",
        ),
        *(
            (
                ["train.num_steps=1", "train.keep_servers=true", override],
                "train.keep_servers",
                "are steps that end with each start of the run",
            )
            for override in ("cluster.num_nodes=2", "cluster.num_rollout_nodes=1")
        ),
    ],
)
def test_contradictions_are_refused_by_key(write, overrides, key, said):
    text = refused(write(), *overrides)
    assert f": {key}: " in text and said in text
    assert len(text.splitlines()) == 1


def test_a_server_of_several_nodes_is_not_kept(write):
    text = refused(write(), "train.num_steps=1", "train.keep_servers=true", "server.num_nodes=2")
    assert ": train.keep_servers: true with " in text and "server.num_nodes: 2: the servers of a Slurm job" in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.clip_low=0.05", "objective.clip_high=0.05"],
        ["algorithm=custom", "objective.ratio=sequence", "objective.clip_low=0.2", "objective.aggregation=token_mean"],
        ["algorithm=custom", "objective.ratio=token", "objective.clip_low=0.2", "objective.clip_high=0.2"],
        ["algorithm=grpo", "objective.aggregation=sequence_mean_token_sum_norm", "objective.norm_constant_tokens=100"],
        ["algorithm=grpo", "objective.aggregation=token_mean"],
        ["batch.num_mini_batches=16"],
        ["optimizer.min_lr=1e-6"],
        ["server.tensor=2", "publish.verify=replicas"],
        ["server.tensor=2"],
        ["data.system_prompt=hi"],
    ],
)
def test_what_stands_next_to_a_contradiction_is_allowed(write, overrides):
    load_config(write(), overrides)


def test_all_contradictions_are_reported_at_once(write):
    text = refused(write(), "objective.clip_low=0.2", "kl.coefficient=1", "rollout.top_k=0")
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("command", "missing"),
    [("train", ["train"]), ("sft", ["sft", "eval"]), ("eval", ["eval"]), ("serve", []), (None, [])],
)
def test_what_a_command_needs(write, command, missing):
    if not missing:
        load_config(write(), (), command)
        return
    lines = refused(write(), command=command).splitlines()
    assert [line.split(": ")[1] for line in lines] == missing
    assert all(f"`gspo-mega {command}`" in line for line in lines)
    load_config(write(), ["train={num_steps: 1}", "eval={path: h}", SFT], command)


def test_the_default_clip_range_of_grpo(write):
    objective = load_config(write(), ["algorithm=grpo"]).config.objective
    assert (objective.clip_low, objective.clip_high) == (0.2, 0.27)
    objective = load_config(write(), ["algorithm=grpo", "objective.clip_low=0.1"]).config.objective
    assert (objective.clip_low, objective.clip_high) == (0.1, 0.27)
    objective = load_config(write(), ["algorithm=gspo_token"]).config.objective
    assert (objective.clip_low, objective.clip_high) == (3e-4, 4e-4)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["objective.clip_low=3e-3", "objective.clip_high=4e-3"],
            "clip range 0.003 / 0.004 instead of 0.0003 / 0.0004",
        ),
        (["algorithm=grpo", "objective.clip_low=3e-4"], "clip range 0.0003 / 0.27 instead of 0.2 / 0.27"),
        (["algorithm=custom", "objective.ratio=sequence"], "algorithm custom"),
        (["objective.dual_clip=3"], "dual clip 3"),
        (["old_log_probs=rollout"], "old_log_probs: rollout: the engines' mismatch enters the policy ratio"),
        (["batch.num_mini_batches=1", "mismatch.correction=none"], "old log-prob pass is skipped"),
        (["rollout.top_p=0.9", "rollout.top_k=50"], "truncated"),
        (["rollout.top_k=50"], "over each token's kept set"),
        (["rollout.top_k=50", "rollout.min_p=0.02"], "min_p 0.02: sampled from a truncated"),
        (["rollout.temperature=0.7"], "temperature 0.7"),
        (["rollout.filter_constant_groups=true", "rollout.max_oversampling=1"], "not refilled"),
        (
            ["rollout.filter_constant_groups=true"],
            "are replaced, up to 3 x prompts_per_step, which the paper does not do",
        ),
        (
            ["train.num_steps=2", "rollout.max_new_tokens=128"],
            "responses on which trainer and server disagree strongly are left out (mismatch.correction: mask; `none` turns"
            " it off), which the paper does not do; mismatch/acted_fraction shows how many. The rule: a response of L tokens is dropped if its mean d is further than 0.5 / sqrt(L)"
            " from the batch's m; a token with |d| > 9.2 drops its response (d: trainer - server, nats)",
        ),
        (
            [
                "train.num_steps=2",
                "rollout.max_new_tokens=128",
                "mismatch={bound_nats: 0.3, token_veto_nats: null, kept_weight: ratio}",
            ],
            "further than 0.3 / sqrt(L) from the batch's m; one that is kept is weighted by exp(mean d - m) (d:",
        ),
        (
            [
                "train.num_steps=2",
                "rollout.max_new_tokens=128",
                "mismatch={correction: truncate, token_veto_nats: null}",
            ],
            "each response is weighted by exp(min(mean d - m, 0.5 / sqrt(L))) (d:",
        ),
        (["mismatch={correction: none, kept_weight: ratio}"], "kept_weight has no effect with `correction: none`"),
        (
            ["batch.num_mini_batches=1"],
            "one mini-batch per step: old and current policy are the same, so nothing is clipped and the old log-prob"
            " pass is made for mismatch.correction only, where a rank has several packs",
        ),
        (["reward.permute_in_batch=true"], "a control"),
        (["advantage.std_ddof=1"], "divided by the sample standard deviation; the paper"),
        (["advantage.divide_by_std=false"], "not divided by a standard deviation"),
        (
            ["moe={load_balancing: aux_loss, load_balancing_coefficient: 1e-3}"],
            "router losses are added to the objective",
        ),
        (["optimizer.min_lr=1e-7"], "no effect"),
        (["optimizer.decay_norms_and_biases=true"], "no effect with weight_decay 0"),
        (["recompute.num_layers=2"], "no effect"),
        (
            ["train.num_steps=2", "rollout.max_new_tokens=128", "mismatch.correction=none", "optimizer.warmup_steps=8"],
            "not over before",
        ),
        (["eval={path: train.jsonl}"], "held-out"),
        (["eval={path: ./x/../train.jsonl}"], "held-out"),
        (
            [
                "data.path=null",
                "data.sources=[{name: a, path: a, reward: gsm8k}, {name: b, path: b}]",
                "eval={path: c}",
            ],
            "not by the own rewards of a; eval.reward",
        ),
        (["precision=bf16", "fp8.recipe=delayed"], "`fp8` has no effect with `precision: bf16`"),
        (["precision=fp8", "fp8.recipe=delayed"], "held for a step"),
        (["precision=fp8", "fp8.parameters=true"], "rounded to FP8"),
        (["algorithm=grpo", "kl.coefficient=0.01"], "KL term 0.01 x k3"),
        (["algorithm=grpo", "kl={coefficient: 0.01, estimator: k1}"], "k1 vanishes in expectation"),
        (["algorithm=grpo", "kl.reference_path=other"], "kl.reference_path has no effect"),
        (["moe.routing_replay=R2"], "routing replay R2"),
        (["moe.routing_replay=R3", "rollout.return_routed_experts=true"], "routing replay R3"),
    ],
)
def test_notices(write, overrides, said):
    notices = load_config(write(), overrides).notices
    assert len(notices) == 1 and said in notices[0]


TRAINED = ["train.num_steps=2", "mismatch.correction=none"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "(objective.clip_low=0.003 objective.clip_high=0.004)"),
        (["rollout.max_new_tokens=127"], "rollout.max_new_tokens 127 with the paper's clip range 0.0003 / 0.0004"),
        (["rollout.max_new_tokens=128"], None),
        (["algorithm=grpo"], None),  # its range is one of tokens
        (["objective.clip_low=3e-3"], None),  # the range is the user's own
    ],
)
def test_short_responses_with_the_published_range_of_sequences_are_named(write, overrides, said):
    found = [n for n in load_config(write(), [*TRAINED, *overrides]).notices if n.startswith("rollout.max_new_tokens")]
    assert len(found) == (said is not None) and all(said in notice for notice in found)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.num_steps=11"], "its first step"),
        (
            ["train.num_steps=11", "checkpoint.peer_copies=1", "cluster.ranks_per_node=2"],
            "its last whole copy in memory",
        ),
        (["train.num_steps=10"], None),
        (["train.num_steps=11", "checkpoint.every_steps=5"], None),
    ],
)
def test_a_long_run_that_saves_nothing_before_its_end_is_named(write, overrides, said):
    found = [n for n in load_config(write(), overrides).notices if n.startswith("checkpoint.every_steps 0")]
    assert len(found) == (said is not None) and all(said in notice for notice in found)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=grpo"],
        ["objective.clip_low=3e-4"],
        ["optimizer.min_lr=1e-7", "optimizer.schedule=cosine"],
        ["optimizer={lr: 1e-6, weight_decay: 0.1, decay_norms_and_biases: true, overlap: true}"],
        ["precision=fp8", "optimizer={lr: 1e-6, moments_dtype: fp8}"],
        ["precision=bf16", "optimizer={lr: 1e-6, cpu_offload_fraction: 1}"],
        ["recompute.num_layers=2", "recompute.granularity=full"],
        ["train.num_steps=2", "rollout.max_new_tokens=128", "mismatch.correction=none", "optimizer.warmup_steps=7"],
        ["eval={path: other.jsonl}"],
        [
            "data.path=null",
            "data.sources=[{name: a, path: a, reward: gsm8k}, {name: b, path: b}]",
            "eval={path: c, reward: gsm8k}",
        ],
        ["data.path=null", "data.sources=[{name: a, path: a, reward: gsm8k}]", "eval={path: c}"],
        ["precision=fp8", "fp8.recipe=tensorwise"],
    ],
)
def test_no_notice_without_a_reason(write, overrides):
    assert load_config(write(), overrides).notices == ()


def test_a_link_to_the_training_file_is_the_training_file(write, tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "held_out.jsonl").symlink_to(tmp_path / "train.jsonl")
    (notice,) = load_config(
        write(), [f"data.path={tmp_path}/train.jsonl", f"eval={{path: {tmp_path}/held_out.jsonl}}"]
    ).notices
    assert "eval.path is also trained on" in notice


def test_data_is_wanted_where_no_rule_asked_for_it():
    """`certify` needs none; what reads prompts all the same says so."""
    with pytest.raises(DataError, match="no data: data.path or data.sources must name a JSONL file"):
        sources_of(Data(max_prompt_tokens=1))
    (source,) = sources_of(Data(max_prompt_tokens=1, path="a folder/x y.jsonl"))
    assert (source.name, source.path) == ("x-y", "a folder/x y.jsonl")
