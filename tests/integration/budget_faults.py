"""A rank of `gspo-mega budget` that goes through several faults in one start: `python budget_faults.py ARGUMENTS...`.

Each scenario samples and scores anew with one fault in it, and leaves what was scored in a folder of its name.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

# Sizes of the noise that `sizes` adds, as KL per token: noise of mean -KL and standard deviation sqrt(2 KL).
KL_OF_BATCH, KL_OF_PACKING = 2e-3, 5e-4


def noise(kl, count, name):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.normal(-kl, np.sqrt(2 * kl), count)


def perturbed_folder(folder: Path, size: float) -> Path:
    """The model with one of its tensors moved by `size`, relative to its own spread."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    target = folder.parent / f"perturbed-{size:g}"
    if not target.exists():
        shutil.copytree(folder, target)
        tensors = load_file(target / "model.safetensors")
        name = "model.layers.1.self_attn.v_proj.weight"
        moved = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(3)) * tensors[name].std()
        save_file(
            tensors | {name: tensors[name] + size * moved}, target / "model.safetensors", metadata={"format": "pt"}
        )
    return target


@contextlib.contextmanager
def changed(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value(before))
    try:
        yield
    finally:
        setattr(module, name, before)


def none(_ranks):
    """Nothing is wrong."""
    return contextlib.nullcontext()


def temperature(ranks):
    """The server samples at 1.25 where the run says 1."""

    def wrong(sample):
        def at_another(rollouts, config, on_wait):
            hotter = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 1.25})})
            return sample(rollouts, hotter, on_wait)

        return at_another

    return changed(ranks, "sample_tokens", wrong)


def cache(ranks):
    """Another version of the weights filled the cache, and the update to these did not empty it."""

    def stale(sample):
        def after_an_update(rollouts, config, on_wait):
            pool, held = rollouts.pool, Path(config.model.path)

            def update(path, flush):
                async def send():
                    server = await pool.acquire()
                    body = {"model_path": str(path), "weight_version": "0", "flush_cache": flush}
                    try:
                        await server.client.update("/update_weights_from_disk", body, 120.0)
                    finally:
                        await pool.release(server)

                pool.loop.run(send())

            position = rollouts.prompts.state_dict()
            update(perturbed_folder(held, 3.0), flush=True)
            sample(rollouts, config, on_wait)
            rollouts.prompts.load_state_dict(position)
            update(held, flush=False)
            return sample(rollouts, config, on_wait)

        return after_an_update

    return changed(ranks, "sample_tokens", stale)


def weights(_ranks):
    """The trainer holds another value projection of one layer."""
    import gspo_mega.budget.trainer_scores as trainer_scores

    return changed(
        trainer_scores,
        "import_huggingface",
        lambda load: lambda path, *rest: load(str(perturbed_folder(Path(path), 0.05)), *rest),
    )


def prompt(_ranks):
    """The server scores a prompt whose fourth token is another one, as with another template."""
    import gspo_mega.budget.server_scores as server_scores

    def other(score):
        async def with_another_token(client, token_ids, *rest):
            token_ids = list(token_ids)
            token_ids[3] = (token_ids[3] + 1) % 100
            return await score(client, token_ids, *rest)

        return with_another_token

    return changed(server_scores, "score_tokens", other)


@contextlib.contextmanager
def sizes(ranks):
    """Noise of known sizes: on the server while it scores requests together, and in the trainer's own packing."""

    def in_a_batch(score):
        def noisy(pool, config, tokens, point):
            values = score(pool, config, tokens, point)
            return values + (noise(KL_OF_BATCH, len(values), "batch") if point.values.get("@together") != 1 else 0.0)

        return noisy

    def in_packs(score):
        def noisy(engine, config, tokens, kind):
            log_probs, entropies = score(engine, config, tokens, kind)
            added = noise(KL_OF_PACKING, len(log_probs), "packing") if kind == "planned" else 0.0
            return log_probs + added, entropies

        return noisy

    with changed(ranks, "score_on_server", in_a_batch), changed(ranks, "score_on_trainer", in_packs):
        yield


SCENARIOS = (none, temperature, weights, prompt, sizes, cache)


def run_all(context):
    import gspo_mega.budget.budget_ranks as ranks
    from gspo_mega.run_folder import Attempt, read_json

    attempt = Attempt(context.attempt_dir)
    work = read_json(attempt.work_file)
    for scenario in SCENARIOS:
        folder = attempt.path / scenario.__name__
        folder.mkdir()
        with scenario(ranks):
            ranks.evaluate(replace(context), work, folder)
    return {"scenarios": len(SCENARIOS)}


if __name__ == "__main__":
    import gspo_mega.engine  # noqa: F401  the CPU backend comes first
    from gspo_mega.runtime import worker

    worker.ENTRY_POINTS["budget"] = ("budget_faults", "run_all")
    worker.main(sys.argv[1:])
