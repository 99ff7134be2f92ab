"""Loads and checks configurations, from YAML files and `--set` overrides. Every mistake becomes one
line."""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from brx.config.parsing import dump_yaml, parse_value, parse_yaml
from brx.config.schema import CODE_SECTIONS, RECORDED, RunConfig, method_tag, model_tag
from brx.config.user_code import allow
from brx.errors import UserError, did_you_mean
from brx.files import user_path
from brx.readers import Damaged, read_text

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed package contains the presets; in a checkout they are next to the package.
PRESETS = _PACKAGE / "presets" if (_PACKAGE / "presets").is_dir() else _PACKAGE.parent / "configs"

_RECORDS = ("metrics.jsonl", "curves.npz", "summary.json")
OF_RUNS = (*_RECORDS, "checkpoints")
"""Files of a run's folder other than config.yaml; one of them identifies a run."""
MOST_SHOWN = 200  # how many characters of an override a message repeats
Settings = Mapping[str, Any]  # dotted keys of a run's configuration and their values
# Two sections have several forms, each a class of its own in the schema. The entry gives the key
# that selects the form, and the function from that key's value to the tag of the form.
FORMS = {"optimizer": ("method", method_tag), "model": ("class", model_tag)}
OWN_TAGS = {"optimizer": "custom", "model": "own"}  # tags of the forms for the user's own code
NOTED = ("code_sha256", "facts")  # keys in which brx notes what it knows of the user's own code
_EITHER = {"delay"}  # keys that hold a value or a section of their own (`pipeline.delay.like`)
Model = TypeVar("Model", bound=BaseModel)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; an empty file gives {}.

    Raises:
        UserError: the file cannot be read, is no YAML, or holds something else.
    """
    try:
        text = read_text(path)
    except Damaged as error:
        raise UserError(f"{path}: {error}") from None
    content = parse_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: must hold a mapping of keys to values, got {type(content).__name__}"
        )
    return content


def read_settings(path: Path) -> dict[str, Any]:
    """Read the configuration of a run, past or new.

    The config.yaml in a run's folder must be whole. If a copy was cut off at the end of a line, the
    rest is valid YAML, and the settings that are gone would count as defaults.

    Raises:
        UserError: as `read_mapping`, or the file was cut off.
    """
    content = read_mapping(path)
    if "base" in content and "grid" in content:
        raise UserError(f"{path}: is a sweep file, not the settings of a run; brx sweep runs it")
    # The other files tell a run from a project with a config.yaml of its own next to checkpoints.
    has_records = any((path.parent / name).exists() for name in _RECORDS)
    if content and path.name == "config.yaml" and has_records:
        _refuse_cut_off(content, path)
    return content


def _refuse_cut_off(content: Mapping[str, Any], path: Path) -> None:
    """UserError if the settings of a run lack what `dump_config` writes last."""
    if _is_recorded(content):  # has only the settings that are known of it
        training = content.get("training")
        last = "training.seed"
        is_whole = isinstance(training, dict) and "seed" in training
    else:
        last = list(RunConfig.model_fields)[-1]
        is_whole = last in content
    if not is_whole:
        raise UserError(
            f"{path}: cut off: lacks {last}, with which the settings of a run end; restore the "
            f"file from a copy"
        )


def load_yaml_as(path: Path, model: type[Model]) -> Model:
    """Read a YAML file and check it against a pydantic model.

    Raises:
        UserError: the file cannot be read, or does not fit the model.
    """
    return validate(read_mapping(path), model, str(path))


def load_config(
    name: str | Path, overrides: Sequence[str] = (), *, is_new: bool = False
) -> RunConfig:
    """Load and check a run's configuration.

    Args:
        name: a file, a run's folder, or the name of a preset.
        overrides: settings `a.b=value`, which win over the file.
        is_new: the configuration is for a new run, so what an old run noted about the user's own
            code is dropped (`new_content`).

    Raises:
        UserError: there is no such file or preset, or a key or value is wrong.
    """
    path = find_config(name)
    content = new_content(path) if is_new else read_settings(path)
    return config_of(content, _as_given(name, path), overrides)


def _as_given(name: str | Path, path: Path) -> str:
    """What messages call a configuration: a preset by its name, any other by its path."""
    is_preset = path == PRESETS / f"{name}.yaml"
    return str(name) if is_preset else str(path)


def config_of(content: Mapping[str, Any], where: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Check the content of a configuration file together with `a.b=value` overrides.

    Args:
        content: the file's content, from `read_mapping` or `new_content`.
        where: the file's name in messages.

    Raises:
        UserError: the content is empty, or a key or value is wrong.
    """
    # The default run is a long one. A file that was emptied by accident must not start it.
    if not content:
        raise UserError(
            f"{where}: is empty; restore it, or name a preset ({', '.join(preset_names())})"
        )
    if not overrides:
        return validate(content, RunConfig, where)
    return apply_overrides(content, overrides, where)


def new_content(path: Path) -> dict[str, Any]:
    """Read a configuration for a new run: without what an old run noted about the user's own code,
    since that code may have changed.

    Raises:
        UserError: the file cannot be read, or belongs to a run that was recorded from another loop.
    """
    content = read_settings(path)
    _refuse_recorded(content, path)
    for section in sections_of_code(content):
        for key in NOTED:
            section.pop(key, None)
    return content


def load_config_to_plan(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration for a command that plans (arguments and errors as `load_config`).

    A run's configuration keeps what the run noted about the user's own code. For a preset or
    another file, the code itself is looked at."""
    path = find_config(name)
    belongs_to_run = is_of_run(path)
    if belongs_to_run:
        _refuse_recorded(read_settings(path), path)
    return load_config(name, overrides, is_new=not belongs_to_run)


def allow_code_of(*names: str | Path) -> None:
    """Let a command that plans import the user's own code that these configurations name.

    If one of them belongs to a run, nothing is imported: a run may come from anybody."""
    if not any(is_of_run(find_config(name)) for name in names):
        allow()


def is_of_run(config: Path) -> bool:
    """Whether a configuration file belongs to a run, finished or not."""
    return any((config.parent / name).exists() for name in OF_RUNS)


def sections_of_code(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The sections in `CODE_SECTIONS` that the content has. They are not copies: a change to one
    changes `content`."""
    for keys in CODE_SECTIONS:
        section: Any = content
        for key in keys:
            section = section.get(key) if isinstance(section, Mapping) else None
        if isinstance(section, dict):
            yield section


def _refuse_recorded(content: Mapping[str, Any], path: Path) -> None:
    """UserError for a run that `brx.record` wrote: brx cannot build its model."""
    if _is_recorded(content):
        raise UserError(
            f"{path}: was recorded from a loop of your own, with a model that brx does not know"
        )


def _is_recorded(content: Mapping[str, Any]) -> bool:
    """Whether the content is of a run that `brx.record` wrote."""
    optimizer = content.get("optimizer")
    return isinstance(optimizer, dict) and str(optimizer.get("method")).startswith(RECORDED)


def find_config(name: str | Path) -> Path:
    """The path of a configuration file.

    Args:
        name: the file itself, a run's folder (gives its config.yaml), or the name of a preset.

    Raises:
        UserError: it is none of these; the message lists the presets.
    """
    path = user_path(name)
    if path.is_file():
        return path
    if (path / "config.yaml").is_file():
        return path / "config.yaml"
    preset = PRESETS / f"{name}.yaml"
    if preset.is_file():
        return preset
    if path.is_dir():
        raise UserError(f"{name}: is a folder without config.yaml, so it is not a run's folder")
    presets = preset_names()
    hint = did_you_mean(str(name), presets)
    raise UserError(f"{name}: no such file or preset{hint} (presets: {', '.join(presets)})")


def preset_names() -> list[str]:
    """The names of the presets that come with brx, sorted."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def method_names() -> list[str]:
    """The methods that come with brx."""
    return _names_of("optimizer")


def model_names() -> list[str]:
    """The models that come with brx."""
    return _names_of("model")


def _names_of(section: str) -> list[str]:
    """The tags of a section's forms, without the form for the user's own code."""
    tags = map(_tag_of, _models_in(RunConfig.model_fields[section].annotation))
    return [tag for tag in tags if tag != OWN_TAGS[section]]


def apply_overrides(content: Mapping[str, Any], overrides: Sequence[str], where: str) -> RunConfig:
    """Check `content` together with `a.b=value` overrides, which win.

    Raises:
        UserError: an override has another form, or a key or value is wrong. The message names the
            override if it is the cause, else `where`.
    """
    settings: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}  # the override that set a key, for messages
    for override in overrides:
        shown = f"--set {_shortened(override)}"
        key, equals, text = override.partition("=")
        parts = tuple(key.split("."))
        for earlier, earlier_shown in origins.items():
            if len(earlier) > len(parts) and earlier[: len(parts)] == parts:
                raise UserError(
                    f"{shown}: replaces the whole section, with what {earlier_shown} sets in it; "
                    f"give {shown} first"
                )
        is_well_formed = bool(equals) and all(parts) and key.isprintable()
        if not is_well_formed:
            raise UserError(
                f"{shown}: write it as section.key=value, for example optimizer.lr=3e-4"
            )
        settings[key] = parse_value(text, shown)
        origins[parts] = shown
    source = f"{where} with {' '.join(origins.values())}" if origins else where
    changed = set_values(content, settings, "--set")
    return validate(changed, RunConfig, source, origins)


def _shortened(override: str) -> str:
    """An override as messages show it: its beginning, on one line."""
    short = override
    if len(override) > MOST_SHOWN:
        short = f"{override[:MOST_SHOWN]}..."
    return short if short.isprintable() else repr(short)  # a newline would split the message


def preset_with(preset: str, settings: Settings) -> RunConfig:
    """A preset, or another configuration file, with some settings changed.

    Raises:
        UserError: there is no such preset, or a key or value is wrong.
    """
    path = find_config(preset)
    where = _as_given(preset, path)
    changed = set_values(_read_once(path), settings, f"{where}:")
    return validate(changed, RunConfig, where)


_read_once = lru_cache(read_mapping)


def set_values(content: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
    """A copy of a configuration's content in which dotted keys have new values.

    If `optimizer.method` or `model.class` is set, the section keeps the other keys that the new
    method or model knows.

    Args:
        where: the beginning of messages.

    Raises:
        UserError: a part of a key, before its last one, is a value and no section, as in
            `training.seed.a`.
    """
    copy = deepcopy(dict(content))
    for name, (key, tag_of) in FORMS.items():
        chosen = settings.get(f"{name}.{key}")
        if chosen is not None and isinstance(copy.get(name), dict):
            copy[name] = _known_to_form(copy[name], name, tag_of(chosen))
    for key, value in settings.items():
        _set_value(copy, key, value, where)
    _drop_outdated_facts(copy, settings)
    return copy


def _known_to_form(section: dict[str, Any], name: str, tag: str) -> dict[str, Any]:
    """The keys of section `name` that its form `tag` knows."""
    _, tag_of = FORMS[name]
    known = set(_known_keys(RunConfig, [name, tag]))
    own = OWN_TAGS[name]
    if tag == own and tag_of(section) == own:
        # Two classes of the user's own may have the same options.
        known |= section.keys()
    # Facts that were noted about the old code do not hold for the new code.
    kept = known.difference(NOTED)
    return {key: value for key, value in section.items() if key in kept}


def _set_value(content: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set one dotted key in place. Sections that it leads through are made if they are missing."""
    *sections, last = key.split(".")
    section = content
    for part in sections:
        inner = section.get(part)
        becomes_section = part in _EITHER and not isinstance(inner, dict)
        if inner is None or becomes_section:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise UserError(f"{where} {key}: '{part}' is a value, not a section")
    section[last] = value


def _drop_outdated_facts(content: Mapping[str, Any], settings: Settings) -> None:
    """Drop the facts recorded about the user's own code if the changed settings may change them."""
    decisive = ("model.", "optimizer.", "pipeline.delay", "pipeline.stages", "training.seed")
    changed = [key for key in settings if key.startswith(decisive) and key != "optimizer.lr"]
    if not changed:
        return
    for section in sections_of_code(content):
        section.pop("facts", None)


def dump_config(config: BaseModel) -> str:
    """A configuration as YAML that reloads to an equal one. Defaults are written too, except for a
    recorded run, for which brx knows only the settings that it was given."""
    is_recorded = isinstance(config, RunConfig) and config.is_recorded
    content = config.model_dump(mode="json", exclude_unset=is_recorded)
    return dump_yaml(content)


def validate(
    content: Any,
    model: type[Model],
    where: str,
    origins: Mapping[tuple[str, ...], str] | None = None,
) -> Model:
    """Check a file's content against a pydantic model.

    Args:
        where: the name of the source in messages.
        origins: another source for some keys, such as the override that set them. A key is the
            tuple of its parts.

    Raises:
        UserError: one line on the first mistake, with the number of the others.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        # A misspelled key is unknown, and the right one may be missing: the former says more.
        errors = sorted(error.errors(), key=lambda one: one["type"] == "missing")
        first = errors[0]
        kinds = _kinds_allowed(errors)
        num_others = len(errors) - max(1, len(kinds))
        more = f" (and {num_others} more)" if num_others else ""
        if kinds:
            key = ".".join(map(str, first["loc"][:-1]))
            problem = f"must be {_one_of(kinds)}, got {reprlib.repr(first['input'])}"
            raise UserError(f"{where}: {key}: {problem}{more}") from None
        raise UserError(_explain(first, model, where, origins or {}) + more) from None


# The types of values that a key may have, in pydantic's words and in ours.
_KINDS = {
    "bool": "true or false",
    "int": "a number",
    "float": "a number",
    "str": "a text",
    "list": "a list",
    "dict": "a mapping of keys to values",
}


def _kinds_allowed(errors: Sequence[ErrorDetails]) -> list[str]:
    """What a value may be that has none of the types of its key, in words.

    Pydantic reports one error for each type that a value may have (`int | str`), and puts the type
    last in the location. Here, these are one mistake.

    Returns:
        A text for each type; none if the first error is of another kind.
    """
    *place, _ = errors[0]["loc"] or ("",)
    kinds = []
    for error in errors:
        *place_of_error, kind = error["loc"] or ("",)
        name = str(kind).partition("[")[0]  # `list[int]`
        if place_of_error == place and name in _KINDS and error["input"] is errors[0]["input"]:
            kinds.append(_KINDS[name])
    return kinds if len(kinds) > 1 else []


def _one_of(kinds: Sequence[str]) -> str:
    """Alternatives in words: `a number, a text or a list`; each once."""
    *others, last = dict.fromkeys(kinds)
    return f"{', '.join(others)} or {last}" if others else last


def _explain(
    error: ErrorDetails, model: type[BaseModel], where: str, origins: Mapping[tuple[str, ...], str]
) -> str:
    """One line on a mistake: where it is, what is wrong, and what would be right."""
    location = tuple(str(part) for part in error["loc"])
    key = _written_key(location)
    origin = _origin_of(key, where, origins)
    is_option_of_key = len(key) == 1 and origin == f"--{key[0]}"
    prefix = f"{origin}: "
    if key and not is_option_of_key:
        prefix += f"{'.'.join(key)}: "
    if error["type"] == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        within = _sections_with(location[0]) if model is RunConfig and len(location) == 1 else []
        hint = did_you_mean(location[-1], known)
        if within:
            hint = f", did you mean '{within[0]}.{location[0]}'?"
        newer = ""
        if origin == where and _is_settings_of_run(where):
            newer = "; a newer brx may have written this run"
        return f"{prefix}unknown key{hint} (known here: {', '.join(known)}){newer}"
    is_no_section = error["type"] in ("model_type", "dict_type")
    is_of_no_form = error["type"] == "union_tag_invalid"
    if is_no_section or (is_of_no_form and not isinstance(error["input"], dict)):
        what = "a section of keys and values"
        if error["input"] is None:
            field = model.model_fields.get(location[0]) if len(location) == 1 else None
            is_required = field is not None and field.is_required()
            hint = "" if is_required else "; without the key, the defaults hold"
            return f"{prefix}must be {what}, got nothing{hint}"
        if model is RunConfig and len(key) == 1:
            what += f", such as {first_key_of(key[0])}"
        return f"{prefix}must be {what}, got {reprlib.repr(error['input'])}"
    if is_of_no_form:
        return _explain_form(location[0], error, where, origins)
    is_empty = error["input"] in ("", [], {})
    if is_empty and error["type"] in ("string_pattern_mismatch", "string_too_short", "too_short"):
        return f"{prefix}must not be empty"
    message = error["msg"].removeprefix("Value error, ")
    if key:
        message = message.removeprefix(f"{key[-1]} ")  # the prefix names the key
    message = message[0].lower() + message[1:]
    if error["type"] in ("missing", "value_error"):
        return f"{prefix}{message}"
    return f"{prefix}{message}, got {reprlib.repr(error['input'])}"


def _is_settings_of_run(where: str) -> bool:
    """Whether messages name the config.yaml of a run, finished or not."""
    path = Path(where)
    return path.name == "config.yaml" and is_of_run(path)


def _written_key(location: tuple[str, ...]) -> tuple[str, ...]:
    """The key as the user wrote it. In a section with several forms, pydantic puts the form's tag
    second in the location."""
    if location and location[0] in FORMS:
        return location[:1] + location[2:]
    return location


def _origin_of(key: tuple[str, ...], where: str, origins: Mapping[tuple[str, ...], str]) -> str:
    """The override that set the key, or the section around it; else the file `where`."""
    for parts, text in origins.items():
        if parts == key[: len(parts)]:
            return text
    return where


def _explain_form(
    section: str, error: ErrorDetails, where: str, origins: Mapping[tuple[str, ...], str]
) -> str:
    """One line on a method or model that does not exist."""
    key, _ = FORMS[section]
    origin = origins.get((section, key), where)
    prefix = f"{origin}: {section}: "
    tag = str(error.get("ctx", {}).get("tag"))
    if tag.endswith(".py"):
        return f"{prefix}{key} must name a class of the file, {tag}:CLASS"
    what = "model" if section == "model" else "method"
    known = _names_of(section)
    hint = did_you_mean(tag, known)
    choices = f"(known: {', '.join(known)}, FILE.py:CLASS, package.module:Class)"
    return f"{prefix}unknown {what} '{tag}'{hint} {choices}"


def _known_keys(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """The keys in YAML of the section at `location`, a path from `model` to it.

    In a section with several forms, the form's tag is one part of the path."""
    candidates = [model]  # more than one while the form is open
    for part in location:
        if len(candidates) > 1:
            candidates = [member for member in candidates if _tag_of(member) == part]
        else:
            candidates = _models_in(candidates[0].model_fields[part].annotation)
    keys = []
    for candidate in candidates:
        for name, field in candidate.model_fields.items():
            keys.append(field.alias or name)
    return keys


def _sections_with(key: str) -> list[str]:
    """The sections of a run's settings that have a key of this name."""
    return [name for name in RunConfig.model_fields if key in _known_keys(RunConfig, [name])]


def first_key_of(section: str) -> str:
    """The dotted key by which the form of a section is chosen; for other sections, their first
    key."""
    key = FORMS[section][0] if section in FORMS else _known_keys(RunConfig, [section])[0]
    return f"{section}.{key}"


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models that a field's annotation names, inside unions and `Annotated` too."""
    is_class = isinstance(annotation, type) and not isinstance(annotation, UnionType)
    if is_class and issubclass(annotation, BaseModel):
        return [annotation]
    models = []
    for part in get_args(annotation):
        models += _models_in(part)
    return models


def _tag_of(model: type[BaseModel]) -> str:
    """The tag of a form of `optimizer` or `model`."""
    key = "method" if "method" in model.model_fields else "name"
    choices = get_args(model.model_fields[key].annotation)
    if choices:
        tag: str = choices[0]
        return tag
    # Only the form for the user's own code takes any name.
    section = "optimizer" if key == "method" else "model"
    return OWN_TAGS[section]
