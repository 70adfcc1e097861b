"""The supervised cold start: cross-entropy on demonstrations until the sampled accuracy reaches its band.

It uses the same ranks, engine, servers and evaluation as the training loop. Weights are published only to be measured.
`state.step` counts the optimizer steps that were tried here, including skipped ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gspo_mega.agents.demonstrated import demonstration_encoder
from gspo_mega.base.errors import NumericsError, RewardError
from gspo_mega.config.derived import sft_config
from gspo_mega.config.prompt_sources import sources_of
from gspo_mega.config.schema import Sft
from gspo_mega.data.demonstrations import Demonstration, load_demonstrations
from gspo_mega.data.prompts import encoder_of
from gspo_mega.data.stream import PromptStream
from gspo_mega.data.templates import check_taught_end
from gspo_mega.metrics.writer import progress_line
from gspo_mega.train.batches import assemble_supervised
from gspo_mega.train.context import WorkerContext
from gspo_mega.train.final_table import accuracy_text
from gspo_mega.train.reports import adapter_metrics, due_sets, evaluation_metrics, expert_loads, router_losses
from gspo_mega.train.scatter import Work
from gspo_mega.train.session import RankSession


def run_sft(context: WorkerContext) -> dict[str, Any] | None:
    """Train on demonstrations until a measured accuracy is within the configured band, then export.

    Returns rank 0's result: {"stopped": reason, "step": step} if a stop was requested, else the step, the accuracy and
    the exported folder. Raises NumericsError if the accuracy jumps past the band or does not reach it within
    `sft.max_steps`. Collective.
    """
    config = sft_config(context.config)
    settings = config.sft
    with RankSession(context, num_optimizer_steps=settings.max_steps, trains_policy=False) as session:
        state = session.state
        demonstrations = _demonstrations(session)
        if session.lead is not None:
            for line in [*session.lead.rollouts.describe_ends(), *session.lead.rollouts.held_out.report()]:
                session.say(line)
        verdict = _start(session)
        while verdict is None:
            if state.step >= settings.max_steps:
                raise NumericsError(
                    f"sampled accuracy did not reach sft.stop_accuracy_low {settings.stop_accuracy_low} in"
                    f" {settings.max_steps} steps (sft.max_steps); last:"
                    f" {accuracy_text(state.summary.get('accuracy_after'))}. A larger optimizer.lr or more steps may"
                    " help"
                )
            with session.profiling.step(state.step + 1):
                verdict = _step(session, demonstrations)
        if verdict == "stopped":
            _checkpoint(session, demonstrations)
            return {"stopped": "on request", "step": state.step}
        _checkpoint(session, demonstrations)
        session.saving.export()
        accuracy = state.summary.get("accuracy_after")
        session.say(
            f"cold start done after {state.step} steps: held-out accuracy {accuracy_text(accuracy)};"
            f" {session.run_folder.huggingface_dir}"
        )
        return {"step": state.step, "accuracy": accuracy, "huggingface_dir": str(session.run_folder.huggingface_dir)}


def _demonstrations(session: RankSession) -> PromptStream[Demonstration] | None:
    """Rank 0's stream of demonstrations, at the position where the run left it; None on other ranks."""
    if session.lead is None:
        return None
    config = session.config
    rollouts = session.lead.rollouts
    check_taught_end(encoder_of(config.data, rollouts.tokenizer), rollouts.end_tokens.ids, config.model.path)
    conversation = demonstration_encoder(config, rollouts.tokenizer, rollouts.end_tokens.ids, rollouts.tool_schemas)
    sources = load_demonstrations(
        config.data,
        rollouts.tokenizer,
        max_response_tokens=config.rollout.max_new_tokens,
        conversation=conversation,
    )
    stream = PromptStream(
        sources,
        [s.weight for s in sources_of(config.data)],
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        accept_changed=config.data.accept_changed,
    )
    if session.state.demonstrations:
        stream.load_state_dict(session.state.demonstrations)
    return stream


def _checkpoint(session: RankSession, demonstrations: PromptStream[Demonstration] | None) -> None:
    if demonstrations is not None:
        session.state.demonstrations = demonstrations.state_dict()
    session.saving.checkpoint()
    session.saving.poll(wait=True)


def _start(session: RankSession) -> str | None:
    """Wait for the servers. Returns "stopped" after a stop request, "done" for a run that is done already, else
    None.
    """
    stop = session.servers.wait()
    session.phases.timer.start_step()
    return "stopped" if stop is not None else session.state.summary.get("verdict")


def _step(session: RankSession, demonstrations: PromptStream[Demonstration] | None) -> str | None:
    """Make one optimizer step, and a measurement if one is due. Returns "done", "stopped", or None to go on."""
    config, state = sft_config(session.config), session.state
    settings = config.sft
    work = _next_work(session, demonstrations)
    if work.stop is not None:
        return "stopped"
    (mini_batch,) = work.mini_batches
    session.gpus.switch_to("train")
    with session.phase("train"):
        result, passed = session.engine.train_supervised(mini_batch.micro_batches, mini_batch.denominator)
    session.count_step(result.skipped, result.grad_norm)
    state.step += 1
    with session.phase("report"):
        of_adapters = adapter_metrics(session.engine)
        gathered = session.exchange.gather({"totals": passed.totals, "routing": passed.routing})
    verdict, metrics = None, {}
    due = state.step % settings.eval_every_steps == 0 and state.step >= settings.eval_from_step
    if due or state.step == settings.max_steps:
        verdict, metrics = _measure(session, settings)
    seconds = session.phases.timer.finish_step()
    if gathered is not None and session.lead is not None:
        log_probs, entropy = np.sum([part["totals"]["supervised_sums"] for part in gathered if part["totals"]], axis=0)
        routing = [part["routing"] for part in gathered]
        metrics |= router_losses(config.moe, routing) | expert_loads(routing)
        metrics |= {
            "sft/loss": -float(log_probs) / mini_batch.denominator,
            "sft/num_tokens": mini_batch.denominator,
            "policy/entropy": float(entropy) / mini_batch.denominator,
            "optimizer/grad_norm": result.grad_norm,
            "optimizer/lr": result.lr,
            "optimizer/num_optimizer_steps": state.num_optimizer_steps,
            "optimizer/num_skipped": int(result.skipped),
            **of_adapters,
            **seconds,
        }
        session.lead.writer.write(state.step, metrics)
        if "eval/accuracy" in metrics:
            session.say(progress_line(state.step, metrics, settings.max_steps))
    return verdict


def _next_work(session: RankSession, demonstrations: PromptStream[Demonstration] | None) -> Work:
    """This rank's share of the step's demonstrations, or the reason to stop in `Work.stop`. Collective."""
    if demonstrations is None or session.lead is None:
        with session.phase("rollout"):
            return session.ranks.receive_work()
    stop = session.lead.stop_request.check()
    if stop is not None:
        return session.ranks.hand_out_stop(stop)
    config = sft_config(session.config)
    with session.phase("assemble"):
        chosen = [demonstrations.next() for _ in range(config.sft.sequences_per_step)]
        return session.ranks.hand_out(
            assemble_supervised(chosen, config.batch, config.run, session.layout, session.state.step)
        )


def _measure(session: RankSession, settings: Sft) -> tuple[str | None, dict[str, float]]:
    """Publish the weights, sample held-out problems, and decide. Returns "done" or None, and the metrics. Collective.

    Raises, on every rank, NumericsError if the accuracy is past the band, and RewardError if too many samples could not
    be scored to decide by the others.
    """
    state = session.state
    state.weight_version += 1
    session.servers.publish(state.weight_version)
    first = session.eval_sets[0].name
    others = due_sets(session, state.step, state.step == settings.max_steps)
    found = session.evaluate(list(dict.fromkeys([first, *others])))
    if found is None:
        return None, {}
    evaluation = found[first]
    most_failed = session.config.reward.max_failed_fraction
    if evaluation.num_reward_failures > most_failed * evaluation.num_samples:
        raise RewardError(
            f"{evaluation.num_reward_failures} of {evaluation.num_samples} held-out scorings failed after step"
            f" {state.step}, more than reward.max_failed_fraction {most_failed:g} allows; the cold start cannot be"
            " stopped by such an accuracy"
        )
    accuracy = [evaluation.accuracy, evaluation.standard_error]
    state.summary["accuracy_after"] = accuracy
    if accuracy[0] > settings.stop_accuracy_high:
        raise NumericsError(
            f"sampled accuracy {accuracy_text(accuracy)} after step {state.step} is above sft.stop_accuracy_high"
            f" {settings.stop_accuracy_high}: it jumped past the band; measure more often (sft.eval_every_steps) or"
            " lower optimizer.lr"
        )
    if accuracy[0] >= settings.stop_accuracy_low:
        state.summary["verdict"] = "done"
    return state.summary.get("verdict"), evaluation_metrics(found, first)
