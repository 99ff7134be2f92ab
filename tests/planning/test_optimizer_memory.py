"""The closed forms of the memory overhead against the state that the optimizer keeps, and against the paper's table."""

import pytest
import torch

from brx.optim import BasisRotation
from brx.planning.optimizer_memory import LLAMA_3_8B, STRATEGIES, basis_elements, covariance_elements, overhead_elements


@pytest.mark.parametrize("shape", [(6, 6), (4, 7), (7, 4), (1, 5), (3, 4, 7)])
@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
def test_closed_forms_are_the_state(shape, source, geometry):
    parameter = torch.nn.Parameter(torch.randn(shape))
    optimizer = BasisRotation([parameter], source=source, geometry=geometry)
    parameter.grad = torch.randn(shape)
    optimizer.step()
    found = {"basis": 0, "covariance": 0, "moments": 0, "counters": 0}
    for name, tensor in optimizer.state_dict()["state"][0].items():
        kind = {"exp_avg": "moments", "exp_avg_sq": "moments"}.get(name, name.partition("_")[2])
        found[kind if kind in found else "counters"] += tensor.untyped_storage().nbytes()
    assert found["basis"] == 4 * basis_elements(shape, geometry)
    assert found["covariance"] == 4 * covariance_elements(shape, source, geometry)
    assert found["moments"] == 2 * 4 * parameter.numel()
    assert found["counters"] <= 4 + 8 * 3


def test_the_papers_table():
    gibibytes = {
        strategy: [4 * overhead_elements(shape, *strategy) / 2**30 for shape in LLAMA_3_8B.values()]
        for strategy in STRATEGIES
    }
    expected = {
        ("2nd", "bilateral"): [0.25, 1.66],
        ("2nd", "unilateral"): [0.13, 0.13],
        ("1st", "bilateral"): [0.13, 0.83],
        ("1st", "unilateral"): [0.06, 0.06],
    }
    for strategy, values in expected.items():
        assert gibibytes[strategy] == pytest.approx(values, abs=0.00501)
