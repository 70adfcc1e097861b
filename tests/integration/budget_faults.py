"""A rank of `gspo-mega mismatch` that goes through several faults in one start, in a fork (`forked_workers.py`).

Each scenario samples and scores anew with one fault in it, and leaves what was scored in a folder of its name.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

# How far `sizes` moves a tensor, relative to its spread: of the server while it scores requests together, and of the
# trainer in its own packing. What that does to a log-prob, transformers says (test_budget.py).
OF_BATCH, OF_PACKING = 0.5, 0.25


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


def update_server(pool, folder: Path, empties_cache: bool = True) -> None:
    """Load a folder on the server, which goes on saying that it has version 0."""

    async def send():
        server = await pool.acquire()
        body = {"model_path": str(folder), "weight_version": "0", "flush_cache": False}
        try:
            await server.client.update("/update_weights_from_disk", body, 120.0)
        finally:
            await pool.release(server)

    pool.loop.run(send())
    if empties_cache:  # waits for the server's own health check, which is a request as well
        for control in pool.controls():
            control.flush_cache(deadline_seconds=120.0)


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

            position = rollouts.prompts.state_dict()
            update_server(pool, perturbed_folder(held, 3.0))
            sample(rollouts, config, on_wait)
            rollouts.prompts.load_state_dict(position)
            update_server(pool, held, empties_cache=False)
            return sample(rollouts, config, on_wait)

        return after_an_update

    return changed(ranks, "sample_tokens", stale)


def weights(_ranks):
    """The trainer holds another value projection of one layer."""
    import gspo_mega.verify.mismatch.ranks as trainer_scores

    return changed(
        trainer_scores,
        "import_huggingface",
        lambda load: lambda path, *rest: load(str(perturbed_folder(Path(path), 0.05)), *rest),
    )


def prompt(_ranks):
    """The server scores a prompt whose fourth token is another one, as with another template."""
    import gspo_mega.verify.mismatch.ranks as server_scores

    def other(score):
        async def with_another_token(client, token_ids, *rest):
            token_ids = list(token_ids)
            token_ids[3] = (token_ids[3] + 1) % 100
            return await score(client, token_ids, *rest)

        return with_another_token

    return changed(server_scores, "score_tokens", other)


@contextlib.contextmanager
def sizes(ranks):
    """Both engines compute with other weights in one setting each: the server unless it scores requests one by one
    (it samples with them, too), the trainer in its own packing. What is scored is what the engines compute.
    """
    held: dict[str, Path] = {}

    def serve(pool, folder):
        if held.get("server") != folder:
            update_server(pool, folder)
            held["server"] = folder

    def sampled(sample):
        def with_others(rollouts, config, on_wait):
            held["server"] = held["own"] = Path(config.model.path)
            serve(rollouts.pool, perturbed_folder(Path(config.model.path), OF_BATCH))
            return sample(rollouts, config, on_wait)

        return with_others

    def in_a_batch(score):
        def with_others(pool, budget, rollout, tokens, point):
            own = held["own"]  # the samples are made first
            serve(pool, own if point.values.get("@together") == 1 else perturbed_folder(own, OF_BATCH))
            values = score(pool, budget, rollout, tokens, point)
            serve(pool, own)
            return values

        return with_others

    def in_packs(score):
        def with_others(engine, config, tokens, kind):
            from gspo_mega.checkpoint.hf_import import import_huggingface

            def load(folder):
                import_huggingface(str(folder), engine.spec, engine.groups, engine.chunks)
                engine.after_weights_loaded()

            own = Path(config.model.path)
            load(perturbed_folder(own, OF_PACKING) if kind == "planned" else own)
            try:
                return score(engine, config, tokens, kind)
            finally:
                load(own)

        return with_others

    with (
        changed(ranks, "sample_tokens", sampled),
        changed(ranks, "score_on_server", in_a_batch),
        changed(ranks, "score_on_trainer", in_packs),
    ):
        yield


SCENARIOS = (none, temperature, weights, prompt, sizes, cache)


def run_all(context):
    import gspo_mega.verify.mismatch.ranks as ranks
    from gspo_mega.base.run_folder import Attempt, read_json

    attempt = Attempt(context.attempt_dir)
    work = read_json(attempt.work_file)
    for scenario in SCENARIOS:
        folder = attempt.path / scenario.__name__
        folder.mkdir()
        with scenario(ranks):
            ranks.evaluate(replace(context), work, folder)
    return {"scenarios": len(SCENARIOS)}


def main(words: list[str]) -> None:
    """A rank, in a fork (`forked_workers.py`). Does not return."""
    from gspo_mega.train import worker

    worker.ENTRY_POINTS["budget"] = ("budget_faults", "run_all")
    worker.main(words)
