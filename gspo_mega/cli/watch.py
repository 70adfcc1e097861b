"""Show the report of a running run on a page of a local server, to which new steps come without a reload.

    gspo-mega watch runs/quickstart/train

Only reads the run's folder. The address contains a token; the server answers no request without it.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
from pathlib import Path

from gspo_mega.base.errors import ConfigError
from gspo_mega.report.live_page import LiveReport, LiveServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the folder of a run")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="where to listen (default: 127.0.0.1); any other address lets other machines ask",
    )


def run(args: argparse.Namespace) -> int:
    report = LiveReport(args.runs)
    try:
        server = LiveServer(report, args.address, args.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"gspo-mega watch: cannot listen on {args.address} port {args.port}: {error}; valid: an address of this"
            " machine and a free port, or neither option"
        ) from error
    with server:
        print(server.url, flush=True)
        if args.address == "127.0.0.1":
            print(
                f"from another machine: ssh -L {server.port}:127.0.0.1:{server.port} {socket.gethostname()}", flush=True
            )
        print("Ctrl-C ends it.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
