"""A program for the user's interpreter that has the installed DeepSpeed read a configuration.

It reads a request as JSON from standard input and writes one JSON document to standard output.
`inspection` runs it in a process that is killed when it hangs. It needs nothing of dshealthd, runs
on Python 3.8 and later with DeepSpeed 0.15 and later, and touches no GPU.

The configuration goes through DeepSpeed's own `DeepSpeedConfig`, in dictionaries that record which
keys are looked up: a key that is never looked up has no effect.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

if __name__ == "__main__" and os.path.realpath(sys.path[0]) == os.path.dirname(
    os.path.realpath(__file__)
):
    # Python puts this file's folder first, unless it is told not to: a file beside this one would
    # shadow a library's module.
    del sys.path[0]

import contextlib
import copy
import inspect
import json
import logging
import re
import resource
from typing import Any

CPU_SECONDS = 120
"""CPU time limit of this process; importing torch takes 2 to 10."""
MAX_ERRORS = 20
_OPAQUE = ("optimizer.params", "scheduler.params")
"""Blocks passed to a class that a user may choose, so any key may be right."""
_EXTRA = "extra_forbidden"
"""pydantic's type of error for a key that a block does not have."""
_LOOKED_UP = re.compile(
    r"""["'](\w+)["'] (?:not )?in (?:self\.)?config\b(?!\[)|\bconfig(?:\.get\(|\[)["'](\w+)["']"""
)


class Looks:
    """The keys that were looked up, by the dotted path of their dictionary."""

    def __init__(self) -> None:
        self.keys: dict[str, set[str]] = {}
        self.whole: set[str] = set()
        self.block = ""


class Block(dict):  # type: ignore[type-arg]
    """A dictionary that records which keys are looked up."""

    def __init__(self, content: dict[str, Any], path: str, looks: Looks) -> None:
        super().__init__(
            {
                key: Block(value, f"{path}.{key}" if path else key, looks)
                if isinstance(value, dict)
                else value
                for key, value in dict.items(content)
            }
        )
        self.path = path
        self.looks = looks

    def _look(self, key: object) -> None:
        if isinstance(key, str):
            self.looks.keys.setdefault(self.path, set()).add(key)
            if not self.path and isinstance(dict.get(self, key), dict):
                self.looks.block = key

    def __getitem__(self, key: str) -> Any:
        self._look(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._look(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value as `dict.get` does, and record the look-up."""
        self._look(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a value as `dict.pop` does, and record the look-up."""
        self._look(key)
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[str]:
        self.looks.whole.add(self.path)
        return super().__iter__()

    def keys(self) -> Any:
        """Return what is iterated and tested like the keys, so that both are recorded."""
        return self

    def items(self) -> Any:
        """Return the items as `dict.items` does, and record a look-up of all keys."""
        self.looks.whole.add(self.path)
        return super().items()

    def __copy__(self) -> Block:
        return Block(dict(super().items()), self.path, self.looks)

    def __deepcopy__(self, _memo: object) -> Block:
        return Block(copy.deepcopy(plain(self)), self.path, self.looks)


def plain(value: Any) -> Any:
    """Return a value of the configuration with each `Block` replaced by a plain dictionary."""
    if isinstance(value, dict):
        return {key: plain(below) for key, below in dict.items(value)}
    return value


def unread(document: dict[str, Any], looks: Looks) -> list[str]:
    """Return dotted paths of keys that DeepSpeed never looked up in blocks that it did read."""
    found: list[str] = []

    def walk(block: dict[str, Any], path: str) -> None:
        if path in looks.whole or path in _OPAQUE or path not in looks.keys:
            return
        for key, value in block.items():
            below = f"{path}.{key}" if path else key
            if key not in looks.keys[path]:
                found.append(below)
            elif isinstance(value, dict):
                walk(value, below)

    walk(document, "")
    return found


def read_by_source(deepspeed: Any) -> set[str]:
    """Return the top-level keys that DeepSpeed reads outside its `DeepSpeedConfig`."""
    from deepspeed.runtime import engine  # type: ignore[import-untyped]

    found: set[str] = set()
    for module in (deepspeed, engine):
        try:
            source = inspect.getsource(module)
        except OSError:  # installed without sources: fewer keys are known
            continue
        for one, other in _LOOKED_UP.findall(source):
            found.add(one or other)
    return found


def models(base: Any) -> dict[str, list[str]]:
    """Return the keys of DeepSpeed's blocks, with aliases, by the name of their class."""
    found: dict[str, list[str]] = {}
    for model in base.__subclasses__():
        pairs = ((name, field.alias) for name, field in model.model_fields.items())
        found[model.__name__] = sorted({name for pair in pairs for name in pair if name})
        found.update(models(model))
    return found


class Warnings(logging.Handler):
    """Log handler that keeps DeepSpeed's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line of DeepSpeed's log."""
        if len(self.lines) < MAX_ERRORS and record.getMessage() not in self.lines:
            self.lines.append(record.getMessage())


def complaints(error: Any, document: dict[str, Any], looks: Looks) -> list[dict[str, Any]]:
    """Return the errors in a pydantic ValidationError from DeepSpeed, with their paths."""
    found = []
    for one in error.errors():
        path = [str(part) for part in one["loc"]]
        if not (path and isinstance(document.get(path[0]), dict)):
            path = [looks.block, *path]
        found.append(
            {
                "kind": "unknown" if one["type"] == _EXTRA else "value",
                "path": ".".join(path),
                "text": one["msg"],
                "model": error.title,
            }
        )
    return found


def first_line(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message, if it has one."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def understood(config: Any) -> dict[str, Any]:
    """Return the settings that other checks compare, as DeepSpeed understood them."""
    zero = config.zero_config

    def device(block: Any) -> str:
        return str(getattr(getattr(block, "device", "none"), "value", None) or block.device)

    return {
        "stage": int(config.zero_optimization_stage),
        "offload_optimizer": device(zero.offload_optimizer) if zero.offload_optimizer else "none",
        "offload_param": device(zero.offload_param) if zero.offload_param else "none",
        "load_universal": bool(getattr(config, "load_universal_checkpoint", False)),
    }


@contextlib.contextmanager
def world(ranks: int | None) -> Iterator[None]:
    """Make DeepSpeed see a job with this number of ranks, with this process as rank 0."""
    from deepspeed import comm  # type: ignore[import-untyped]

    before = comm.get_rank, comm.get_world_size
    if ranks is not None:
        comm.get_rank, comm.get_world_size = lambda *_, **__: 0, lambda *_, **__: ranks
    try:
        yield
    finally:
        comm.get_rank, comm.get_world_size = before


def validate(deepspeed: Any, document: dict[str, Any]) -> dict[str, Any]:
    """Give a configuration to DeepSpeed; return what it refuses, else what it understands."""
    import deepspeed.runtime.config as module  # type: ignore[import-untyped]
    import pydantic
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel  # type: ignore[import-untyped]

    class Inspected(module.DeepSpeedConfig):  # type: ignore[misc]
        """DeepSpeed's configuration, without batch sizes, which another check compares."""

        def _configure_train_batch_size(self) -> None:
            try:
                super()._configure_train_batch_size()
            except (AssertionError, TypeError, ValueError, ArithmeticError):
                self.train_micro_batch_size_per_gpu = self.gradient_accumulation_steps = 1

    original = copy.deepcopy(document)
    aio = document.get("aio")
    if isinstance(aio, dict):
        aio.pop("use_gds", None)  # refused without a GPU, as in this process
    looks, config, errors = Looks(), None, []
    try:
        config = Inspected(Block(document, "", looks))
    except pydantic.ValidationError as error:
        errors = complaints(error, document, looks)
    except Exception as error:  # noqa: BLE001 - parts of DeepSpeed raise any exception
        errors.append({"kind": "refused", "path": looks.block, "text": first_line(error)})
    known = looks.keys.get("", set()) | read_by_source(deepspeed)
    return {
        "errors": errors[:MAX_ERRORS],
        "settings": None if config is None else understood(config),
        # After a refusal, later keys are never looked up, so the unread ones are unknown.
        "unread": None
        if config is None
        else [
            path for path in unread(original, looks) if path not in known and path != "aio.use_gds"
        ],
        "looked_up": {
            **{path: sorted(keys) for path, keys in looks.keys.items()},
            "": sorted(known),
        },
        "models": models(DeepSpeedConfigModel),
    }


def from_hjson(text: str) -> Any:
    """Parse a text with DeepSpeed's parser. ValueError, RecursionError."""
    import hjson  # type: ignore[import-untyped]
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys as hook

    return json.loads(json.dumps(hjson.loads(text, object_pairs_hook=hook), allow_nan=False))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request to inspect DeepSpeed."""
    try:
        import deepspeed
    except ImportError as error:
        return {"problem": f"DeepSpeed cannot be imported: {first_line(error)}"}
    except Exception as error:  # noqa: BLE001 - an installation may be broken in any way
        return {"problem": f"DeepSpeed fails at import: {first_line(error)}"}
    found: dict[str, Any] = {"version": deepspeed.__version__, "problem": ""}
    warnings = Warnings()
    loggers = [logging.getLogger(name) for name in ("DeepSpeed", "deepspeed")]
    for logger in loggers:
        logger.addHandler(warnings)
    document = request.get("document")
    try:
        if request.get("text") is not None:
            document = found["document"] = from_hjson(request["text"])
    except (ValueError, ArithmeticError, RecursionError) as error:
        found["syntax"] = first_line(error)
    if isinstance(document, dict):
        try:
            with world(request.get("ranks")):
                found.update(validate(deepspeed, document))
        except (ImportError, AttributeError, TypeError, KeyError) as error:
            found["problem"] = f"this release of DeepSpeed is not supported: {first_line(error)}"
    for logger in loggers:
        logger.removeHandler(warnings)
    found["warnings"] = warnings.lines
    return found


def main() -> None:
    """Answer the request on standard input."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    output = os.dup(1)
    os.dup2(2, 1)  # libraries print too; only the answer belongs on standard output
    found = answer(json.load(sys.stdin))
    try:
        text = json.dumps(found, allow_nan=False)
    except (ValueError, ArithmeticError) as error:  # Infinity in a configuration
        text = json.dumps({"problem": f"no JSON: {error}"}, allow_nan=False)
    with os.fdopen(output, "w") as stream:
        stream.write(text)


if __name__ == "__main__":
    main()
