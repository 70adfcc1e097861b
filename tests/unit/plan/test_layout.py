import itertools

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import Coordinates, Layout, plan_run, render_report, resolve_layout

LAYOUTS = [
    dict(world=world, tensor=t, pipeline=p, context=c, expert=e, expert_tensor=et)
    for world, t, p, c, e, et in itertools.product((1, 2, 4, 8, 16), (1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2))
    if world % (t * p * c) == 0 and world % (p * e * et) == 0
]


def layout_of(*, world, tensor, pipeline, context, expert, expert_tensor):
    return Layout(
        world_size=world,
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=None,
        context=context,
        data=world // (tensor * pipeline * context),
        expert=expert,
        expert_tensor=expert_tensor,
        expert_data=world // (pipeline * expert * expert_tensor),
        sequence_parallel=False,
        stage_layers=(1,) * pipeline,
        padded_vocab_size=128,
        sequence_multiple_tokens=1,
        pack_multiple_tokens=1,
        mini_batch_sequences=(1,),
        attention_crossover_tokens=1,
        equal_packs=False,
    )


def groups_by(layout, same):
    """Ranks that agree in everything but one kind of parallelism, as sorted lists."""
    groups = {}
    for rank in range(layout.world_size):
        groups.setdefault(same(layout.coordinates(rank)), []).append(rank)
    return sorted(groups.values())


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_coordinates_are_megatrons(sizes):
    """Against Megatron's own generator of ranks, without process groups."""
    from megatron.core.parallel_state import RankGenerator

    import gspo_mega.engine  # noqa: F401  installs the CPU backend, which must come before Megatron

    layout = layout_of(**sizes)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context, order=order)
    assert groups_by(layout, lambda c: (c.data, c.pipeline, c.context)) == sorted(dense.get_ranks("tp"))
    assert groups_by(layout, lambda c: (c.data, c.pipeline, c.tensor)) == sorted(dense.get_ranks("cp"))
    assert groups_by(layout, lambda c: (c.data, c.context, c.tensor)) == sorted(dense.get_ranks("pp"))
    assert groups_by(layout, lambda c: (c.pipeline, c.context, c.tensor)) == sorted(dense.get_ranks("dp"))
    experts = RankGenerator(
        tp=layout.expert_tensor, ep=layout.expert, dp=layout.expert_data, pp=layout.pipeline, cp=1, order=order
    )
    assert groups_by(layout, lambda c: (c.pipeline, c.expert_data, c.expert_tensor)) == sorted(experts.get_ranks("ep"))
    assert groups_by(layout, lambda c: (c.pipeline, c.expert, c.expert_data)) == sorted(experts.get_ranks("tp"))
    assert groups_by(layout, lambda c: (c.pipeline, c.expert, c.expert_tensor)) == sorted(experts.get_ranks("dp"))


def test_coordinates_by_hand():
    layout = layout_of(world=8, tensor=2, pipeline=2, context=1, expert=2, expert_tensor=1)
    assert layout.coordinates(0) == Coordinates(
        data=0, pipeline=0, context=0, tensor=0, expert=0, expert_tensor=0, expert_data=0
    )
    assert layout.coordinates(3) == Coordinates(
        data=1, pipeline=0, context=0, tensor=1, expert=1, expert_tensor=0, expert_data=1
    )
    assert layout.coordinates(6) == Coordinates(
        data=1, pipeline=1, context=0, tensor=0, expert=0, expert_tensor=0, expert_data=1
    )


def test_what_a_layout_holds(load, shape):
    loaded = load(
        "cluster={num_nodes: 2, ranks_per_node: 12}",
        "parallel={tensor: 2, pipeline: 3, context: 2, expert: 4}",
        "batch.num_mini_batches=5",
    )
    layout = resolve_layout(loaded.config, read_model_spec(shape("moe", vocab_size=300)))
    assert layout == Layout(
        world_size=24,
        tensor=2,
        pipeline=3,
        virtual_pipeline=None,
        context=2,
        data=2,
        expert=4,
        expert_tensor=1,
        expert_data=2,
        sequence_parallel=True,
        stage_layers=(1, 1, 1),
        padded_vocab_size=384,
        sequence_multiple_tokens=8,
        pack_multiple_tokens=8,
        mini_batch_sequences=(7, 7, 6, 6, 6),
        attention_crossover_tokens=683,
        equal_packs=False,
    )


def test_sequence_parallelism_and_padding_need_their_sizes(load, shape):
    def layout(*overrides):
        return resolve_layout(load(*overrides).config, read_model_spec(shape("dense")))

    assert (layout().sequence_parallel, layout().sequence_multiple_tokens) == (False, 1)
    two = "cluster.ranks_per_node=2"
    assert layout(two, "parallel.context=2").sequence_multiple_tokens == 4
    assert layout(two, "parallel.tensor=2").sequence_multiple_tokens == 2
    assert layout(two, "parallel.tensor=2", "parallel.sequence=false").sequence_multiple_tokens == 1


def test_fp8_packs_are_padded_as_a_whole(load, shape):
    def layout(*overrides):
        return resolve_layout(load("precision=fp8", *overrides).config, read_model_spec(shape("dense")))

    alone = layout("fp8.recipe=mxfp8")
    assert (alone.sequence_multiple_tokens, alone.pack_multiple_tokens) == (1, 32)
    two = ("cluster.ranks_per_node=2", "fp8.recipe=delayed")
    assert (
        layout(*two, "parallel.tensor=2").sequence_multiple_tokens,
        layout(*two, "parallel.tensor=2").pack_multiple_tokens,
    ) == (2, 32)
    assert layout(*two, "parallel.context=2").pack_multiple_tokens == 32


def test_data_ranks_wait_in_every_pack_where_experts_span_them():
    sizes = dict(world=8, pipeline=1, context=1, expert_tensor=1)
    assert not layout_of(tensor=1, expert=1, **sizes).synchronised_packs
    assert layout_of(tensor=1, expert=2, **sizes).synchronised_packs
    assert not layout_of(tensor=2, expert=2, **sizes).synchronised_packs
    assert layout_of(tensor=2, expert=4, **sizes).synchronised_packs


def test_packs_are_made_equally_long_for_the_allgather_dispatcher(load, shape):
    def equal(kind, dispatcher):
        loaded = load("cluster.ranks_per_node=2", f"parallel.expert_dispatcher={dispatcher}")
        return resolve_layout(loaded.config, read_model_spec(shape(kind))).equal_packs

    assert equal("moe", "allgather") and not equal("moe", "alltoall") and not equal("dense", "allgather")


def test_virtual_pipeline_chunks(load, shape):
    loaded = load("cluster.ranks_per_node=2", "parallel={pipeline: 2, virtual_pipeline: 3}")
    layout = resolve_layout(loaded.config, read_model_spec(shape("dense", num_hidden_layers=12)))
    assert layout.virtual_pipeline == 3
    assert layout.chunk_layers(1) == [range(2, 4), range(6, 8), range(10, 12)]


def test_the_first_and_the_last_stage_may_have_layers_of_their_own_number(load, shape):
    def layers(*parallel, num_layers=12):
        loaded = load("cluster.ranks_per_node=4", f"parallel={{pipeline: 4, {', '.join(parallel)}}}")
        spec = read_model_spec(shape("dense", num_hidden_layers=num_layers))
        layout = resolve_layout(loaded.config, spec)
        return [layout.chunk_layers(stage) for stage in range(4)]

    assert layers("last_stage_layers: 1", num_layers=13) == [[range(4)], [range(4, 8)], [range(8, 12)], [range(12, 13)]]
    assert layers("first_stage_layers: 3", num_layers=6) == [[range(3)], [range(3, 4)], [range(4, 5)], [range(5, 6)]]
    # Interleaved, as Megatron divides: each chunk is a whole pipeline of stages.
    both = layers("virtual_pipeline: 2", "first_stage_layers: 2", "last_stage_layers: 2")
    assert both == [
        [range(1), range(6, 7)],
        [range(1, 3), range(7, 9)],
        [range(3, 5), range(9, 11)],
        [range(5, 6), range(11, 12)],
    ]


def test_a_model_that_cannot_be_read_names_the_place_in_the_configuration(load, tmp_path):
    with pytest.raises(ModelError) as caught:
        plan_run(load())
    assert str(caught.value).startswith(f"{tmp_path}/c.yaml:2:9: model.path: m: no such folder")


def test_notices_of_a_layout(load, shape, tmp_path):
    loaded = load("cluster={num_nodes: 2, ranks_per_node: 1}", "parallel.tensor=2", "objective.dual_clip=3")
    notices = plan_run(loaded, model=shape("dense")).notices
    assert len(notices) == 2 and "dual clip" in notices[0] and "span nodes" in notices[1]
    uneven = plan_run(load("cluster.ranks_per_node=3"), model=shape("dense")).notices
    assert len(uneven) == 1 and "8 trajectories per mini-batch do not divide evenly over 3" in uneven[0]
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(shape("dense").read_text())
    assert any("end-of-sequence" in notice for notice in plan_run(load(), model=folder).notices)


def test_the_report(load, shape):
    loaded = load(
        "cluster.ranks_per_node=2", "parallel={tensor: 2, expert: 2}", "train.num_steps=10", "rollout.temperature=0.5"
    )
    report = render_report(plan_run(loaded, model=shape("moe")))
    assert "399 k parameters, 178 k active per token" in report
    assert "2 = 1 node x 2: data 1 x pipeline 1 x context 1 x tensor 2, sequence parallel" in report
    assert "expert 2 x expert tensor 1 x expert data 1 x pipeline 1, 4 experts per rank" in report
    table = [line.split() for line in report.splitlines()]
    assert ["rank", "data", "pipeline", "context", "tensor", "expert"] in table
    assert ["1", "0", "0", "0", "1", "1"] in table
    assert "8 prompts x 4 = 32 trajectories per step, 4 mini-batches of 8, 8 per data-parallel rank" in report
    assert "10 steps, 40 optimizer steps" in report
    assert "longest sequence 48, padded to multiples of 2" in report
    assert "48 tokens of context" in report
    first, second, last = report.splitlines()[-3:]
    assert first.startswith("notice   rollout.max_new_tokens 32 with the paper's clip range")
    assert second.strip().startswith("responses on which trainer and server disagree strongly are left out")
    assert last.strip().startswith("temperature 0.5")


def test_the_report_of_many_ranks_leaves_out_the_middle(load, shape):
    loaded = load(
        "cluster={num_nodes: 8, ranks_per_node: 8}",
        "batch={prompts_per_step: 128, group_size: 8, micro_batch_tokens: 256}",
    )
    lines = render_report(plan_run(loaded, model=shape("dense"))).splitlines()
    start = next(index for index, line in enumerate(lines) if line.split()[:2] == ["rank", "data"])
    ranks = [line.split()[0] for line in lines[start + 1 : start + 18]]
    assert ranks == [*map(str, range(15)), "...", "63"]
    assert "expert" not in lines[start]
