"""Which worker comes in place of a lost one, and when: suspects do not wait for a long queue's end, and workers that end
without an episode are not replaced for ever.
"""

import asyncio

import pytest
from pool_support import PolicySession, kinds, run, settings, task

from gspo_mega.agents import pool as episode_pool
from gspo_mega.agents.pool import EpisodePool
from gspo_mega.base.errors import EpisodeError
from gspo_mega.config.schema import EpisodeFunction

pytestmark = pytest.mark.usefixtures("folder", "nothing_is_left")

NOTES = "Path('order').open('a').write(f'{task.seed}\\n')\nreturn 1.0"
# Ends its process in its first life, while a turn is sampled for it; in the next one it is a suspect.
SUSPECT = (
    "asking = asyncio.create_task(model.turn(task.messages))\nawait asyncio.sleep(0.2)\n"
    "if not os.path.exists(f'lost{task.seed}'):\n    Path(f'lost{task.seed}').touch()\n    os._exit(3)\n"
    "await asking\n" + NOTES
)


@pytest.mark.parametrize(("num_workers", "num_suspects"), [(1, 1), (3, 2)])
def test_a_suspect_begins_again_although_many_wait(folder, num_workers, num_suspects):
    """Its turn ends when the new worker has been filled from the queue, and no worker is ever empty."""
    others = [f"await asyncio.sleep(0.3)\n{NOTES}"] * 100 * num_workers
    tasks = [task(number, text) for number, text in enumerate([SUSPECT] * num_suspects + others)]
    sessions = [PolicySession(3.0 if number < num_suspects else 0.0) for number in range(len(tasks))]
    ends, _, pool = run(tasks, sessions=sessions, num_workers=num_workers, episodes_per_worker=3)
    assert kinds(ends) == {"": len(tasks)}
    order = [int(line) for line in (folder / "order").read_text().split()]
    assert max(order.index(number) for number in range(num_suspects)) < 3 / 4 * len(tasks)
    # One for each loss, one to make room for each suspect, and no more.
    assert pool.counts["num_workers_recycled"] <= 2 * num_suspects
    assert sum(session.num_restarts for session in sessions) <= 3 * num_suspects


ENDS_ITS_PROCESS = "\n\nthreading.Timer(0.3, os._exit, (7,)).start()\n"


def test_workers_that_end_without_an_episode_are_replaced_a_few_times_and_then_end_the_run(folder, monkeypatch):
    monkeypatch.setattr(episode_pool, "_PAUSE_SECONDS", 0.01)
    with open(folder / "user_episodes.py", "a") as module:
        module.write(ENDS_ITS_PROCESS)

    async def play():
        async with EpisodePool(settings(num_workers=2), EpisodeFunction(function="user_episodes:behave")) as pool:
            with pytest.raises(EpisodeError) as caught:
                while True:
                    await asyncio.sleep(0.1)
                    if pool.counts["num_workers_recycled"] >= 6:  # so that no episode is in one that may be the last
                        await asyncio.sleep(5)
                        await pool.run(task(0, "return 1.0"), PolicySession(), "0")
            assert pool.counts["num_workers_recycled"] <= 2 * 4
            return str(caught.value)

    text = asyncio.run(asyncio.wait_for(play(), 60))
    assert "5 processes of episodes in a row ended without an episode in them" in text
    assert "(exit code 7)" in text and "user_episodes:behave" in text


def test_between_them_is_a_pause_that_grows(folder):
    with open(folder / "user_episodes.py", "a") as module:
        module.write(ENDS_ITS_PROCESS)

    async def play():
        async with EpisodePool(settings(), EpisodeFunction(function="user_episodes:behave")) as pool:
            await asyncio.sleep(4)
            return pool.counts["num_workers_recycled"]

    assert 1 <= asyncio.run(play()) <= 3


def test_one_that_had_episodes_is_replaced_at_once(folder):
    """Its end may be anybody's, and a new one has its chance."""
    ends, _, pool = run(["threading.Timer(0.3, os._exit, (7,)).start()\nreturn 1.0"], inside=until_replaced)
    assert kinds(ends) == {"": 1} and pool.counts == {"num_workers_recycled": 1}


async def until_replaced(pool, sessions):
    while not pool.counts["num_workers_recycled"]:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)
    assert (await pool.run(task(1, "return 2.0"), PolicySession(), "1")).outcome.reward == 2.0
