"""Rank 0 leads: work, values and requests reach the other ranks in the order in which it sends them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from gspo_mega.base.records import MicroBatch
from gspo_mega.plan.layout import Layout
from gspo_mega.train.batches import MiniBatch
from gspo_mega.train.scatter import RankLink, decode, encode


def layout_of(data: int = 1, **sizes: int) -> Layout:
    parts = dict(tensor=1, pipeline=1, context=1) | sizes
    return Layout(
        world_size=data * parts["tensor"] * parts["pipeline"] * parts["context"],
        virtual_pipeline=None,
        data=data,
        expert=1,
        expert_tensor=1,
        expert_data=1,
        sequence_parallel=False,
        stage_layers=(4 // parts["pipeline"],) * parts["pipeline"],
        padded_vocab_size=16,
        sequence_multiple_tokens=1,
        pack_multiple_tokens=1,
        mini_batch_sequences=(1,),
        attention_crossover_tokens=1,
        equal_packs=False,
        **parts,
    )


class Wire:
    """Messages to every rank but 0, through their encoding. `sent`: (ranks, bytes) of each."""

    def __init__(self, layout: Layout):
        self.replicas = [layout.ranks_of(data) for data in range(layout.data)]
        self.waiting = defaultdict(list)
        self.sent = []

    def send_each(self, values):
        self.send_more(zip(self.replicas, values, strict=True))

    def send_all(self, value):
        self.send_each([value] * len(self.replicas))

    def send_more(self, parts):
        for ranks, value in parts:
            message = encode(value)
            self.sent.append((ranks, len(message)))
            for rank in ranks:
                self.waiting[rank].append((ranks, message))

    def of(self, rank: int) -> End:
        return End(self, rank)


class End:
    """A rank's end of the wire."""

    def __init__(self, wire: Wire, rank: int):
        self.wire, self.rank = wire, rank
        self.send_each, self.send_all, self.send_more = wire.send_each, wire.send_all, wire.send_more

    def receive(self):
        return decode(self.wire.waiting[self.rank].pop(0)[1])

    def receive_more(self, ranks):
        sent_to, message = self.wire.waiting[self.rank].pop(0)
        assert sent_to == ranks
        return decode(message)


def links_of(layout: Layout):
    wire = Wire(layout)
    return wire, [RankLink(wire.of(rank), layout, rank) for rank in range(layout.world_size)]


@pytest.fixture
def links():
    return links_of(layout_of(data=2))[1]


def micro_batch(row, tokens=4):
    values, rows = np.arange(tokens), np.array([row])
    return MicroBatch(values, values, np.array([0, tokens]), values * 0, values, values * 0.0, rows, values * 0.0)


def test_each_rank_gets_its_share(links):
    lead, other = links
    own = lead.hand_out([[MiniBatch(2.0, [micro_batch(0)])], [MiniBatch(2.0, [micro_batch(1), micro_batch(-1)])]])
    got = other.receive_work()
    assert [m.trajectory_index.tolist() for m in own.mini_batches[0].micro_batches] == [[0]]
    assert [m.trajectory_index.tolist() for m in got.mini_batches[0].micro_batches] == [[1], [-1]]
    assert (own.num_positions, got.num_positions, own.stop, got.stop) == (12, 0, None, None)


class Recognisable:
    """Routes that say their layer, of a model whose first layer has no experts."""

    def layers(self, chunks):
        return [layer for chunk in chunks for layer in chunk if layer > 0]

    def packed(self, micro_batch, layers):
        return np.tile(np.array(layers, np.uint8)[:, None], (micro_batch.num_tokens, 1, 2))


def test_each_stage_gets_the_routes_of_its_own_layers_and_no_others():
    layout = layout_of(data=2, tensor=2, pipeline=2)
    wire, links = links_of(layout)
    own = links[0].hand_out([[MiniBatch(2.0, [micro_batch(row), micro_batch(-1)])] for row in range(2)], Recognisable())
    works = [own, *(link.receive_work() for link in links[1:])]
    for rank, work in enumerate(works):
        place = layout.coordinates(rank)
        wanted = [1] if place.pipeline == 0 else [2, 3]
        packs = work.mini_batches[0].micro_batches
        assert [pack.trajectory_index.tolist() for pack in packs] == [[place.data], [-1]]
        for pack in packs:
            assert pack.routed_layers.tolist() == wanted
            assert pack.routed_experts.tolist() == [[[layer] * 2 for layer in wanted]] * 4
    assert not any(waiting for rank, waiting in wire.waiting.items() if rank)


@pytest.mark.parametrize(
    "sizes", [dict(tensor=4), dict(context=4), dict(pipeline=4), dict(tensor=2, pipeline=2)], ids=str
)
def test_what_leaves_rank_0_does_not_grow_with_the_ranks_of_a_replica(sizes):
    def sent_to_second_replica(layout):
        wire, links = links_of(layout)
        links[0].hand_out([[MiniBatch(2.0, [micro_batch(row, 2**14)])] for row in range(2)], Recognisable())
        second = set(layout.ranks_of(1))
        return sum(size for ranks, size in wire.sent if set(ranks) <= second)

    alone, wide = (sent_to_second_replica(layout_of(data=2, **each)) for each in ({}, sizes))
    assert alone > 2**19 and wide == pytest.approx(alone, rel=0.001), "headers and padding of four messages for one"


def test_requests_are_carried_out_while_the_others_wait(links):
    lead, other = links
    done = []
    other.on_request("publish_again", lambda: done.append("published"))
    lead.request("publish_again")
    lead.request("publish_again")
    assert lead.agree({"accuracy": 0.5}) == {"accuracy": 0.5}
    assert other.agree(None) == {"accuracy": 0.5} and done == ["published"] * 2
    lead.request("publish_again")
    assert lead.hand_out_stop("enough").stop == "enough"
    work = other.receive_work()
    assert (work.stop, work.mini_batches) == ("enough", []) and len(done) == 3


def test_ranks_that_lost_step_with_each_other_are_found(links):
    lead, other = links
    lead.agree(1)
    with pytest.raises(AssertionError, match="rank 0 sent 'value' where 'work' was due"):
        other.receive_work()
