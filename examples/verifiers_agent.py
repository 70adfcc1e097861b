"""An environment of the package verifiers as an agent (docs/agents.md): one process for each episode.

gspo_mega starts it, with its task and its model in environment variables. Without these it says so.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

if "GSPO_MEGA_TASK_FILE" not in os.environ:
    print("gspo_mega starts this program for each episode: see docs/agents.md. It needs the package verifiers.")
    sys.exit(0)

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  # in an environment of its own

os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]  # where uv is, which harnesses start


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def says_the_answer(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


async def main():
    task = json.loads(Path(os.environ["GSPO_MEGA_TASK_FILE"]).read_text())
    policy = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(
        model=os.environ["OPENAI_MODEL"],
        client=policy,
        harness=vf.HarnessConfig(id="null"),
        runtime=vf.SubprocessConfig(),
    )
    async with vf.make_agent(config) as agent:
        trace = await agent.run(SumTask(Sum(prompt=task["messages"][-1]["content"], answer=task["answer"])))
    if trace.last_error is not None:
        raise SystemExit(f"verifiers: {trace.last_error.message}")
    Path(os.environ["GSPO_MEGA_RESULT_FILE"]).write_text(json.dumps(trace.reward))


asyncio.run(main())
