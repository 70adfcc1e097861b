"""Delta publishes (`publish.full_every`) to real servers: of each precision, divided over two ranks, restarted.

    python tests/soak/delta_publishes.py [plain tensor fp8 int8 fp8_block ...]

For each kind of server and both methods: a full publish, three that send only what changed in every fiftieth value, and
one that the server is killed and restarted before. Every publish must be verified. After each, all tensors are sent
whole to the same server, and its own checksums must be what they were before. Ends with exit code 1 otherwise.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("distributed", "integration", "support")]

KINDS = ("plain", "tensor", "fp8", "int8", "fp8_block")
EVERY = 50


def main(kinds: tuple[str, ...]) -> int:
    from quantized_models import make_blocks_model
    from rank_pool import RankPools
    from servers import Serve, run_config
    from test_publish_servers import Side
    from tiny_models import make_model

    wrong = 0
    pools = RankPools()
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            server = {"tensor": 2} if kind == "tensor" else {"quantization": "none" if kind == "plain" else kind}
            is_plain = kind in ("plain", "tensor")
            model = make_model(place / "model", moe=True) if is_plain else make_blocks_model(place / "model")
            config = run_config(place, model, server=server, publish={"full_every": 5})
            serve, start = Serve(config, place / "run", forked=True), 1
            try:
                for method in ("disk", "distributed"):
                    serve.wait_for("ready", generation=start)
                    side = Side(
                        pools(2),
                        config,
                        serve.attempt.path,
                        place / method,
                        {"expert": 2},
                        method=method,
                        verify="replicas" if kind == "tensor" else "tensors",
                        full_every=100,
                    )
                    said, shares = [], []
                    for version in range(1, 7):
                        if version == 5:
                            os.kill(serve.sglang_pid(), signal.SIGKILL)
                            start += 1
                            serve.wait_for("ready", generation=start)
                            side._run("await_server", generation=start)
                        result = side.publish(version, change="weight", every=EVERY)
                        good = result.get("verified") == [["server-0", start]] and not result.get("fallback")
                        good = good and result["is_full"] == (version in (1, 5))
                        said.append("." if good else f"\n  version {version}: {result}")
                        if good and not result["is_full"]:
                            shares.append(result["num_delta_bytes"] / result["num_bytes"])
                        held = side._run("held")[0]
                        again = side.publish(version, again=True)
                        whole = side._run("held")[0]
                        if not (held and held == whole and again.get("is_full")):
                            said.append(f"\n  version {version}: another content after it was sent whole")
                    side._run("close_trainer")
                    good = set(said) == {"."} and len(shares) == 4
                    wrong += not good
                    print(
                        f"{kind:10} {method:12} {''.join(said)} delta bytes {max(shares, default=1):.3f} of a version"
                        f" {'all right' if good else 'WRONG'}",
                        flush=True,
                    )
            finally:
                serve.stop()
    pools.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or KINDS))
