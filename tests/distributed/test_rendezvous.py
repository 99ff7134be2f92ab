"""Messages over NCCL by a model, since the tests have no GPUs.

The real engine and the real channels run on each rank, one rank after another, with a recorder in
place of torch.distributed. It keeps the order in which a rank posts its messages and waits for
them. A simulation plays these records under the strictest rules that NCCL may follow: a message
passes when both sides have posted it, and each side's messages of a communicator pass in the order
in which it has posted them.
"""

from dataclasses import dataclass

import pytest

from brx.distributed import processes
from brx.distributed.processes import DistributedWorld
from brx.train.build import assemble
from tests.pipeline.test_engine import make_config, micro_batch

UPDATES = 12


@dataclass(eq=False)
class Message:
    """One side of a message, as its rank has posted it."""

    group: int  # the number of its process group: one for activations, one for gradients
    is_send: bool
    rank: int
    peer: int
    has_passed: bool = False

    def fits(self, other):
        """Whether the other is the same message, seen from the other side."""
        is_same_pair = (self.rank, self.peer) == (other.peer, other.rank)
        return is_same_pair and self.group == other.group and self.is_send != other.is_send


class Recorder:
    """In place of torch.distributed: what a rank posts, and what it waits for, in order."""

    def __init__(self, rank):
        self.rank = rank
        self.num_groups = 0
        self.record = []  # pairs of "post" or "wait", and the message

    def new_group(self, **options):
        self.num_groups += 1
        return self.num_groups

    def isend(self, tensor, peer, group):
        return self._post(Message(group, True, self.rank, peer))

    def irecv(self, tensor, peer, group):
        tensor.zero_()
        return self._post(Message(group, False, self.rank, peer))

    def _post(self, message):
        self.record.append(("post", message))
        return Work(self.record, message)


@dataclass
class Work:
    record: list
    message: Message

    def wait(self, timeout):
        self.record.append(("wait", self.message))


class LonelyWorld(DistributedWorld):
    """A rank that has not met the others."""

    def __init__(self, rank, num_ranks):
        self.rank, self.num_ranks = rank, num_ranks
        self._timeout_s = 1.0
        self._through_host = False


def record_of(rank, num_ranks, accumulation, monkeypatch):
    """What a rank posts and waits for in two sessions of training, with a validation between."""
    recorder = Recorder(rank)
    monkeypatch.setattr(processes, "dist", recorder)
    extra = (f"pipeline.accumulation={accumulation}", "training.batch_size=6")
    config = make_config("pipedream", num_ranks, "exact", UPDATES, *extra)
    engine = assemble(config, micro_batch, world=LonelyWorld(rank, num_ranks)).engine
    half = UPDATES // 2
    for first, last in ((1, half), (half + 1, UPDATES)):
        for _ in engine.run(first, lambda last=last: last):
            pass
        engine.evaluate([micro_batch(n) for n in range(3)])
    return recorder.record


def steps_taken(records, communicator):
    """How many steps of its record each rank gets through.

    Args:
        records: by rank.
        communicator: of a message; messages with equal ones wait for each other.
    """
    steps = [0] * len(records)
    queues = {}  # by rank and communicator: what was posted and has not passed, in order
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, record in enumerate(records):
            while steps[rank] < len(record):
                what, message = record[steps[rank]]
                if what == "post":
                    queues.setdefault((rank, communicator(message)), []).append(message)
                elif not message.has_passed:
                    break
                steps[rank] += 1
                is_moving = True
        for queue in queues.values():
            if not queue:
                continue
            message = queue[0]
            others = queues.get((message.peer, communicator(message)))
            if others and message.fits(others[0]):
                message.has_passed = others[0].has_passed = True
                del queue[0], others[0]
                is_moving = True
    return steps


def of_pair(message):
    """torch's choice when it makes communicators late: one per group and pair of ranks."""
    return message.group, min(message.rank, message.peer), max(message.rank, message.peer)


def of_group(message):
    """torch's choice with `device_id`: one per group."""
    return message.group


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_every_rank_ends_with_a_communicator_per_pair_and_direction(
    num_ranks, accumulation, monkeypatch
):
    records = [record_of(rank, num_ranks, accumulation, monkeypatch) for rank in range(num_ranks)]
    assert steps_taken(records, of_pair) == [len(record) for record in records]


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_ranks_would_wait_for_each_other_forever_with_device_id(num_ranks, monkeypatch):
    """So `init_process_group` must not be given one (docs/multi-node.md)."""
    records = [record_of(rank, num_ranks, 1, monkeypatch) for rank in range(num_ranks)]
    assert steps_taken(records, of_group) != [len(record) for record in records]
