"""Precision and fused operations on this machine: what is installed, Megatron's settings, what is refused.

FP8 applies to Transformer Engine's linear layers only. Embedding, LM head, norms, the router (fp32) and attention keep
their precision. fp32 uses Megatron's plain layers on a GPU too: Transformer Engine multiplies fp32 as TF32, and its
attention takes packed sequences in half precision only.

In this order: the settings of precision, and the libraries and devices of this machine; fused operations and the
dispatcher of experts' tokens (`config/precision.py` decides what is fused, and why); the FP8 scales of recipe
`delayed`; the differences between Megatron-Core 0.16 and 0.19 that matter here, each of which is a question for a
feature, never for a version number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.fp8_utils import get_fp8_context, get_fp8_recipe
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import fused_a2a, moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.algorithm.fp8 import E4M3_MAX
from gspo_mega.base.errors import ModelError
from gspo_mega.config.precision import (
    BLACKWELL,
    FLOAT32_SCALES_VARIABLE,
    FUSION_SETTINGS,
    FusionChoice,
    FusionKey,
    describe_fusions,
    fused_operations,
    fusion_obstacle,
    has_block_scaled_products,
    has_powers_of_two,
    has_transformer_engine_layers,
    is_sharp_fp8,
    loads_quantized,
)
from gspo_mega.config.schema import Certify, Config, Engine, Fp8, Parallel, Precision
from gspo_mega.cpu import te_loading
from gspo_mega.cpu.backend import is_cpu_backend
from gspo_mega.cpu.products import uses_onednn, widens_bf16
from gspo_mega.models.block_fp8 import publishes_powers_of_two
from gspo_mega.plan.validate_precision import precision_problem

logger = logging.getLogger(__name__)

# The dtype of parameters, of activations between layers and of exported weights; nominal for FP8 parameters. A
# certificate may use another one, which `parameter_dtype` returns.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}

# With one scale per tensor, gradients need the range of e5m2 (`hybrid`). With one per block, e4m3 is wide enough for
# gradients too.
_FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}


def parameter_dtype(precision: Precision, certify: Certify) -> torch.dtype:
    """The dtype of a model's parameters, and of activations between layers."""
    return torch.float32 if is_sharp_fp8(precision, certify) else DTYPES[precision]


def uses_transformer_engine(megatron_config: TransformerConfig) -> bool:
    """Whether the layers of this configuration are Transformer Engine's. Otherwise they are Megatron's plain ones."""
    return megatron_config.transformer_impl == "transformer_engine"


def require_precision(config: Config) -> None:
    """Raise ModelError, with a remedy, if this machine cannot compute in the configured precision."""
    if is_cpu_backend():
        if has_transformer_engine_layers(config.precision, config.engine, has_gpu=False) and not te_loading.is_loaded():
            raise ModelError(
                f"precision: {config.precision} uses Transformer Engine's layers, which this process has not loaded; it"
                f" loads them if {te_loading.VARIABLE}=1 when it starts"
            )
        if te_loading.is_loaded():
            te_loading.compute_as_gpu_of(config.fp8.recipe if config.precision == "fp8" else None)
            te_loading.compute_sharply(is_sharp_fp8(config.precision, config.certify))
        _require_block_scales(config, None)
        return
    capability = torch.cuda.get_device_capability()
    problem = precision_problem(config, capability, torch.version.cuda, transformer_engine_version())
    if problem is None:
        _require_block_scales(config, capability)
        return
    reason = transformer_engine_error()
    if reason is not None:
        problem += f" (importing it: {reason})"
    raise ModelError(f"precision: {problem}")


def _require_block_scales(config: Config, capability: tuple[int, int] | None) -> None:
    """Raise ModelError if the block scales of products are not those that the configuration asks for, or not those of
    the published weights. `capability`: that of this rank's GPU. It is None without a GPU, and published weights may
    then be for any GPU.
    """
    wanted = has_powers_of_two(config.fp8.block_scales, capability)
    if loads_quantized(config.server) and (
        has_block_scaled_products(config.precision, config.fp8) or capability is not None
    ):
        published = publishes_powers_of_two(config.fp8, config.cluster)
        if published != wanted:
            raise ModelError(
                f"fp8.block_scales: {config.fp8.block_scales} is {_kind(wanted)} on {_device(capability)}, and"
                f" {_kind(published)} in published weights, which follow cluster.gpu ({config.cluster.gpu or 'null'});"
                " name this machine's GPU there, or set fp8.block_scales to power_of_two"
                + (" or float32" if capability is None or capability < BLACKWELL else "")
            )
    if has_block_scaled_products(config.precision, config.fp8) and (found := _multiplies_powers_of_two()) != wanted:
        raise ModelError(
            f"fp8.block_scales: {config.fp8.block_scales} is {_kind(wanted)} on {_device(capability)}, but this process"
            f" multiplies with {_kind(found)}: Transformer Engine reads {FLOAT32_SCALES_VARIABLE} once, when it is"
            " imported. A rank sets it before that. Another program must do so too, and cannot change it later"
        )


def _multiplies_powers_of_two() -> bool:
    """Whether block scales in this process are powers of two, which Transformer Engine read when it was imported."""
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8BlockScaling()
    return recipe.fp8_quant_fwd_weight.power_2_scale


def _kind(powers_of_two: bool) -> str:
    return "powers of two" if powers_of_two else "float32 scales"


def _device(capability: tuple[int, int] | None) -> str:
    return "a CPU" if capability is None else f"a GPU of compute capability {capability[0]}.{capability[1]}"


def precision_settings(precision: Precision, engine: Engine, fp8: Fp8, dtype: torch.dtype) -> dict:
    """The settings of Megatron's TransformerConfig that define how numbers are stored and multiplied. `dtype`: of
    parameters.
    """
    settings: dict = dict(
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, transformer_impl="local"
    )
    if has_transformer_engine_layers(precision, engine, has_gpu=not is_cpu_backend()):
        settings["transformer_impl"] = "transformer_engine"
        # One kernel for the rotary positions of a whole pack, instead of one per sequence.
        settings["apply_rope_fusion"] = True
    if precision == "fp8":
        settings |= dict(fp8=_FORMATS[fp8.recipe], fp8_recipe=fp8.recipe, fp8_param=fp8.parameters)
        if fp8.recipe == "delayed":
            # The history is one of steps, because `Fp8Scales` updates scales once in a step.
            settings |= dict(fp8_amax_history_len=16, fp8_amax_compute_algo="max")
    return settings


@functools.cache
def transformer_engine_error() -> str | None:
    """Why Transformer Engine cannot be imported, or None if it can. On a machine without a GPU a process loads it at
    its start, or not at all.
    """
    if is_cpu_backend():
        return None if te_loading.is_loaded() else "there is no GPU, and this process did not load it"
    try:
        importlib.import_module("transformer_engine.pytorch")
    # A build for another CUDA or torch can fail with any of these errors.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def transformer_engine_version() -> str | None:
    """Transformer Engine's version, or None if it cannot be imported."""
    if transformer_engine_error() is not None:
        return None
    return str(importlib.import_module("transformer_engine").__version__)


def describe_backends() -> list[str]:
    """The libraries and devices that this machine computes with, one line each, for a run's log."""
    lines = [f"PyTorch {torch.__version__}, Megatron-Core {importlib.metadata.version('megatron-core')}"]
    if is_cpu_backend():
        if uses_onednn():
            lines.append("fp32 products by oneDNN: MKL has no AVX-512 kernels for this processor")
        if widens_bf16():
            lines.append("bf16 products by fp32 ones: oneDNN has no bf16 kernels for this processor")
        if not te_loading.is_loaded():
            return [*lines, "no GPU: Megatron's plain layers over gloo"]
        version = transformer_engine_version()
        return [*lines, f"Transformer Engine {version} over CPU kernels: its numbers, not its speed", "no GPU: gloo"]
    major, minor = torch.cuda.get_device_capability()
    lines.append(f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}")
    version = transformer_engine_version()
    lines.append(
        f"Transformer Engine {version}" if version else f"Transformer Engine: no ({transformer_engine_error()})"
    )
    return lines


@functools.cache
def log_backends() -> None:
    """Log `describe_backends`, once per process and on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        for line in describe_backends():
            logger.info(line)


# --- Fused operations and the dispatcher ---------------------------------------------------------------------

_PERMUTATIONS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
# Eight for an activation: two gradient modes, and four kinds of shape. The rest is for models of other widths in the
# same process (reference, critic).
COMPILED_VARIANTS = 64
# The field with which Megatron lets ranks of an expert group have packs of different lengths under HybridEP.
_UNEVEN_HYBRID = "moe_hybridep_pad_uneven_dispatch_inputs"


def fusion_choices(config: Config, has_experts: bool) -> list[FusionChoice]:
    """Which operations are fused on this machine. Raises ModelError for an operation that the configuration asks for
    and that cannot be fused here.
    """
    missing, has_gpu = _missing(), not is_cpu_backend()
    for key in FUSION_SETTINGS:
        if getattr(config.engine, key):
            reason = fusion_obstacle(config, key, has_experts=has_experts, has_gpu=has_gpu) or missing.get(key)
            if reason is not None:
                raise ModelError(f"engine.{key}: true, which is not possible here: {reason}; leave the key out")
    return fused_operations(config, has_experts=has_experts, has_gpu=has_gpu, missing=missing)


def fusion_settings(made: list[FusionChoice], has_experts: bool) -> dict[str, bool]:
    """The settings of TransformerConfig for these choices. Logs them once, on rank 0."""
    _log(describe_fusions(made))
    settings = {FUSION_SETTINGS[choice.key]: choice.on for choice in made}
    if settings[FUSION_SETTINGS["fuse_activation"]]:
        keep_functions_compiled()
    if has_experts and not settings[FUSION_SETTINGS["fuse_permutation"]] and not is_cpu_backend():
        _add_in_fixed_order()
    return settings


def keep_functions_compiled() -> None:
    """Let torch.compile make a variant of a function for each kind of argument it is called with, and make it raise
    FailOnRecompileLimitHit if there are more than COMPILED_VARIANTS.

    A variant belongs to a dtype, a gradient mode, and a shape that is fixed, any, 1 or 0 rows. After eight, torch's
    default is to run the function uncompiled from then on, which rounds intermediate values to bf16. If that happens
    between the old pass and the training pass, the ratios of an unchanged policy are not 1: with a limit of five, a
    small mixture in bf16 had |log s| up to 3.7e-2, a hundred times GSPO's clip range. Megatron's plain experts in fp32
    reached eight on an H100: a weight's offset of 0 is a kind of argument, too.
    """
    settings: Any = importlib.import_module("torch._dynamo.config")  # its values have no types
    settings.recompile_limit = max(settings.recompile_limit, COMPILED_VARIANTS)
    settings.fail_on_recompile_limit_hit = True


def _add_in_fixed_order() -> None:
    """Make the sums of this process independent of the order in which a GPU's threads come to them.

    Megatron's own combine adds the experts' rows of a token with atomic additions (`scatter_add_`), so two passes with
    the same weights can differ in last bits. Fused permutation does not need this. Operations that have no
    deterministic kernel warn once.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory: Any = torch.utils.deterministic  # the attribute is set by its module's class
    memory.fill_uninitialized_memory = False


def dispatcher_settings(parallel: Parallel) -> dict[str, Any]:
    """The settings of TransformerConfig by which tokens reach the experts of other ranks. Raises ModelError if the
    library for the chosen dispatcher is missing.
    """
    chosen = parallel.expert_dispatcher
    if chosen in ("alltoall", "allgather"):
        return {"moe_token_dispatcher_type": chosen}
    settings: dict[str, Any] = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": chosen}
    if chosen == "hybridep":
        if _UNEVEN_HYBRID not in {field.name for field in dataclasses.fields(TransformerConfig)}:
            raise ModelError(
                "parallel.expert_dispatcher: hybridep needs Megatron-Core 0.19: older versions take packs of one length"
                " only; use alltoall or deepep"
            )
        settings[_UNEVEN_HYBRID] = True
    found = fused_a2a.HAVE_DEEP_EP if chosen == "deepep" else fused_a2a.HAVE_HYBRIDEP
    if not found:
        branch = "" if chosen == "deepep" else ", branch hybrid-ep"
        raise ModelError(
            f"parallel.expert_dispatcher: {chosen} needs the Python package deep_ep, and this Python cannot import the"
            f" parts that Megatron uses (https://github.com/deepseek-ai/DeepEP{branch}); install it, or use alltoall"
        )
    return settings


@contextlib.contextmanager
def head_without_apex() -> Iterator[None]:
    """Inside this context Megatron builds an LM head layer although weight gradients are fused and Apex is not
    installed.

    That layer's own product, which would call Apex's kernel, is never run: `log_probs.py` multiplies by its weight. The
    other layers are Transformer Engine's, which need no Apex.
    """
    before = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = before


def _missing() -> dict[FusionKey, str]:
    """Which operations this process cannot fuse because a library is missing, each with the reason in words."""
    found: dict[FusionKey, str] = {}
    if any(getattr(moe_utils, name, None) is None for name in _PERMUTATIONS):
        found["fuse_permutation"] = "Megatron found no Transformer Engine 2.1 or later with Triton"
    if not is_cpu_backend() and importlib.util.find_spec("triton") is None:
        found["fuse_activation"] = "torch.compile needs Triton on a GPU, and it is not installed"
    return found


@functools.cache
def _log(line: str) -> None:
    """Log a line once per process, on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(line)


# --- FP8 scales ----------------------------------------------------------------------------------------------

_FORWARD, _BACKWARD = "scaling_fwd", "scaling_bwd"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FLAGS = "flags"
# A scale is 1 until it is measured, and at scale 1 small gradients round to 0. So the first pass measures
# only the last product of a branch correctly, and the next pass the one before it; a branch has two.
MEASURING_PASSES = 3
# The quantised tensors of a product in its forward pass: input, weight, output.
_TENSORS_PER_PRODUCT = 3


class Fp8Scales:
    """Decides when the FP8 scales of one model change, and saves them. Does nothing unless the recipe is `delayed`.

    `delayed` rounds a tensor with a scale that follows from the largest values of earlier passes. Transformer Engine
    updates scales after each micro-batch, also between the old pass and the training passes: an unchanged policy then
    has an importance ratio that is not 1, by more than GSPO's clip range. Here the scales of forward passes stay fixed,
    and the largest values are recorded, from the old pass to the last training pass that is compared with it, or for
    one mini-batch without an old pass. The scales of gradients, on which no log-prob depends, are updated after each
    mini-batch. The other recipes have no state: a tensor's scale follows from the tensor.

    The methods are collective over the ranks of a pipeline stage, which share each tensor's largest value.
    """

    def __init__(self, config: TransformerConfig, chunks: Sequence[torch.nn.Module]) -> None:
        self._config, self._chunks, self.is_active = config, chunks, _is_delayed(config)
        self._forward_known = self._backward_known = self._has_trained = self._is_measuring = False

    def require_known(self) -> None:
        """Raise RuntimeError before a pass whose scales would be 1, because `begin_step` was not called."""
        if self.is_active and not (self._forward_known or self._is_measuring):
            raise RuntimeError(
                "a pass with FP8 recipe `delayed` before its scales were measured; call `begin_step` first"
            )

    @torch.no_grad()
    def fit_parameters(self) -> None:
        """Round newly loaded FP8 parameters again, each with the scale of its own largest value.

        They were filled before anything was measured, with the scale 1, with which numbers below 2^-6 lose bits. The
        parameters still have the loaded numbers as `exact_values` (`checkpoint/quantized.py`).
        """
        if not self.is_active:
            return
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                exact = vars(parameter).get("exact_values")
                if exact is not None and float(largest := exact.abs().max().float()) > 0:
                    quantized: Any = parameter
                    quantized._get_quantizer().scale.fill_(E4M3_MAX / largest)
                    quantized.quantize_(exact)

    def begin_step(self, measure: Callable[[], object]) -> None:
        """Update the scales of forward passes. Call it before the first pass with new weights; a second call does
        nothing.

        `measure`: runs a forward pass. It is called if there are no scales yet, because the run is new.
        """
        if not self.is_active:
            return
        if not self._forward_known:
            self._is_measuring = True
            try:
                for _ in range(MEASURING_PASSES):
                    measure()
                    _manager().reduce_and_update_fp8_tensors(forward=True)
            finally:
                self._is_measuring = False
            self._forward_known = True
        elif self._has_trained:
            _manager().reduce_and_update_fp8_tensors(forward=True)
        self._has_trained = False

    def before_gradients(self, measure: Callable[[], object]) -> None:
        """Measure the scales of gradients if there are none yet. `measure`: runs a forward and a backward pass. The
        caller drops the gradients that these passes accumulate.
        """
        if self.is_active and not self._backward_known:
            for _ in range(MEASURING_PASSES):
                measure()
                self.after_gradients()

    def after_gradients(self) -> None:
        """Update the scales of gradients. Call it after the backward passes of a mini-batch."""
        if not self.is_active:
            return
        self._backward_known = self._has_trained = True
        _manager().reduce_and_update_fp8_tensors(forward=False)

    def forget(self) -> None:
        """Drop all measured scales, as in a new run. Load the weights again afterwards."""
        if not self.is_active:
            return
        self._forward_known = self._backward_known = self._has_trained = False
        for _, module in _modules(self._chunks):
            for direction in (_FORWARD, _BACKWARD):
                if hasattr(module.fp8_meta.get(direction), "amax_history"):
                    module.fp8_meta[direction].scale.fill_(1.0)
                    module.fp8_meta[direction].amax_history.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's FP8 state by name, on the host; empty if there is none.

        Per module and direction `scale` [n] and `amax_history` [steps, n], float32: one scale per tensor, and the
        largest values of past steps, those since the last update first. These are this rank's own until the next
        update shares them. Names of modules have the layer's number in the model, so they belong to no layout.
        """
        if not self.is_active:
            return {}
        tensors = {_FLAGS: torch.tensor([self._forward_known, self._backward_known, self._has_trained])}
        for name, module in _modules(self._chunks):
            for direction in (_FORWARD, _BACKWARD):
                if hasattr(module.fp8_meta.get(direction), "amax_history"):
                    part = module.fp8_meta[direction]
                    tensors[f"{name}/{direction}/scale"] = part.scale.cpu().clone()
                    tensors[f"{name}/{direction}/amax_history"] = part.amax_history.cpu().clone()
        return tensors

    def module_names(self) -> list[str]:
        """The names of this rank's modules, as `state` has them."""
        return [name for name, _ in _modules(self._chunks)] if self.is_active else []

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Continue with a `state` of the same layout; with an empty one, start as in a new run.

        Earlier versions counted the layers of each chunk from 0: `0.decoder.layers.0...`. Raises KeyError for a module
        that this rank does not have, and RuntimeError for another shape.
        """
        if not self.is_active:
            return
        flags = tensors[_FLAGS].tolist() if _FLAGS in tensors else [False] * 3
        self._forward_known, self._backward_known, self._has_trained = flags
        modules = dict(_modules(self._chunks)) | dict(_modules(self._chunks, of_chunks=True))
        with _held(self._config), get_fp8_context(self._config), torch.no_grad():
            for name, value in tensors.items():
                if name == _FLAGS:
                    continue
                place, direction, kind = name.rsplit("/", 2)
                meta = modules[place].fp8_meta
                # A module does this in its first pass. Until then it has no scales, or none that is updated.
                modules[place].init_fp8_metadata(tensors[f"{place}/{_FORWARD}/scale"].numel() // _TENSORS_PER_PRODUCT)
                _manager().add_fp8_tensors_to_global_buffer(meta)
                getattr(meta[direction], kind).copy_(value)


def held_scales(config: TransformerConfig) -> AbstractContextManager[None]:
    """Inside this context passes leave the scales of recipe `delayed` as they are, and record the largest values.

    Transformer Engine updates them at the end of an outermost context only, and those of gradients after the first
    module of one. Inside, this context is the outermost, and its first module is used up.
    """
    return _held(config) if _is_delayed(config) else contextlib.nullcontext()


@contextlib.contextmanager
def _held(config: TransformerConfig) -> Iterator[None]:
    # Without a recipe, Transformer Engine would ask for the default one of the chip.
    recipe = get_fp8_recipe(config)
    with importlib.import_module("transformer_engine.pytorch").fp8_autocast(enabled=False, fp8_recipe=recipe):
        _manager().is_first_fp8_module()
        yield


@contextlib.contextmanager
def without_extra_state(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside this context Transformer Engine's modules have no state except their parameters, as in bf16.

    They would put a pickle into a checkpoint, which they then refuse to read, and Megatron 0.16 to 0.18 cannot divide
    the empty one of several experts. `Fp8Scales.state` has the same numbers, as tensors.
    """
    before = []
    for _, module in _modules(chunks):
        kept = {name: module.__dict__[name] for name in ("fp8", "fp8_calibration") if name in module.__dict__}
        before.append((module, kept, module.fp8_meta.get("fp8_checkpoint")))
        module.__dict__.update(dict.fromkeys(kept, False))
        module.fp8_meta["fp8_checkpoint"] = False
    try:
        yield
    finally:
        for module, kept, is_saved in before:
            module.__dict__.update(kept)
            module.fp8_meta["fp8_checkpoint"] = is_saved


def _is_delayed(config: TransformerConfig) -> bool:
    return bool(config.fp8) and config.fp8_recipe == "delayed"


def _modules(chunks: Sequence[torch.nn.Module], *, of_chunks: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield Transformer Engine's modules with their names in the model, or with those that each chunk has for them."""
    for index, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if isinstance(getattr(module, "fp8_meta", None), dict):
                yield f"{index}.{name}" if of_chunks else _name_in_model(chunk, name), module


def _name_in_model(chunk: Any, name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}.{match[2]}"


def _manager() -> Any:
    return importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager


# --- Megatron-Core 0.16 and 0.19 -----------------------------------------------------------------------------


def router_losses() -> dict[str, torch.Tensor]:
    """This rank's router losses since they were last cleared, by name: [layers] float32, before coefficients."""
    return {name: entry["values"] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}


def clear_router_losses() -> None:
    """Clear the routers' losses. 0.16 returns its own dictionary; 0.19 returns a copy and has a tracker to clear."""
    tracker = getattr(moe_utils, "get_moe_metrics_tracker", moe_utils.get_moe_layer_wise_logging_tracker)()
    tracker.clear()


def router_losses_know_their_parts() -> bool:
    """Whether Megatron multiplies a router loss by all positions of a pack (0.19), or by this rank's part of them
    (0.16).

    For a loss that is later divided by tokens the former is right; 0.16 leaves out the tensor and context ranks.
    """
    return "needs_dp_avg" in inspect.signature(TopKRouter.attach_and_log_load_balancing_loss).parameters


def asynchronous_save() -> dict[str, Any]:
    """The arguments with which `dist_checkpointing.save` returns a request instead of waiting.

    0.19 uses NVIDIA's resiliency extension unless the call names Megatron's own way, which is the only one in 0.16.
    """
    named = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    return {"async_sharded_save": True} | ({"async_strategy": "mcore"} if named else {})


def mlp_submodules(mlp: Any) -> Any:
    """The submodules of a layer's MLP, whose spec is a ModuleSpec (0.16) or a partly applied function (0.19)."""
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
