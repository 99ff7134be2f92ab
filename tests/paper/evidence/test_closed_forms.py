"""What follows from formulas, as the paper prints it or not; a changed print changes the verdict."""

import pytest

from brx.paper import measured_evidence as closed_forms
from brx.paper.measured_evidence import memory_of_strategies, memory_share, parameter_counts, stage_counts
from brx.paper.printed import DEVICES_GB, LLAMA_3_8B, LLAMAS, STAGE_COUNTS
from brx.planning.optimizer_memory import STRATEGIES, overhead_elements
from brx.planning.stage_count import GB, stage_count


def test_memory():
    assert memory_share(None).value == pytest.approx(4096 / (4 * 14336))
    judged = memory_of_strategies(None)
    assert judged.holds
    assert "1st/bilateral 0.13 and 0.83" in judged.text


def test_every_cell_of_the_memory_table_counts(monkeypatch):
    monkeypatch.setattr(closed_forms, "MEMORY_GIB", [*closed_forms.MEMORY_GIB[:-1], ["0.06", "0.07"]])
    assert not memory_of_strategies(None).holds


def test_parameters(monkeypatch):
    assert parameter_counts(None).holds
    assert parameter_counts(None).text == "paper-95m 95.6 M, paper-1b 1,035.0 M, paper-3b 3,047.0 M"
    monkeypatch.setitem(closed_forms.PARAMETERS, "paper-1b", 1.2e9)
    assert not parameter_counts(None).holds


def test_stage_counts_differ_for_one_model_alone(monkeypatch):
    judged = stage_counts(None)
    assert not judged.holds
    assert judged.text.startswith("6 of 7 models as printed; not Llama 3.1 405B")
    monkeypatch.setitem(closed_forms.STAGE_COUNTS, "Llama 3.1 405B", [">= 252"] * 4 + ["126"])
    assert stage_counts(None).holds


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
