"""Messages between GPUs by way of host memory, here from and to the CPU."""

from collections import deque

import pytest
import torch

from brx.distributed.processes import ThroughHost


class Loopback:
    """A channel to itself with one message in flight and one receive buffer, as over gloo."""

    def __init__(self, shape):
        self.buffer = torch.zeros(shape)
        self.sent = deque()

    def send(self, tensor):
        assert not self.sent, "the message before this one has not left"
        self.sent.append(tensor)

    def wait_for_send(self):
        if self.sent:
            message = self.sent.popleft()
            self.buffer[: len(message)] = message
            self.buffer[len(message) :] = 0

    def post_receive(self):
        pass

    def receive(self):
        self.wait_for_send()
        return self.buffer


@pytest.fixture
def channel():
    shape = (4, 3, 2)
    buffers = [torch.empty(shape), torch.empty(shape)]
    return ThroughHost(Loopback(shape), buffers, outgoing=torch.empty(shape))


def test_message_arrives_as_sent(channel):
    message = torch.randn(4, 3, 2)
    channel.send(message)
    assert torch.equal(channel.receive(), message)


def test_smaller_last_batch_arrives(channel):
    message = torch.randn(1, 3, 2)
    channel.send(message)
    assert torch.equal(channel.receive()[:1], message)


def test_next_message_leaves_the_last_alone(channel):
    first, second = torch.randn(2, 4, 3, 2)
    channel.send(first)
    received = channel.receive()
    channel.send(second)
    channel.receive()
    assert torch.equal(received, first)


def test_sender_may_change_its_tensor(channel):
    message = torch.ones(4, 3, 2)
    channel.send(message)
    message.zero_()
    assert torch.equal(channel.receive(), torch.ones(4, 3, 2))
