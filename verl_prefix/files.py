"""Files that are written whole or not at all."""

import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: bytes | str) -> None:
    """Writes beside `path`, to the disk, and renames: a full disk or a kill leaves what was there before.

    Of several writers the last one's content stays. An error leaves nothing beside `path`.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
