"""Which deadline must be shorter than which: one table for all relations between keys, and the fixed deadlines of a
run.

`validate.py` refuses a configuration that breaks a relation (`validate_deadlines`). Relations that need an estimate are
in `plan/validate.py`, and those of a Slurm job's time limit are in `launcher/slurm/size.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from gspo_mega.config.schema import Cluster

# A collective that makes no progress for this time will never finish.
COLLECTIVE_SECONDS = 1800.0


# Default of cluster.preflight_seconds. Loading torch on all nodes from one shared folder takes minutes.
PREFLIGHT_SECONDS = 600.0


def preflight_seconds(cluster: Cluster) -> float:
    """Return the time limit of each check before a start, and of the ranks' wait for each other, in seconds."""
    return cluster.preflight_seconds or PREFLIGHT_SECONDS


class Relation(NamedTuple):
    """`shorter` must be less than `longer`; each is a dotted key, `longer` possibly a number of seconds. `blame`: the
    key that the error names. `why`: what would happen otherwise. `of_agents`: the relation matters only if an episode
    has more than one turn.
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
