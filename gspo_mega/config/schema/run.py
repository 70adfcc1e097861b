"""The sections about the run, its model and the machines: what it is called, where it runs, how it is laid out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gspo_mega.config.schema.section import HUB_MODEL, LOCAL_INPUT, MAY_CHANGE, Section


class Run(Section):
    name: str = Field(
        min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run; its folder is <dir>/<name>."
    )
    dir: str = Field(
        default="runs",
        min_length=1,
        json_schema_extra=MAY_CHANGE,
        description="Folder that holds run folders. Shared by all nodes.",
    )
    seed: int = Field(default=1, ge=0, lt=2**31, description="Seeds prompt order, sampling and every rank's RNG.")
    modules_dir: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=LOCAL_INPUT | MAY_CHANGE,
        description=(
            "Folder in which a module of yours (`module:function`) is looked for if it is neither in the working"
            " directory nor where Python looks. null: the folder of this file. All nodes need it at the same path."
        ),
    )


class Model(Section):
    path: str = Field(
        min_length=1,
        json_schema_extra=HUB_MODEL,
        description=(
            "Hugging Face folder (config.json, safetensors, tokenizer) to start from; or the hub's id of a model that"
            " is in this machine's cache."
        ),
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Branch, tag or commit of a model that is named by its id in `path`. The command may then download it."
        ),
    )
    weights: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=LOCAL_INPUT,
        description=(
            "Folder that `gspo-mega convert` wrote. `train` and `sft` start with its weights instead of the"
            " safetensors in `path`."
        ),
    )


class Cluster(Section):
    num_nodes: int = Field(default=1, ge=1, description="Trainer nodes.")
    ranks_per_node: int = Field(
        default=1, ge=1, description="Trainer ranks per node; each has one GPU where there are GPUs."
    )
    gpus_per_node: int | None = Field(default=None, ge=1, description="GPUs per machine; ranks_per_node when absent.")
    gpu: Literal["A100", "H100", "H200", "B200"] | None = Field(
        default=None, description="GPU type for which `gspo-mega plan` estimates memory and time."
    )
    gpu_memory_gib: float | None = Field(
        default=None, gt=0, le=1e6, description="Memory of one GPU in GiB, in place of the memory of `gpu`."
    )
    host_memory_gib: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description=(
            "Host memory of one trainer node in GiB, without its GPUs' memory. A plan whose ranks keep more there"
            " (offloaded optimizer state, weights of diagnostics.exact_staleness) is refused. When absent, nothing is"
            " compared."
        ),
    )
    preflight_seconds: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Time limit of the checks before a start, and of the ranks' wait for each other, in seconds: a Python in a"
            " shared folder takes minutes to load for many nodes at once. When absent: GSPO_PREFLIGHT_SECONDS of"
            " launch/slurm/site.sh under Slurm, else 600."
        ),
    )
    num_rollout_nodes: int = Field(
        default=0,
        ge=0,
        description="Nodes of a Slurm job that run only servers; 0: the servers share the trainer nodes.",
    )
    colocated: bool = Field(
        default=False,
        description=(
            "Ranks and servers use the same GPUs in turns. While servers sample, the ranks' weights, gradients and"
            " optimizer state are on the host; while ranks train, the servers hold no weights, cache and graphs"
            " (SGLang's memory saver). GPUs only, with `rollout.max_staleness: 0` and `publish.method: disk`."
        ),
    )


class Parallel(Section):
    """Megatron's sizes. Data parallelism is what is left: world / (tensor x pipeline x context)."""

    tensor: int = Field(default=1, ge=1, description="Tensor-parallel size.")
    pipeline: int = Field(default=1, ge=1, description="Pipeline-parallel size.")
    virtual_pipeline: int | None = Field(
        default=None, ge=2, description="Model chunks per pipeline rank; none by default."
    )
    first_stage_layers: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Layers of the first pipeline stage, which also has the embedding. The stages without a number divide what"
            " is left evenly; by default all do."
        ),
    )
    last_stage_layers: int | None = Field(
        default=None, ge=1, description="Layers of the last pipeline stage, which also has the head."
    )
    context: int = Field(default=1, ge=1, description="Context-parallel size.")
    expert: int = Field(default=1, ge=1, description="Expert-parallel size.")
    expert_tensor: int = Field(default=1, ge=1, description="Tensor-parallel size inside experts.")
    sequence: bool = Field(default=True, description="Sequence parallelism; has an effect only with tensor > 1.")
    expert_dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep"] = Field(
        default="alltoall",
        description=(
            "How tokens reach the experts of other ranks. alltoall, allgather: by NCCL or gloo. deepep, hybridep:"
            " Megatron's `flex` dispatcher with DeepEP's kernels, which the trainer's Python must have, on GPUs, in"
            " bf16 or fp8; hybridep needs Megatron-Core 0.19."
        ),
    )


class Recompute(Section):
    granularity: Literal["none", "full"] = Field(
        default="none", description="`full` recomputes whole layers in the backward pass."
    )
    num_layers: int = Field(default=1, ge=1, description="Layers per recomputed block.")


class PlanRules(Section):
    """Says what happens when the plan's figures do not fit the machine."""

    over_memory: Literal["refuse", "warn"] = Field(
        default="refuse",
        description=(
            "What happens when a rank's estimated peak memory exceeds its GPU's. refuse: `plan`, `train`, `sft` and"
            " the submission of a job say what to change and end with exit code 10. warn: they go on, and the report"
            " shows it; the estimate's formulas have not been checked on a GPU yet. What certainly does not fit"
            " (weights, gradients and optimizer state) is always refused."
        ),
    )


class Engine(Section):
    """Whose layers compute the policy, and which of their operations are fused (docs/fused_operations.md)."""

    transformer_engine: bool | None = Field(
        default=None,
        description=(
            "true: Transformer Engine's layers; false: Megatron's plain ones. Without it: Transformer Engine's with"
            " fp8, and with bf16 on a GPU. On a CPU its kernels are this project's: its numbers, not its speed."
        ),
    )
    batch_invariant: bool = Field(
        default=False,
        description=(
            "On a CPU, for dense Qwen3: trainer and servers compute a token's log-prob by the same operations in the"
            " same order, no matter what else is in the batch, so that the two are equal to the last bit"
            " (docs/studies/true_on_policy.md)."
        ),
    )
    fuse_activation: bool | None = Field(
        default=None,
        json_schema_extra=MAY_CHANGE,
        description=(
            "SwiGLU, and the weight of a token's expert, in one compiled operation that rounds once"
            " (bias_activation_fusion). Without it: on GPUs. On a CPU: the same formulas, not compiled."
        ),
    )
    fuse_permutation: bool | None = Field(
        default=None,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Move tokens to their experts' rows and back by Transformer Engine's kernels (moe_permute_fusion). Without"
            " it: on GPUs, with Transformer Engine's layers."
        ),
    )
    fuse_weight_gradient: bool | None = Field(
        default=None,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Transformer Engine's products add weight gradients to their fp32 buffers themselves"
            " (gradient_accumulation_fusion, without Apex): unrounded, and with one pass fewer over the buffers."
            " Without"
            " it: on GPUs, with Transformer Engine's layers, unless `lora` freezes the weights."
        ),
    )


class Fp8(Section):
    """With `precision: fp8`: how Transformer Engine's linear layers compute. The router computes in fp32;
    embeddings, LM head, norms and attention stay in bf16.
    """

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = Field(
        default="blockwise",
        description=(
            "Scaling of FP8 products. delayed and tensorwise: Ada, Hopper and later; blockwise: Hopper with CUDA 12.9;"
            " mxfp8: Blackwell."
        ),
    )
    block_scales: Literal["auto", "float32", "power_of_two"] = Field(
        default="auto",
        description=(
            "Scales of FP8 blocks: those of recipe blockwise, and those that are published to servers with"
            " `server.quantization: fp8_block`. auto: powers of two on Blackwell, whose hardware takes no others, else"
            " float32."
        ),
    )
    parameters: bool = Field(
        default=False, description="Keep the linear layers' parameters in FP8 too, next to the optimizer's fp32 ones."
    )


class Moe(Section):
    """Mixture of experts; what the model itself fixes (experts, top-k, score function) is in its config.json."""

    load_balancing: Literal["none", "aux_loss"] = Field(
        default="none",
        description=(
            "aux_loss: Megatron's load-balancing loss of each layer, over the positions of a micro-batch, in training"
            " passes."
        ),
    )
    load_balancing_coefficient: float = Field(default=0.0, ge=0, description="Weight of that loss.")
    z_loss_coefficient: float = Field(default=0.0, ge=0, description="Weight of the router's z-loss; 0 turns it off.")
    expert_bias_update_rate: float = Field(
        default=0.0,
        ge=0,
        description=(
            "How far the expert bias moves towards balance per optimizer step; 0 freezes it. Only for models that have"
            " such a bias (as DeepSeek-V3, GLM-4.x and MiniMax-M2 have)."
        ),
    )
    routing_replay: Literal["none", "R2", "R3"] = Field(
        default="none",
        description=(
            "R2: the training passes go through the experts of the old pass. R3: all passes go through the experts that"
            " SGLang chose."
        ),
    )
