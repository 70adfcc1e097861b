"""The results of a decode step, for SGLang on a CPU: a few list operations for each token.

SGLang asks some forty questions of each request after each step: its beam, grammar, speculation, sampling mask, hidden
states and so on. With 128 requests of a small model that is a tenth of the scheduler's time. `DecodeResults` asks once
for each set of requests. While all of them are plain (streamed, with log-probs and without any of those), a step adds
its tokens and log-probs to their lists; SGLang's own functions handle a request that may end or is due a report. It
handles all other steps.

A server whose answers nobody continues does not put those that end by themselves into the prefix cache.
Prompts stay there, and so does an answer that is cut short, which is continued.

Only a server process imports this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class _Row(NamedTuple):
    """A plain request. It may end with one of `end_tokens`, a token of `vocab_size` or above, or at `most_tokens`; it
    is reported every `interval` tokens.
    """

    request: Any
    end_tokens: frozenset[int]
    most_tokens: int
    vocab_size: float
    interval: int


class DecodeResults:
    """What a scheduler does with the results of its decode steps. `stock`: SGLang's function for it."""

    def __init__(self, stock: Callable[[Any, Any, Any], None], forgets: Callable[[], bool]) -> None:
        self._stock, self._forgets = stock, forgets
        self._requests: list[Any] = []  # those of `_rows`; the list itself is how a batch is known again
        self._count = -1
        self._rows: list[_Row] | None = None

    def process(self, processor: Any, batch: Any, result: Any) -> None:
        """Give each request of `batch` its token of `result`. `processor`: SGLang's SchedulerBatchResultProcessor."""
        rows, output = self._rows_of(processor, batch), result.logits_output
        if rows is None or not _is_plain_result(result, len(rows)):
            self._stock(processor, batch, result)
            return
        if result.routed_experts_output is not None:
            result.routed_experts_output.finalize()
            result.routed_experts_output = None
        num_tokens = result.get_num_generated_tokens(len(rows))
        processor.metrics_reporter.num_generated_tokens += num_tokens
        processor.token_to_kv_pool_allocator.free_group_begin()
        due: list[Any] = []
        tokens, log_probs = result.next_token_ids.tolist(), output.next_token_logprobs.tolist()
        for index, (row, token, log_prob) in enumerate(zip(rows, tokens, log_probs, strict=True)):
            request, end_tokens, most_tokens, vocab_size, interval = row
            token_ids = request.output_ids
            token_ids.append(token)
            count, reported = len(token_ids), request.send_token_offset
            may_end = token in end_tokens or count >= most_tokens or token >= vocab_size
            if may_end or request.to_finish is not None:
                self._end(processor, batch, result, index, request)
            if count - reported >= interval or not reported or request.finished_reason is not None:
                request.time_stats.set_last_decode_finish_time()
                due.append(request)
            record = request.logprob
            record.output_token_logprobs_val.append(log_prob)
            record.output_token_logprobs_idx.append(token)
        if due:
            processor.output_streamer.stream_output(due, batch.return_logprob)
        processor.token_to_kv_pool_allocator.free_group_end()
        reporter = processor.metrics_reporter
        reporter.forward_ct_decode = (reporter.forward_ct_decode + 1) % (1 << 30)
        reporter.report_decode_stats(result.can_run_cuda_graph, running_batch=batch, num_generated_tokens=num_tokens)

    def _end(self, processor: Any, batch: Any, result: Any, index: int, request: Any) -> None:
        """Let SGLang decide whether the request has ended, and give its memory back if so."""
        request.update_finish_state(1)
        reason = request.finished_reason
        if reason is not None and reason.to_json()["type"] in ("length", "stop") and self._forgets():
            request.skip_radix_cache_insert = True
        processor._handle_finish_state_updated_req(request, batch, result, index, result.logits_output)

    def _rows_of(self, processor: Any, batch: Any) -> list[_Row] | None:
        """Return the requests of a batch if all are plain, else None."""
        if batch.reqs is not self._requests or len(batch.reqs) != self._count:
            self._requests, self._count = batch.reqs, len(batch.reqs)
            plain = _is_plain_server(processor) and _is_plain_batch(batch) and all(map(_is_plain_request, batch.reqs))
            default = _report_interval() if plain else 0
            self._rows = [_row(request, default) for request in batch.reqs] if plain else None
        return self._rows


def _is_plain_server(processor: Any) -> bool:
    from sglang.srt.runtime_context import get_disagg, get_memory, get_observability

    return not (
        processor.enable_overlap
        or processor.enable_overlap_mlx
        or processor.tree_cache.supports_mamba()
        or processor.model_config.self_opened_think_start_ids
        or get_observability().enable_metrics
        or get_disagg().disaggregation_decode_enable_offload_kvcache
        or get_memory().enable_hisparse
    )


def _is_plain_batch(batch: Any) -> bool:
    return batch.spec_algorithm.is_none() and batch.return_logprob and not batch.has_grammar


def _is_plain_request(request: Any) -> bool:
    params, record = request.sampling_params, request.logprob
    return (
        request.stream
        and request.return_logprob
        and request.tokenizer is None
        and request.beam_group is None
        and request.grammar is None
        and request.multimodal_inputs is None
        and not request.require_reasoning
        and not request.return_hidden_states
        and not request.return_sampling_mask
        and not params.stop_strs
        and not params.stop_regex_strs
        and not record.top_logprobs_num
        and record.token_ids_logprob is None
    )


def _is_plain_result(result: Any, num_requests: int) -> bool:
    output = result.logits_output
    return (
        result.copy_done is None
        and result.auxiliary_host_output is None
        and result.indexer_topk_output is None
        and output is not None
        and output.customized_info is None
        and torch.is_tensor(result.next_token_ids)
        and len(result.next_token_ids) == len(output.next_token_logprobs) == num_requests
    )


def _report_interval() -> int:
    from sglang.srt.runtime_context import get_serving

    return get_serving().stream_interval


def _row(request: Any, default_interval: int) -> _Row:
    params = request.sampling_params
    ends = () if params.ignore_eos else (*(params.stop_token_ids or ()), *(request.eos_token_ids or ()))
    return _Row(
        request,
        frozenset(ends),
        params.max_new_tokens,
        float("inf") if request.vocab_size is None else request.vocab_size,
        params.stream_interval or default_interval,
    )


def decode_results_of(
    stock: Callable[[Any, Any, Any], None], forgets: Callable[[], bool]
) -> Callable[[Any, Any, Any], None]:
    """Wrap `stock`, the `process_batch_result_decode` of SGLang's SchedulerBatchResultProcessor. `forgets`: whether
    nobody continues an answer of this server.
    """
    results = DecodeResults(stock, forgets)

    @functools.wraps(stock)
    def process(self: Any, batch: Any, result: Any) -> None:
        results.process(self, batch, result)

    return process
