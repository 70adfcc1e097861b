"""Publish to a real server of each precision, by disk and through a group, with both kinds of verification.

    python tests/soak/publish_precisions.py [fp8 int8 fp8_block ...]

Every publish must be verified, and so must one after a change of every weight. Ends with exit code 1 otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("distributed", "integration", "support")]

KINDS = ("fp8", "int8", "fp8_block")


def main(kinds: tuple[str, ...]) -> int:
    from quantized_models import make_blocks_model
    from rank_pool import RankPools
    from servers import Serve, run_config
    from test_publish_servers import Side

    wrong = 0
    pools = RankPools()
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            config = run_config(place, make_blocks_model(place / "model"), server={"quantization": kind})
            serve = Serve(config, place / "run")
            try:
                serve.wait_for("ready")
                for method in ("disk", "distributed"):
                    for verify in ("tensors", "replicas"):
                        side = Side(
                            pools(2),
                            config,
                            serve.attempt.path,
                            place / f"{method}-{verify}",
                            {"expert": 2},
                            method=method,
                            verify=verify,
                        )
                        results = [side.publish(version, change="weight") for version in (1, 2)]
                        side._run("close_trainer")
                        good = all(result.get("verified") for result in results)
                        wrong += not good
                        said = "verified" if good else f"NOT VERIFIED: {results}"
                        print(f"{kind:10} {method:12} {verify:9} {said}", flush=True)
            finally:
                serve.stop()
    pools.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or KINDS))
