"""The closed forms of the memory overhead against the state that the optimizer keeps."""

import pytest
import torch

from brx.optim import BasisRotation
from brx.planning.optimizer_memory import STRATEGIES, overhead_elements


@pytest.mark.parametrize("shape", [(6, 6), (4, 7), (7, 4), (1, 5), (3, 4, 7)])
@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
def test_closed_forms_are_the_state(shape, source, geometry):
    parameter = torch.nn.Parameter(torch.randn(shape))
    optimizer = BasisRotation([parameter], source=source, geometry=geometry)
    parameter.grad = torch.randn(shape)
    optimizer.step()
    num_bytes = {"basis": 0, "covariance": 0, "moments": 0, "counters": 0}
    for name, tensor in optimizer.state_dict()["state"][0].items():
        kind = {"exp_avg": "moments", "exp_avg_sq": "moments"}.get(name, name.partition("_")[2])
        num_bytes[kind if kind in num_bytes else "counters"] += tensor.untyped_storage().nbytes()
    assert num_bytes["basis"] + num_bytes["covariance"] == 4 * overhead_elements(shape, source, geometry)
    assert num_bytes["moments"] == 2 * 4 * parameter.numel()
    assert num_bytes["counters"] <= 4 + 8 * 3
