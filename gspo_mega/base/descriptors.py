"""The limit on open files and connections of a process. Standard library only.

Owns the limit of this process (RLIMIT_NOFILE), which processes that it starts inherit. The usual soft limit of 1024 is
too low for four servers with 256 open requests each; the administrator sets the hard limit.
"""

from __future__ import annotations

import resource

# Beside the requests: logs, checkpoints, libraries, sockets of torch.distributed.
SPARE = 512


def raise_limit() -> int:
    """Raise the soft limit to the hard limit and return it (resource.RLIM_INFINITY where there is none)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def allowed() -> int:
    """The hard limit, up to which `raise_limit` raises."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def enough_for(num_requests: int) -> bool:
    """Whether the hard limit admits `num_requests` open requests, of one connection each."""
    limit = allowed()
    return limit == resource.RLIM_INFINITY or limit >= num_requests + SPARE
