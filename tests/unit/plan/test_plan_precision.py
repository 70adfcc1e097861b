from pathlib import Path

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.plan import plan_run
from gspo_mega.plan.validate_precision import precision_problem

SHAPES = Path(__file__).parents[3] / "configs" / "models"
HOPPER, ADA, AMPERE, BLACKWELL, CONSUMER = (9, 0), (8, 9), (8, 0), (10, 0), (12, 0)


def problem(load, precision, capability, cuda="13.0", engine="2.20.2", recipe="blockwise"):
    return precision_problem(load(f"precision={precision}", f"fp8.recipe={recipe}").config, capability, cuda, engine)


@pytest.mark.parametrize(
    ("precision", "capability", "recipe", "cuda", "engine"),
    [
        ("fp32", (7, 0), "blockwise", "12.4", None),
        ("bf16", AMPERE, "blockwise", "12.4", "2.2"),
        ("fp8", ADA, "delayed", "12.1", "2.2.0"),
        ("fp8", ADA, "tensorwise", "12.4", "2.2.0+cu124"),
        ("fp8", HOPPER, "delayed", "11.8", "2.20.2"),
        ("fp8", HOPPER, "blockwise", "12.9", "2.3"),
        ("fp8", HOPPER, "blockwise", "13.0", "2.20.2"),
        ("fp8", BLACKWELL, "mxfp8", "13.0", "2.20.2"),
        ("fp8", CONSUMER, "tensorwise", "13.0", "2.20.2"),
    ],
)
def test_what_can_be_had_is_not_refused(load, precision, capability, recipe, cuda, engine):
    assert problem(load, precision, capability, cuda, engine, recipe) is None


@pytest.mark.parametrize(
    ("precision", "capability", "recipe", "cuda", "engine", "said"),
    [
        ("bf16", (7, 5), "delayed", "12.4", "2.20.2", ["Ampere (compute capability 8.0)", "has 7.5", "use fp32"]),
        (
            "bf16",
            HOPPER,
            "delayed",
            "13.0",
            None,
            ["bf16 on a GPU needs Transformer Engine", "install transformer-engine[pytorch]"],
        ),
        ("fp8", HOPPER, "delayed", "13.0", None, ["fp8 on a GPU needs Transformer Engine"]),
        (
            "fp8",
            (8, 6),
            "delayed",
            "13.0",
            "2.20.2",
            ["delayed needs Ada (compute capability 8.9)", "has 8.6", "use bf16"],
        ),
        ("fp8", AMPERE, "blockwise", "13.0", "2.20.2", ["blockwise needs Hopper", "has 8.0", "use bf16"]),
        ("fp8", ADA, "blockwise", "13.0", "2.20.2", ["blockwise needs Hopper", "`fp8.recipe: tensorwise` runs here"]),
        ("fp8", HOPPER, "blockwise", "12.8", "2.20.2", ["CUDA 12.9", "has 12.8", "`fp8.recipe: tensorwise` runs here"]),
        (
            "fp8",
            HOPPER,
            "mxfp8",
            "13.0",
            "2.20.2",
            ["mxfp8 needs Blackwell", "has 9.0", "`fp8.recipe: blockwise` runs here"],
        ),
        ("fp8", HOPPER, "mxfp8", "12.4", "2.20.2", ["`fp8.recipe: tensorwise` runs here"]),
        (
            "fp8",
            CONSUMER,
            "mxfp8",
            "13.0",
            "2.20.2",
            ["mxfp8 needs Blackwell (compute capability 10.0); this GPU has 12.0", "runs here"],
        ),
        ("fp8", ADA, "delayed", "12.0", "2.20.2", ["CUDA 12.1", "has 12.0", "use bf16"]),
        (
            "fp8",
            HOPPER,
            "blockwise",
            "12.9",
            "2.2.1",
            ["blockwise needs Transformer Engine 2.3 or later; 2.2.1 is installed"],
        ),
        ("fp8", HOPPER, "tensorwise", "12.9", "2.1", ["tensorwise needs Transformer Engine 2.2"]),
        ("fp8", HOPPER, "delayed", "12.9", "2", ["delayed needs Transformer Engine 2.2 or later; 2.0 is installed"]),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_way_out(load, precision, capability, recipe, cuda, engine, said):
    text = problem(load, precision, capability, cuda, engine, recipe)
    assert text is not None and "\n" not in text
    assert [part for part in said if part not in text] == [], text


def test_plain_layers_need_no_transformer_engine(load):
    def text(*overrides):
        return precision_problem(load(*overrides).config, HOPPER, "13.0", None)

    assert text("precision=bf16", "engine.transformer_engine=false") is None
    assert "`engine.transformer_engine: false` (Megatron's plain layers)" in text("precision=bf16")
    assert "engine.transformer_engine" not in text("precision=fp8")
    old = precision_problem(load("precision=bf16", "engine.transformer_engine=false").config, (7, 5), "13.0", None)
    assert old is not None and "use fp32" in old


def test_float32_block_scales_are_refused_where_products_take_powers_of_two(load):
    def text(capability, block_scales, recipe="blockwise"):
        loaded = load("precision=fp8", f"fp8.recipe={recipe}", f"fp8.block_scales={block_scales}")
        return precision_problem(loaded.config, capability, "13.0", "2.20.2")

    refused = text(BLACKWELL, "float32")
    assert "needs Hopper; this GPU has 10.0" in refused and "`fp8.block_scales: auto`" in refused
    assert text(BLACKWELL, "auto") is text(BLACKWELL, "power_of_two") is text(HOPPER, "float32") is None
    assert text(BLACKWELL, "float32", "mxfp8") is None


def test_a_sharp_certificate_is_refused_on_a_gpu(load):
    loaded = load("precision=fp8", "certify.sharp_fp8=true")
    assert "machines without a GPU" in precision_problem(loaded.config, HOPPER, "13.0", "2.20.2")


ALIGNED = dict(hidden_size=256, head_dim=64, intermediate_size=512)


def test_the_plan_says_what_fp8_is_without_a_gpu(load, shape):
    def notices(device, *overrides):
        loaded = load("batch.micro_batch_tokens=512", *overrides)
        return " ".join(plan_run(loaded, device=device, model=shape("dense", **ALIGNED)).notices)

    emulated = "over CPU kernels"
    assert emulated in notices("cpu", "precision=fp8") and "not its speed" in notices("cpu", "precision=fp8")
    assert emulated in notices("cpu", "precision=bf16", "engine.transformer_engine=true")
    assert emulated not in notices("gpu", "precision=fp8") + notices("cpu", "precision=bf16")


@pytest.mark.parametrize(
    ("gpu", "recipe", "said"),
    [
        ("A100", "tensorwise", "cluster.gpu A100: fp8.recipe tensorwise needs Ada"),
        ("H100", "mxfp8", "cluster.gpu H100: fp8.recipe mxfp8 needs Blackwell"),
        ("H100", "blockwise", None),
        ("B200", "mxfp8", None),
    ],
)
def test_a_named_gpu_has_its_recipes(load, shape, gpu, recipe, said):
    loaded = load("precision=fp8", f"fp8.recipe={recipe}", f"cluster.gpu={gpu}", "batch.micro_batch_tokens=512")
    model = shape("dense", **ALIGNED)
    if said is None:
        assert plan_run(loaded, model=model)
        return
    with pytest.raises(PlanError) as caught:
        plan_run(loaded, model=model)
    assert said in str(caught.value)
    # The name describes the cluster; ranks on a CPU have every recipe.
    assert plan_run(loaded, device="cpu", model=model)


@pytest.mark.parametrize(
    ("kind", "changes", "overrides", "said", "valid"),
    [
        (
            "dense",
            ALIGNED | {"hidden_size": 200},
            [],
            ["blockwise needs", "multiple of 16", "hidden size 200"],
            "nearest",
        ),
        ("dense", ALIGNED | {"hidden_size": 144}, ["fp8.recipe=mxfp8"], ["hidden size 144"], "tensorwise or blockwise"),
        (
            "dense",
            ALIGNED | {"intermediate_size": 96},
            ["fp8.recipe=mxfp8", "cluster.ranks_per_node=2", "parallel.tensor=2"],
            ["intermediate size 96 / 2 ranks"],
            "blockwise",
        ),
        ("moe", ALIGNED | {"moe_intermediate_size": 72}, [], ["experts' intermediate size 72"], "nearest"),
        # Whole blocks are not needed: 160 and 192 have a ragged one of 128, 64 and 576 as well.
        ("dense", ALIGNED | {"hidden_size": 160}, [], None, None),
        ("moe", ALIGNED | {"moe_intermediate_size": 192}, [], None, None),
        ("dense", ALIGNED | {"head_dim": 16}, ["fp8.recipe=mxfp8"], None, None),
    ],
)
def test_sizes_that_products_cannot_have_are_named(load, shape, kind, changes, overrides, said, valid):
    loaded, model = load("precision=fp8", "batch.micro_batch_tokens=512", *overrides), shape(kind, **changes)
    if said is None:
        assert plan_run(loaded, model=model)
        return
    with pytest.raises(PlanError) as caught:
        plan_run(loaded, model=model)
    line = next(line for line in str(caught.value).splitlines() if ": fp8.recipe: " in line)
    assert [part for part in said if part not in line] == [], line
    assert ("nearest valid" not in line) if valid == "nearest" else (valid in line), line


@pytest.mark.parametrize("model", ["qwen3_4b", "deepseek_v3"])
def test_models_whose_shares_are_no_whole_blocks_have_tensor_parallelism(load, model):
    """Latents of 576, and the fused query, key and value of 6144 / 8 = 768 beside an attention output of 512."""
    loaded = load(
        "precision=fp8",
        "cluster.num_nodes=4",
        "cluster.ranks_per_node=8",
        "parallel.tensor=8",
        "parallel.expert=32" if model == "deepseek_v3" else "parallel.expert=1",
        "batch={prompts_per_step: 64, group_size: 8, micro_batch_tokens: 2048}",
    )
    assert plan_run(loaded, model=SHAPES / f"{model}.json", device="gpu").layout.tensor == 8
