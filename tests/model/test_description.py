"""`brx models`: every model of brx has an entry."""

from brx.config.schema import GPTConfig, LlamaConfig
from brx.model.description import all_models, one_model, sections
from brx.model.models import MODELS


def test_every_model_has_a_section():
    assert sections().keys() == MODELS.keys()


def test_sections_are_those_of_the_settings():
    assert sections() == {"gpt": GPTConfig, "llama": LlamaConfig}


def test_entry_of_one_model_is_the_lists():
    assert one_model("llama") in all_models()
