"""CPU support for SGLang: import hooks with which the unmodified package serves on a machine without a GPU.

`activate()` must run before `sglang` is imported, in every process of a server. `rollout/server/entry.py` calls it at
import, so spawned children call it too. It works only through import hooks, each of which changes one module of SGLang
around its import. Nothing of SGLang is edited on disk, and with a usable GPU `activate()` does nothing. The batched
attention is in `sglang_attention.py`, layers and sampling in `sglang_layers.py`, adapters in `sglang_adapters.py`,
quantized layers in `sglang_quantization.py`, results of a decode step in `sglang_results.py`, and the way of a request
in `sglang_requests.py`.

Sinks of gpt-oss are kept in the server's dtype and used with this package's attention. Adapters (LoRA): SGLang's
backend `torch_native` computes them with plain PyTorch, but its host buffers are page-locked, and adapters of experts
exist only as Triton kernels. Both need a GPU, so `sglang_adapters.py` makes plain buffers and computes the products of
experts and their adapters. SGLang's own code reads the adapters, lays them out, and maps tokens to them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types
from collections.abc import Callable

from gspo_mega.base.garbage import keep_freed_memory

ATTENTION_BACKEND = "cpu_batched"
"""Name under which the batched attention is registered with SGLang."""
INVARIANT_ATTENTION_BACKEND = "cpu_batch_invariant"
"""Name of the attention of `engine.batch_invariant`."""
_CONTROLLER_SLEEP_MS = 100  # after so long without a request its watchdog is fed
FORGETS_ANSWERS = "GSPO_MEGA_FORGETS_ANSWERS"
"""The environment variable that is set in a server whose answers nobody continues."""
_LENT = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")


def has_gpu() -> bool:
    """Return whether torch can use a CUDA device."""

    import torch

    return torch.cuda.is_available()


class _MissingKernels(types.ModuleType):
    """Stands in for a package of compiled kernels; using any of them is an error that names it."""

    __version__ = "0.0.0+absent"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"

        def unavailable(*_args, **_kwargs):
            raise NotImplementedError(f"{full_name} is not here: the set-up for machines without a GPU leaves it out")

        return unavailable


class _MissingKernelsFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for `sgl_kernel`. It is last on the path, so it acts only if `sgl_kernel` is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _MissingKernels(spec.name)

    def exec_module(self, module):
        """Do nothing: a stand-in has no code to run."""


class _BeforeAfterImport(importlib.abc.MetaPathFinder):
    """Calls a function just before, or just after, the first import of a module."""

    def __init__(self, before: dict[str, Callable[[], None]], after: dict[str, Callable[[types.ModuleType], None]]):
        self._before = dict(before)
        self._after = dict(after)

    def find_spec(self, name, path=None, target=None):
        before = self._before.pop(name, None)
        if before is not None:
            before()
        after = self._after.pop(name, None)
        if after is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        exec_module = spec.loader.exec_module

        def exec_then(module):
            exec_module(module)
            after(module)

        spec.loader.exec_module = exec_then
        return spec


def _lend_torchvision() -> None:
    """Let SGLang import its table of configurations, which holds those of image models, too: the only modules on a text
    model's path that import torchvision. The set-up without a GPU leaves torchvision out: PyPI's build is linked
    against CUDA, and next to a CPU build of torch it keeps transformers from importing even a text model like Llama.
    """
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():  # transformers keeps this answer: it does not see the stand-in
        return
    for name in _LENT:
        module = _MissingKernels(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module


def _take_torchvision_back(_module: types.ModuleType) -> None:
    for name in _LENT:
        if isinstance(sys.modules.get(name), _MissingKernels):
            del sys.modules[name]


def _plain_host_buffers(module: types.ModuleType) -> None:
    """Allocate host buffers (those of returned routed experts) without page-locking them, which needs CUDA."""

    def allocate(dims, dtype, device, *_pinning, **_pinning_options):
        import torch

        return torch.empty(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _compare_on_host(module: types.ModuleType) -> None:
    """Have the weight checker compare on the host; by default it moves both sides to CUDA, chunk by chunk."""

    def iter_chunks(self):
        flat = self.tensor.reshape(-1)
        for start in range(0, flat.numel(), module.CHUNK_NUMEL):
            yield flat[start : start + module.CHUNK_NUMEL], None

    module.RawComparable.iter_chunks = iter_chunks


def _register_attention(module: types.ModuleType) -> None:
    """Add the batched attention through SGLang's public registry."""

    @module.register_attention_backend(ATTENTION_BACKEND)
    def create(model_runner):
        from gspo_mega.cpu.sglang_attention import BatchedCpuAttention

        return BatchedCpuAttention(model_runner)

    @module.register_attention_backend(INVARIANT_ATTENTION_BACKEND)
    def create_invariant(model_runner):
        from gspo_mega.cpu.sglang_attention import InvariantCpuAttention

        return InvariantCpuAttention(model_runner)


def _register_quantization(_module: types.ModuleType) -> None:
    """Put quantized layers that need no GPU kernels into SGLang's registry of quantization methods."""
    importlib.import_module("gspo_mega.cpu.sglang_quantization")


def _absorb_plain_blocks(module: types.ModuleType) -> None:
    """Dequantize the blocks of `kv_b_proj`, whose parts latent attention multiplies by, as SGLang does on a GPU.
    Elsewhere it rounds them again, to one scale, for a product that does not exist on a CPU.
    """
    from gspo_mega.algorithm.fp8 import dequantize_blocks

    def plain(weight, scale_inv, block):
        import torch

        return dequantize_blocks(weight, scale_inv, tuple(block)).to(torch.get_default_dtype()), None

    vars(module)["block_quant_to_tensor_quant"] = plain


def _plain_adapters(module: types.ModuleType) -> None:
    """Compute adapters (LoRA) without page-locked host buffers, which need CUDA."""
    from gspo_mega.cpu.sglang_adapters import use_plain_host_memory

    use_plain_host_memory(module)


def _adapters_of_layers(module: types.ModuleType) -> None:
    """Apply `_plain_adapters`, and compute adapters of experts without SGLang's kernels for them, which need Triton."""
    from gspo_mega.cpu.sglang_adapters import compute_experts

    _plain_adapters(module)
    compute_experts(module)


def _adapters_of_tokens(module: types.ModuleType) -> None:
    """Map tokens to adapters without a kernel's limits."""
    from gspo_mega.cpu.sglang_adapters import count_whole_segments

    count_whole_segments(module)


class _CachesFp8:
    """Stands in for SGLang's platform where the KV cache is made. On a CPU SGLang has an FP8 cache only for one
    vendor's kernels, with scales of its own; with this it makes the plain one that it has on a GPU.
    """

    def __init__(self, platform) -> None:
        self._platform = platform

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str):
        return getattr(self._platform, name)


def _cache_fp8(module: types.ModuleType) -> None:
    """Let `kv_cache_dtype: fp8_e4m3` make the cache that it makes on a GPU: e4m3, without a scale."""
    vars(module)["current_platform"] = _CachesFp8(module.current_platform)


def _attend_to_latents(module: types.ModuleType) -> None:
    """Read the latents in the cache of latent attention as one wide key-value head, in prefill too."""
    module.AttentionBackendRegistry.register(
        ATTENTION_BACKEND, lambda attention, forward_batch: module.AttnForwardMethod.MLA
    )


def _unscaled_positions(module: types.ModuleType) -> None:
    """Give latent attention unscaled rotary positions, as Moonlight has them; on a CPU SGLang makes only YaRN's."""
    scaled = module.get_rope_cpu

    def positions(head_size, rotary_dim, max_position, base, is_neox_style=True, rope_scaling=None, *others):
        made = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, *others)
        return module.get_rope(*made[:8]) if rope_scaling is None else scaled(*made)

    vars(module)["get_rope_cpu"] = positions


def _plain_layers(name: str) -> Callable[[types.ModuleType], None]:
    """Compute the layers of `name`, a class of the module, with fewer operations where they are plain."""

    def take_over(module: types.ModuleType) -> None:
        from gspo_mega.cpu.sglang_layers import take_over_layers

        take_over_layers(getattr(module, name))

    return take_over


def _gate_shared_experts(module: types.ModuleType) -> None:
    """Compute the gate of a shared expert without SGLang's kernel for it, which is compiled for GPUs."""
    from gspo_mega.cpu.sglang_layers import add_gated, gated

    vars(module).update(fused_gate_sigmoid_mul=gated, fused_gate_sigmoid_mul_add=add_gated)


def _norm_all_heads(module: types.ModuleType) -> None:
    """Norm queries and keys over all heads without SGLang's kernels for it, which are compiled for GPUs."""
    from gspo_mega.cpu.sglang_layers import norm_by_squares, sum_of_squares

    vars(module).update(rms_sumsq_serial=sum_of_squares, rms_apply_serial=norm_by_squares)
    norms = module.MiniMaxM2QKRMSNorm
    norms._forward_cpu = norms._forward_naive  # that of processors with AMX is compiled, too


def _lend_delta_kernels() -> None:
    """Let gated delta nets be computed without SGLang's compiled kernels, which are not here."""
    if "sgl_kernel.mamba" not in sys.modules and importlib.util.find_spec("sgl_kernel.mamba") is None:
        from gspo_mega.cpu.sglang_delta import lend_kernels

        lend_kernels()


def _norm_gated(name: str) -> Callable[[types.ModuleType], None]:
    """Compute the norm of a gated delta net, a class of the module, without a kernel, which needs Triton."""

    def take_over(module: types.ModuleType) -> None:
        from gspo_mega.cpu.sglang_delta import gated_norm

        norm = getattr(module, name)
        norm.forward = gated_norm(norm.forward)

    return take_over


class _Functional:
    """Stands in for `torch.nn.functional` where SGLang computes unquantized linear layers."""

    def __init__(self, linear: Callable) -> None:
        self.linear = linear

    def __getattr__(self, name: str):
        import torch

        return getattr(torch.nn.functional, name)


def _products(module: types.ModuleType) -> None:
    """Compute unquantized linear layers by the CPU's faster kernels."""
    from gspo_mega.cpu.products import linear, uses_onednn, widens_bf16

    if uses_onednn() or widens_bf16():
        vars(module)["F"] = _Functional(linear)


def _plain_experts(module: types.ModuleType) -> None:
    """Compute plain experts with fewer operations."""
    from gspo_mega.cpu.sglang_layers import experts_forward_plain

    vars(module)["moe_forward_native"] = experts_forward_plain(module.moe_forward_native)


def _plain_sampling(module: types.ModuleType) -> None:
    """Sample with one random number for each request, and make only the log-probs that are returned; with the
    batch-invariant attention, log-probs by log-softmax.
    """
    from gspo_mega.cpu.sglang_layers import log_softmax_of, sampler_plain, sampling_plain

    vars(module)["sampling_from_probs_torch"] = sampling_plain(module.sampling_from_probs_torch)
    own_log_probs = not module.SGLANG_RETURN_ORIGINAL_LOGPROB
    module.Sampler.forward = sampler_plain(module.Sampler.forward, own_log_probs)
    module.Sampler.__init__ = log_softmax_of(module.Sampler.__init__, INVARIANT_ATTENTION_BACKEND)


def _invariant_head(module: types.ModuleType) -> None:
    """With the batch-invariant attention, compute the trainer's LM head."""
    from gspo_mega.cpu.sglang_layers import head_of

    processor = module.LogitsProcessor
    processor._compute_lm_head = head_of(processor._compute_lm_head)


def _plain_results(module: types.ModuleType) -> None:
    """Handle the tokens of a decode step with few operations where its requests are plain."""
    from gspo_mega.cpu.sglang_results import decode_results_of

    processor = module.SchedulerBatchResultProcessor
    processor.process_batch_result_decode = decode_results_of(
        processor.process_batch_result_decode, forgets=lambda: FORGETS_ANSWERS in os.environ
    )


def _short_way(module: types.ModuleType) -> None:
    """Pass generate requests by FastAPI."""
    from gspo_mega.cpu.sglang_requests import open_lane

    open_lane(module)


def _scatter_by_sums(module: types.ModuleType) -> None:
    """Reduce-scatter unequal parts, for data-parallel attention, in SGLang's own way without NCCL: sum all and keep a
    part.
    """
    group = module.GroupCoordinator
    group.reduce_scatterv = group._deterministic_reduce_scatterv


def _wait_for_requests(module: types.ModuleType) -> None:
    """Let the controller of data-parallel schedulers sleep until a request arrives. By itself it keeps a core busy,
    also with `sleep_on_idle`.
    """
    receive = module.sock_recv

    def wait_and_receive(socket, *arguments, flags: int = 0):
        if flags & module.zmq.NOBLOCK:
            socket.poll(_CONTROLLER_SLEEP_MS)
        return receive(socket, *arguments, flags=flags)

    vars(module)["sock_recv"] = wait_and_receive


class _ForkingMultiprocessing:
    """Stands in for `multiprocessing` in SGLang's engine: processes are forked instead of spawned."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")

    def set_start_method(self, method: str, force: bool = False) -> None:
        """Ignore SGLang's request for `spawn`, which only CUDA needs."""

    def __getattr__(self, name: str):
        return getattr(self._context, name)


def _fork_children(module: types.ModuleType) -> None:
    """Start scheduler and detokenizer as forks of the process that has imported everything. Spawned, each would import
    SGLang and torch again, which is two thirds of a start's work.
    """
    vars(module)["mp"] = _ForkingMultiprocessing()


def after_import(actions: dict[str, Callable[[types.ModuleType], None]]) -> None:
    """Call the action of each named module with it, just after this process has imported it for the first time."""
    sys.meta_path.insert(0, _BeforeAfterImport(before={}, after=actions))


_installed = False


def activate() -> bool:
    """Make `import sglang` work without a GPU; a second call does nothing.

    Returns True if CPU support is active, False on a machine with a GPU, where nothing is changed. Call it before
    anything imports `sglang`.
    """
    global _installed
    if _installed:
        return True
    if has_gpu():
        return False
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    keep_freed_memory(os.environ)
    sys.meta_path.append(_MissingKernelsFinder())
    sys.meta_path.insert(
        0,
        _BeforeAfterImport(
            before={
                "sglang.srt.configs": _lend_torchvision,
                # Another kind of linear attention, which asks for them first.
                "sglang.srt.layers.attention.linear.kda_backend": _lend_delta_kernels,
                "sglang.srt.models.qwen3_5": _lend_delta_kernels,
            },
            after={
                "sglang.srt.configs": _take_torchvision_back,
                "sglang.srt.mem_cache.pool_host.common": _plain_host_buffers,
                "sglang.srt.utils.weight_checker_comparator": _compare_on_host,
                "sglang.srt.layers.attention.attention_registry": _register_attention,
                "sglang.srt.layers.quantization": _register_quantization,
                "sglang.srt.layers.quantization.unquant": _products,
                "sglang.srt.models.deepseek_common.deepseek_weight_loader": _absorb_plain_blocks,
                "sglang.srt.layers.rotary_embedding.factory": _unscaled_positions,
                "sglang.srt.mem_cache.kv_cache_configurator": _cache_fp8,
                "sglang.srt.models.qwen2_moe": _gate_shared_experts,
                "sglang.kernels.ops.attention.fla.fused_norm_gate": _norm_gated("FusedRMSNormGated"),
                "sglang.kernels.ops.attention.fla.layernorm_gated": _norm_gated("RMSNorm"),
                "sglang.srt.models.gpt_oss": keep_sinks_wide,
                "sglang.srt.arg_groups.model_hook": lambda module: allow_sinks(module, ATTENTION_BACKEND),
                "sglang.srt.models.minimax_m2": _norm_all_heads,
                "sglang.srt.models.llama": _plain_layers("LlamaModel"),
                "sglang.srt.models.qwen2": _plain_layers("Qwen2Model"),
                "sglang.srt.models.qwen3": _plain_layers("Qwen3Model"),
                "sglang.srt.models.qwen3_moe": _plain_layers("Qwen3MoeModel"),
                "sglang.srt.layers.moe.fused_moe_native": _plain_experts,
                "sglang.srt.layers.sampler": _plain_sampling,
                "sglang.srt.layers.logits_processor": _invariant_head,
                "sglang.srt.managers.scheduler_components.batch_result_processor": _plain_results,
                "sglang.srt.entrypoints.http_server": _short_way,
                "sglang.srt.lora.layers": _adapters_of_layers,
                "sglang.srt.lora.backend.base_backend": _adapters_of_tokens,
                "sglang.srt.lora.backend.torch_backend": _plain_adapters,
                "sglang.srt.distributed.parallel_state": _scatter_by_sums,
                "sglang.srt.entrypoints.engine": _fork_children,
                "sglang.srt.managers.data_parallel_controller": _wait_for_requests,
                "sglang.srt.models.deepseek_common.attention_backend_handler": _attend_to_latents,
            },
        ),
    )
    _installed = True
    return True


def keep_sinks_wide(module: types.ModuleType) -> None:
    """Keep the sinks of gpt-oss in the server's dtype. SGLang makes them bf16, for its GPU kernels."""
    attention = module.GptOssAttention
    stock = attention.__init__

    def init(self, *arguments, **named):

        stock(self, *arguments, **named)
        import torch

        self.sinks = torch.nn.Parameter(self.sinks.data.to(self.o_proj.weight.dtype), requires_grad=False)

    attention.__init__ = init


def allow_sinks(module: types.ModuleType, own: str) -> None:
    """Let models with sinks use this package's attention. They accept backends with sinks by name, so report it under
    another's.
    """
    stock = module.attention_backends_of

    def named(view):
        return tuple("intel_amx" if name == own else name for name in stock(view))

    vars(module)["attention_backends_of"] = named
