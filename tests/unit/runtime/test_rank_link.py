"""Rank 0 leads: work, values and requests reach the other ranks in the order in which it sends them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gspo_mega.batches.assemble import MiniBatch
from gspo_mega.records import MicroBatch
from gspo_mega.runtime.message_codec import decode, encode
from gspo_mega.runtime.rank_link import RankLink


class Wire:
    """Messages to rank 1 of two, through their encoding."""

    def __init__(self):
        self.messages = []

    def send_each(self, values):
        self.messages.append(encode(values[1]))
        return values[0]

    def send_all(self, value):
        return self.send_each([value, value])

    def receive(self):
        return decode(self.messages.pop(0))


@pytest.fixture
def links():
    wire = Wire()
    layout = SimpleNamespace(world_size=2, coordinates=lambda rank: SimpleNamespace(data=rank))
    return RankLink(wire, layout, leads=True), RankLink(wire, layout, leads=False)


def micro_batch(row):
    tokens, rows = np.arange(4), np.array([row])
    return MicroBatch(tokens, tokens, np.array([0, 4]), tokens * 0, tokens, tokens * 0.0, rows, tokens * 0.0)


def test_each_rank_gets_its_share(links):
    lead, other = links
    own = lead.hand_out([[MiniBatch(2.0, [micro_batch(0)])], [MiniBatch(2.0, [micro_batch(1), micro_batch(-1)])]])
    got = other.receive_work()
    assert [m.trajectory_index.tolist() for m in own.mini_batches[0].micro_batches] == [[0]]
    assert [m.trajectory_index.tolist() for m in got.mini_batches[0].micro_batches] == [[1], [-1]]
    assert (own.num_positions, got.num_positions, own.stop, got.stop) == (12, 0, None, None)


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
