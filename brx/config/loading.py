"""YAML files and `--set` overrides into checked configurations; every mistake becomes one line."""

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

OF_RUNS = ("metrics.jsonl", "curves.npz", "summary.json", "checkpoints")
"""Files of a run's folder other than config.yaml; one of them identifies a run."""
MOST_SHOWN = 200  # characters of an override that a message repeats
Settings = Mapping[str, Any]  # dotted keys of a run's configuration and their values
# By section that has several forms: the key that names one, and the section's tag.
FORMS = {"optimizer": ("method", method_tag), "model": ("class", model_tag)}
OWN_TAGS = {"optimizer": "custom", "model": "own"}  # of forms that are code of the user's own
_EITHER = {"delay"}  # keys that hold a value or a section of their own (`pipeline.delay.like`)
Model = TypeVar("Model", bound=BaseModel)


def read_mapping(path: Path) -> dict[str, Any]:
    """The content of a YAML file that holds a mapping, and {} for an empty one.

    Raises:
        UserError: it cannot be read, or is something else.
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


def load_yaml_as(path: Path, model: type[Model]) -> Model:
    return validate(read_mapping(path), model, str(path))


def load_config(
    name: str | Path, overrides: Sequence[str] = (), *, is_new: bool = False
) -> RunConfig:
    """Load a run's configuration from a file, a run's folder or a preset by name, and apply
    `a.b=value` overrides."""
    path = find_config(name)
    content = new_content(path) if is_new else read_mapping(path)
    return config_of(content, _as_given(name, path), overrides)


def _as_given(name: str | Path, path: Path) -> str:
    """A configuration's file in messages: a preset by its name, not where brx keeps it."""
    return str(name) if path == PRESETS / f"{name}.yaml" else str(path)


def config_of(content: Mapping[str, Any], where: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Check what a configuration's file, `where`, holds (`read_mapping`), with `a.b=value`
    overrides."""
    if not content:  # a default run is a long one: it is asked for with {}, not by an emptied file
        raise UserError(
            f"{where}: is empty; restore it, or name a preset ({', '.join(preset_names())})"
        )
    if not overrides:
        return validate(content, RunConfig, where)
    return apply_overrides(content, overrides, where)


def new_content(path: Path) -> dict[str, Any]:
    """For a run that is to begin: files of the user's own code count as they are now, whatever an
    old run's were."""
    content = read_mapping(path)
    _refuse_recorded(content, path)
    for section in sections_of_code(content):
        section.pop("code_sha256", None)
        section.pop("facts", None)
    return content


def load_config_to_plan(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a command that plans: of a run it has what is noted of its code, of a
    preset or file its code counts as it is now."""
    path = find_config(name)
    if is_of_run(path):
        _refuse_recorded(read_mapping(path), path)
    return load_config(name, overrides, is_new=not is_of_run(path))


def allow_code_of(*names: str | Path) -> None:
    """Let a command that plans import what its configurations name of the user's own code, unless
    one of them is a run's: a run may be anybody's."""
    if not any(is_of_run(find_config(name)) for name in names):
        allow()


def is_of_run(config: Path) -> bool:
    """Whether a configuration file belongs to a run, finished or not."""
    return any((config.parent / name).exists() for name in OF_RUNS)


def sections_of_code(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of `CODE_SECTIONS` that a configuration's content has, to be changed in place."""
    for keys in CODE_SECTIONS:
        section: Any = content
        for key in keys:
            section = section.get(key) if isinstance(section, Mapping) else None
        if isinstance(section, dict):
            yield section


def _refuse_recorded(content: Mapping[str, Any], path: Path) -> None:
    optimizer = content.get("optimizer")
    if isinstance(optimizer, dict) and str(optimizer.get("method")).startswith(RECORDED):
        raise UserError(
            f"{path}: was recorded from a loop of your own, with a model that brx does not know"
        )


def find_config(name: str | Path) -> Path:
    """The configuration file: the path itself, the file of the run in a folder, or a preset in
    `configs/`."""
    path = user_path(name)
    if path.is_file():
        return path
    if (path / "config.yaml").is_file():
        return path / "config.yaml"
    preset = PRESETS / f"{name}.yaml"
    if preset.is_file():
        return preset
    presets = preset_names()
    raise UserError(
        f"{name}: no such file or preset{did_you_mean(str(name), presets)} (presets: "
        f"{', '.join(presets)})"
    )


def preset_names() -> list[str]:
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def method_names() -> list[str]:
    """The methods that come with brx."""
    return _names_of("optimizer")


def model_names() -> list[str]:
    """The models that come with brx."""
    return _names_of("model")


def _names_of(section: str) -> list[str]:
    """The tags of a section's union that are no code of the user's own."""
    tags = map(_tag_of, _models_in(RunConfig.model_fields[section].annotation))
    return [tag for tag in tags if tag != OWN_TAGS[section]]


def apply_overrides(content: Mapping[str, Any], overrides: Sequence[str], where: str) -> RunConfig:
    """Check `content` together with `a.b=value` overrides; overrides win."""
    settings: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        short = override if len(override) <= MOST_SHOWN else f"{override[:MOST_SHOWN]}..."
        # A newline must not split the message
        shown = f"--set {short}" if short.isprintable() else f"--set {short!r}"
        if not equals or not all(key.split(".")) or not key.isprintable():
            raise UserError(
                f"{shown}: write it as section.key=value, for example optimizer.lr=3e-4"
            )
        settings[key] = parse_value(text, shown)
        origins[tuple(key.split("."))] = shown
    source = f"{where} with {' '.join(origins.values())}" if origins else where
    return validate(set_values(content, settings, "--set"), RunConfig, source, origins)


def preset_with(preset: str, settings: Settings) -> RunConfig:
    path = find_config(preset)
    where = _as_given(preset, path)
    return validate(set_values(_read_once(path), settings, f"{where}:"), RunConfig, where)


_read_once = lru_cache(read_mapping)


def set_values(content: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
    """A copy of a configuration's content with dotted keys set; UserError where one leads through a
    value.

    Where `optimizer.method` or `model.class` is set, the section's other keys are kept as far as
    that method or model knows them."""
    copy = deepcopy(dict(content))
    for name, (key, tag_of) in FORMS.items():
        chosen = settings.get(f"{name}.{key}")
        if chosen is None or not isinstance(copy.get(name), dict):
            continue
        tag, before = tag_of(chosen), copy[name]
        known = set(_known_keys(RunConfig, [name, tag]))
        if tag == OWN_TAGS[name] == tag_of(before):  # one's options may be those of the other
            known |= before.keys()
        kept = known - {"code_sha256", "facts"}  # which are those of the form before
        copy[name] = {key: value for key, value in before.items() if key in kept}
    for key, value in settings.items():
        *sections, last = key.split(".")
        section = copy
        for part in sections:
            if section.get(part) is None or (
                part in _EITHER and not isinstance(section[part], dict)
            ):
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                raise UserError(f"{where} {key}: '{part}' is a value, not a section")
        section[last] = value
    _drop_facts_of_others(copy, settings)
    return copy


def _drop_facts_of_others(content: Mapping[str, Any], settings: Settings) -> None:
    """Drop what is noted of code that would now be asked otherwise: with other arguments, or of
    other stages."""
    changed = {key for key in settings if key != "optimizer.lr"}
    decisive = ("model.", "optimizer.", "pipeline.delay", "pipeline.stages", "training.seed")
    if any(key.startswith(decisive) for key in changed):
        for section in sections_of_code(content):
            section.pop("facts", None)


def dump_config(config: BaseModel) -> str:
    """The configuration, complete as far as it is known, as YAML that reloads to an equal one."""
    is_recorded = isinstance(config, RunConfig) and config.is_recorded
    content = config.model_dump(mode="json", exclude_unset=is_recorded)
    return dump_yaml(content)


def validate(
    content: Any,
    model: type[Model],
    where: str,
    origins: Mapping[tuple[str, ...], str] | None = None,
) -> Model:
    """Check what `where` (`origins` for some keys) holds against a pydantic model; a mistake is
    told in one line."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first, *others = error.errors()
        more = f" (and {len(others)} more)" if others else ""
        raise UserError(_explain(first, model, where, origins or {}) + more) from None


def _explain(
    error: ErrorDetails, model: type[BaseModel], where: str, origins: Mapping[tuple[str, ...], str]
) -> str:
    location = tuple(str(part) for part in error["loc"])
    # A tagged union puts its tag (the method's name) second in the location; the user never wrote
    # it there.
    is_tagged = location[:1] in {(name,) for name in FORMS}
    key = location[:1] + location[2:] if is_tagged else location
    origin = next((text for parts, text in origins.items() if parts == key[: len(parts)]), where)
    prefix = f"{origin}: {'.'.join(key)}: " if key else f"{origin}: "
    if error["type"] == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        return (
            f"{prefix}unknown key{did_you_mean(location[-1], known)} (known here: "
            f"{', '.join(known)})"
        )
    if error["type"] == "union_tag_invalid":
        return _explain_form(location[0], error, where, origins)
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    shown = (
        ""
        if error["type"] in ("missing", "value_error")
        else f", got {reprlib.repr(error['input'])}"
    )
    return f"{prefix}{message}{shown}"


def _explain_form(
    section: str, error: ErrorDetails, where: str, origins: Mapping[tuple[str, ...], str]
) -> str:
    """What is wrong with a method or model that is none."""
    key, _ = FORMS[section]
    prefix = f"{origins.get((section, key), where)}: {section}: "
    known, tag = _names_of(section), str(error.get("ctx", {}).get("tag"))
    what = "model" if section == "model" else "method"
    choices = f"(known: {', '.join(known)}, FILE.py:CLASS, package.module:Class)"
    if tag.endswith(".py"):
        return f"{prefix}{key} must name a class of the file, {tag}:CLASS"
    return f"{prefix}unknown {what} '{tag}'{did_you_mean(tag, known)} {choices}"


def _known_keys(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """Names of the fields of the section at `location` (a union's tag is a part of it)."""
    candidates = [model]
    for part in location:
        if len(candidates) > 1:
            candidates = [member for member in candidates if _tag_of(member) == part]
        else:
            candidates = _models_in(candidates[0].model_fields[part].annotation)
    return [_written(candidate, key) for candidate in candidates for key in candidate.model_fields]


def _written(model: type[BaseModel], key: str) -> str:
    """A field's name in YAML."""
    return model.model_fields[key].alias or key


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, UnionType)
        and issubclass(annotation, BaseModel)
    ):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _tag_of(model: type[BaseModel]) -> str:
    """The tag of a form of `optimizer` or `model`."""
    key = "method" if "method" in model.model_fields else "name"
    choices = get_args(model.model_fields[key].annotation)
    return choices[0] if choices else OWN_TAGS["optimizer" if key == "method" else "model"]
