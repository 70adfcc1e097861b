"""Which deadline must be shorter than which: one table for all that a configuration can set.

Owns those relations and the fixed deadlines of a run. Relations that need an estimate are
`plan/estimate.py`'s, those of a Slurm job's time `launcher/slurm/size.py`'s.
"""

from __future__ import annotations

from typing import NamedTuple

from gspo_mega.config.schema import Config

# A collective without progress for this time never finishes.
COLLECTIVE_SECONDS = 1800.0


# For what precedes a run, without cluster.preflight_seconds: loading torch on all nodes from one shared folder takes
# minutes.
PREFLIGHT_SECONDS = 600.0


def preflight_seconds(config: Config) -> float:
    """Time limit of each check before a start, and of the ranks' wait for each other."""
    return config.cluster.preflight_seconds or PREFLIGHT_SECONDS


class Relation(NamedTuple):
    """`shorter` must be below `longer`, dotted keys or seconds. `blame`: the key that the error names; `why`: what
    would happen. `of_agents`: only where an episode is more than one turn.
    """

    shorter: str
    longer: str | float
    blame: str
    why: str
    of_agents: bool = False


RELATIONS = (
    Relation(
        "server.start_deadline_seconds",
        "rollout.no_server_deadline_seconds",
        "rollout.no_server_deadline_seconds",
        "a restarted server may take that long, and a run without another server would end before it is back",
    ),
    Relation(
        "rollout.no_server_deadline_seconds",
        COLLECTIVE_SECONDS,
        "rollout.no_server_deadline_seconds",
        "rank 0 waits this long for a server before it publishes, while the other ranks wait in a collective",
    ),
    Relation(
        "publish.deadline_seconds",
        COLLECTIVE_SECONDS,
        "publish.deadline_seconds",
        "the other ranks wait in a collective while rank 0 publishes",
    ),
    Relation(
        "rollout.progress_deadline_seconds",
        "rollout.request_deadline_seconds",
        "rollout.request_deadline_seconds",
        "a stalled response would end the run before it continues on another server",
    ),
    *(
        Relation(
            shorter,
            f"watchdog.{phase}_seconds",
            f"watchdog.{phase}_seconds",
            "the run would end as stuck before that deadline can resolve the delay",
        )
        for shorter, phase in (
            ("server.start_deadline_seconds", "start"),
            ("rollout.no_server_deadline_seconds", "rollout"),
            ("rollout.progress_deadline_seconds", "rollout"),
            ("reward.deadline_seconds", "rollout"),
            ("rollout.no_server_deadline_seconds", "eval"),
            ("rollout.progress_deadline_seconds", "eval"),
            ("reward.deadline_seconds", "eval"),
            ("rollout.no_server_deadline_seconds", "publish"),
            ("publish.deadline_seconds", "publish"),
        )
    ),
    Relation(
        "episodes.blocked_seconds",
        "episodes.turn_deadline_seconds",
        "episodes.blocked_seconds",
        "an episode that blocks its process would be found by a deadline, and its neighbours would reach theirs",
        of_agents=True,
    ),
    Relation(
        "episodes.turn_deadline_seconds",
        "episodes.deadline_seconds",
        "episodes.turn_deadline_seconds",
        "the deadline of the whole episode would always be the one that ends it",
        of_agents=True,
    ),
    *(
        Relation(
            "episodes.turn_deadline_seconds",
            f"watchdog.{phase}_seconds",
            f"watchdog.{phase}_seconds",
            "the run would end as stuck before that deadline can end an episode",
            of_agents=True,
        )
        for phase in ("rollout", "eval")
    ),
)
