"""The smallest configuration that the engine's parts are made from."""

from gspo_mega.config.schema import Config


def engine_config(**sections) -> Config:
    return Config.model_validate(
        dict(
            run=dict(name="engine"),
            model=dict(path="unused"),
            batch=dict(prompts_per_step=4, group_size=4, micro_batch_tokens=512),
            data=dict(path="unused.jsonl", max_prompt_tokens=64),
            reward=dict(functions=(dict(function="exact_match"),)),
            rollout=dict(max_new_tokens=64),
            optimizer=dict(lr=1e-3),
        )
        | sections
    )
