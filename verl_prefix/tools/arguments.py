"""Words of a command line, for `verl-prefix` and for the examples: what is wrong with one is said in one line, with the
value seen and what to type instead. The readers are argparse's `type`."""

import argparse
import math
import re
import tempfile
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, NoReturn

HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")


class Parser(argparse.ArgumentParser):
    """Takes whole names of options alone; says what is wrong in one line, without the usage above it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def numbers(form: str, counts: Container[int]) -> Callable[[str], tuple[int, ...]]:
    """Reader of so many numbers above 0, divided as in `form`."""

    def read(text: str) -> tuple[int, ...]:
        values = [int(x) if x.isdecimal() else 0 for x in text.split("/" if "/" in form else ",")]
        if len(values) not in counts or min(values) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}: write {form}, numbers above 0")
        return tuple(values)

    return read


def names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reader of some of the names, comma-separated, each at most once."""

    def read(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(known) or len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r}: name each of {', '.join(known)} at most once")
        return found

    return read


def at_least(least: float, kind: type = int) -> Callable[[str], Any]:
    """Reader of a finite number."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r}: give a number of {least} or more")
        return value

    return read


def file_to_read(text: str) -> Path:
    """Reader of a file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is no file here; name one that is")
    return path


def model_to_read(text: str) -> str:
    """Reader of a model's folder, or of its name on the hub, which is asked for the config."""
    if not Path(text, "config.json").is_file() and (Path(text).is_dir() or not HUB_NAME.fullmatch(text)):
        raise argparse.ArgumentTypeError(f"{text} has no config.json; name a model's folder, or a model of the hub")
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(text)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text} cannot be read here ({reason}); name a model's folder") from error
    return text


def file_to_write(text: str) -> Path:
    """Reader of a file that a report can be written to, before the hours that it takes to make it."""
    path = Path(text)
    try:
        if path.exists() and not path.is_file():
            wrong = "is a folder" if path.is_dir() else "is no plain file"
        elif not path.parent.is_dir():
            wrong = f"is in {path.parent}, which is no folder here"
        else:
            _write_nothing(path.parent)
            return path
    except OSError as error:
        wrong = f"cannot be written ({error.strerror})"
    raise argparse.ArgumentTypeError(f"{path} {wrong}; write the name of a file in a folder that exists")


def json_to_write(text: str) -> Path:
    """Reader as `file_to_write`, of a report that has its Markdown and its plot beside it, by their endings."""
    path = file_to_write(text)
    if path.suffix != ".json":
        beside, right = ".md and .png are written beside it", path.with_suffix(".json")
        raise argparse.ArgumentTypeError(f"{path} does not end in .json, and {beside}; write {right}")
    return path


def folder_to_write(text: str | Path) -> Path:
    """Reader of a folder that files can be written to, or that can be made. It is not made yet."""
    path = Path(text)
    try:
        _write_nothing(_there(path))
    except OSError as error:
        told = f"{path} cannot be written ({error.strerror}); name a folder that can be made, or written to"
        raise argparse.ArgumentTypeError(told) from None
    return path


def _there(path: Path) -> Path:
    """The path, or the nearest above it that exists."""
    try:
        path.lstat()
    except FileNotFoundError:
        return _there(path.parent)
    return path


def _write_nothing(folder: Path) -> None:
    """Raises OSError where no file can be made. Permissions would not tell: /proc has root's, and takes none."""
    tempfile.TemporaryFile(dir=folder).close()
