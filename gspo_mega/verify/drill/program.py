"""The drill: the reference, the trials one after another, and their rows in a file from which the drill goes on.

    <folder>/drill.json         what is drilled: the configuration, the seed, and what the reference reached
    <folder>/reference/         an undisturbed run that sampled, and `replayed`, one that trained on its rollouts
    <folder>/rows.jsonl         one line per fault
    <folder>/trials/NNNN/       the run of a trial, while it runs, and for good if its end was another one

A trial starts a run, strikes its faults at their moments, and continues the run with the same command until it ends.
Then the run's end is compared: of a run on recorded rollouts with the replayed reference, and of a run that sampled
(whose samples are its own) with an undisturbed run that trains on what its journal has.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo_mega.base import processes
from gspo_mega.base.errors import ConfigError, FolderError, GspoMegaError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, atomic_write_text, read_json
from gspo_mega.base.untrusted import parse_json, read_text
from gspo_mega.config import Config, LoadedConfig, render_config
from gspo_mega.launcher.prepare import yaml_string
from gspo_mega.verify.drill.kinds import KINDS, Fault, Kind
from gspo_mega.verify.drill.outcome import differences, journal_problems, outcome, shorten
from gspo_mega.verify.drill.plan import MOST_FAULTS, Row, Trial, draw_trial, next_fault
from gspo_mega.verify.drill.scene import POLL_SECONDS, TRAIN, NotThereError, Scene
from gspo_mega.verify.run_folder_check import check_run_folder

_MOST_COMMANDS = 12
_DISK_BYTES = 2**28
# How long a run may take to show that a fault ended it, before the next one is struck.
_SETTLE_SECONDS = 2.0
# How often is looked whether a command has ended.
_WATCH_SECONDS = 0.05


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run did. `reached`: how often rank 0 reached each point; `start_seconds`: until the first
    one; `steps_seconds`: from then to the end.
    """

    reached: dict[str, int]
    start_seconds: float
    steps_seconds: float


@dataclass(frozen=True)
class Settings:
    """`words`: the configuration's file and the user's overrides. `patience_seconds`: after which a command that has
    not ended counts as hung. `rows`: the file of the rows, if not the folder's own; several drills may share it, one
    after another. `command`: what trains, before these words.
    """

    loaded: LoadedConfig
    words: Sequence[str]
    folder: Path
    seed: int
    patience_seconds: float
    live_share: float
    most_faults: int = MOST_FAULTS
    keep: bool = False
    rows: Path | None = None
    command: Sequence[str] = TRAIN


def refuse(loaded: LoadedConfig) -> None:
    """Raise ConfigError for a configuration that cannot be drilled."""
    config = loaded.config
    assert config.train is not None
    for key, value, valid in (
        ("cluster.num_nodes", config.cluster.num_nodes, 1),
        ("cluster.num_rollout_nodes", config.cluster.num_rollout_nodes, 0),
        ("server.num_nodes", config.server.num_nodes, 1),
        ("train.rollouts_only", config.train.rollouts_only, False),
        ("train.from_rollouts", config.train.from_rollouts, None),
        ("journal.keep_last", config.journal.keep_last, None),
    ):
        if value != valid:
            raise ConfigError(
                f"{loaded.where(key)}: {key}: {value}: a drill runs on one machine, trains on what it samples, and"
                f" compares every step's rollouts; set {key}={json.dumps(valid)}"
            )


def missing_processes(config: Config) -> dict[str, str]:
    """{need of a kind: why no run of this configuration has such a process}."""
    assert config.train is not None
    missing = {}
    if config.rollout.episode.function == "one_turn":
        missing["episode worker"] = "rollout.episode is one_turn"
    if not config.train.standby_processes:
        missing["standby"] = "train.standby_processes is false"
    return missing


class Drill:
    """One drill, new or continued. `skipped`: the kinds that cannot be tried here, and why."""

    def __init__(
        self, settings: Settings, kinds: Sequence[str], skipped: dict[str, str], say: Callable[[str], None]
    ) -> None:
        self._settings, self._say = settings, say
        self.skipped = skipped
        self._kinds = [name for name in kinds if name not in skipped]
        self._name = settings.loaded.config.run.name
        self._rows_file = settings.rows or settings.folder / "rows.jsonl"
        self.rows = read_rows(self._rows_file)
        self._label = f"{Path(settings.words[0]).stem} {_digest(settings.loaded)[:8]} seed {settings.seed}"
        self._code = code_version()
        self._references: dict[bool, Reference] = {}
        self._wanted: dict[str, Any] = {}
        processes.adopt_orphans()

    # --- the reference ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the reference runs, or read those of an earlier start. Raises FolderError if they fail, ConfigError if
        the folder is of another drill.
        """
        record_file = self._settings.folder / "drill.json"
        identity = {"config": _digest(self._settings.loaded), "seed": self._settings.seed}
        record = read_json(record_file)
        if record is not None and {key: record.get(key) for key in identity} != identity:
            raise ConfigError(
                f"{self._settings.folder} holds a drill of another configuration or seed; give another --folder"
            )
        if record is None:
            self._settings.folder.mkdir(parents=True, exist_ok=True)
            live = self._undisturbed(self._scene("reference/live", self._words(), [], with_disk=False))
            replayed = self._undisturbed(
                self._scene("reference/replayed", self._words(self._live), [], with_disk=False)
            )
            record = {**identity, "live": asdict(live), "replayed": asdict(replayed)}
            atomic_write_json(record_file, record)
        self._references = {True: Reference(**record["live"]), False: Reference(**record["replayed"])}
        self._wanted = outcome(self._replayed)
        if found := differences(outcome(self._live), self._wanted, same_source=False):
            raise FolderError(
                f"{self._settings.folder}: the reference and a run that trains on its rollouts end differently:"
                f" {', '.join(shorten(found))}. Nothing disturbed them, so the configuration is not reproducible to the"
                " bit, and a drill could not tell a fault's effect"
            )
        norms = [
            values.get("optimizer/grad_norm")
            for name, values in self._wanted.items()
            if name.startswith("metrics/step ")
        ]
        if not any(norms):
            raise FolderError(
                f"{self._settings.folder}: every gradient of the reference is 0, so no step changed the weights and a"
                " comparison could find nothing; use a reward that differs within a group"
            )

    @property
    def _live(self) -> RunFolder:
        return RunFolder(self._settings.folder / "reference/live/runs" / self._name)

    @property
    def _replayed(self) -> RunFolder:
        return RunFolder(self._settings.folder / "reference/replayed/runs" / self._name)

    def _words(self, recorded: RunFolder | None = None) -> list[str]:
        more = [] if recorded is None else [f"train.from_rollouts={yaml_string(str(recorded.path))}"]
        return [*self._settings.words, *more]

    def _scene(self, place: str, words: list[str], faults: Sequence[Fault], with_disk: bool) -> Scene:
        root = self._settings.folder / place
        needs = {need for fault in faults for need in KINDS[fault.kind].needs}
        size = None
        if with_disk and "disk" in needs:
            size = _DISK_BYTES + 4 * _bytes_below(self._live.path)
        words = [*words, f"run.dir={yaml_string(str(root / 'runs'))}"]
        return Scene(root, self._name, [*self._settings.command, *words], "network" in needs, size)

    def _undisturbed(self, scene: Scene) -> Reference:
        self._say(f"{scene.root.name}: a run that nothing disturbs")
        command = scene.start()
        self._wait(scene, [])
        command.look()
        if command.process.returncode != 0:
            raise FolderError(f"{scene.root}: the undisturbed run failed: {command.said()}; see {command.errors}")
        first = command.first_reached or command.started
        ended = time.monotonic()
        return Reference(dict(scene.points()), first - command.started, ended - first)

    # --- trials ----------------------------------------------------------------------------------------------

    def run(self, num_faults: int, deadline: float | None) -> None:
        """Go on until `num_faults` were tried in all, or until `deadline` (of time.monotonic)."""
        reached = {is_live: reference.reached for is_live, reference in self._references.items()}
        settings = self._settings
        while sum(row.tried for row in self.rows) < num_faults and (deadline is None or time.monotonic() < deadline):
            number = 1 + max((row.trial for row in self.rows if row.drill in ("", self._label)), default=-1)
            trial = draw_trial(
                settings.seed, number, self._kinds, self.rows, reached, settings.live_share, settings.most_faults
            )
            self.rows += self._try(trial)
            text = "".join(json.dumps(asdict(row)) + "\n" for row in self.rows)
            atomic_write_text(self._rows_file, text)  # whole, because a killed drill may have left half a line

    def _try(self, trial: Trial) -> list[Row]:
        words = self._words(None if trial.is_live else self._live)
        scene = self._scene(f"trials/{trial.number:04d}", words, trial.faults, with_disk=True)
        began, used = time.monotonic(), _processor_seconds()
        tried: list[_Struck] = []
        is_equal = False
        try:
            left, missed = list(trial.faults), set()
            while left:
                self._strike(scene, trial, tried, left, missed)
            self._finish(scene, tried)
            different = self._differences(scene, trial)
            is_equal = not different
            if different:
                _blame(tried, [f"differs: {name}" for name in shorten(different)])
        except (GspoMegaError, OSError, ValueError, subprocess.SubprocessError) as error:
            _blame(tried, [f"{type(error).__name__}: {error}"])
        finally:
            is_sound = is_equal and not any(one.problems for one in tried)
            scene.close(remove=is_sound and not self._settings.keep)
        share = max(len(tried), 1)
        seconds, processor_seconds = (time.monotonic() - began) / share, (_processor_seconds() - used) / share
        rows = [
            Row(
                trial.number,
                trial.is_live,
                one.fault.kind,
                one.fault.moment,
                one.done,
                bool(one.done),
                one.ended.replace(f"{scene.root}/", "") or "went on",
                is_equal,
                [problem.replace(f"{scene.root}/", "") for problem in one.problems],
                round(seconds, 1),
                self._code,
                self._label,
                round(processor_seconds, 1),
            )
            for one in tried
        ]
        for row in rows:
            self._say(_line(row))
        return rows

    def _strike(self, scene: Scene, trial: Trial, tried: list[_Struck], left: list[Fault], missed: set[Fault]) -> None:
        """Strike the fault of `left` that comes next at its moment, unless the run ends before, and move it to `tried`.
        One whose moment did not come because an earlier fault ended the command, or whose process was not there, gets
        a second chance, and is then one of `missed`.
        """
        is_new = scene.command is None or scene.command.has_ended()
        if scene.command is not None and is_new:
            self._after(scene, tried)
            if scene.command.process.returncode == 0:
                tried += map(_Struck, left)
                left.clear()
                return
        fault = next_fault(left, is_new)
        kind = KINDS[fault.kind]
        if kind.begins_with_command and not is_new:
            self._wait(scene, tried)  # only a command that starts can begin with it
            return
        left.remove(fault)
        struck = _Struck(fault)
        tried.append(struck)
        if kind.begins_with_command:
            number = len(tried)
            mark, log = scene.root / f"mark-{number}", scene.root / f"strace-{number}"
            scene.start(kind.prefix(fault, log), kind.variable(fault, mark))
            self._wait(scene, tried, until=lambda: bool(_evidence(kind, fault, mark, log)))
            struck.done = _evidence(kind, fault, mark, log)
            if struck.done:
                self._settle(scene, tried, kind, fault)
                struck.done = _evidence(kind, fault, mark, log)
            return
        if is_new:
            scene.start()
        assert kind.strike is not None
        with contextlib.suppress(NotThereError):
            if self._wait_for(scene, trial, fault, is_new):
                struck.done = kind.strike(scene, fault)
        if not struck.done:
            if fault not in missed:
                missed.add(fault)
                tried.remove(struck)
                left.append(fault)
            return
        self._settle(scene, tried, kind, fault)
        if kind.release is not None and scene.command is not None and not scene.command.has_ended():
            kind.release(scene)

    def _settle(self, scene: Scene, tried: list[_Struck], kind: Kind, fault: Fault) -> None:
        """Let a fault that was struck have its effect, before the next one or before its release."""
        if kind.do in ("disk_full", "denied") or kind.is_repeated(fault):
            self._wait(scene, tried)  # the command ends
        else:
            self._wait(scene, tried, seconds=fault.seconds if kind.release else _SETTLE_SECONDS)

    def _wait_for(self, scene: Scene, trial: Trial, fault: Fault, is_new: bool) -> bool:
        """Whether the moment of the fault came before the command's end."""
        command, reference = scene.command, self._references[trial.is_live]
        assert command is not None
        begun, before = time.monotonic(), scene.points()
        while not command.has_ended():
            now = time.monotonic()
            command.look()
            if now - begun > self._settings.patience_seconds:
                return False
            if fault.when == "start" and is_new:
                if now - command.started > fault.place * reference.start_seconds:
                    return True
            elif fault.when == "point":
                if scene.points()[fault.point] - before[fault.point] >= fault.hit:
                    return True
            else:
                since = command.first_reached if is_new else begun
                length = reference.steps_seconds if is_new else reference.steps_seconds / 2
                if since is not None and now - since > fault.place * length:
                    return True
            time.sleep(POLL_SECONDS)
        return False

    def _wait(
        self,
        scene: Scene,
        tried: list[_Struck],
        seconds: float | None = None,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until the command has ended, or for some `seconds`, or `until` something. Kill what hangs."""
        command = scene.command
        assert command is not None
        deadline = time.monotonic() + (self._settings.patience_seconds if seconds is None else seconds)
        while not command.has_ended() and time.monotonic() < deadline:
            if until():
                return
            command.look()
            time.sleep(_WATCH_SECONDS)
        if seconds is None and not command.has_ended():
            _blame(tried, [f"hung: no end after {self._settings.patience_seconds:.0f} s"])
            processes.kill_below((), [command.process.pid])
            command.process.wait()

    def _after(self, scene: Scene, tried: list[_Struck]) -> None:
        """The command has ended: note how, end what it left, undo faults, and look at the folder."""
        command = scene.command
        assert command is not None
        if command.is_over:
            return
        command.is_over = True
        last = next((one for one in reversed(tried) if one.done), None)
        if last is not None and not last.ended and command.process.returncode != 0:
            last.ended = command.said()
        _blame(tried, scene.left_running())
        scene.mend()
        if command.has_traceback():
            _blame(tried, [f"a traceback where an error should speak to a person: {command.said()}"])
        if scene.run.config_file.exists():
            findings, _ = check_run_folder(scene.run)
            _blame(tried, [f"inspect --verify: {one.where}: {one.problem}" for one in findings if not one.is_note])

    def _finish(self, scene: Scene, tried: list[_Struck]) -> None:
        """Continue the run until it ends. Raises FolderError if it does not."""
        last = ""
        for _ in range(_MOST_COMMANDS):
            if scene.command is None:
                scene.start()
            self._wait(scene, tried)
            self._after(scene, tried)
            assert scene.command is not None
            if scene.command.process.returncode == 0:
                return
            last = scene.command.said()
            scene.command = None
        raise FolderError(f"{scene.run.path} did not end after {_MOST_COMMANDS} starts; the last: {last}")

    def _differences(self, scene: Scene, trial: Trial) -> list[str]:
        """What is not as in an undisturbed run."""
        config = self._settings.loaded.config
        found = outcome(scene.run)
        in_order = config.rollout.max_staleness == 0 and not config.rollout.filter_constant_groups
        reference = self._live if in_order or not trial.is_live else None
        problems = journal_problems(scene.run, config.batch.group_size, reference)
        if not trial.is_live:
            return [*problems, *differences(found, self._wanted)]
        place = f"{scene.root.relative_to(self._settings.folder)}-replay"
        replay = self._scene(place, self._words(scene.run), [], with_disk=False)
        try:
            self._undisturbed(replay)
            return [*problems, *differences(found, outcome(replay.run), same_source=False)]
        finally:
            replay.close(remove=True)


@dataclass
class _Struck:
    """A fault of a trial, what was done (empty if its moment did not come), how the command ended (empty if it went
    on), and what was wrong after it.
    """

    fault: Fault
    done: str = ""
    ended: str = ""
    problems: list[str] = field(default_factory=list)


def _blame(tried: Sequence[_Struck], problems: Sequence[str]) -> None:
    """Note problems with the fault that was struck last, or with the last one if none was."""
    if tried and problems:
        next((one for one in reversed(tried) if one.done), tried[-1]).problems.extend(problems)


def _line(row: Row) -> str:
    verdict = "; ".join(row.problems) or ("equal" if row.equal else "not equal")
    what = f"{row.done}; {row.ended}" if row.tried else "not struck: the run ended before, or had no such process then"
    mode = "live" if row.is_live else "replayed"
    return f"trial {row.trial} ({mode})  {row.kind}, {row.moment}: {what}; {verdict}"


def _evidence(kind: Kind, fault: Fault, mark: Path, log: Path) -> str:
    """What a fault that began with its command did; empty if it did nothing yet. `mark`: a file that a declared point
    makes; `log`: strace's.
    """
    if kind.do:
        again = ", after each restart too" if kind.is_repeated(fault) else ""
        return f"{kind.do} {fault.moment}{again}" if mark.exists() else ""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    count = sum("INJECTED" in line or "DELAYED" in line for line in lines)
    return f"{count} of {len(lines)} calls" if count else ""


def read_rows(file: Path) -> list[Row]:
    """The rows of a drill, without a half-written last line."""
    try:
        lines = read_text(file).split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [Row(**parse_json(line)) for line in lines]


def _processor_seconds() -> float:
    """Of this process and of all that have ended below it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def code_version() -> str:
    """The date and commit of the package's git checkout, with a + if files differ from it; else its version."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "../..")
        return git("log", "-1", "--date=format:%Y-%m-%d", "--format=%cd %h") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return importlib.metadata.version("gspo-mega")


def _digest(loaded: LoadedConfig) -> str:
    return hashlib.sha256(render_config(loaded.config).encode()).hexdigest()[:16]


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
