"""Writes files whole or not at all, and reads JSON that anyone wrote."""

import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Writes beside `path`, to the disk, and then renames: a full disk or a kill leaves what was there before.

    Of several writers the last one's content stays. An error leaves nothing beside `path`.

    Args:
        mode: permissions of the file, less the process's umask.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError where it is none, or is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
