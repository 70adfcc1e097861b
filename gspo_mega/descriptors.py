"""How many files and connections a process may have open. Standard library only.

Owns the limit of this process (RLIMIT_NOFILE) and of what it starts from then on. The usual soft limit of 1024 is less
than four servers with 256 open requests each; the hard limit is what the administrator allows.
"""

from __future__ import annotations

import resource

# Beside the requests: logs, checkpoints, libraries, sockets of torch.distributed.
SPARE = 512


def raise_limit() -> int:
    """Raise the soft limit to the hard one; returns it (resource.RLIM_INFINITY where there is none)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def allowed() -> int:
    """The hard limit: what `raise_limit` can reach."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def enough_for(num_requests: int) -> bool:
    """Whether a process with so many open requests, each a connection, can stay below the hard limit."""
    limit = allowed()
    return limit == resource.RLIM_INFINITY or limit >= num_requests + SPARE
