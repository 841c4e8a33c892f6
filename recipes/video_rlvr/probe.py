"""Whether a clip or picture can be decoded: a row that verl cannot decode leaves nothing but a traceback in its log."""

from pathlib import Path

import av
from PIL import Image

# A clip ends this many seconds before the length that its header gives, and counts as complete.
TAIL_SECONDS = 1.0


def probe_video(path: Path) -> float:
    """Return the seconds of a video whose last frame can be decoded.

    Raises:
        ValueError: not a video, or cut off.
    """
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        if stream.frames and stream.average_rate:
            seconds = float(stream.frames / stream.average_rate)
        elif container.duration is not None:
            seconds = container.duration / av.time_base
        else:
            raise ValueError("its header gives no length")
        start = float((stream.start_time or 0) * stream.time_base)
        # From its beginning where a container has no index to find its end by.
        for begin in (max(0.0, start + seconds - TAIL_SECONDS), 0.0):
            container.seek(int(begin * av.time_base))
            if times := [frame.time for frame in container.decode(stream) if frame.time is not None]:
                break
        end = max(times, default=start) - start
        if end < seconds - TAIL_SECONDS or not times:
            raise ValueError(f"its header gives {seconds:.1f} s, and the last frame is at {end:.1f} s")
        if stream.frames == 1:
            raise ValueError("it has one frame; verl needs two")
        return seconds


def probe(kind: str, path: Path) -> float | tuple[str, str]:
    """Return the seconds of a clip, 0 for a picture, or reason and message of the error that its rows raise."""
    if not path.is_file():
        return "missing file", f"path: no such file: {path}"
    try:
        if kind == "video":
            return probe_video(path)
        with Image.open(path) as image:
            image.load()
        return 0.0
    # PyAV's errors are ValueErrors or OSErrors; Pillow says SyntaxError of some broken files.
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        return "unreadable file", f"path: cannot decode {path}: {error}"
