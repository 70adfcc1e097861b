"""Transformer Engine's layers on a CPU in every layout, recipe and model family: a table, and an error for each case
that raises or is further from one rank than its bound.

    python tests/soak/te_layouts.py [--only WORD]        about 35 minutes on two cores; exit code 1 with a failure

The bounds of bf16 are derived in tests/distributed/test_te_layers.py. In FP8 a tensor rank has other blocks and scales
than one rank (`cut`): then two roundings of 3 bits differ. Pipeline stages change nothing (`same`). Data, context and
expert ranks divide rows: blockwise and mxfp8 have a scale for each row's blocks, so only weight gradients regroup
(`rows`); with one scale for a tensor, other rows have another largest value (`cut`). Between bf16 and FP8 (`recipe`) log s
moves by more than the clip range of the recorded batch, so other sequences carry the gradient: two of like size and no
relation differ by sqrt(2).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "distributed"), str(HERE.parent / "support")]
warnings.filterwarnings("ignore")

import family_models
import numpy as np
from family_models import make_family_folder
from layout_models import make_folder
from rank_pool import RankPool

LAYOUTS = {
    "DP2": dict(),
    "TP2": dict(tensor=2, sequence=False),
    "TP2+SP": dict(tensor=2),
    "PP2": dict(pipeline=2),
    "PP2xVPP2": dict(pipeline=2, virtual_pipeline=2),
    "CP2": dict(context=2),
}
EXPERT_LAYOUTS = {
    "DP2": dict(),
    "EP2": dict(expert=2),
    "TP2+SP-EP2": dict(tensor=2, expert=2),
    "PP2": dict(pipeline=2),
    "CP2-EP2": dict(context=2, expert=2),
}
FUSED = ("fuse_activation", "fuse_permutation", "fuse_weight_gradient")
BF16 = dict(precision="bf16", engine=dict(transformer_engine=True))
PRECISIONS = {
    "bf16": BF16,
    **{recipe: dict(precision="fp8", fp8=dict(recipe=recipe)) for recipe in ("tensorwise", "blockwise", "mxfp8")},
    **{
        f"{r}+parameters": dict(precision="fp8", fp8=dict(recipe=r, parameters=True))
        for r in ("tensorwise", "blockwise")
    },
}
FAMILIES = ("qwen2", "qwen2-tied", "llama3", "mixtral", "deepseek_v3", "deepseek_v3-one-group", "deepseek_v3-yarn")
FAMILIES += ("glm4_moe_lite", "qwen3_next", "qwen3_5", "qwen3_5_moe")
# Heads and positions of a delta net, divided among ranks: against plain layers in the same layout, because bf16's noise
# in the gradients of its decays is larger between layouts (6.5e-2 with plain layers).
DELTA_LAYOUTS = {"TP2+SP": dict(tensor=2), "CP2": dict(context=2), "PP2": dict(pipeline=2)}
# Sides that FP8 products can have.
WIDE = dict(
    hidden_size=64, intermediate_size=64, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=32,
    v_head_dim=16, moe_intermediate_size=32,
)  # fmt: skip
# Mean difference of a sequence's log-probs in nats, and of the gradient relative to it.
BOUNDS = {"same": (1e-7, 1e-6), "rows": (1e-2, 5e-2), "bf16": (0.036, 0.054), "cut": (0.5, 0.6), "recipe": (0.5, 1.5)}
# Uncompiled, fused operations leave the forward pass as it is; a gradient whose bf16 roundings differ is rounded to FP8
# again in the layers below.
BOUNDS["fused"] = (1e-7, 0.3)
BOUNDS["rounded"] = (1e-7, 2**-8)  # each pack's weight gradient is rounded to bf16, or not


def bound_of(precision: str, layout: str) -> tuple[float, float]:
    if layout.startswith("PP"):
        return BOUNDS["same"]
    if precision == "bf16":
        return BOUNDS["bf16"]
    return BOUNDS["rows" if precision.startswith(("blockwise", "mxfp8")) and "TP" not in layout else "cut"]


def flat(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


class Matrix:
    def __init__(self, only: str) -> None:
        self.only, self.pools, self.failures = only, {}, 0

    def compute(self, world: int, folder: str, parallel: dict, name: str, **sections) -> dict:
        whole = "+parameters" in name
        job = dict(folder=folder, parallel=parallel, align=2 if name in ("bf16", "plain") else 32)
        job |= dict(optimizer=dict(lr=1e-3, distributed=whole)) | sections
        if world not in self.pools or not all(p.is_alive() for p in self.pools[world]._processes):
            self.pools[world] = RankPool(world, transformer_engine=True)
        return self.pools[world].run("layout_jobs:run_layout", timeout=600.0, **job)[0]

    def compare(self, title: str, bound: tuple[float, float], want, get) -> None:
        if self.only not in title:
            return
        started = time.monotonic()
        try:
            got, reference = get(), want()
        except (AssertionError, TimeoutError) as error:
            self.failures += 1
            print(f"{title:42} FAILED {str(error).strip().splitlines()[-1][:200]}", flush=True)
            return
        tokens = np.maximum(reference["mismatch"][:, 0], 1)
        nats = float((np.abs(got["mismatch"][:, 1] - reference["mismatch"][:, 1]) / tokens).max())
        # FP8 parameters need the distributed optimizer, which leaves no whole gradient: its norm then.
        mine, theirs = (
            flat(r["gradient"]) if r["gradient"] else np.array(r["grad_norms"][:1]) for r in (got, reference)
        )
        relative = float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))
        wrong = not (nats <= bound[0] and relative <= bound[1])
        self.failures += wrong
        line = f"log-probs {nats:.1e} of {bound[0]:.0e}  gradient {relative:.1e} of {bound[1]:.0e}"
        print(f"{title:42} {line}  {time.monotonic() - started:5.1f} s{'  TOO FAR' if wrong else ''}", flush=True)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose title contains it")
    matrix = Matrix(parser.parse_args().only)
    with tempfile.TemporaryDirectory() as name:
        try:
            _layouts(matrix, Path(name))
            _families(matrix, Path(name))
            _fused(matrix, Path(name))
        finally:
            matrix.close()
    print(f"{matrix.failures} failures")
    return 1 if matrix.failures else 0


def _layouts(matrix: Matrix, root: Path) -> None:
    for kind, layouts in (("dense", LAYOUTS), ("moe", EXPERT_LAYOUTS)):
        folder = str(make_folder(root / kind, moe=kind == "moe"))
        for precision, sections in PRECISIONS.items():
            one: list[dict] = []

            def alone(precision=precision, sections=sections, folder=folder, one=one) -> dict:
                if not one:
                    one.append(matrix.compute(1, folder, {}, precision, **sections))
                return one[0]

            for layout, parallel in layouts.items():
                matrix.compare(
                    f"{kind} {precision} {layout}",
                    bound_of(precision, layout),
                    alone,
                    lambda f=folder, par=parallel, p=precision, s=sections: matrix.compute(2, f, par, p, **s),
                )


def _families(matrix: Matrix, root: Path) -> None:
    for family in FAMILIES:
        folder = str(make_family_folder(root / family, family))
        matrix.compare(
            f"{family} bf16, plain layers",
            BOUNDS["bf16"],
            lambda f=folder: matrix.compute(1, f, {}, "plain", precision="bf16"),
            lambda f=folder: matrix.compute(1, f, {}, "bf16", **BF16),
        )
    for layout, parallel in DELTA_LAYOUTS.items():
        folder = str(root / "qwen3_5")
        matrix.compare(
            f"qwen3_5 bf16 {layout}, plain layers",
            BOUNDS["bf16"],
            lambda f=folder, par=parallel: matrix.compute(2, f, par, "plain", precision="bf16"),
            lambda f=folder, par=parallel: matrix.compute(2, f, par, "bf16", **BF16),
        )
    for family in ("deepseek_v3", "deepseek_v3-one-group"):
        base, own = family_models.VARIANTS[family]
        family_models.VARIANTS[f"{family}-wide"] = (base, own | {k: v for k, v in WIDE.items() if own.get(k, v)})
        folder = str(make_family_folder(root / f"{family}-wide", f"{family}-wide"))
        for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
            matrix.compare(
                f"{family}-wide {recipe}, bf16",
                BOUNDS["recipe"],
                lambda f=folder: matrix.compute(1, f, {}, "fp8", **BF16),
                lambda f=folder, r=recipe: matrix.compute(1, f, {}, "fp8", precision="fp8", fp8=dict(recipe=r)),
            )


def _fused(matrix: Matrix, root: Path) -> None:
    """Every fused operation against none, in every precision and layout."""
    for kind, layouts in (("dense", LAYOUTS), ("moe", EXPERT_LAYOUTS)):
        folder = str(make_folder(root / f"{kind}-fused", moe=kind == "moe", per_token=3))
        keys = FUSED if kind == "moe" else [key for key in FUSED if key != "fuse_permutation"]
        for precision, sections in PRECISIONS.items():
            engine = sections.get("engine", {})
            alone = sections | dict(engine=engine | dict(fuse_weight_gradient=True))
            matrix.compare(
                f"{kind} {precision} one rank weight gradient fused",
                BOUNDS["rounded"],
                lambda f=folder, p=precision, s=sections: matrix.compute(1, f, {}, p, **s),
                lambda f=folder, p=precision, s=alone: matrix.compute(1, f, {}, p, **s),
            )
            fused = sections | dict(engine=engine | dict.fromkeys(keys, True))
            for layout, parallel in (("one rank", None), *layouts.items()):
                world, sizes = (1, {}) if parallel is None else (2, parallel)
                matrix.compare(
                    f"{kind} {precision} {layout} fused",
                    BOUNDS["bf16" if precision == "bf16" else "fused"],
                    lambda w=world, f=folder, x=sizes, p=precision, s=sections: matrix.compute(w, f, x, p, **s),
                    lambda w=world, f=folder, x=sizes, p=precision, s=fused: matrix.compute(w, f, x, p, **s),
                )


if __name__ == "__main__":
    sys.exit(main())
