"""An evaluation between two steps, while requests of the next batches are open."""

from __future__ import annotations

from ahead_support import Ahead, sample_of

from gspo_mega.base.records import Prompt


def test_an_evaluation_beside_open_requests_changes_neither(attempt):
    run = Ahead(attempt, max_staleness=2, token_seconds=0.02)
    prompts = [Prompt(f"held:{k}", "held", (3, 60 + k, 5), "q") for k in range(4)]
    try:
        num_beside = 0
        for step in range(run.num_steps):
            run.step(step)
            num_beside += sum(server.num_open for server in run.servers)
            groups = run.collector.sample(prompts, 4, 0.0)
            assert [group.prompt for group in groups] == prompts
            for episode in (episode for group in groups for episode in group.episodes):
                (turn,) = episode.turns
                assert (turn.token_ids, turn.log_probs) == sample_of(episode.episode_id)
                assert set(turn.weight_versions) == {step} and episode.reward is not None
        assert num_beside > 8, "nothing was open beside an evaluation"
        assert run.broken() == {}
        assert all(episode.episode_id.startswith("step") for episode in run.episodes)
    finally:
        run.close()
