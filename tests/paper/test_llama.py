"""The two tables of cost against every value that the paper prints."""

import pytest

from brx.paper.evidence.closed_forms import STAGE_COUNTS
from brx.paper.llama import DEVICES_GB, LLAMA_3_8B, LLAMAS
from brx.planning.optimizer_memory import STRATEGIES, overhead_elements
from brx.planning.stage_count import GB, stage_count

# The paper prints >= 512 where its own rule, P >= 2 L, gives 252.
BY_THE_RULE = {**STAGE_COUNTS, "Llama 3.1 405B": [">= 252", ">= 252", ">= 252", ">= 252", "126"]}


@pytest.mark.parametrize("model", LLAMAS, ids=lambda model: model.name)
def test_stage_counts(model):
    assert [str(stage_count(model, GB * memory)) for memory in DEVICES_GB] == BY_THE_RULE[model.name]


def test_every_model_is_checked():
    assert [model.name for model in LLAMAS] == list(STAGE_COUNTS)


def test_memory_of_the_strategies():
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
