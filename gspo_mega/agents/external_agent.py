"""`rollout.episode: foreign`: the agent is any program, which knows the policy as an address of OpenAI's or Anthropic's
API.

    rollout:
      episode:
        function: foreign
        options:
          command: [python, my_agent.py]     # in the folder of the run's command
          reward: functions                  # functions: reward.functions judge; exit_code: 0 is 1.0, another 0.0;
                                             # file: what the agent writes into GSPO_MEGA_RESULT_FILE
          model: policy                      # the name that the agent must ask for
          processes: 32                      # agents at the same time

Each episode has one process. In addition to the short list of docs/rewards.md and `episodes.environment` it gets the
variables OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, the same with ANTHROPIC_, GSPO_MEGA_TASK_FILE (JSON: messages,
answer, metadata, prompt_id, source, seed) and GSPO_MEGA_RESULT_FILE. TMPDIR is a folder of the episode's own, which is
removed with it.

`ForeignAgents` starts the processes, enforces their deadlines and decides what their end means. The endpoint
(`endpoint.py`) answers their turns.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gspo_mega.agents.endpoint import AgentEndpoint
from gspo_mega.agents.endpoint_session import EndpointSession
from gspo_mega.agents.messages import Decode
from gspo_mega.agents.protocol import Outcome, Task, outcome_of
from gspo_mega.agents.session import EpisodeSession
from gspo_mega.agents.turn import Failure, Finished
from gspo_mega.base.errors import EpisodeError
from gspo_mega.base.network import no_proxy_variables
from gspo_mega.config.schema import Episodes, Rollout
from gspo_mega.config.validate_episodes import ForeignOptions, program_problem
from gspo_mega.rewards.guarded_process import GuardedProcess, ProcessKind, environment_of
from gspo_mega.rewards.user_code import BadResult

_AGENT = ProcessKind(
    module="gspo_mega.agents.agent_worker", name="agent's process", section="episodes", error=EpisodeError
)
_POLL_SECONDS = 1.0
# The longest wait for the last output of an agent that a deadline ends.
_LAST_WORDS_SECONDS = 2.0
_MOST_RESULT_BYTES = 1024 * 1024
_SHOWN_CHARACTERS = 500
_RESULT_FIELDS = tuple(one.name for one in dataclasses.fields(Outcome))


class _Failed(Exception):
    """The episode failed; its open turns are dropped."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.failure = Failure(kind, text)


class ForeignAgents:
    """Runs an agent's process for each episode: an `EpisodeRunner`.

    Attributes:
        tool_schemas: empty; agents bring their own tools.
        counts: empty; what happens at the endpoint is counted in the episode's session.
    """

    def __init__(
        self,
        episodes: Episodes,
        rollout: Rollout,
        decode: Decode,
        openers: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """The arguments after `config` are those of `AgentEndpoint`."""
        self._episodes = episodes
        self._options = ForeignOptions.read(rollout.episode.options)
        self._endpoint = AgentEndpoint(episodes.endpoint, self._options.model, decode, openers, stop_token_ids)
        self._slots = asyncio.Semaphore(self._options.processes)
        self._scratch: Path | None = None
        self.tool_schemas: list[dict[str, Any]] = []
        self.counts: collections.Counter[str] = collections.Counter()

    async def start(self) -> None:
        """Bind the endpoint's address. Raises EpisodeError if the agent's program or a variable of its environment is
        missing, and RolloutError if the address cannot be bound.
        """
        if (problem := program_problem(self._options.command)) is not None:
            raise EpisodeError(f"rollout.episode.options.command: {problem}")
        environment_of(_AGENT, self._episodes.environment)
        await self._endpoint.start()
        self._scratch = Path(tempfile.mkdtemp(prefix="gspo-mega-agents-"))

    async def close(self) -> None:
        """Close the endpoint and remove what agents left. Every `run` must be over or cancelled."""
        await self._endpoint.close()
        if self._scratch is not None:
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    async def run(self, task: Task, session: EpisodeSession, name: str) -> Finished:
        """Run one episode, and return how it ended. `name` is the episode's id and prompt, for failures.

        What the agent does wrong becomes the episode's failure. If its process is killed, it begins again once, with
        the turns that it had. Raises the error of a turn that ends the run (`EndpointSession.failed`).
        """
        async with self._slots:
            finished = await self._once(task, session, name)
            if finished.failure is not None and finished.failure.kind == "killed":
                session.restart()
                finished = await self._once(task, session, name)
        return finished

    async def _once(self, task: Task, session: EpisodeSession, name: str) -> Finished:
        assert self._scratch is not None
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        served: EndpointSession | None = None
        try:
            async with self._endpoint.open(session) as served:
                try:
                    return await self._run_process(served, task, folder)
                except _Failed as error:
                    if error.failure.kind != "killed":
                        raise
                    # Leave the block normally: open turns are then sampled to their end, for the next process.
                    return _failed(error, name, served)
        except _Failed as error:
            return _failed(error, name, served)
        finally:
            if served is not None:
                session.counts.update(served.counts)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _run_process(self, served: EndpointSession, task: Task, folder: Path) -> Finished:
        files = {"GSPO_MEGA_TASK_FILE": folder / "task.json", "GSPO_MEGA_RESULT_FILE": folder / "result.json"}
        shown = {key: value for key, value in dataclasses.asdict(task).items() if key != "state"}
        files["GSPO_MEGA_TASK_FILE"].write_text(json.dumps(shown), encoding="utf-8")
        environment = {
            "OPENAI_BASE_URL": served.base_url,
            "OPENAI_API_KEY": served.api_key,
            "OPENAI_MODEL": served.model,
            # Anthropic's clients add /v1 themselves.
            "ANTHROPIC_BASE_URL": served.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": served.api_key,
            "ANTHROPIC_MODEL": served.model,
            "TMPDIR": str(folder),
            **no_proxy_variables([urlsplit(served.base_url).hostname or ""]),
            **{key: str(path) for key, path in files.items()},
        }
        setup = {
            "command": list(self._options.command),
            "environment": environment,
            "memory_bytes": self._episodes.memory_bytes,
            "file_bytes": self._episodes.file_bytes,
        }
        try:
            process = await GuardedProcess.start(_AGENT, setup, "the agent", self._episodes.environment)
        except EpisodeError as error:
            raise _Failed("not_started", str(error)) from error
        served.start_clock()
        try:
            ended = await self._ended(process, served)
        finally:
            await process.end()
        outcome, limit = self._judge(ended, files["GSPO_MEGA_RESULT_FILE"], served)
        return Finished(outcome, limit=limit, own_seconds=served.own_seconds)

    async def _ended(self, process: GuardedProcess, served: EndpointSession) -> dict[str, Any]:
        """Wait for the agent's end, and return how it ended. Raises _Failed at a deadline, or if its process ends
        without a report; and the error in `served.failed`.
        """
        reply = asyncio.ensure_future(process.receive(None))
        try:
            while not reply.done():
                left, key = served.left(self._episodes)
                if left <= 0:
                    seconds = getattr(self._episodes, key.removeprefix("episodes."))
                    text = f"the agent took more than {seconds:g} s of its own ({key})"
                    process.send({"tell": True})
                    await asyncio.wait({reply}, timeout=_LAST_WORDS_SECONDS)
                    told = reply.result() if reply.done() else None
                    raise _Failed("deadline", text if told is None else f"{text}; {_last_output(told)}")
                await asyncio.wait(
                    {reply, served.failed}, timeout=min(left, _POLL_SECONDS), return_when=asyncio.FIRST_COMPLETED
                )
                if served.failed.done():
                    served.failed.result()
            ended = reply.result()
        finally:
            reply.cancel()
        if ended is None:
            raise _Failed("killed", f"the agent's process ended ({await process.exit_text()})")
        return ended

    def _judge(self, ended: dict[str, Any], file: Path, served: EndpointSession) -> tuple[Outcome, str]:
        """Return what the agent earned, and the kind of the limit that ended it ("" if none did)."""
        code, way = ended["exit"], self._options.reward
        if way == "exit_code" and code >= 0:
            return Outcome(float(code == 0), correct=code == 0), ""
        if code == 0 and way == "functions":
            return Outcome(), ""
        try:
            if code == 0:
                return _read_result(file), ""
        except BadResult as error:
            if served.refused is None:
                raise _Failed(error.kind, str(error)) from error
        if served.refused is not None:  # ended by a limit: the reward functions judge it, and it is trained on
            return Outcome(), served.refused.kind
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        kind = "exception" if code > 0 else "killed" if code == -signal.SIGKILL else "crash"
        raise _Failed(kind, f"the agent ended with {how}; {_last_output(ended)}")


def _last_output(told: dict[str, Any]) -> str:
    return f"its last output: {told['output'][-_SHOWN_CHARACTERS:]}"


def _failed(error: _Failed, name: str, served: EndpointSession | None) -> Finished:
    own = served.own_seconds if served is not None else 0.0
    return Finished(None, Failure(error.failure.kind, f"{name}: {error}"), own_seconds=own)


def _read_result(file: Path) -> Outcome:
    """Read what an agent wrote: a number, or an object with the fields of Outcome. Raises BadResult."""
    try:
        # Never wait for what the agent put there: it may be a pipe that nobody writes to.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise BadResult("wrong_type", "GSPO_MEGA_RESULT_FILE is not a regular file")
            text = opened.read(_MOST_RESULT_BYTES + 1)
        found = json.loads(text) if len(text) <= _MOST_RESULT_BYTES else None
    except FileNotFoundError:
        raise BadResult("wrong_type", "the agent wrote no GSPO_MEGA_RESULT_FILE") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadResult("wrong_type", f"GSPO_MEGA_RESULT_FILE cannot be read: {error}") from None
    if not isinstance(found, dict):
        if found is None:
            raise BadResult("wrong_type", f"GSPO_MEGA_RESULT_FILE is null, or over {_MOST_RESULT_BYTES} bytes")
        return outcome_of(found)
    for key in found:
        if key not in _RESULT_FIELDS:
            raise BadResult("wrong_type", f"GSPO_MEGA_RESULT_FILE has {key!r:.60}; valid: {', '.join(_RESULT_FIELDS)}")
    return outcome_of(Outcome(**found))
