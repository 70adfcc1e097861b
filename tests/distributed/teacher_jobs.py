"""What ranks run in the tests of a teacher."""

from __future__ import annotations

import numpy as np
import torch
from routing_jobs import SETTINGS, Run

from gspo_mega.algorithm.distillation import TEACHER_SUMS, token_guidance
from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base.records import MicroBatch
from gspo_mega.config.algorithms import Ratio
from gspo_mega.config.derived import num_served_top
from gspo_mega.engine.device_batch import to_device
from gspo_mega.train.session import load_teachers

RATIOS: dict[str, Ratio] = {"gspo": "sequence", "gspo_token": "sequence_token", "grpo": "token"}


def _settings(algorithm: str) -> ObjectiveSettings:
    return ObjectiveSettings(ratio=RATIOS[algorithm], clip_low=SETTINGS.clip_low, clip_high=SETTINGS.clip_high)


def taught(folder: str, teacher: str, parallel: dict, algorithm: str = "gspo", steps: int = 0, **own) -> dict:
    """Sums of the teacher and gradient of the first training pass; after each of `steps` optimizer steps the mean of
    (log policy - log old) x (log teacher - log old), nats squared.
    """
    section = dict(path=teacher, coefficient=0.5, reward_weight=2.0) | own
    objective = dict(ratio=RATIOS[algorithm])
    with Run(folder, parallel, algorithm="custom", objective=objective, teacher=section) as run:
        frozen = load_teachers(run.config, run.groups)
        assert frozen is not None
        packs = run.packs()
        old = run.engine.old_pass(packs)
        scores = frozen.score(packs)
        report = run.engine.policy_gradients(packs, _settings(algorithm), run.denominator, old, teacher=scores)
        result: dict = dict(sums=_sums(run, report), gradient=run.gradient(), towards=[])
        for _ in range(steps):
            run.engine.train_mini_batch(packs, _settings(algorithm), run.denominator, old, teacher=scores)
            now = run.engine.old_pass(packs)
            parts = zip(now.micro_batches, old.micro_batches, scores, strict=True)
            moved = [(n.log_probs - o.log_probs) * (s.log_probs - o.log_probs) for n, o, s in parts]
            result["towards"].append(float(torch.cat(moved).mean()))
        if steps:
            again = frozen.score(packs)
            result["stands_still"] = all(
                torch.equal(a.log_probs, b.log_probs) for a, b in zip(scores, again, strict=True)
            )
        return result


def without_teacher(folder: str, teacher: str, algorithm: str) -> dict:
    """The gradient of the same objective made without the engine's own part of a teacher: advantages of tokens that are
    put into the packs, and for GSPO the gradients of two passes, added up. On one rank.
    """
    section = dict(path=teacher, coefficient=0.5, reward_weight=2.0)
    with Run(folder, {}, algorithm="custom", objective=dict(ratio=RATIOS[algorithm]), teacher=section) as run:
        frozen = load_teachers(run.config, run.groups)
        assert frozen is not None
        scores = frozen.score(run.packs())
        run.engine.config = run.config.model_copy(update={"teacher": None})
        packs = run.packs()
        old = run.engine.old_pass(packs)
        guided = [
            _guidance(run, pack, o.log_probs, s.log_probs)
            for pack, o, s in zip(packs, old.micro_batches, scores, strict=True)
        ]

        def gradient(settings: ObjectiveSettings) -> dict[str, np.ndarray]:
            run.engine.policy_gradients(packs, settings, run.denominator, old)
            return run.gradient()

        if algorithm != "gspo":
            for pack, one in zip(packs, guided, strict=True):
                _put(pack, one.total)
            return gradient(_settings(algorithm))
        for pack, one in zip(packs, guided, strict=True):
            _put(pack, one.teacher)
            pack.sequence["advantage"] = 2.0 * pack.sequence["advantage"]
        first, second = gradient(_settings("gspo")), gradient(_settings("gspo_token"))
        return {name: first[name] + second[name] for name in first}


def _guidance(run: Run, pack: MicroBatch, student: torch.Tensor, teacher: torch.Tensor):
    batch = to_device(pack, run.groups)
    return token_guidance(
        0.5,
        2.0,
        student_log_probs=student,
        teacher_log_probs=teacher,
        mask=torch.ones_like(batch.sequence_ids),
        segment_ids=batch.sequence_ids,
        advantages=batch.sequence["advantage"],
    )


def _put(pack: MicroBatch, values: torch.Tensor) -> None:
    pack.token_advantages = np.zeros(pack.num_tokens)
    pack.token_advantages[np.flatnonzero(pack.loss_mask > 0)] = values.numpy()


def _sums(run: Run, report) -> dict[str, float]:
    whole = torch.zeros(len(TEACHER_SUMS), dtype=torch.float64)
    if "teacher_sums" in report.totals:
        whole += torch.from_numpy(report.totals["teacher_sums"])
    torch.distributed.all_reduce(whole, group=run.groups.host.group)
    return dict(zip(TEACHER_SUMS, whole.tolist(), strict=True))


def put_scores(packs: list[MicroBatch], num_top: int, given: dict[int, tuple] | None = None) -> None:
    """Write into the packs what servers said: `given` by trajectory, or numbers that depend on the trajectory only."""
    for pack in packs:
        pack.teacher_log_probs = np.zeros(pack.num_tokens, np.float32)
        pack.teacher_top_ids = np.zeros((pack.num_tokens, num_top), np.int32)
        pack.teacher_top_log_probs = np.zeros((pack.num_tokens, num_top), np.float32)
        for row, places in active_places(pack):
            own, ids, tops = _drawn(row, len(places), num_top) if given is None else given[row]
            pack.teacher_log_probs[places] = own
            pack.teacher_top_ids[places] = ids[:, :num_top]
            pack.teacher_top_log_probs[places] = tops[:, :num_top]


def active_places(pack: MicroBatch) -> list[tuple[int, np.ndarray]]:
    """(trajectory, places of its active labels in the pack) of each sequence that has any."""
    found = []
    for sequence, row in enumerate(pack.trajectory_index.tolist()):
        places = np.flatnonzero((pack.loss_mask > 0) & (pack.sequence_ids == sequence))
        if row >= 0 and len(places):
            found.append((row, places))
    return found


def _drawn(row: int, count: int, num_top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng((row, 11))
    ids = np.array([rng.permutation(500)[:num_top] for _ in range(count)]).reshape(count, num_top)
    masses = np.sort(rng.dirichlet(np.ones(num_top + 1), count)[:, :num_top])[:, ::-1]
    return rng.uniform(-8, -4, count), ids, np.log(masses)


def taught_by_several(
    folder: str, parallel: dict, by_source: list[dict], given: dict[int, tuple] | None = None, **own
) -> dict:
    """Sums and gradient with teachers by source; trajectory i is of source i mod 3, and the third has none if only two
    are named. `given`: of a server, by trajectory. Also the log-probs of all tokens of this rank's teachers, in order.
    """
    section = dict(by_source=tuple(by_source), coefficient=0.5, reward_weight=2.0) | own
    with Run(folder, parallel, algorithm="custom", objective=dict(ratio="token"), teacher=section) as run:
        teachers = load_teachers(run.config, run.groups)
        assert teachers is not None
        packs = run.packs()
        put_scores(packs, num_served_top(run.config.teacher), given)
        for pack in packs:
            number = pack.trajectory_index % 3
            pack.sequence["teacher"] = np.where(number < len(by_source), number, -1).astype(np.float64)
        old = run.engine.old_pass(packs)
        scores = teachers.score(packs)
        report = run.engine.policy_gradients(packs, _settings("grpo"), run.denominator, old, teacher=scores)
        return dict(
            sums=_sums(run, report),
            gradient=run.gradient(),
            log_probs=torch.cat([one.log_probs for one in scores]).numpy() if scores else None,
        )


def model_scores(folder: str, teacher: str) -> dict:
    """On one rank: {trajectory: (its tokens up to the last active one, places of the active ones among them, the
    teacher's log-probs of these)}.
    """
    with Run(folder, {}, algorithm="custom", objective=dict(ratio="token"), teacher=dict(path=teacher)) as run:
        teachers = load_teachers(run.config, run.groups)
        assert teachers is not None
        packs, found = run.packs(), {}
        for pack, scores in zip(packs, teachers.score(packs), strict=True):
            whole = np.zeros(pack.num_tokens)
            whole[np.flatnonzero(pack.loss_mask > 0)] = scores.log_probs.numpy()
            for row, places in active_places(pack):
                start = int(pack.cu_seqlens[pack.trajectory_index.tolist().index(row)])
                tokens = pack.token_ids[start : places[-1] + 2]
                found[row] = tokens.tolist(), (places + 1 - start).tolist(), whole[places]
        return found


def refused(folder: str, teacher: str) -> str:
    """The error of a run with a teacher whose scores were not given."""
    with Run(folder, {}, algorithm="custom", teacher=dict(path=teacher)) as run:
        packs = run.packs()
        try:
            run.engine.policy_gradients(packs, SETTINGS, run.denominator, run.engine.old_pass(packs))
        except ValueError as error:
            return str(error)
        return "nothing was refused"
