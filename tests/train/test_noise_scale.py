"""The gradient noise scale, against gradients whose noise is known."""

import pytest
import torch

from brx.config.loading import load_config
from brx.data.prepare import prepare
from brx.errors import UserError
from brx.model.stage import whole_model
from brx.train.build import training_batches
from brx.train.noise_scale import SAMPLES, gradient_noise_scale, noise_over_signal
from tests.train.helpers import tiny_config


def test_ratio_of_a_known_noise():
    generator = torch.Generator().manual_seed(0)
    signal = [torch.full((20, 10), 0.1).double(), torch.full((40,), 0.2).double()]  # |G|^2 = 3.6
    gradients = (
        [
            part + 0.3 * torch.randn(part.shape, generator=generator, dtype=torch.float64)
            for part in signal
        ]
        for _ in range(4000)
    )
    assert noise_over_signal(gradients) == pytest.approx(240 * 0.09 / 3.6, rel=0.03)
    with pytest.raises(UserError, match="2 batches do not tell"):  # noise alone
        noise_over_signal([[torch.tensor([1.0, -1.0])], [torch.tensor([-1.0, 1.0])]])


def test_ratio_of_two_gradients_by_hand():
    # The mean square is 10, and the square of the mean 8. So the noise of one is 4, the signal 6.
    gradients = [
        [torch.tensor([3.0]), torch.tensor([1.0])],
        [torch.tensor([1.0]), torch.tensor([3.0])],
    ]
    assert noise_over_signal(gradients) == pytest.approx(4 / 6)


SETTINGS = [
    "model.blocks=1",
    "pipeline.stages=1",
    "model.width=16",
    "model.heads=1",
    "model.sequence_length=16",
    "training.iterations=40",
    "runtime.threads=1",
]


def test_a_larger_batch_has_the_same_scale(tmp_path):
    settings = [*SETTINGS, f"data.directory={tmp_path}"]
    small, large = (
        gradient_noise_scale(load_config("quick", [*settings, f"training.batch_size={size}"]), 3)
        for size in (4, 16)
    )
    assert large == pytest.approx(small, rel=0.5)


def test_scale_of_a_run_with_graphs_is_measured_without_them(tmp_path):
    settings = [*SETTINGS, f"data.directory={tmp_path}"]
    plain = gradient_noise_scale(load_config("quick", settings), 3)
    graphed = load_config("quick", [*settings, "runtime.graphs=true"])
    assert gradient_noise_scale(graphed, 3) == plain


def plain_gradient(model, batch):
    """The gradient of the loss as one vector."""
    gradients = torch.autograd.grad(model(*batch).loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.usefixtures("own_code")
def test_scale_is_that_of_plain_gradients_without_delay(tmp_path):
    # The configuration is a pipeline of four stages, whose delay the measurement has to leave out.
    config = tiny_config(
        tmp_path,
        "optimizer={method: 'torch.optim:SGD', lr: 0.5}",
        "training.warmup_fraction=0.0",
        "training.final_lr_fraction=1.0",
        "training.clip=1e9",
    )
    model = whole_model(config.model, config.data.vocabulary_size, seed=config.training.seed)
    batches = training_batches(config, prepare(config.data))
    num_updates = 3
    for t in range(1, num_updates + 1):
        gradient = plain_gradient(model, batches.batch(t))
        weights = torch.nn.utils.parameters_to_vector(model.parameters())
        torch.nn.utils.vector_to_parameters((weights - 0.5 * gradient).detach(), model.parameters())

    numbers = range(num_updates + 1, num_updates + 1 + SAMPLES)
    gradients = torch.stack([plain_gradient(model, batches.batch(n)) for n in numbers]).double()
    noise = gradients.var(0).sum()  # tr(Sigma) / B
    signal = gradients.mean(0).square().sum() - noise / SAMPLES
    expected = float(noise / signal) * config.training.batch_size * config.model.sequence_length
    assert gradient_noise_scale(config, num_updates) == pytest.approx(expected, rel=1e-3)
