"""Read a whole run folder as a continuation would, and say what is damaged: `gspo-mega inspect RUN --verify`.

`check_run_folder` reads the configuration, the attempts' records, metrics.jsonl, every checkpoint with its checksums,
the held-out responses, every frame of the journal, and the tensors of published and exported folders against their
manifests. It changes nothing, takes no lock, and starts nothing, so it works on a running run too: what a running run
removes while it is read is left out. It reads with the readers that a run uses (`checkpoint/folders.py`,
`data/journal`, `metrics/writer.py`), so what it calls sound is what a run accepts.

A `Finding` is something that a continuation, or a reader of the result, meets as an error or as a loss. A `Finding`
with `is_note` is something that looks odd and costs nothing: what a killed process left half-written, or a file that no
part of the program wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import CheckpointError, DataError, FolderError, GspoMegaError, JournalError
from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.base.untrusted import MOST_BYTES, open_regular, parse_json, read_bytes, read_json_file, read_text
from gspo_mega.checkpoint import folders
from gspo_mega.config import load_config
from gspo_mega.data.held_out_responses import read_responses
from gspo_mega.data.journal.frames import JournalDamage
from gspo_mega.data.journal.journal import Journal, PartGoneError
from gspo_mega.data.journal.steps import TokenGaps, read_file, token_gaps_file

_PIECE_BYTES = 2**24
_HEADER_BYTES = 100 * 2**20  # of a safetensors file, as the library allows
_VERSION = re.compile(r"v\d{8}")
# What saves, the journal and publishes leave for a moment, or for ever if they are killed; the next start removes them.
_DRAFT = re.compile(r"\..*\.part|.*\.(part|writing|replaced|removed|new)|\.step_\d{8}\.aside")
_OWN_NAMES = {
    "checkpoints": re.compile(r"step_\d{8}(\.damaged(-\d+)?)?|latest"),
    "evaluations": re.compile(r"step_\d{8}\.jsonl"),
    "journal": re.compile(r"step_\d{8}(\.gaps|\.old-\d{4,})?"),
    "weights": re.compile(r"v\d{8}(\.delta)?|current\.json|start-.*|start\.lock"),
}


@dataclass(frozen=True)
class Finding:
    """Something wrong with one file. `place`: the byte or line, if it is known. `loss`: what is lost with it; `remedy`:
    what the user should do. `area` decides the exit code.
    """

    area: str  # checkpoint, journal, or folder
    path: Path
    problem: str
    loss: str
    remedy: str
    place: str = ""
    is_note: bool = False

    @property
    def where(self) -> str:
        return f"{self.path}{f', {self.place}' if self.place else ''}"

    def lines(self) -> list[str]:
        kind = "note" if self.is_note else "damaged"
        return [f"{kind:<8} {self.where}: {self.problem}", f"{'':8} lost: {self.loss}", f"{'':8} do: {self.remedy}"]


def exit_code(findings: list[Finding]) -> int:
    """0 if there is nothing but notes; else the code of the errors that a run would raise: 6 for a damaged checkpoint,
    8 for the journal, 9 for another file.
    """
    areas = {finding.area for finding in findings if not finding.is_note}
    codes = (("checkpoint", CheckpointError), ("journal", JournalError), ("folder", FolderError))
    return next((error.exit_code for area, error in codes if area in areas), 0)


def check_run_folder(run: RunFolder) -> tuple[list[Finding], list[str]]:
    """What is wrong with a run's folder, and what was read, one line per part. Raises FolderError if it is no run's."""
    if not run.config_file.exists() and not run.attempts_dir.exists():
        raise FolderError(f"{run.path} is not a run's folder: it has neither {run.config_file.name} nor attempts/")
    findings: list[Finding] = []
    checkpoints, step, prompts = _check_checkpoints(run, findings)
    _check_start(run, findings)
    num_lines = _check_metrics(run, step, findings)
    num_steps = _check_journal(run, step, prompts, findings)
    _check_held_out_responses(run, findings)
    num_tensors = _check_weights(run, findings)
    for name, pattern in _OWN_NAMES.items():
        findings += _foreign(run.path / name, pattern)
    return findings, [
        f"checkpoints  {checkpoints} read",
        f"journal      {num_steps} steps read",
        f"metrics      {num_lines} lines read{_superseded(run)}",
        f"weights      {num_tensors} tensors compared with their manifests",
    ]


# --- checkpoints ----------------------------------------------------------------------------------------------


def _check_checkpoints(run: RunFolder, findings: list[Finding]) -> tuple[int, int, dict[str, Any]]:
    """(Number of checkpoints read, step of the one that a continuation takes, the prompt order's state in it)."""
    latest = run.latest_checkpoint_file
    names: list[Path] = []
    try:
        names = folders.candidates(run)
        found = {folder for folder in run.checkpoints_dir.glob("step_????????") if folder.is_dir()}
        names += sorted(found - set(names), reverse=True)
    except (OSError, GspoMegaError, UnicodeDecodeError) as error:
        findings.append(
            Finding(
                "checkpoint",
                latest,
                _said(error, latest),
                "the run does not continue: exit code 6",
                "write the name of the newest sound checkpoint into it, as `step_00000042`",
            )
        )
        with contextlib.suppress(OSError):
            names = list(reversed(folders.complete_checkpoints(run)))
    sound: list[tuple[Path, dict[str, Any]]] = []
    broken: list[tuple[Path, list[Finding]]] = []
    for folder in names:
        record, problems = _check_checkpoint(folder)
        if not folder.exists() and latest.exists() and folder.name != _text(latest):
            continue  # a running run has removed it meanwhile
        if record is not None and not any(not one.is_note for one in problems):
            sound.append((folder, record))
        broken.append((folder, problems))
    fallback = f"{sound[0][0].name} is sound and is taken instead" if sound else "no checkpoint is sound"
    for folder, problems in broken:
        for problem in problems:
            is_taken = names and folder == names[0]
            loss = problem.loss or (
                f"the steps after the one before it; {fallback}" if is_taken else "a checkpoint to fall back on"
            )
            findings.append(Finding(**{**vars(problem), "loss": loss}))
    if not sound:
        return len(names), 0, {}
    state = sound[0][1].get("state", {})
    return len(names), int(state.get("step", 0)), state.get("prompts") or {}


def _check_checkpoint(folder: Path) -> tuple[dict[str, Any] | None, list[Finding]]:
    remedy = "restore the file from a copy; a continuation renames a damaged checkpoint and takes the one before it"
    state_file = folder / "state.json"

    def damage(path: Path, text: str) -> Finding:
        return Finding("checkpoint", path, text, "", remedy)

    try:
        record = folders.read_record(folder)
    except (OSError, ValueError, GspoMegaError) as error:
        return None, [damage(state_file, _said(error, state_file))]
    files = record.get("files")
    if not isinstance(files, dict) or not all(_is_checksum(value) for value in files.values()):
        if record["format_version"] >= 2:
            return None, [damage(state_file, "its list of checksums is none")]
        return record, [
            Finding(
                "checkpoint",
                state_file,
                "has no checksums: an early release wrote it",
                "nothing that is known",
                "nothing; its files cannot be checked",
                is_note=True,
            )
        ]
    problems = []
    for text in folders.checksum_problems(folder, files, 0, 1):
        name = next((name for name in sorted(files, key=len, reverse=True) if text.startswith(name)), "")
        path, what = folder / name, text.removeprefix(name).lstrip(": ")
        problems.append(damage(path, "is missing" if not path.exists() else what))
    known = {folder / name for name in files} | {state_file}
    with contextlib.suppress(OSError):
        problems += [
            _stranger("checkpoint", path, "the checkpoint's list of files does not have it")
            for path in sorted(folder.rglob("*"))
            if path not in known and not path.is_dir()
        ]
    return record, problems


def _is_checksum(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) is int and isinstance(value[1], str)


# --- what a start reads -----------------------------------------------------------------------------------------


def _check_start(run: RunFolder, findings: list[Finding]) -> None:
    copies = [attempt.config_file for attempt in run.attempts() if attempt.config_file.is_file()]
    copy = f"copy {copies[-1]} there" if copies else "give the run's own YAML file instead of the folder"
    try:
        load_config(run.config_file)
    except (OSError, UnicodeDecodeError, GspoMegaError) as error:
        findings.append(
            Finding(
                "folder", run.config_file, _said(error, run.config_file), "the run does not continue: exit code 2", copy
            )
        )
    for attempt in run.attempts():
        for path, read in (
            (attempt.command_file, read_text),
            (attempt.started_in_file, read_text),
            (attempt.restart_file, read_json),
        ):
            try:
                if path.exists():
                    read(path)
            except (OSError, UnicodeDecodeError, GspoMegaError) as error:
                findings.append(
                    Finding(
                        "folder",
                        path,
                        _said(error, path),
                        "the record of one start; a continuation stops at it: exit code 9",
                        "move the file away",
                    )
                )


def _superseded(run: RunFolder) -> str:
    path = run.superseded_metrics_file
    if not path.is_file():
        return ""
    number = read_bytes(path, 64 * MOST_BYTES).count(b"\n")
    return f"; {path.name} has {number} of steps that were trained again after a restart"


def _check_metrics(run: RunFolder, step: int, findings: list[Finding]) -> int:
    path = run.metrics_file
    remedy = "move the file away, or take the line out; a continuation refuses a line that it did not write"
    try:
        lines = read_bytes(path, 64 * MOST_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        if step:
            findings.append(
                Finding(
                    "folder",
                    path,
                    "is missing, and the run has a checkpoint",
                    "the curves of the steps before it",
                    "restore it from a copy; a continuation begins a new one",
                )
            )
        return 0
    except OSError as error:
        findings.append(Finding("folder", path, _said(error, path), "the curves; the run stops at it", remedy))
        return 0
    seen, last, problems = 0, 0, []
    for number, line in enumerate(lines, 1):
        place = f"line {number}"
        if number == len(lines) and not line.endswith(b"\n"):
            findings.append(
                Finding(
                    "folder",
                    path,
                    "the last line is cut short, or is being written",
                    "this line; the step is written again",
                    "nothing: a continuation cuts it off",
                    place,
                    True,
                )
            )
            continue
        try:
            value = parse_json(line)["step"]
            if type(value) is not int:
                raise TypeError
        except (ValueError, KeyError, TypeError):
            problems.append(
                Finding(
                    "folder", path, "is not a line of metrics", "the run does not continue: exit code 2", remedy, place
                )
            )
            last = 0
            continue
        if last and value != last + 1:
            problems.append(
                Finding(
                    "folder",
                    path,
                    f"step {value} follows step {last}",
                    "the curves of the steps between",
                    "restore the file from a copy, if there is one",
                    place,
                )
            )
        seen, last = seen + 1, value
    findings += problems
    if last and last < step:
        findings.append(
            Finding(
                "folder",
                path,
                f"ends with step {last}, and the newest sound checkpoint is of step {step}",
                f"the curves of steps {last + 1} to {step}",
                "restore the file from a copy, if there is one",
            )
        )
    return seen


def _check_held_out_responses(run: RunFolder, findings: list[Finding]) -> None:
    for file in sorted(run.evaluations_dir.glob("step_????????.jsonl")):
        try:
            list(read_responses(file))
        except DataError as error:
            if file.exists():  # else a continuation has removed it meanwhile
                loss = "what the report shows of this evaluation; a continuation does not read it"
                remedy = "restore it from a copy, or remove it"
                findings.append(Finding("folder", file, str(error).removeprefix(f"{file}:"), loss, remedy))


# --- the journal ------------------------------------------------------------------------------------------------


def _check_journal(run: RunFolder, step: int, prompts: dict[str, Any], findings: list[Finding]) -> int:
    """Check every file of the journal. `step`: that of the newest sound checkpoint, which is the number of steps that
    are trained; `prompts`: the state of the prompt order in it. Returns the number of files read.
    """
    journal = Journal(run.journal_dir)
    try:
        steps = journal.steps()
    except OSError as error:
        findings.append(_journal_finding(run.journal_dir, _said(error, run.journal_dir), "all recorded rollouts"))
        return 0
    if not steps:
        return 0
    # From this file on a continuation reads: groups that were sampled ahead, and the step that was interrupted.
    first_needed = min(step, int(prompts.get("tickets", {}).get("since", step)))
    whole: set[int] = set()
    for number in range(steps[0], steps[-1] + 1):
        loss = _loss_of_step(number, step, first_needed)
        file = journal.file(number)
        if number not in steps:
            findings.append(_journal_finding(file, "is missing between two steps", loss))
        elif _check_step(journal, number, number < max(step, steps[-1]), loss, findings):
            whole.add(number)
    if steps[-1] < step - 1:
        findings.append(
            _journal_finding(
                journal.file(steps[-1] + 1),
                f"is missing; the checkpoint is of step {step}",
                _loss_of_step(steps[-1] + 1, step, first_needed),
            )
        )
    for number in sorted(whole):
        with contextlib.suppress(PartGoneError):  # removed by `journal.keep_last`, or said above
            try:
                journal.read(number)
            except JournalDamage:
                pass  # said of the file that has it
            except JournalError as error:
                loss = _loss_of_step(number, step, first_needed)
                findings.append(_journal_finding(journal.file(number), _said(error, journal.file(number)), loss))
        _check_gaps(run, number, findings)
    return len(steps)


def _loss_of_step(number: int, step: int, first_needed: int) -> str:
    if number >= step:
        return f"the rollouts of step {number + 1}, which is not trained yet; they are sampled again"
    if number >= first_needed:
        return "groups that were sampled ahead for later steps; a continuation stops at it: exit code 8"
    return (
        f"nothing of a continuation, which has trained on step {number + 1}; its rollouts for `inspect`, `report` and"
        " `--from-rollouts`"
    )


def _check_step(journal: Journal, number: int, must_be_whole: bool, loss: str, findings: list[Finding]) -> bool:
    """Whether the file of a step is intact and complete."""
    file = journal.file(number)
    try:
        record = read_file(file, past_damage=True)
    except JournalError as error:
        if file.exists():
            findings.append(_journal_finding(file, _said(error, file), loss))
        return False
    for damage in record.damages if record is not None else ():
        text = str(damage).partition(": ")[2]
        findings.append(_journal_finding(file, text, loss, f"byte {damage.offset}, frame {damage.frame}"))
    if record is not None and record.damages:
        return False
    size = file.stat().st_size if file.exists() else 0
    torn = size if record is None else record.num_torn_bytes
    if not must_be_whole:
        if torn:
            findings.append(
                Finding(
                    "journal",
                    file,
                    f"its last {torn} bytes are a record that is cut short, or is being written",
                    "this record; what it held is sampled again",
                    "nothing: a continuation cuts it off",
                    f"byte {size - torn}",
                    True,
                )
            )
        return record is not None and record.consumed is not None
    if torn or record is None or record.consumed is None:
        what = f"its last {torn} bytes are cut short" if torn else "it ends before the record of its batch"
        findings.append(_journal_finding(file, f"{what}, and the run went on after it", loss, f"byte {size - torn}"))
        return False
    if record.step != number:
        findings.append(_journal_finding(file, f"is the file of step {record.step + 1}", loss))
        return False
    return True


def _check_gaps(run: RunFolder, number: int, findings: list[Finding]) -> None:
    file = token_gaps_file(run.journal_dir, number)
    try:
        TokenGaps(run.journal_dir, number)
    except (JournalError, ValueError, KeyError, TypeError) as error:
        findings.append(
            _journal_finding(file, _said(error, file), "the mismatch of single tokens, for `report`; no continuation")
        )


def _journal_finding(path: Path, problem: str, loss: str, place: str = "") -> Finding:
    remedy = (
        "restore the file from a copy, or move it out of journal/: `gspo-mega inspect RUN --step N` shows what is"
        " intact"
    )
    return Finding("journal", path, problem, loss, remedy, place)


# --- published and exported weights ---------------------------------------------------------------------------


def _check_weights(run: RunFolder, findings: list[Finding]) -> int:
    """Compare the tensors of the published versions and of the exported folders with their manifests."""
    count = 0
    current = run.current_weights_file
    again = "servers start from an older version until the next publish"
    try:
        value = read_json(current)
        wanted = (Path(value["path"]), run.weights_version_dir(int(value["weight_version"]))) if value else ()
        if wanted and not any(folder.is_dir() for folder in wanted):
            findings.append(
                Finding(
                    "folder",
                    current,
                    f"names {wanted[0]}, which is not there",
                    "nothing: servers start from the model, and the run publishes its weights again",
                    "nothing",
                    is_note=True,
                )
            )
    except (OSError, ValueError, KeyError, TypeError, GspoMegaError) as error:
        findings.append(
            Finding(
                "folder",
                current,
                _said(error, current),
                "the weights that servers start from: they do not start",
                "remove it; the run publishes its weights again",
            )
        )
    places: list[tuple[Path, str, str]] = []
    with contextlib.suppress(OSError):
        versions = sorted(path for path in run.weights_dir.iterdir() if _VERSION.fullmatch(path.name))
        places += [
            (path, again, "remove current.json and the folder; the run publishes its weights again")
            for path in versions
        ]
    exports = [run.huggingface_dir]
    with contextlib.suppress(OSError):
        exports += sorted(run.huggingface_steps_dir.iterdir())
    lost = "an exported result; no continuation reads it"
    places += [(path, lost, "remove it; `gspo-mega convert` makes it again from a checkpoint") for path in exports]
    for folder, loss, remedy in places:
        if not folder.is_dir():
            continue
        found = []
        for path, text in _manifest_problems(folder):
            if isinstance(text, int):
                count += text
            else:
                found.append(Finding("folder", path, text, loss, remedy))
        if folder.is_dir():  # a running run removes old versions
            findings += found
    return count


def _manifest_problems(folder: Path) -> Iterator[tuple[Path, str | int]]:
    """(File, what is wrong), and last (folder, number of tensors that were compared)."""
    manifest, count = folder / "manifest.json", 0
    try:
        tensors: dict[str, dict[str, Any]] = read_json_file(manifest)["tensors"]
        by_file: dict[str, dict[str, str | None]] = {}
        for name, about in tensors.items():
            by_file.setdefault(str(about["file"]), {})[name] = about.get("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield manifest, _said(error, manifest)
        return
    for name, wanted in sorted(by_file.items()):
        path = folder / Path(name).name
        try:
            for tensor, found in _tensor_digests(path, set(wanted)):
                count += 1
                if wanted.pop(tensor) not in (None, found):
                    yield path, f"tensor {tensor} has other bytes than its manifest says"
            for tensor in wanted:
                yield path, f"tensor {tensor} of the manifest is not in it"
        except FileNotFoundError:
            yield path, "is missing; the manifest names it"
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield path, _said(error, path)
    yield folder, count


def _tensor_digests(path: Path, names: set[str]) -> Iterator[tuple[str, str]]:
    """(Name, SHA-256 of the stored bytes) of tensors of a safetensors file. Raises ValueError for another file."""
    with open_regular(path, 2**63) as file:
        size = file.seek(0, 2)
        file.seek(0)
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if length > min(size, _HEADER_BYTES):
            raise ValueError(f"its header would have {length} bytes")
        header = json.loads(file.read(length))
        for name in sorted(names & header.keys()):
            start, end = header[name]["data_offsets"]
            if not 0 <= start <= end <= size - 8 - length:
                raise ValueError(f"it ends at byte {size}, before the end of tensor {name} at {8 + length + end}")
            file.seek(8 + length + start)
            digest, left = hashlib.sha256(), end - start
            while left and (piece := file.read(min(left, _PIECE_BYTES))):
                digest.update(piece)
                left -= len(piece)
            yield name, digest.hexdigest()


# --- names ------------------------------------------------------------------------------------------------------


def _foreign(folder: Path, pattern: re.Pattern[str]) -> list[Finding]:
    """Entries of a folder that this program did not write, and drafts that a killed process left."""
    area = {"checkpoints": "checkpoint", "journal": "journal"}.get(folder.name, "folder")
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        return [Finding(area, folder, _said(error, folder), "all that is in it", "give back its permissions")]
    found = []
    for entry in entries:
        if _DRAFT.fullmatch(entry.name):
            found.append(
                Finding(
                    area,
                    entry,
                    "is a draft: a killed process left it, or one is writing it",
                    "nothing",
                    "nothing: a continuation removes it",
                    is_note=True,
                )
            )
        elif not pattern.fullmatch(entry.name):
            found.append(_stranger(area, entry, "is not a name that a run writes"))
    return found


def _stranger(area: str, path: Path, why: str) -> Finding:
    return Finding(
        area, path, f"foreign: {why}", "nothing: no reader opens it", "move it away if it is not yours", is_note=True
    )


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return read_text(path).strip()
    return ""


def _said(error: Exception, path: Path) -> str:
    """An error's text, without the name of the file that the finding names already."""
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}".replace("cannot be read: cannot be read", "cannot be read")
    text = str(error) or type(error).__name__
    if isinstance(error, KeyError):
        return f"has no {error}"
    return text.removeprefix(f"{path}:").strip()
