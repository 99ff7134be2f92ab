"""`brx models` and the page of models: every model of brx has an entry."""

import re
from pathlib import Path

import pytest

from brx.config.loading import validate
from brx.model.description import OWN, all_models, one_model, sections
from brx.model.models import MODELS
from brx.model.stage import whole_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_every_model_has_a_section():
    assert sections().keys() == MODELS.keys()


def test_every_model_has_a_row_on_the_page():
    table = PAGE.read_text().partition("\n## ")[0]  # up to the first heading
    assert re.findall(r"^\| `(.+?)`.* \|$", table, flags=re.M)[1:] == [*MODELS, OWN]


@pytest.mark.parametrize("name", MODELS)
def test_entry_of_one_model_is_the_lists(name):
    assert one_model(name) in all_models()


def test_every_model_has_words_of_its_own():
    words = {validate({"class": name}, sections()[name], "model").in_words for name in MODELS}
    assert len(words) == len(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_shrunk_model_has_the_same_parameters(name):
    section = validate({"class": name, "blocks": 2}, sections()[name], "model")
    names = []
    for model in (section, section.shrunk(8)):
        names.append([name for name, _ in whole_model(model, 16, seed=None).named_parameters()])
    assert names[0] == names[1]
