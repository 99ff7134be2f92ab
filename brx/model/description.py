"""The models in words: what they are, and their options."""

import inspect
import textwrap
from typing import Any, get_args

from brx.config.loading import validate
from brx.config.schema import ModelConfig, ModelSection, OwnModelConfig, Section
from brx.errors import UserError, did_you_mean
from brx.model.models import MODELS, load_model_class

WIDTH = 110
COLUMN = 46  # where an option's explanation begins
OWN = "FILE.py:CLASS"
OWN_SUMMARY = (
    "a torch.nn.Module of your own with embed, blocks and head; its further options are keys of the"
    " section (docs/models.md)"
)


def sections() -> dict[str, type[ModelSection]]:
    """The schema of each of brx's models, by name, in the order of `ModelConfig`."""
    union, _ = get_args(ModelConfig)  # the other is the discriminator
    section_by_name = {}
    for tagged in get_args(union):
        section, tag = get_args(tagged)
        if section is not OwnModelConfig:
            section_by_name[tag.tag] = section
    return section_by_name


def all_models() -> str:
    """Every model with its options; for `brx models`."""
    entries = [_entry(name, section) for name, section in sections().items()]
    entries.append(_filled(f"{OWN}: {OWN_SUMMARY}", "  "))
    return "\n\n".join(entries)


def one_model(name: str) -> str:
    """One model with its options. For a user's own model, these are its constructor's arguments.

    Raises:
        UserError: there is no model of this name.
    """
    if ":" in name:
        settings = validate({"class": name}, OwnModelConfig, "model")
        parameters = inspect.signature(load_model_class(settings)).parameters
        options = [f"  {parameters[key]}" for key in parameters if key != "vocabulary_size"]
        return "\n".join([f"{name}: a model of your own", *options])
    if name not in MODELS:
        known = ", ".join(MODELS)
        raise UserError(f"{name}: no such model{did_you_mean(name, MODELS)} (known: {known})")
    return _entry(name, sections()[name])


def _entry(name: str, section: type[ModelSection]) -> str:
    lines = [_filled(f"{name}: {_sentence(section.__doc__)}", "  ")]
    return "\n".join(lines + _options(section, "  "))


def _options(section: type[Section], indent: str, prefix: str = "") -> list[str]:
    """One or more lines for each key of a section, and for each key of its subsections."""
    lines = []
    for key, field in section.model_fields.items():
        if key == "name":
            continue
        default: Any = field.get_default(call_default_factory=True)
        shown = "null" if default is None else str(default).lower()
        title = f"{indent}{prefix}{key} = {shown}"
        explanation = _sentence(field.description)
        lines.append(_filled(f"{title:<{COLUMN - 1}} {explanation}", " " * COLUMN))
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, Section):
                lines += _options(inner, indent, f"{prefix}{key}.")
    return lines


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _filled(text: str, further: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=further, break_on_hyphens=False)
