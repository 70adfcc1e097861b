"""A teacher in a plan: its bytes by hand, its seconds, and what it is refused for before anything starts."""

import json

import pytest

from gspo_mega.base.errors import ModelError, PlanError
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import count_parameters
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.disk import disk_use
from gspo_mega.plan.teacher import served_bytes, tokenizer_difference

GPU = ("precision=bf16", "cluster.gpu=H100", "cluster.gpus_per_node=8", "optimizer.distributed=false")


@pytest.fixture
def teach(load, shape, tmp_path):
    """The plan of a policy with a teacher. `changes`: of the teacher's shape."""

    def plan(*overrides, policy="moe", teacher="dense", device=None, **changes):
        model = shape(policy).rename(tmp_path / "policy.json")
        path = shape(teacher, **changes).rename(tmp_path / "teacher.json")
        return plan_run(load(f"model.path={model}", f"teacher={{path: {path}}}", *overrides), device)

    return plan


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_are_the_weights_of_the_teachers_own_shape(teach, precision):
    plan = teach(f"precision={precision}", "optimizer.distributed=false", num_hidden_layers=2)
    with_it = estimate(plan)
    spec = read_model_spec(plan.config.teacher.path)
    size = with_it.states[0][1]
    assert size.teacher == count_parameters(spec).total * (4 if precision == "fp32" else 2) > 0
    assert size.on_device == size.weights + size.gradients + size.main + size.moments + size.teacher
    assert size.reference == 0 and "including the frozen teacher" in render_report(plan, with_it)


def test_a_dense_teacher_is_whole_on_every_rank_of_an_expert_group_and_cut_over_tensor_and_pipeline(teach):
    sizes = ("optimizer.distributed=false", "precision=fp32")
    experts = ("cluster.ranks_per_node=2", "parallel.expert=2")
    cut = ("cluster.ranks_per_node=2", "parallel={tensor: 2, expert: 2}")
    own = dict(num_hidden_layers=2, tie_word_embeddings=False)
    one = [estimate(teach(*sizes, *more, **own)).states[0][1].teacher for more in ((), experts, cut)]
    assert one[0] == one[1]
    assert one[0] / 2 < one[2] < one[0] * 0.52  # norms are whole on every rank


def test_memory_and_time_of_a_gpu_count_it(teach):
    large = dict(hidden_size=4096, intermediate_size=16384, num_hidden_layers=8, num_attention_heads=32)
    large |= dict(num_key_value_heads=8, head_dim=128)
    small, whole = (estimate(teach(*GPU, device="gpu", **changes)) for changes in ({}, large))
    assert small.memory is not None and whole.memory is not None and small.time is not None and whole.time is not None
    apart = whole.states[0][1].teacher - small.states[0][1].teacher
    assert whole.memory.parts["teacher"] - small.memory.parts["teacher"] == apart > 3e9
    assert whole.time.train.old_pass > small.time.train.old_pass


@pytest.mark.parametrize(
    ("changes", "overrides", "error", "said"),
    [
        (dict(vocab_size=500), (), ModelError, "has a vocabulary of 500, and the policy may sample any of 512 ids"),
        (
            dict(num_hidden_layers=3),
            ("cluster.ranks_per_node=2", "parallel={pipeline: 2, last_stage_layers: 2}"),
            None,
            "",
        ),
        (
            dict(num_hidden_layers=5),
            ("cluster.ranks_per_node=3", "parallel.pipeline=3"),
            PlanError,
            "in the policy's layout: parallel.pipeline: 3 does not divide the model's 5 layers",
        ),
        (
            dict(num_attention_heads=3, num_key_value_heads=3),
            ("cluster.ranks_per_node=2", "parallel={tensor: 2, expert: 2}"),
            PlanError,
            "in the policy's layout: parallel.tensor: 2 does not divide its attention heads 3, key-value heads 3",
        ),
        (
            dict(max_position_embeddings=16),
            (),
            PlanError,
            "in the policy's layout: rollout.max_new_tokens: prompt and response may have",
        ),
    ],
)
def test_what_a_teacher_is_refused_for(teach, changes, overrides, error, said):
    if error is None:
        teach(*overrides, **changes)
        return
    with pytest.raises(error, match="teacher.path: ") as caught:
        teach(*overrides, **changes)
    assert said in str(caught.value)


def test_whole_distributions_need_one_vocabulary_and_more_memory(teach):
    full = "teacher.divergence=full"
    with pytest.raises(ModelError, match="vocabulary of 600, the policy one of 512: with `divergence: full` they must"):
        teach(full, vocab_size=600)
    teach(vocab_size=600)
    plain, whole = (estimate(teach(*GPU, *more, device="gpu")) for more in ((), (full,)))
    assert plain.memory is not None and whole.memory is not None
    assert "teacher states" not in plain.memory.by_phase["training"]
    assert whole.memory.by_phase["training"]["teacher states"] > 0


def test_a_folder_that_is_not_there(load, shape):
    with pytest.raises(ModelError, match=r"teacher\.path: .*nowhere"):
        plan_run(load(f"model.path={shape('dense')}", "teacher.path=nowhere"))


def _tokenizer(folder, vocab, added=(), merges=("a b",)):
    folder.mkdir(exist_ok=True)
    tree = dict(model=dict(vocab=vocab, merges=list(merges)), added_tokens=[dict(id=i, content=c) for i, c in added])
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder


def test_tokenizers_that_are_not_the_same(tmp_path):
    ours = _tokenizer(tmp_path / "ours", {"a": 0, "b": 1}, [(2, "<end>")])
    same = _tokenizer(tmp_path / "same", {"b": 1, "a": 0, "c": 3}, [(2, "<end>")], merges=[["a", "b"]])
    assert tokenizer_difference(same, ours) is None, "an id that only the teacher has does not matter"
    other = _tokenizer(tmp_path / "other", {"a": 1, "b": 0}, [(2, "<end>")])
    assert tokenizer_difference(other, ours) == "id 0 is 'a' here and 'b' there"
    short = _tokenizer(tmp_path / "short", {"a": 0, "b": 1})
    assert tokenizer_difference(short, ours) == "id 2 is '<end>' here and missing there"
    split = _tokenizer(tmp_path / "split", {"a": 0, "b": 1}, [(2, "<end>")], merges=())
    assert tokenizer_difference(split, ours) == "its merges differ"
    (tmp_path / "none").mkdir()
    assert "it has no tokenizer.json" in (tokenizer_difference(tmp_path / "none", ours) or "")
    assert tokenizer_difference(same, tmp_path / "none") is None, "nothing can be sampled without a tokenizer"
    pieces, others = tmp_path / "pieces", tmp_path / "others"
    for folder, content in ((pieces, b"one"), (others, b"two")):
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(content)
    assert tokenizer_difference(others, pieces) == "its tokenizer.model differs"
    (tmp_path / "other" / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelError, match="holds no tokenizer that can be compared"):
        tokenizer_difference(other, ours)


def test_another_tokenizer_is_refused_by_the_plan(load, shape, tmp_path):
    folders = [tmp_path / name for name in ("policy", "teacher")]
    for folder, vocab in zip(folders, ({"a": 0}, {"b": 0}), strict=True):
        _tokenizer(folder, vocab)
        (folder / "config.json").write_text(shape("dense").read_text())
    with pytest.raises(ModelError, match="another tokenizer than the policy: id 0 is 'a' here and 'b' there"):
        plan_run(load(f"model.path={folders[0]}", f"teacher.path={folders[1]}"))


TWO = "data={sources: [{name: a, path: a.jsonl}, {name: b, path: b.jsonl}], max_prompt_tokens: 16}"


def test_several_teachers_are_all_counted_and_a_folder_for_two_sources_once(load, shape, tmp_path):
    policy = shape("moe").rename(tmp_path / "policy.json")
    first = shape("dense", num_hidden_layers=2).rename(tmp_path / "first.json")
    second = shape("dense", num_hidden_layers=4).rename(tmp_path / "second.json")

    def plan(by_source):
        keys = (TWO, f"model.path={policy}", f"teacher={{by_source: {by_source}}}", *GPU)
        return estimate(plan_run(load(*keys), "gpu"))

    def of(a, b):
        figures = plan(f"[{{source: a, {a}}}, {{source: b, {b}}}]")
        assert figures.time is not None
        return figures.states[0][1].teacher, figures.time.train.old_pass

    both, alone, other = (
        of(f"path: {a}", f"path: {b}") for a, b in ((first, second), (first, first), (second, second))
    )
    assert both[0] == alone[0] + other[0] and both[1] > max(alone[1], other[1])
    assert of(f"path: {first}", "url: 'http://teacher:1'") == alone, "a server costs the ranks nothing"
    assert of("url: 'http://teacher:1'", "url: 'http://teacher:2'")[0] == 0
    with pytest.raises(ModelError, match=r"teacher\.by_source\.1\.path: .*nowhere"):
        plan(f"[{{source: a, path: {first}}}, {{source: b, path: nowhere}}]")


def test_what_a_server_says_is_counted_by_hand(load, shape):
    """16 responses of up to 32 tokens: 4 bytes each, and 8 for each of 20 most likely tokens."""
    keys = [f"model.path={shape('dense')}", "batch.prompts_per_step=4", "batch.group_size=4", "train={num_steps: 3}"]
    plain, served = (
        plan_run(load(*keys, *more)) for more in ((), ("teacher={url: 'http://t:1', divergence: top_k, top_k: 20}",))
    )
    tokens = 16 * served.config.rollout.max_new_tokens
    assert served_bytes(served.config) == (4 * tokens, 160 * tokens) and served_bytes(plain.config) == (0, 0)
    assert "teachers' servers per step: 16 requests at least" in render_report(served, estimate(served))
    disk = [disk_use(plan.config, plan.spec, 1, 1) for plan in (plain, served)]
    assert disk[0] is not None and disk[1] is not None
    assert disk[1].parts["journal"] - disk[0].parts["journal"] == 3 * 164 * tokens


def test_the_policys_servers_need_room_for_the_prompt_of_the_policy_as_a_teacher(load, shape):
    keys = [
        f"model.path={shape('dense')}",
        "teacher={policy: true, context: '{answer}{prompt}', max_prompt_tokens: 64}",
    ]
    plan_run(load(*keys))
    with pytest.raises(PlanError, match=r"teacher: its prompt \(max_prompt_tokens\) and a response have up to"):
        plan_run(load(*keys, "server.context_tokens=90"))
