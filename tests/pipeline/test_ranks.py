"""Several ranks of the engine in one process: a thread per rank, queues between neighbours."""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from brx.pipeline.world import Neighbours, World
from brx.train.build import assemble
from tests.pipeline.test_engine import make_config, micro_batch

NUM_RANKS = 3
MIDDLE = 1
TIMEOUT = 60  # seconds, after which a rank gives up on a neighbour that has failed


class QueueChannel:
    """Tensors on their way between threads."""

    def __init__(self, outgoing, incoming):
        self.outgoing, self.incoming = outgoing, incoming

    def send(self, tensor):
        self.outgoing.put(tensor.clone())

    def receive(self):
        return self.incoming.get(timeout=TIMEOUT)

    def post_receive(self):
        pass

    wait_for_send = post_receive


class ThreadWorld(World):
    """The ranks as one of them sees them.

    Args:
        rank: this one.
        down: by receiving rank, the residual streams on their way to it.
        up: by receiving rank, the gradients on their way to it.
    """

    num_ranks = NUM_RANKS

    def __init__(self, rank, down, up):
        super().__init__()
        self.rank, self.down, self.up = rank, down, up

    def connect(self, shape, dtype, device):
        activations = QueueChannel(self.down.get(self.rank + 1), self.down[self.rank])
        gradients = QueueChannel(self.up.get(self.rank - 1), self.up[self.rank])
        return Neighbours(activations, gradients)


def tokens_of(rank):
    """What gives a rank its tokens; the middle one has none."""

    def none(n):
        raise AssertionError(f"the middle rank asks for micro-batch {n}")

    return none if rank == MIDDLE else micro_batch


def losses_of_ranks(config, updates):
    """The last rank's losses, when each rank is a thread."""
    down = {rank: SimpleQueue() for rank in range(NUM_RANKS)}
    up = {rank: SimpleQueue() for rank in range(NUM_RANKS)}
    engines = []
    for rank in range(NUM_RANKS):
        world = ThreadWorld(rank, down, up)
        engines.append(assemble(config, tokens_of(rank), world=world).engine)

    def train(engine):
        return [result.loss for result in engine.run(1, lambda: updates)]

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        ranks = [threads.submit(train, engine) for engine in engines]
        return ranks[-1].result()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_middle_rank_trains_without_tokens(accumulation):
    config = make_config("pipedream", 3, "exact", 24, f"pipeline.accumulation={accumulation}")
    alone = assemble(config, micro_batch).engine
    expected = [result.loss for result in alone.run(1, lambda: 6)]
    assert losses_of_ranks(config, 6) == expected
