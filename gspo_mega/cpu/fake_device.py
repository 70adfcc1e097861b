"""A process whose PyTorch believes in a GPU: fake CUDA tensors have shapes, dtypes and a backward pass, and no memory.

`load_device` builds a small library (`fake_device.cpp`: a device guard and hooks that do nothing), once per PyTorch,
and loads it before torch is imported. `pretend` answers for `torch.cuda`, and `join_fake_world` lets process groups be
the `fake` ones, which have any size and send nothing. `gspo-mega trace` runs the GPU's own branches on this; nothing is
computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_mega.base.errors import ModelError

if TYPE_CHECKING:
    import torch

_SOURCE = Path(__file__).with_suffix(".cpp")
_BUILD_SECONDS = 300.0
_OPENMP = "libgomp"
_LIBRARIES = ("libc10.so", "libtorch_cpu.so")


def load_device(cache: Path | None = None) -> None:
    """Let this process have a CUDA device that only exists for dispatch. Call it before torch is imported.

    `cache`: the folder of the built library, by default one of the user's cache. Raises ModelError without a C++
    compiler or without a PyTorch that was built without CUDA, and RuntimeError if torch is imported already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the fake CUDA device was loaded")
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ModelError("trace: PyTorch is not installed; launch/setup.sh installs it")
    package = Path(found.origin).parent
    if (package / "lib" / "libtorch_cuda.so").exists():
        raise ModelError(
            "trace: this PyTorch was built with CUDA, whose own device would answer; trace with the CPU set-up"
            " (launch/setup.sh)"
        )
    library = _built(package, cache or _user_cache())
    # The package's own OpenMP first: otherwise the loader may take the system's.
    for name in sorted(path.name for path in (package / "lib").iterdir() if path.name.startswith(_OPENMP)):
        ctypes.CDLL(str(package / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    for name in _LIBRARIES:
        ctypes.CDLL(str(package / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    if ctypes.CDLL(str(library)).gspo_mega_install_fake_device() != 1:
        raise ModelError("trace: this PyTorch has a CUDA device of its own")


def _user_cache() -> Path:
    return Path.home() / ".cache" / "gspo_mega"


def _built(package: Path, cache: Path) -> Path:
    """Return the library for the PyTorch in `package`, and build it if it is not in `cache`."""
    version = (package / "version.py").read_bytes()
    digest = hashlib.sha256(_SOURCE.read_bytes() + version + sys.version.encode()).hexdigest()[:16]
    library = cache / f"fake_device_{digest}.so"
    if library.exists():
        return library
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise ModelError(f"trace: {_SOURCE.name} is built on demand, and no C++ compiler is here (c++ or g++)")
    with contextlib.ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache)))
        except OSError as error:
            raise ModelError(f"trace: the built library has no place in {cache}: {error}") from error
        headers = package / "include"
        command = [compiler, "-O1", "-shared", "-fPIC", "-std=c++20", str(_SOURCE), "-o", str(folder / library.name)]
        command += ["-I", str(headers), "-I", str(headers / "torch" / "csrc" / "api" / "include")]
        command += ["-L", str(package / "lib"), "-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
        if done.returncode != 0:
            last = "\n".join(done.stderr.splitlines()[-20:])
            raise ModelError(f"trace: {_SOURCE.name} cannot be built with {compiler}:\n{last}")
        (folder / library.name).replace(library)
    return library


def pretend(capability: tuple[int, int], name: str, memory_bytes: int, cuda_version: str = "13.0") -> None:
    """Answer for `torch.cuda` as a process does that has one GPU of this kind, idle. Call it once, before the first
    import of Megatron-Core.
    """
    import torch

    from gspo_mega.cpu.backend import NoStream  # which imports torch

    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        total_memory=memory_bytes,
        name=name,
        warp_size=32,
        shared_memory_per_block_optin=232448,
        gcnArchName="",
        L2_cache_size=50 * 2**20,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
    )
    answers = dict(
        is_available=True,
        is_initialized=True,
        is_current_stream_capturing=False,
        is_bf16_supported=True,
        current_device=0,
        device_count=8,
        get_device_capability=capability,
        get_device_properties=properties,
        get_device_name=name,
        mem_get_info=(memory_bytes, memory_bytes),
        initial_seed=1,
        memory_allocated=0,
        max_memory_allocated=0,
        memory_reserved=0,
        max_memory_reserved=0,
    )
    nothing = ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "init", "_lazy_init")
    for key, value in (answers | dict.fromkeys((*nothing, "set_rng_state", "reset_peak_memory_stats"))).items():
        setattr(cuda, key, lambda *args, _value=value, **kwargs: _value)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.Stream = cuda.Event = NoStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.device = lambda *args: contextlib.nullcontext()
    stream = NoStream()
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.default_generators = (torch.Generator(),)
    for key in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, key, lambda *args, **kwargs: None)
    version: Any = torch.version
    version.cuda = cuda_version
    binding: Any = torch._C
    binding._cuda_getDevice = lambda: 0
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
    tensor.pin_memory = lambda self, *args: self
    _hold_modules_there()


def _hold_modules_there() -> None:
    """`Module.cuda()` makes its parameters and buffers anew on the device, with the attributes that they had."""
    import torch

    def moved(self: torch.nn.Module, *args: object) -> torch.nn.Module:
        for module in self.modules():
            for name, held in list(module._parameters.items()):
                if held is not None and held.device.type != "cuda":
                    made = torch.nn.Parameter(
                        torch.empty(held.shape, dtype=held.dtype, device="cuda"), requires_grad=held.requires_grad
                    )
                    vars(made).update({key: value for key, value in vars(held).items() if key not in vars(made)})
                    module._parameters[name] = made
            for name, held in list(module._buffers.items()):
                if held is not None and held.device.type != "cuda":
                    module._buffers[name] = torch.empty(held.shape, dtype=held.dtype, device="cuda")
        return self

    module: Any = torch.nn.Module
    module.cuda = moved


def join_fake_world(rank: int, size: int) -> None:
    """Make this process rank `rank` of `size` in a default process group that sends nothing, and let all later groups
    be of that kind. Objects that are gathered are this rank's own.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed: Any = dist
    plain = dist.new_group

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        return plain(ranks, backend="fake")

    def all_gather_object(objects: list[Any], one: Any, group: Any = None) -> None:
        objects[:] = [one] * len(objects)

    distributed.new_group = distributed.distributed_c10d.new_group = new_group

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, **options: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    distributed.all_gather_object, distributed.gather_object = all_gather_object, gather_object
    distributed.broadcast_object_list = lambda *args, **kwargs: None
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
