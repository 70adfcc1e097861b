"""The process that is one SGLang server: `python -m gspo_mega.rollout.server.entry --spec FILE.json`.

It prepares this process's environment, activates the CPU support if there is no GPU, and makes SGLang's arguments.
`supervise.py` watches and restarts this process. SGLang spawns children that import this module again as their
`__main__`, so all that they need, too, happens at import, at the end of the file.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

from gspo_mega.base import versions
from gspo_mega.base.errors import ConfigError, GspoMegaError
from gspo_mega.base.garbage import uncollected
from gspo_mega.base.network import is_loopback
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.cpu import sglang_hooks
from gspo_mega.models.huggingface import text_values
from gspo_mega.models.value_models import check_head
from gspo_mega.rollout.registration import read_secret
from gspo_mega.rollout.server.spec import (
    ServerSpec,
    check_batch_invariant,
    check_checkpoint,
    check_gpu,
    check_memory_saver,
    check_options_sglang,
    draft_architectures,
    experts_arguments,
    memory_saver_variables,
    missing_values,
    sglang_arguments,
)

_PR_SET_PDEATHSIG = 1
HELD_WEIGHTS = "GSPO_MEGA_HELD_WEIGHTS"
"""The environment variable that says where a server's copy of the weights is (`held_weights.py`)."""


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends in any way (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the call
        os._exit(1)


def use_private_rendezvous(spec: ServerSpec) -> None:
    """Let SGLang's processes find each other through a file of their own if they are on one machine. If the server's
    address is a loopback address, let their sockets listen only on the loopback interface.

    By default they use a torch store, which listens on every address of the machine and accepts keys from anybody. The
    parts of a server over several nodes still do.
    """
    if spec.num_nodes == 1:
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{spec.store}"
    if is_loopback(spec.host):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")


def server_arguments(spec: ServerSpec):
    """Return SGLang's ServerArgs for `spec`. Raises ConfigError for an option that SGLang does not have or refuses."""
    os.environ.update(memory_saver_variables(spec))
    if spec.forgets_answers:
        os.environ[sglang_hooks.FORGETS_ANSWERS] = "1"
    model_config = read_model_config(spec.model_path)
    check_context(spec, model_config)
    check_checkpoint(spec, model_config)
    draft = spec.speculative.get("speculative_draft_model_path")
    drafts = draft_architectures(spec, read_model_config(draft)) if draft is not None else []
    if spec.classifies:
        check_head(spec.model_path)
    import_only([*(model_config.get("architectures") or []), *drafts])
    is_installed = importlib.util.find_spec("torch_memory_saver") is not None
    check_memory_saver(spec, sglang_hooks.activate(), is_installed)
    check_batch_invariant(spec, sglang_hooks.activate())
    if sglang_hooks.activate() and not spec.options.get("enable_torch_compile"):
        # SGLang decorates functions with torch.compile, which imports a compiler in each process and never uses it.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if sglang_hooks.activate():  # its copies of a step's inputs are for CUDA graphs
        os.environ.setdefault("SGLANG_EAGER_INPUT_NO_COPY", "true")
    # The inputs that a gated delta net remembers for its convolution, which SGLang keeps in bf16 otherwise.
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", spec.dtype)
    if sglang_hooks.activate() and spec.tensor > 1:
        # SGLang has one rank per NUMA node unless it is told which cores each rank may use. Here each may use all.
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * spec.tensor))

    import msgspec
    from sglang.srt.server_args import ServerArgs

    fields = msgspec.structs.fields(cast("type[msgspec.Struct]", ServerArgs))  # its decorator hides that it is one
    check_options_sglang(spec.options, (field.name for field in fields))
    on_cpu = sglang_hooks.activate()
    of_gpu: dict[str, str] = {}
    if not on_cpu and (spec.quantization != "none" or spec.return_routed_experts):
        import torch

        capability = torch.cuda.get_device_capability()
        check_gpu(spec, capability)
        of_gpu = experts_arguments(spec, capability)
        for name, value in of_gpu.items():
            sys.stderr.write(f"{name}: {value}, so that SGLang sees the experts that it returns\n")
    attention = sglang_hooks.INVARIANT_ATTENTION_BACKEND if spec.batch_invariant else sglang_hooks.ATTENTION_BACKEND
    arguments = sglang_arguments(spec, on_cpu=on_cpu, cpu_attention_backend=attention)
    arguments["api_key"] = read_secret(Path(spec.api_key_file))
    return ServerArgs(**missing_values(model_config) | of_gpu | arguments)


def read_model_config(folder: str) -> dict[str, Any]:
    """Return config.json of a Hugging Face folder. Raises ConfigError if it cannot be read."""
    try:
        return read_json_file(Path(folder, "config.json"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no Hugging Face model folder: {error}") from error


def import_only(architectures: list[str]) -> None:
    """Let SGLang import only the models of these architectures. All two hundred take nearly half of a start's time.
    Raises ConfigError if SGLang is not installed or too old.
    """
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        raise ConfigError("sglang is not installed in this environment; it is needed to serve")
    if too_old := versions.sglang_problem(_version_of("sglang")):
        raise ConfigError(f"{sys.executable}: {too_old}")
    models = list(Path(package.origin).parent.glob("srt/models/*.py"))
    definitions = [f"class {architecture}(" for architecture in architectures]
    needed = {path for path in models if any(d in path.read_text(encoding="utf-8") for d in definitions)}
    if needed:  # otherwise SGLang may know the architecture in another way, and reports it if it does not
        others = sorted(path.stem for path in models if path not in needed)
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # a source tree on the path


def check_context(spec: ServerSpec, model_config: dict[str, Any]) -> None:
    """Raise ConfigError if the model has fewer positions than the configured context."""
    limit = text_values(model_config).get("max_position_embeddings")
    if limit is not None and spec.context_tokens > limit:
        raise ConfigError(
            f"server.context_tokens: {spec.context_tokens} tokens, but the model's positions end at {limit}"
        )
    # The few tokens of slack that SGLang's own bounds need may exceed the model's positions. They are never used.
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"


def main() -> None:
    """Read the command line and serve until killed."""
    parser = argparse.ArgumentParser(prog="gspo_mega.rollout.server.entry", description="Be one SGLang server.")
    parser.add_argument("--spec", type=Path, required=True, help="JSON file written by `gspo-mega serve`")
    parser.add_argument("--parent", type=int, required=True, help="pid of `gspo-mega serve`; end when it ends")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    with uncollected():
        sglang_hooks.activate()
        try:
            spec = ServerSpec.read(arguments.spec)
            use_private_rendezvous(spec)
            server_args = server_arguments(spec)
        except GspoMegaError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(error.exit_code)
        from sglang.launch_server import run_server
        from sglang.srt.entrypoints import http_server  # noqa: F401, run_server imports it where all is collected
        from sglang.srt.utils import kill_process_tree

        if spec.holds_weights:
            from gspo_mega.rollout.server import held_weights

            reserved = held_weights.reserve(spec.model_path, spec.tensor // spec.num_nodes)
            os.environ[HELD_WEIGHTS] = reserved  # for children that SGLang starts anew
            held_weights.install(reserved, is_imported=True)

    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


# At import: in this process and in every spawned child, before anything imports sglang or torch.
# If Megatron-Core is installed, SGLang imports it, only for a debugging aid.
cast("dict[str, Any]", sys.modules)["megatron"] = None
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# With this, /health only says that the server is up; /health_generate still makes it produce a token.
os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"

if __name__ == "__main__":
    main()
else:
    sglang_hooks.activate()
    if HELD_WEIGHTS in os.environ:
        from gspo_mega.rollout.server import held_weights

        held_weights.install(os.environ[HELD_WEIGHTS], is_imported=False)
