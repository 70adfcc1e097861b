"""What a precision, fused operations, the optimizer and batch invariance need from the chip, the software and the
model.

The `*_problem` functions say, before anything is built, what is wrong with a machine; the engine asks them on its own
device. Megatron silently computes in bf16 where FP8 is requested and Transformer Engine is absent; here that is an
error. The `validate_*` functions are for the plan, which knows a GPU's name at most: they yield violations, which
`validate.py` collects. What a machine's libraries lack is found by its ranks. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.precision import (
    BLACKWELL,
    FUSION_SETTINGS,
    describe_fusions,
    fused_operations,
    fusion_obstacle,
    has_transformer_engine_layers,
    is_sharp_fp8,
)
from gspo_mega.config.schema import Cluster, Config, Engine, Fp8, Optimizer, Precision
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.gpus import GPUS, Device, is_on_gpu
from gspo_mega.plan.layout import RECIPE_SIDES

# The first chip (compute capability) and the first version of Transformer Engine that support a recipe.
_FIRST_CHIP = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
_FIRST_ENGINE = {"delayed": (2, 2), "tensorwise": (2, 2), "blockwise": (2, 3), "mxfp8": (2, 2)}
_CHIPS = {(8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}
_BF16_CHIP = (8, 0)
_BLOCKWISE_CUDA = (12, 9)
_ADA_CUDA = (12, 1)
# Consumer Blackwell lacks mxfp8 products for some operand layouts that the backward pass uses.
_NO_MXFP8_FROM = (12, 0)
_NEWEST = (99, 0)
# What to set instead, without a GPU.
VALID_WITHOUT_GPU = {"optimizer.moments_dtype": "fp32", "optimizer.cpu_offload_fraction": "0"}


def validate_precision(config: Config, spec: ModelSpec, device: Device | None) -> Iterator[Violation]:
    """Yield what the named GPU does not support of `precision` and `fp8.recipe`, and sides of layers that FP8 cannot
    multiply.
    """
    gpu = config.cluster.gpu if device != "cpu" else None
    if gpu is not None and (problem := chip_problem(config.precision, config.fp8, GPUS[gpu].capability)) is not None:
        yield Violation("fp8.recipe" if config.precision == "fp8" else "precision", f"cluster.gpu {gpu}: {problem}")
    sides = list(unaligned_sizes(config, spec))
    if sides:
        yield Violation(
            "fp8.recipe",
            f"{config.fp8.recipe} needs every side of a linear layer on a rank to be a multiple of"
            f" {RECIPE_SIDES[config.fp8.recipe]}, which these are not: {', '.join(sides)}",
            " or ".join(
                r
                for r in RECIPE_SIDES
                if RECIPE_SIDES[r] < RECIPE_SIDES[config.fp8.recipe] and not any(unaligned_sizes(config, spec, r))
            ),
        )


def unaligned_sizes(config: Config, spec: ModelSpec, recipe: str | None = None) -> Iterator[str]:
    """With FP8, yield in words each side of a linear layer's share on one rank that the recipe's products cannot have.

    `recipe`: a recipe to try instead of the configuration's.
    """
    if config.precision != "fp8":
        return
    multiple, tensor = RECIPE_SIDES[recipe or config.fp8.recipe], config.parallel.tensor
    sides = {
        "hidden size": (spec.hidden_size, 1),
        "attention output (heads x head size)": (spec.num_heads * spec.value_head_dim, tensor),
    }
    if spec.latent is None:
        heads = (1 + spec.output_gate) * spec.num_heads + 2 * spec.num_kv_heads
        gate = ", gate" if spec.output_gate else ""
        sides[f"query{gate}, key and value size"] = (heads * spec.head_dim, tensor)
    else:
        latent = spec.latent
        sides |= {
            "query size (heads x head size)": (spec.num_heads * spec.head_dim, tensor),
            "q_lora_rank": (latent.query_rank or multiple, 1),
            "kv_lora_rank": (latent.key_value_rank, 1),
            "kv_lora_rank + qk_rope_head_dim": (latent.key_value_rank + latent.rotary_dim, 1),
            "keys' and values' size (heads x both)": (spec.num_heads * (latent.content_dim + latent.value_dim), tensor),
        }
    if (delta := spec.delta) is not None:
        rounded = 2 * delta.keys + 2 * delta.values
        sides |= {
            "gated delta nets' query, key, value and gate size": (rounded, tensor),
            "gated delta nets' value size": (delta.values, tensor),
            # Betas and alphas are not rounded; Megatron-Core counts them even so, before ranks divide them.
            "gated delta nets' projection, with betas and alphas,": (rounded + 2 * delta.value_heads, 1),
        }
    if not spec.has_experts(0):
        sides["intermediate size"] = (spec.intermediate_size, tensor)
    if spec.moe is not None:
        sides["experts' intermediate size"] = (spec.moe.expert_intermediate_size, config.parallel.expert_tensor)
        if spec.moe.shared_intermediate_size:
            sides["shared experts' intermediate size"] = (spec.moe.shared_intermediate_size, tensor)
    for name, (size, ranks) in sides.items():
        if size % ranks == 0 and size // ranks % multiple:
            yield f"{name} {size}" + (f" / {ranks} ranks" if ranks > 1 else "")


def chip_problem(precision: Precision, fp8: Fp8, capability: tuple[int, int]) -> str | None:
    """Return what `precision_problem` says of a chip with the newest software: a plan knows only a GPU's name."""
    if precision != "fp32" and capability < _BF16_CHIP:
        return _too_old(precision, capability)
    return _fp8_problem(fp8, capability, _NEWEST, _NEWEST) if precision == "fp8" else None


def precision_problem(
    config: Config, capability: tuple[int, int], cuda_version: str | None, engine_version: str | None
) -> str | None:
    """Return why a machine's GPU does not support this configuration's precision and what to do; None if it does.

    `capability`: the GPU's compute capability. `cuda_version`: PyTorch's, as `12.9`. `engine_version`: Transformer
    Engine's, as `2.20.2`, None if it cannot be imported. The question does not arise without a GPU, where kernels of
    this package compute every recipe.
    """
    if config.precision == "fp32":
        return None
    if capability < _BF16_CHIP:
        return _too_old(config.precision, capability)
    if not has_transformer_engine_layers(config.precision, config.engine, has_gpu=True):
        return None
    if engine_version is None:
        other = ", `engine.transformer_engine: false` (Megatron's plain layers)" if config.precision == "bf16" else ""
        return (
            f"{config.precision} on a GPU needs Transformer Engine, and it cannot be imported: install"
            f" transformer-engine[pytorch] for this PyTorch and CUDA, or use fp32{other}"
        )
    if config.precision == "bf16":
        return None
    if is_sharp_fp8(config.precision, config.certify):
        return (
            "certify.sharp_fp8 is for machines without a GPU: on one, Transformer Engine's attention takes no fp32; set"
            " it to false, and the coarse tolerances of FP8 hold"
        )
    return _fp8_problem(config.fp8, capability, _version(cuda_version or "0"), _version(engine_version))


def _too_old(precision: Precision, capability: tuple[int, int]) -> str:
    return f"{precision} needs {_chip(_BF16_CHIP)} or later; this GPU has {_dotted(capability)}; use fp32"


def _fp8_problem(fp8: Fp8, capability: tuple[int, int], cuda: tuple[int, ...], engine: tuple[int, ...]) -> str | None:
    problem = _recipe_problem(fp8.recipe, capability, cuda, engine)
    if problem is None and fp8.recipe == "blockwise" and fp8.block_scales == "float32" and capability >= BLACKWELL:
        problem = (
            f"fp8.block_scales float32 needs Hopper; this GPU has {_dotted(capability)}, whose products take powers of"
            " two: use `fp8.block_scales: auto`, or power_of_two on both kinds of GPU"
        )
    return problem


def _recipe_problem(
    recipe: str, capability: tuple[int, int], cuda: tuple[int, ...], engine: tuple[int, ...]
) -> str | None:
    first = _FIRST_CHIP[recipe]
    other = (
        ""
        if capability < (8, 9)
        else f"; `fp8.recipe: {'blockwise' if _has_blockwise(capability, cuda) else 'tensorwise'}` runs here"
    )
    if recipe == "mxfp8" and capability >= _NO_MXFP8_FROM:
        return (
            f"fp8.recipe mxfp8 needs {_chip((10, 0))}; this GPU has {_dotted(capability)}, which lacks some of its"
            f" products{other}"
        )
    if capability < first:
        return (
            f"fp8.recipe {recipe} needs {_chip(first)} or later; this GPU has"
            f" {_dotted(capability)}{other or '; use bf16'}"
        )
    if recipe == "blockwise" and cuda < _BLOCKWISE_CUDA:
        return (
            f"fp8.recipe blockwise needs a PyTorch built for CUDA {_dotted(_BLOCKWISE_CUDA)} or later; this one has"
            f" {_dotted(cuda)}{other}"
        )
    if capability < (9, 0) and cuda < _ADA_CUDA:
        return (
            f"fp8 on Ada needs a PyTorch built for CUDA {_dotted(_ADA_CUDA)} or later; this one has {_dotted(cuda)};"
            " use bf16"
        )
    if engine < _FIRST_ENGINE[recipe]:
        return (
            f"fp8.recipe {recipe} needs Transformer Engine {_dotted(_FIRST_ENGINE[recipe])} or later; {_dotted(engine)}"
            " is installed"
        )
    return None


def _has_blockwise(capability: tuple[int, int], cuda: tuple[int, ...]) -> bool:
    return capability >= _FIRST_CHIP["blockwise"] and cuda >= _BLOCKWISE_CUDA


def _version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, at least two: `2.20.2+abc` is (2, 20, 2), `13` is (13, 0)."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers + [0] * (2 - len(numbers)))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _chip(capability: tuple[int, int]) -> str:
    return f"{_CHIPS[capability]} (compute capability {_dotted(capability)})"


def validate_fusions(config: Config, spec: ModelSpec, device: Device | None) -> Iterator[Violation]:
    """Yield each fused operation that is asked for and that this model cannot have: on the device, or, if that is not
    known, on either kind.
    """
    on_gpu = is_on_gpu(config.cluster, device)
    for key in FUSION_SETTINGS:
        if getattr(config.engine, key) is not True:
            continue
        reasons = [
            fusion_obstacle(config, key, has_experts=spec.moe is not None, has_gpu=place)
            for place in ((True, False) if on_gpu is None else (on_gpu,))
        ]
        if reasons[0] is not None and None not in reasons:
            yield Violation(
                f"engine.{key}",
                f"true, and there is no such operation in {reasons[0]}"
                if reasons[0] != "no experts"
                else f"true, but the model ({spec.family}) has no experts",
                "leave it out (null)",
            )


def describe_operations(config: Config, spec: ModelSpec, on_gpu: bool | None) -> tuple[str, ...]:
    """Return lines for the plan's report: what is fused where, as far as that is known, the order of operations, and
    how experts' tokens travel.
    """
    places = (True, False) if on_gpu is None else (on_gpu,)
    lines = []
    for has_gpu in places:
        made = fused_operations(config, has_experts=spec.moe is not None, has_gpu=has_gpu)
        where = "" if on_gpu is not None else "on GPUs: " if has_gpu else "without GPUs: "
        lines.append(where + describe_fusions(made))
    if config.engine.batch_invariant:
        lines.append("products, attention and log-softmax in the servers' order (engine.batch_invariant)")
    if spec.moe is not None and config.parallel.expert * config.parallel.expert_tensor > 1:
        lines.append(f"experts' tokens by {config.parallel.expert_dispatcher} (parallel.expert_dispatcher)")
    return tuple(lines)


def validate_optimizer(config: Config, device: Device | None) -> Iterator[Violation]:
    """Yield the memory settings of the optimizer that ranks without a GPU do not support."""
    if device == "cpu":
        fused = has_transformer_engine_layers(config.precision, config.engine, has_gpu=False)
        for key, problem in optimizer_problems(config.optimizer, has_gpu=False, has_fused_adam=fused):
            yield Violation(key, problem, VALID_WITHOUT_GPU[key])


def optimizer_problems(settings: Optimizer, has_gpu: bool, has_fused_adam: bool) -> list[tuple[str, str]]:
    """Return (key, what is missing and what to do) of every setting of the optimizer that a machine does not support.

    `has_fused_adam`: Transformer Engine's Adam with moments of any dtype is there (2.1 and later).
    """
    problems = []
    if settings.moments_dtype != "fp32":
        value = f"{settings.moments_dtype}: moments below fp32 are kept by Transformer Engine's fused Adam"
        if not has_gpu and not has_fused_adam:
            advice = "without a GPU it comes with `precision: fp8`, or bf16 and `engine.transformer_engine: true`"
            problems.append(("optimizer.moments_dtype", f"{value}; {advice}"))
        elif not has_fused_adam:
            advice = "install transformer-engine[pytorch] 2.1 or later, or use fp32"
            problems.append(("optimizer.moments_dtype", f"{value}, which cannot be imported; {advice}"))
    if settings.cpu_offload_fraction > 0 and not has_gpu:
        problems.append(
            (
                "optimizer.cpu_offload_fraction",
                f"{settings.cpu_offload_fraction:g}: there is no GPU to move optimizer state away from",
            )
        )
    return problems


def validate_batch_invariance(
    engine: Engine, cluster: Cluster, spec: ModelSpec, device: Device | None
) -> Iterator[Violation]:
    """Yield models and devices for which the operations of `engine.batch_invariant` were not written."""
    if not engine.batch_invariant:
        return
    if is_on_gpu(cluster, device):
        yield Violation(
            "engine.batch_invariant", "true on GPUs: its operations are written and measured for CPUs", "false"
        )
    if spec.family != "qwen3":
        yield Violation(
            "engine.batch_invariant",
            f"true, and the model is {spec.family}: the servers' layers are written for dense qwen3",
            "false",
        )
    elif spec.rope_scaling is not None:
        yield Violation(
            "engine.batch_invariant", "true, and the model's rotary positions are stretched (rope_scaling)", "false"
        )
