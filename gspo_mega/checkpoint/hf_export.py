"""Export: the policy as a Hugging Face folder, written by all ranks that own tensors.

The folder, with its files, index and manifest, appears complete or not at all. `sync/versions.py` decides which
versions a run keeps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import ModelError, PublishError
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.checkpoint.collectives import all_gather_json, raise_together
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_folder import INDEX_NAME, SINGLE_NAME
from gspo_mega.checkpoint.mtp_layers import CarriedLayers
from gspo_mega.checkpoint.quantized import PublishedForm, plain_form
from gspo_mega.models import delta_net
from gspo_mega.models.block_fp8 import KEY as QUANTIZATION_KEY
from gspo_mega.models.block_fp8 import quantization_config
from gspo_mega.models.huggingface import description_files
from gspo_mega.models.spec import BlockFp8, ModelSpec

if TYPE_CHECKING:
    from gspo_mega.checkpoint.shard_check import ShardCheck
    from gspo_mega.engine.model import PolicyModel
    from gspo_mega.engine.process_groups import ParallelGroups

MANIFEST_NAME = "manifest.json"
sync = atomic_io.sync
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
}
MAX_FILE_BYTES = 4 * 1024**3
Digest = Callable[[str, torch.Tensor], str | None]
"""Takes a name and a whole tensor in the host's memory. Returns its SHA-256 (hexadecimal), or None if it has none."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 (hex) of the bytes of a local tensor of any shape and dtype, in row-major order as in
    safetensors.
    """
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a local tensor of any shape and dtype, in row-major order.

    They are a copy if the tensor is on a device or not contiguous, and otherwise share its memory.
    """
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in the host's memory, of any shape and dtype, have the same bytes in row-major order."""
    first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def policy_digests(policy: PolicyTensors, form: PublishedForm) -> dict[str, str]:
    """Return the SHA-256 of every whole tensor of `form`, by name, on every rank. Each owner hashes its own.
    Collective.

    Raises PublishError, the same on every rank, for a tensor that cannot be sent in that form.
    """
    mine: dict[str, str] = {}
    problems: list[str] = []
    try:
        for name, tensor in form.owned(policy):
            mine[name] = tensor_digest(tensor)
    except PublishError as error:
        problems = [str(error)]
    raise_together(problems, policy.groups.host, PublishError, "the weights cannot be published")
    return {name: digest for part in all_gather_json(mine, policy.groups.host) for name, digest in part.items()}


def export_huggingface(
    out_dir: str | Path,
    spec: ModelSpec,
    groups: ParallelGroups,
    chunks: Sequence[PolicyModel],
    dtype: torch.dtype,
    source_folder: str | Path,
    weight_version: int,
    max_file_bytes: int = MAX_FILE_BYTES,
    end_token_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """Write the policy in `chunks` (this rank's unwrapped GPT chunks) to `out_dir` as `export_policy` does, with the
    layers for multi-token prediction that `source_folder` has. Collective.

    If `end_token_ids` has tokens that `source_folder` does not name, generation_config.json names all of them, so that
    a server of the folder stops where the run did. Those of the lead rank count.
    """
    policy, form = PolicyTensors(spec, groups, chunks), plain_form(dtype)
    more = end_token_ids if set(end_token_ids) - set(spec.eos_token_ids) else ()
    return export_policy(
        policy, out_dir, form, source_folder, weight_version, max_file_bytes, carries=True, end_token_ids=more
    )


def export_policy(
    policy: PolicyTensors,
    out_dir: str | Path,
    form: PublishedForm,
    source_folder: str | Path,
    weight_version: int,
    max_file_bytes: int = MAX_FILE_BYTES,
    *,
    carries: bool = False,
    end_token_ids: Sequence[int] = (),
    digest: Digest | None = None,
    check: ShardCheck | None = None,
) -> dict[str, Any]:
    """Write the policy in `form` to `out_dir`, with config and tokenizer files of `source_folder`; return the manifest.

    Each owner of tensors writes its own files of at most about `max_file_bytes`, and uses no more host memory than
    that. Files are written to a staging folder, synced, read back and compared with memory. Then the folder is renamed
    and replaces an existing one. `out_dir` is on a file system that all ranks share. With `carries`, the lead rank also
    writes the layers for multi-token prediction of `source_folder`, as they are there. generation_config.json names
    `end_token_ids`, if there are any, instead of the source's.

    `digest` gets every tensor that this rank writes, in the order of the table, and returns its SHA-256 or None;
    without it, every tensor is hashed. `check` compares what is gathered with what the ranks hold.

    The manifest, which is also in the folder, has `weight_version`, the `dtype` of plain tensors, and for every tensor
    its `shape`, `dtype`, `file`, and the `sha256` of the owner's memory, if it was hashed. Collective over all ranks.

    Raises PublishError, the same on every rank, if a tensor cannot be sent in that form, if `check` finds a difference,
    or if a file cannot be written or reads back differently.
    """
    out_dir = Path(out_dir)
    staging = out_dir.with_name(out_dir.name + ".writing")
    groups = policy.groups
    lead = groups.is_lead
    problems: list[str] = []
    carried: list[CarriedLayers] = []
    if lead:
        problems = _attempt(_start, staging, Path(source_folder), form, policy, carries, carried, end_token_ids)
    raise_together(problems, groups.host, PublishError, f"{out_dir} cannot be written")

    writer = _Writer(staging, groups.world.rank, max_file_bytes, digest or (lambda _, tensor: tensor_digest(tensor)))
    try:
        for name, tensor in form.owned(policy, check):
            # After a failure the iterator still runs to its end, because other ranks wait in its collectives.
            if not problems:
                problems = _attempt(writer.add, name, tensor)
    except PublishError as error:  # raised by the iterator itself, after its end
        problems = [str(error)]
    if not problems:
        problems = _attempt(_close, writer, carried)
    raise_together(problems, groups.host, PublishError, f"{out_dir} cannot be written")

    written = all_gather_json([writer.files, writer.tensors], groups.host)
    final_names = _final_names([file for files, _ in written for file in files])
    problems = _attempt(writer.rename, final_names)
    raise_together(problems, groups.host, PublishError, f"{out_dir} cannot be written")

    tensors = {name: t | {"file": final_names[t["file"]]} for _, part in written for name, t in part.items()}
    manifest = {
        "weight_version": weight_version,
        "dtype": DTYPE_NAMES[form.plain],
        "tensors": {name: tensors[name] for entry, _ in policy.stored() for name in form.described(entry)}
        | {entry.name: tensors[entry.name] for layers in carried for entry in layers.entries},
    }
    if lead:
        problems = _attempt(_finish, staging, out_dir, manifest)
    raise_together(problems, groups.host, PublishError, f"{out_dir} cannot be written")
    return manifest


def _close(writer: _Writer, carried: list[CarriedLayers]) -> None:
    for layers in carried:
        for name, tensor in layers.tensors():
            writer.add(name, tensor)
    writer.close()


def _attempt(action, *arguments: object) -> list[str]:
    """Run an action on files. Returns its problem, if any, which all ranks then report."""
    try:
        action(*arguments)
    except (OSError, SafetensorError, PublishError, ModelError) as error:
        return [f"{type(error).__name__}: {error}"]
    return []


class _Writer:
    """One rank's files, which it fills, writes and checks one after the other."""

    def __init__(self, folder: Path, rank: int, max_file_bytes: int, digest: Digest) -> None:
        self.folder = folder
        self.rank = rank
        self.max_file_bytes = max_file_bytes
        self.digest = digest
        self.files: list[str] = []
        self.tensors: dict[str, dict[str, Any]] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_file_bytes:
            self._write()
        # A copy, because the tensor may be a parameter's own memory.
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size

    def close(self) -> None:
        if self._pending:
            self._write()

    def _write(self) -> None:
        file = f"rank{self.rank:05d}-{len(self.files):05d}.safetensors"
        for name, tensor in self._pending.items():
            sha256 = self.digest(name, tensor)
            self.tensors[name] = {
                "shape": list(tensor.shape),
                "dtype": DTYPE_NAMES[tensor.dtype],
                **({} if sha256 is None else {"sha256": sha256}),
                "file": file,
            }
        with atomic_io.operation("publish.tensors"):
            save_file(self._pending, self.folder / file, metadata={"format": "pt"})
            atomic_io.follow_umask(self.folder / file)
        atomic_io.sync(self.folder / file, at="publish.sync")
        with safe_open(self.folder / file, framework="pt") as saved:
            for name, tensor in self._pending.items():
                if not _same_bytes(saved.get_tensor(name), tensor):
                    raise PublishError(f"{self.folder / file}: {name} reads back with other bytes than were written")
        self.files.append(file)
        self._pending, self._pending_bytes = {}, 0

    def rename(self, final_names: dict[str, str]) -> None:
        for file in self.files:
            atomic_io.rename(self.folder / file, self.folder / final_names[file], at="publish.name")


def _final_names(files: list[str]) -> dict[str, str]:
    if len(files) == 1:
        return {files[0]: SINGLE_NAME}
    return {file: f"model-{number:05d}-of-{len(files):05d}.safetensors" for number, file in enumerate(files, start=1)}


def _start(
    staging: Path,
    source: Path,
    form: PublishedForm,
    policy: PolicyTensors,
    carries: bool,
    carried: list[CarriedLayers],
    end_token_ids: Sequence[int],
) -> None:
    atomic_io.remove_tree(staging, at="publish.clear")
    atomic_io.make_folder(staging, at="publish.folder")
    edited = policy.config_json
    if carries:
        layers = CarriedLayers(source)
        carried.append(layers)
        edited = lambda raw: layers.config_json(policy.config_json(raw))  # noqa: E731
    copy_description(source, staging, DTYPE_NAMES[form.plain], form.stored, edited)
    if end_token_ids:
        file = staging / "generation_config.json"
        generation = read_json_file(file) if file.exists() else {}
        atomic_io.atomic_write_json(file, {**generation, "eos_token_id": list(end_token_ids)}, at="publish.config")


def copy_description(
    source: Path,
    target: Path,
    dtype_name: str,
    stored: BlockFp8 | None = None,
    edited: Callable[[dict[str, Any]], dict[str, Any]] = lambda raw: raw,
) -> None:
    """Copy the files that describe a model (configuration, generation configuration, tokenizer). They are on the disk
    on return.

    The copied config.json names `dtype_name`, the layout `stored` of quantised weights in place of the source's, and no
    layers for multi-token prediction. `edited` makes the last changes to it. Weights and code are not copied. Raises
    OSError, and ModelError for a link that leads out of the folder.
    """
    for file in description_files(source):
        atomic_io.copy_file(file, target / file.name, at="publish.copy")
    config = read_json_file(source / "config.json")
    # Both spellings are in use, and a vision-language class may name the dtype for its text part only.
    text = config.get("text_config")
    named = [(part, key) for part in (config, text) for key in ("dtype", "torch_dtype") if part and key in part]
    for part, key in named or [(config, "torch_dtype")]:
        part[key] = dtype_name
    if config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0
    config.pop(QUANTIZATION_KEY, None)
    if stored is not None:
        kept = (*stored.kept, *delta_net.unrounded_modules(config))
        config[QUANTIZATION_KEY] = quantization_config(replace(stored, kept=kept))
    atomic_io.atomic_write_json(target / "config.json", edited(config), at="publish.config")


def _finish(staging: Path, out_dir: Path, manifest: dict[str, Any]) -> None:
    tensors = manifest["tensors"]
    files = {t["file"] for t in tensors.values()}
    if files != {SINGLE_NAME}:
        total = sum((staging / file).stat().st_size for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": {n: t["file"] for n, t in tensors.items()}}
        atomic_io.atomic_write_json(staging / INDEX_NAME, index, at="publish.index")
    atomic_io.atomic_write_json(staging / MANIFEST_NAME, manifest, at="publish.manifest")
    atomic_io.sync(staging, at="publish.sync")
    replaced = out_dir.with_name(out_dir.name + ".replaced")
    atomic_io.remove_tree(replaced, at="publish.drop")
    if out_dir.exists():
        atomic_io.rename(out_dir, replaced, at="publish.aside")
    atomic_io.rename(staging, out_dir, at="publish.rename")
    atomic_io.remove_tree(replaced, at="publish.drop")
