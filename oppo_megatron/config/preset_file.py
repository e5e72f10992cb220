"""Presets of a user's own: `algorithm.preset: my.yaml` lays a file of settings under the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from oppo_megatron.config.paths import missing_path
from oppo_megatron.nesting import read_yaml

SECTIONS = ("algorithm", "ppo", "dpo", "rollout", "overlap", "filter")
SUFFIXES = (".yaml", ".yml")


def with_preset_file(settings: Any) -> Any:
    """Return the settings over those of the file that `algorithm.preset` names, if it names one.

    The file names in `algorithm.preset` the built-in preset that it starts from.  Raises ValueError if it cannot be read, or
    has other sections.
    """
    algorithm = settings.get("algorithm") if isinstance(settings, dict) else None
    name = algorithm.get("preset") if isinstance(algorithm, dict) else None
    if not isinstance(name, str | Path) or Path(name).suffix not in SUFFIXES:
        return settings
    assert isinstance(algorithm, dict), "it has the name"
    brought = _read(Path(name))
    start = brought.get("algorithm", {}).get("preset", "ppo") if isinstance(brought.get("algorithm"), dict) else "ppo"
    if Path(str(start)).suffix in SUFFIXES:
        raise ValueError(f"algorithm.preset of `{name}` is `{start}`, but must be a built-in preset; name one of these")
    return _laid_over(brought, {**settings, "algorithm": {**algorithm, "preset": start}})


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(missing_path("algorithm.preset", path))
    try:
        tree = read_yaml(path.read_bytes())
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ValueError(f"algorithm.preset `{path}` cannot be read ({str(error).partition(chr(10))[0]}); correct it") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ValueError(f"algorithm.preset `{path}` is not a YAML mapping; write sections such as `ppo: {{clip: 0.1}}`")
    if others := [key for key in tree if key not in SECTIONS]:
        raise ValueError(
            f"algorithm.preset `{path}` has {', '.join(others)}, but a preset has the sections {', '.join(SECTIONS)} only; move "
            "the others into the configuration"
        )
    return tree


def _laid_over(under: Any, over: Any) -> Any:
    """The mapping `under` with the keys of `over` replaced, section by section."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return {**under, **{key: _laid_over(under[key], value) if key in under else value for key, value in over.items()}}
