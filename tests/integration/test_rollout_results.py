"""The results of decode steps equal SGLang's own: lists, ends, memory given back, and every report, step by step."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import types
from array import array
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo_mega.cpu import sglang_hooks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.skipif(sglang_hooks.has_gpu(), reason="SGLang's own function handles results where there is a GPU"),
]
sglang_hooks.activate()

END, OTHER_END, VOCABULARY, NUM_STEPS = 7, 11, 20, 12


class Off:
    """A section of SGLang's settings in which everything is off."""

    def __getattr__(self, name: str) -> Off:
        return self

    def __bool__(self) -> bool:
        return False


class Sent:
    def __init__(self) -> None:
        self.reports: list[list[Any]] = []

    def send_output(self, payload) -> None:
        self.reports.append(
            [
                payload.rids,
                [list(ids) for ids in payload.output_ids],
                payload.output_token_logprobs_val,
                payload.output_token_logprobs_idx,
                payload.finished_reasons,
                payload.completion_tokens,
                payload.weight_versions,
            ]
        )


class Side:
    """One scheduler's processor, with the requests that it is given."""

    def __init__(self, monkeypatch, forgets: bool | None, plans) -> None:
        """forgets: None for SGLang's own function, otherwise ours. plans: (most tokens, interval, other) of each."""
        from sglang.srt import runtime_context
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.managers import schedule_batch
        from sglang.srt.managers.scheduler_components import batch_result_processor, output_streamer
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        from gspo_mega.cpu.sglang_results import decode_results_of

        serving = types.SimpleNamespace(stream_interval=1, weight_version="3")
        for module in (runtime_context, batch_result_processor, output_streamer, schedule_batch):
            for name in ("exec", "memory", "disagg", "observability", "parallel", "features", "schedule", "serving"):
                if hasattr(module, f"get_{name}"):
                    given_here = serving if name == "serving" else Off()
                    monkeypatch.setattr(module, f"get_{name}", lambda given_here=given_here: given_here)
        self.released: list[tuple[str, bool]] = []
        monkeypatch.setattr(
            batch_result_processor,
            "release_kv_cache",
            lambda req, tree, checkpoint: self.released.append((req.rid, req.skip_radix_cache_insert)),
        )
        self.sent = Sent()
        streamer = output_streamer.SchedulerOutputStreamer(
            send_to_detokenizer=self.sent,
            tree_cache=None,
            server_args=None,
            is_generation=True,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_hicache_storage=lambda: False,
        )
        self.groups: list[str] = []
        self.metrics = types.SimpleNamespace(
            num_generated_tokens=0, forward_ct_decode=0, report_decode_stats=lambda *a, **k: None
        )
        fields = dict.fromkeys(batch_result_processor.SchedulerBatchResultProcessor.__dataclass_fields__)
        fields |= {
            "enable_overlap": False,
            "enable_overlap_mlx": False,
            "model_config": types.SimpleNamespace(self_opened_think_start_ids=None, think_end_ids=None),
            "token_to_kv_pool_allocator": types.SimpleNamespace(
                free_group_begin=lambda: self.groups.append("begin"), free_group_end=lambda: self.groups.append("end")
            ),
            "tree_cache": types.SimpleNamespace(supports_mamba=lambda: False),
            "metrics_reporter": self.metrics,
            "output_streamer": streamer,
            "beam_coordinator": types.SimpleNamespace(commit_decode=lambda batch: set()),
        }
        self.processor = batch_result_processor.SchedulerBatchResultProcessor(**fields)
        stock = batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_decode
        stock = inspect.unwrap(stock)
        self.was_stock = 0

        def counted(*arguments) -> None:
            self.was_stock += 1
            stock(*arguments)

        self.process = stock if forgets is None else decode_results_of(counted, lambda: forgets)
        self.requests = []
        for index, (most_tokens, interval, other) in enumerate(plans):
            params = SamplingParams(max_new_tokens=most_tokens, stop_token_ids=[END], ignore_eos=other == "endless")
            params.stream_interval = interval
            params.normalize(None)
            request = schedule_batch.Req(
                str(index),
                "",
                array("q", [1, 2, 3]),
                params,
                return_logprob=True,
                stream=other != "whole",
                eos_token_ids={OTHER_END},
                vocab_size=VOCABULARY,
            )
            self.requests.append(request)
        none = SpeculativeAlgorithm.NONE
        self.batch = types.SimpleNamespace(
            reqs=self.requests,
            return_logprob=True,
            has_grammar=False,
            spec_algorithm=none,
            mamba_track_mask_cpu=None,
            batch_size=lambda: len(self.batch.reqs),
        )

    def step(self, tokens: torch.Tensor, log_probs: torch.Tensor, aborted: int | None) -> None:
        """Process one token of each open request; `tokens`, `log_probs`: by request."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.managers.utils import GenerationBatchResult

        if any(request.finished() for request in self.batch.reqs):
            self.batch.reqs = [request for request in self.batch.reqs if not request.finished()]
        if not self.batch.reqs:
            return
        if aborted is not None and self.requests[aborted] in self.batch.reqs:
            self.requests[aborted].to_finish = FINISH_ABORT("gone")
        rows = [int(request.rid) for request in self.batch.reqs]
        output = LogitsProcessorOutput(next_token_logits=None, next_token_logprobs=log_probs[rows])
        self.process(self.processor, self.batch, GenerationBatchResult(output, next_token_ids=tokens[rows]))

    def state(self) -> list[Any]:
        return [
            (
                list(request.output_ids),
                request.logprob.output_token_logprobs_val,
                request.logprob.output_token_logprobs_idx,
                None if request.finished_reason is None else request.finished_reason.to_json(),
                request.finished_len,
                request.send_token_offset,
            )
            for request in self.requests
        ]


plans = st.lists(
    st.tuples(st.integers(1, 10), st.integers(1, 5), st.sampled_from(["plain", "plain", "endless"])),
    min_size=1,
    max_size=6,
)
aborts = st.one_of(st.none(), st.integers(0, 5))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans, st.integers(0, 2**31), aborts, st.booleans())
def test_every_step_is_sglangs(monkeypatch, plans, seed, aborted, forgets):
    generator = torch.Generator().manual_seed(seed)
    steps = [
        (
            torch.randint(0, VOCABULARY + 1, (len(plans),), generator=generator, dtype=torch.int32),
            -torch.rand(len(plans), generator=generator),
            aborted if index == 3 and aborted is not None and aborted < len(plans) else None,
        )
        for index in range(NUM_STEPS)
    ]
    stock = Side(monkeypatch, None, plans)
    for step in copy.deepcopy(steps):
        stock.step(*step)
    ours = Side(monkeypatch, forgets, plans)
    for step in steps:
        ours.step(*step)
    assert ours.state() == stock.state()
    assert ours.sent.reports == stock.sent.reports
    assert vars(ours.metrics)["num_generated_tokens"] == vars(stock.metrics)["num_generated_tokens"]
    assert ours.metrics.forward_ct_decode == stock.metrics.forward_ct_decode
    assert ours.groups == stock.groups
    assert [rid for rid, _ in ours.released] == [rid for rid, _ in stock.released]
    ends = {request.rid: request.finished_reason for request in ours.requests if request.finished_reason is not None}
    for rid, was_skipped in ours.released:
        assert was_skipped == (forgets and ends[rid].to_json()["type"] != "abort")
    assert not ours.was_stock


def test_a_batch_with_another_kind_of_request_is_sglangs(monkeypatch):
    """A request that is not streamed goes to SGLang's function, and takes its batch along until it has ended."""
    ours = Side(monkeypatch, False, [(2, 1, "whole"), (6, 1, "plain")])
    tokens = torch.zeros(2, dtype=torch.int32)
    for _ in range(5):
        ours.step(tokens, torch.zeros(2), None)
    assert ours.was_stock == 2
    assert [len(request.output_ids) for request in ours.requests] == [2, 5]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_and_log_probs_have_sglangs_bits(monkeypatch, temperature):
    from sglang.srt.layers import sampler as module
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor

    from gspo_mega.cpu.sglang_layers import sampler_plain, sampling_plain

    monkeypatch.setattr(module, "sampling_from_probs_torch", sampling_plain(lambda *_: None))
    sampler = module.Sampler.__new__(module.Sampler)
    torch.nn.Module.__init__(sampler)
    vars(sampler).update(
        enable_deterministic=False,
        rl_on_policy_target=None,
        use_log_softmax_logprob=False,
        use_ascend_backend=False,
        output_logprob_processor=OutputLogprobProcessor(),
    )
    off = dict.fromkeys(("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling", "is_all_greedy"), False)
    none = dict.fromkeys(
        (
            "sampling_seed",
            "sampling_mask_batch_indices",
            "sampling_support_logprobs_capture_indices",
            "grammars",
        )
    )
    info = types.SimpleNamespace(
        temperatures=torch.full((64, 1), temperature), has_custom_logit_processor=False, **off, **none
    )
    torch.manual_seed(0)
    logits = 8 * torch.randn(64, 300)
    logits[0, 5] = 200.0  # all others have probability 0
    found = []
    stock = inspect.unwrap(module.Sampler.forward)

    def unused(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("a plain batch")

    for forward in (stock, sampler_plain(unused, True)):
        torch.manual_seed(1)
        output = LogitsProcessorOutput(next_token_logits=logits.clone())
        tokens = forward(sampler, output, info, True, [0] * 64, [None] * 64, torch.zeros(64, dtype=torch.int64))
        found.append((tokens, output.next_token_logprobs))
    (theirs, their_log_probs), (ours, our_log_probs) = found
    assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    assert torch.equal(our_log_probs, their_log_probs)


@pytest.mark.parametrize(
    ("changed", "info"),
    [
        ({}, {"is_all_greedy": True}),
        ({}, {"sampling_seed": torch.zeros(1)}),
        ({}, {"need_min_p_sampling": True}),
        ({}, {"sampling_mask_batch_indices": torch.zeros(1)}),
        ({"return_logprob": False}, {}),
        ({"top_logprobs_nums": [0, 2]}, {}),
        ({"token_ids_logprobs": [None, [3]]}, {}),
        ({"own": False}, {}),
        ({"deterministic": True}, {}),
    ],
)
def test_every_other_batch_is_sampled_by_sglang(changed, info):
    from gspo_mega.cpu.sglang_layers import sampler_plain

    names = ("is_all_greedy", "sampling_seed", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")
    names += ("sampling_mask_batch_indices", "sampling_support_logprobs_capture_indices")
    plain = {"own": True, "return_logprob": True, "top_logprobs_nums": [0, 0], "token_ids_logprobs": [None, None]}
    given = plain | {"deterministic": False} | changed
    sampler = types.SimpleNamespace(
        enable_deterministic=given["deterministic"], rl_on_policy_target=None, use_ascend_backend=False
    )
    batch = types.SimpleNamespace(**dict.fromkeys(names) | info)
    forward = sampler_plain(lambda *_: "SGLang's", given["own"])
    arguments = (given["return_logprob"], given["top_logprobs_nums"], given["token_ids_logprobs"], None)
    assert forward(sampler, None, batch, *arguments) == "SGLang's"
