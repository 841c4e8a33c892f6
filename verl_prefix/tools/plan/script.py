"""The training command inside a shell script, or in one quoted word: bash itself expands it, and nothing else runs."""

import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from verl_prefix.tools.plan.options import MAIN, PlanError

# Restricted bash starts no program by a path and writes no file, and it finds none in an empty PATH. A script goes on
# where one is missing, or where `set -e` would have ended it.
PRELUDE = """
BASH_XTRACEFD={descriptor}
command_not_found_handle() {{ return 0; }}
set() {{ :; }}
kill() {{ :; }}
source() {{ :; }}
cd() {{ FOLDER=$1; }}
pwd() {{ echo "${{FOLDER:-$PWD}}"; }}
dirname() {{ case $1 in */*) echo "${{1%/*}}" ;; *) echo . ;; esac; }}
"""
SECONDS = 20  # a script that waits for something waits for ever here


def expanded(words: list[str]) -> list[str]:
    """The words of a training command; of a script's file or a quoted command, as bash expands them.

    Args:
        words: of the command line. Those behind a script's file are its arguments; where it leaves them out they come
            last.

    Raises:
        PlanError: the script has no training command, or does not come to it.
    """
    if not words:
        return words
    first, *rest = words[1:] if words[0] in ("bash", "sh") and len(words) > 1 else words
    is_quoted = any(map(str.isspace, first)) and any(map(MAIN.fullmatch, first.split()))
    is_file = "=" not in first and not MAIN.fullmatch(first) and Path(first).is_file()
    if not (is_quoted or is_file):
        return [first, *rest]
    named = first if is_file else "the quoted command"
    with tempfile.TemporaryFile("w+") as trace, tempfile.NamedTemporaryFile("w") as prelude:
        prelude.write(PRELUDE.format(descriptor=trace.fileno()))
        prelude.flush()
        script = [str(Path(first).resolve()), *rest] if is_file else ["-c", first]
        environment = os.environ | {"PATH": "/nonexistent", "BASH_ENV": prelude.name, "PS4": "+ "}
        try:
            subprocess.run(
                ["/bin/bash", "-r", "-x", *script], env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[trace.fileno()], timeout=SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise PlanError(f"{named} takes over {SECONDS} s to read; give the words of its training command") from None
        trace.seek(0)
        text = trace.read()
    for entry in re.split(r"^\++ ", text, flags=re.MULTILINE):
        if "main_ppo" in entry and any(map(MAIN.fullmatch, found := shlex.split(entry))):
            return found + [word for word in rest if word not in found]
    raise PlanError(
        f"{named} comes to no python3 -m verl.trainer.main_ppo; give the words of its training command, key=value ..."
    )
