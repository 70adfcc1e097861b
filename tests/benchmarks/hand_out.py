"""What routed experts and a step's shards cost rank 0, before and now, at real lengths and a few of the responses.

    python tests/benchmarks/hand_out.py [--model configs/models/qwen3_235b_a22b.json] [--responses 16] [--tokens 16384]
        [--data 1] [--tensor 2] [--pipeline 2]

`parse`: core-seconds from a server's event to the response's routes, per response, on one thread and on one per core;
over HTTP, with the share of the event loop's own thread.
`hand-out`: real ranks over gloo on this machine, which receive and drop what they get: seconds of rank 0 from rows to the
last byte, bytes that leave it, and its peak memory over that of the batch. `before` is what releases up to 2026-11 did:
int32 parsed in the event loop, int16 of all layers packed for the whole batch, encoded and sent once for each rank.
`ahead`: packs and messages were made while the step before trained; what is left is the sending.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
OF_RESPONSES = 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(ROOT / "configs/models/qwen3_235b_a22b.json"))
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16384)
    for name, size in (("data", 1), ("tensor", 2), ("pipeline", 2)):
        parser.add_argument(f"--{name}", type=int, default=size)
    arguments = parser.parse_args()
    parse(arguments)
    for with_routes in (True, False):
        for how in ("before", "now", "ahead"):
            report(arguments, how, with_routes)


def parse(arguments: argparse.Namespace) -> None:
    from gspo_mega.models.huggingface import read_model_spec
    from gspo_mega.rollout.client.completion import cut_routes, decode_routes

    spec = read_model_spec(arguments.model)
    shape = (arguments.tokens - 1, spec.num_layers, spec.moe.experts_per_token)
    numbers = np.random.default_rng(0).integers(0, spec.moe.num_experts, shape).astype("<i4")
    text = base64.b64encode(numbers.tobytes()).decode()
    event = json.dumps({"meta_info": {"id": "x", "routed_experts": text}}, separators=(",", ":")).encode()
    print(f"parse    {len(event) / 1e6:.1f} MB per response, {numbers.size / 1e6:.1f} million numbers")

    def before() -> np.ndarray:
        meta = json.loads(event)["meta_info"]
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), dtype="<i4")
        assert 0 <= flat.min() <= flat.max() < spec.moe.num_experts
        return flat.reshape(shape).astype(np.int32)

    def now() -> np.ndarray:
        rest, routes = cut_routes(event)
        json.loads(rest)
        return decode_routes(routes.text, spec.moe.num_experts).reshape(shape)

    assert np.array_equal(before(), now())
    for name, function in (("before", before), ("now", now)):
        rounds = []
        for _ in range(5):
            start = time.process_time()
            function()
            rounds.append(time.process_time() - start)
        seconds = float(np.median(rounds))
        cores = len(os.sched_getaffinity(0))
        start = time.perf_counter()
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(lambda _: function(), range(2 * cores)))
        beside = (time.perf_counter() - start) / 2 / cores
        print(
            f"  {name:<7} {seconds:.4f} core-s per response ({seconds / numbers.size * 1e9:.2f} ns per number), x"
            f" {OF_RESPONSES}: {seconds * OF_RESPONSES:.1f} core-s; {cores} threads: {seconds / beside:.2f} times one"
        )
    receive(event, spec.moe.num_experts)


def receive(event: bytes, num_experts: int, rounds: int = 6) -> None:
    """Whole answers over HTTP from another process: what of it is the event loop's own work."""
    from aiohttp import ClientSession

    from gspo_mega.rollout.client.completion import decode_routes_of
    from gspo_mega.rollout.client.http_stream import read_events

    async def fetch(port: int) -> None:
        async with ClientSession(auto_decompress=False) as session:
            for number in range(rounds + 1):
                if number == 1:  # the first opens the connection
                    begin.extend([time.process_time(), time.thread_time()])
                async with session.get(f"http://127.0.0.1:{port}/", headers={"Accept-Encoding": "identity"}) as answer:
                    async for one in read_events(answer, 2 * len(event)):
                        await decode_routes_of(one, num_experts)
            end.extend([time.process_time(), time.thread_time()])

    begin: list[float] = []
    end: list[float] = []
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(event, theirs), daemon=True)
    server.start()
    asyncio.run(fetch(ours.recv()))
    server.terminate()
    whole, loop = ((b - a) / rounds for a, b in zip(begin, end))
    print(
        f"  over HTTP {whole:.4f} core-s per response, of which the event loop {loop:.4f}; x {OF_RESPONSES}:"
        f" {whole * OF_RESPONSES:.1f}, {loop * OF_RESPONSES:.1f}"
    )


def _serve(event: bytes, pipe) -> None:
    from aiohttp import web

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + event + b"\n\ndata: [DONE]\n\n")
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pipe.send(runner.addresses[0][1])
        await asyncio.sleep(3600)

    asyncio.run(run())


def report(arguments: argparse.Namespace, how: str, with_routes: bool) -> None:
    size = arguments.data * arguments.tensor * arguments.pipeline
    context = multiprocessing.get_context("spawn")
    port, pipes, processes = 20000 + os.getpid() % 20000 + 2 * len(how) + with_routes, [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, size, port, theirs, arguments, how, with_routes))
        process.start()
        pipes.append(ours)
        processes.append(process)
    found = pipes[0].recv()
    for process in processes:
        process.join()
    more = f"{arguments.responses} of {OF_RESPONSES} responses of {arguments.tokens}"
    layout = f"DP{arguments.data} TP{arguments.tensor} PP{arguments.pipeline}"
    own = f", {found['bytes'] / found['own']:.2f} x the routes" if with_routes else ""
    print(
        f"hand-out {'with' if with_routes else 'without'} routes, {more}, {layout}, {how}:"
        f" {found['seconds']:.2f} s (processor {found['host']:.2f}), {found['bytes'] / 1e6:.1f} MB leave rank 0{own},"
        f" peak memory {found['peak'] / 1e6:.0f} MB over the batch's"
    )


def _rank(rank, size, port, pipe, arguments, how, with_routes) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from gspo_mega.engine.process_groups import create_groups
    from gspo_mega.train.scatter import Exchange, RankLink

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = create_groups()
    layout = _layout(arguments)
    replicas = [layout.ranks_of(data) for data in range(layout.data)]
    store = dist.PrefixStore("benchmark", dist.distributed_c10d._get_default_store())
    exchange = Exchange(store, groups.host, replicas)
    link = RankLink(exchange, layout, rank)
    parcels = None
    if rank == 0:
        from gspo_mega.data.packing import ExpertRoutes
        from gspo_mega.train.scatter import Parcels

        spec, rows = _rows(arguments, with_routes)
        if how == "ahead":
            parcels = Parcels(_shards(rows, layout), ExpertRoutes.of(rows, spec, to_replay=True), layout)
            parcels.encode_all()
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dist.barrier()
    begin, host = time.perf_counter(), time.process_time()
    if rank == 0:
        if how == "before":
            sent = _hand_out_as_before(_shards(rows, layout), rows, spec, layout, groups.host)
        else:
            if parcels is None:
                parcels = Parcels(_shards(rows, layout), ExpertRoutes.of(rows, spec, to_replay=True), layout)
            link.send(parcels)
            sent = exchange.num_sent_bytes
        seconds, processor = time.perf_counter() - begin, time.process_time() - host
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        own = sum(row.routed_experts.size for row in rows if row.routed_experts is not None)
        pipe.send(dict(seconds=seconds, host=processor, bytes=sent, own=own, peak=(peak - base) * 1024))
    elif how == "before":
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, src=0, group=groups.host.group)
        dist.recv(torch.empty(int(length), dtype=torch.uint8), src=0, group=groups.host.group)
    else:
        link.receive_work()
    dist.barrier()
    dist.destroy_process_group()


def _hand_out_as_before(shards, rows, spec, layout, host) -> int:
    import torch
    import torch.distributed as dist

    routed = [row for row in rows if row.routed_experts is not None]
    for shard in shards:
        for micro_batch in (m for mini in shard for m in mini.micro_batches):
            if routed:
                routes = np.full((micro_batch.num_tokens, *routed[0].routed_experts.shape[1:]), -1, np.int16)
                for place, row in enumerate(micro_batch.trajectory_index.tolist()):
                    given, start = rows[row].routed_experts, int(micro_batch.cu_seqlens[place])
                    np.sort(given, axis=-1)
                    routes[start : start + len(given)] = given
                micro_batch.routed_experts = routes
    wire = [[m.to_wire() for m in shard] for shard in shards]
    sent = 0
    for rank in range(1, layout.world_size):
        buffers: list[bytes] = []

        def strip(item):
            if isinstance(item, np.ndarray):
                buffers.append(np.ascontiguousarray(item).tobytes())
                return {"__array__": len(buffers) - 1, "dtype": item.dtype.str, "shape": list(item.shape)}
            if isinstance(item, dict):
                return {key: strip(entry) for key, entry in item.items()}
            return [strip(entry) for entry in item] if isinstance(item, list) else item

        header = json.dumps(strip(wire[layout.coordinates(rank).data])).encode()
        message = b"".join([len(header).to_bytes(8, "little"), header, *buffers])
        dist.send(torch.tensor([len(message)], dtype=torch.int64), dst=rank, group=host.group)
        dist.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), dst=rank, group=host.group)
        sent += len(message)
    return sent


def _layout(arguments: argparse.Namespace):
    from gspo_mega.models.huggingface import read_model_spec
    from gspo_mega.plan.layout import Layout

    num_layers = read_model_spec(arguments.model).num_layers
    return Layout(
        world_size=arguments.data * arguments.tensor * arguments.pipeline,
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        virtual_pipeline=None,
        context=1,
        data=arguments.data,
        expert=1,
        expert_tensor=1,
        expert_data=1,
        sequence_parallel=True,
        stage_layers=(num_layers // arguments.pipeline,) * arguments.pipeline,
        padded_vocab_size=1,
        sequence_multiple_tokens=arguments.tensor,
        pack_multiple_tokens=1,
        mini_batch_sequences=(arguments.responses,),
        attention_crossover_tokens=1,
        equal_packs=False,
    )


def _rows(arguments: argparse.Namespace, with_routes: bool):
    from gspo_mega.base.episodes import one_turn_row
    from gspo_mega.base.records import Prompt
    from gspo_mega.models.huggingface import read_model_spec

    spec, count, prompt = read_model_spec(arguments.model), arguments.tokens, Prompt("p:0", "p", (1, 2), "")
    k = spec.moe.experts_per_token
    first = np.random.default_rng(0).integers(0, spec.moe.num_experts, (count + 1, spec.num_layers, 1))
    routes = ((first + np.arange(k)) % spec.moe.num_experts).astype(np.uint8)
    rows = [
        one_turn_row(
            f"t{index}",
            index,
            prompt,
            [1] * count,
            [1] * count,
            [-1.0] * count,
            [0] * count,
            "length",
            routed_experts=routes.copy() if with_routes else None,
        )
        for index in range(arguments.responses)
    ]
    return spec, rows


def _shards(rows, layout):
    from gspo_mega.data.packing import build_micro_batch
    from gspo_mega.train.batches import MiniBatch

    records = [
        dict(
            prompt_token_ids=row.prompt.token_ids,
            response_token_ids=row.response_token_ids,
            response_mask=row.response_mask,
            rollout_log_probs=row.rollout_log_probs,
        )
        for row in rows
    ]
    packs = [build_micro_batch(records, [row], layout.sequence_multiple_tokens) for row in range(len(rows))]
    return [[MiniBatch(1.0, packs[data :: layout.data])] for data in range(layout.data)]


if __name__ == "__main__":
    main()
