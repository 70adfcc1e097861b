"""The CPU backend: lets an unmodified Megatron-Core run over gloo on a machine without a GPU.

It changes objects in memory and no file of a dependency; `install()` does nothing if CUDA is available. It must run
before the first import of `megatron.core`, which importing `gspo_mega.engine` ensures. Transformer Engine is loaded in
between if the process asks for it (`te_loading.py`).

It covers three kinds of difference: Megatron asks `torch.cuda` for devices, streams and RNG states; it compares tensor
type names with CUDA's; and in some places it needs Transformer Engine or a GPU by oversight (`_complete_megatron` names
each).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._device import _device_constructors

from gspo_mega.cpu import delta_rule, products, te_layers, te_loading

_CPU = torch.device("cpu")
_PlainGloo: Any = dist.ProcessGroupGloo
_GLOO_TIMEOUT = timedelta(minutes=30)  # torch's
_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def is_cpu_backend() -> bool:
    """Return True if this process has no CUDA device and therefore runs Megatron on the CPU."""
    return not torch.cuda.is_available()


class NoStream:
    """Stands in for torch.cuda.Stream and Event: all work has already finished."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *exc: object) -> bool:
        return False

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def _on_cpu(device: object) -> object:
    if device is None or isinstance(device, int):
        return None if device is None else _CPU
    return _CPU if str(device).startswith("cuda") else device


def _wrap_factory(factory):
    @functools.wraps(factory)
    def on_cpu(*args, **kwargs):
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return on_cpu


def _stand_in_for_cuda() -> None:
    """Make `torch.cuda`'s device, stream and RNG calls answer for the CPU, and let factories accept CUDA devices."""
    cuda = torch.cuda
    tensor_class: Any = torch.Tensor  # no type describes methods that are replaced by others
    stream = NoStream()
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda *a, **k: None
    cuda.synchronize = lambda *a, **k: None
    cuda.empty_cache = lambda *a, **k: None
    cuda.Stream = cuda.Event = NoStream
    cuda.stream = lambda s: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *a, **k: stream
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *a, **k: None)
    tensor_class.cuda = lambda self, *a, **k: self
    # `with torch.device(...)` recognises the factories by identity, from a set that it builds once. Build the set
    # before they are wrapped; otherwise it no longer reaches the functions that the wrappers call.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _wrap_factory(getattr(torch, name)))

    plain_type = torch.Tensor.type

    def type_as_megatron_expects(self, dtype=None, *args, **kwargs):
        # Megatron's optimizers compare type names with 'torch.cuda.FloatTensor'.
        if dtype is not None:
            return plain_type(self, dtype, *args, **kwargs)
        name = plain_type(self)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return name.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.core") else name

    tensor_class.type = type_as_megatron_expects


def _complete_megatron() -> None:
    """Define what Megatron-Core 0.16 leaves undefined, or bound to a device, without Transformer Engine and a GPU."""
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    # The router refers to this name even if the import of Transformer Engine failed.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    # Recomputation asks Transformer Engine if FP8 is on.
    if not hasattr(random, "FP8GlobalStateManager"):

        class _Fp8Off:
            is_fp8_enabled = staticmethod(lambda: False)

        random.FP8GlobalStateManager = _Fp8Off
        random.activation_recompute_forward = lambda **k: contextlib.nullcontext()
        random.fp8_autocast = lambda **k: contextlib.nullcontext()

    # Megatron's RNG tracker uses the CUDA generator directly.
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()

    # It warns if the CPU's random state changes inside a region that has the GPU's; here the two are one.
    tracker_log = logging.getLogger("megatron.core.tensor_parallel.random")
    tracker_log.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())

    # Without Transformer Engine its classes are stand-ins, which latent attention must not pass to `isinstance`; and
    # 0.19 does not import Megatron's own linear layer there.
    import megatron.core.transformer.multi_latent_attention as multi_latent_attention
    from megatron.core.post_training.modelopt.layers import Linear

    if te_loading.is_loaded():
        te_layers.replace_kernel()
    else:
        multi_latent_attention.HAVE_TE = False
        multi_latent_attention.Linear = Linear

    delta_rule.install()
    products.replace_linear(layers)

    # Loading optimizer state assumes a fused Adam that keeps no 'step' of its own. An offloaded Adam has met the same:
    # https://github.com/NovaSky-AI/SkyRL/pull/1403
    plain_set = DistributedOptimizer._set_main_param_and_optimizer_states

    def keep_step(self, model_param, tensors):
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        if "step" in state and "step" not in tensors:
            tensors = {"step": state["step"], **tensors}
        return plain_set(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = keep_step

    # The dispatchers leave sizes that are already on the CPU as tensors; gloo needs numbers.
    def to_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _gather_as_bytes() -> None:
    """Let gloo gather several tensors of different dtypes at once, as Megatron gathers FP8 beside bf16 parameters.

    gloo joins them into one tensor, which would convert them to one dtype; as bytes they already share one.
    """
    group_class: Any = dist.ProcessGroup
    names = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")  # since torch 2.13, and before
    name = next(n for n in names if hasattr(group_class, n))
    plain = getattr(group_class, name)

    def gather(group, outputs, inputs, *options):
        if len({tensor.dtype for tensor in (*outputs, *inputs)}) > 1:
            outputs, inputs = ([tensor.view(torch.uint8) for tensor in each] for each in (outputs, inputs))
        return plain(group, outputs, inputs, *options)

    setattr(group_class, name, gather)


class _OneDevice(type(dist.ProcessGroupGloo)):
    """Makes gloo groups that share this process's device, and with it one thread for sockets."""

    _device: tuple[int, Any] | None = None

    def __call__(cls, store, rank: int, size: int, *options, timeout: timedelta = _GLOO_TIMEOUT):
        if not options:
            if _OneDevice._device is None or _OneDevice._device[0] != os.getpid():  # threads do not survive a fork
                _OneDevice._device = os.getpid(), _PlainGloo.create_default_device()
            shared = _PlainGloo._Options()
            shared._devices, shared._timeout = [_OneDevice._device[1]], timeout
            options = (shared,)
        return _PlainGloo(store, rank, size, *options)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _PlainGloo)


def _share_gloo_threads() -> None:
    """Give all gloo groups of a process one thread for their sockets. By default each group has its own, which wakes a
    hundred times a second as long as the group lives, and Megatron makes dozens.
    """

    class ProcessGroupGloo(_PlainGloo, metaclass=_OneDevice):
        """Stands in for torch's name of the class; what it makes are plain groups."""

    module: Any = c10d
    module.ProcessGroupGloo = ProcessGroupGloo


_installed = False


def install() -> None:
    """Make Megatron-Core usable on this machine. Idempotent; does nothing on a machine with a GPU."""
    global _installed
    if _installed or not is_cpu_backend():
        return
    _installed = True
    # Megatron's jit_fuser is torch.compile; without this variable every fused function would start a compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _stand_in_for_cuda()
    _gather_as_bytes()
    _share_gloo_threads()
    if te_loading.is_requested():
        te_loading.load_transformer_engine()
    _complete_megatron()
