"""The training command inside a shell script, or in one quoted word: bash itself expands it, and nothing else runs."""

import contextlib
import fcntl
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from verl_prefix.tools.plan.options import MAIN, PlanError

# Restricted bash starts no program by a path and opens no file to write, and it finds no program in an empty PATH. A
# script goes on where one is missing, or where `set -e` or `exit` would have ended it. A loop in the background that
# sleeps ends after twenty rounds. A script that it calls, itself or by a program (srun bash SCRIPT), is named in the
# trace, with its environment, and read next; a file that it sources is named there too, and SOURCED holds its text when
# the script is traced again.
PRELUDE = """
ulimit -t {seconds}
BASH_XTRACEFD={descriptor}
readonly PS4
enable -n history fc
command_not_found_handle() {{
  case " $* " in *" bash "* | *" sh "*) ;; *) return 0 ;; esac
  while [[ $1 != bash && $1 != sh ]]; do shift; done
  "$@"
}}
command() {{ :; }}
set() {{ case $1 in [-+]a) builtin set "$1" ;; esac; }}
exit() {{ :; }}
kill() {{ :; }}
sleep() {{ (( ++SLEPT < 20 )) || [[ $BASHPID = "$$" ]] || builtin exit; }}
source() {{
  local SCRIPT_SOURCE=$1
  [[ $1 = /* ]] || SCRIPT_SOURCE=$PWD/$1
  : SOURCE "$1" "$SCRIPT_SOURCE"
  shift
  (( $# )) || builtin set -- "${{SCRIPT_ARGUMENTS[@]}}"
  eval "${{SOURCED[$SCRIPT_SOURCE]}}"
}}
function . {{ source "$@"; }}
cd() {{ [[ $1 != -- ]] || shift; case $1 in /*) PWD=$1 ;; *) PWD=$PWD/$1 ;; esac; }}
pwd() {{ echo "$PWD"; }}
bash() {{ : SCRIPT "$PWD" "$(export -p)" "$@"; }}
sh() {{ bash "$@"; }}
dirname() {{ [[ $1 != -- ]] || shift; case $1 in */*) echo "${{1%/*}}" ;; *) echo . ;; esac; }}
realpath() {{ case ${{!#}} in /*) echo "${{!#}}" ;; *) echo "$PWD/${{!#}}" ;; esac; }}
readlink() {{ realpath "$@"; }}
"""
ARGUMENTS = 'SCRIPT_ARGUMENTS=("$@")\n'  # for a file that is sourced without any
DECLARE = re.compile(r"^([ \t]*(?:declare|typeset))\b", re.M)  # `source` is a function here, where it would be local
# The end of a block whose output goes to files, { ...; } > log 2>&1: restricted bash would leave the block out.
TO_FILE = re.compile(
    r"((?:^|[;\s])(?:[})]|done|fi|esac))"
    r"(?:[ \t]*(?:\d*>[>|]?|&>>?)&?[ \t]*(?:\"[^\"\n]*\"|'[^'\n]*'|\$\([^()\n]*\)|[^\s;|&()\"'])+)+",
    re.M,
)
# A script that runs in this one's place, or is called by its path, which a restricted bash would not do.
CALL = re.compile(
    r"^([ \t]*)(?:exec[ \t]+)?(?:(?:ba)?sh[ \t]+|(?=\"[^\"\n]*\.sh\"|[^\s\"'=#;|&()]+\.sh(?:\s|$)))", re.M
)
SFT = re.compile(r"\bverl[./]trainer[./]\w*sft\w*")  # verl's trainers of it
VAL_ONLY = re.compile(r"\+*trainer\.val_only=['\"]?(?i:true)['\"]?")
DEEP = 5  # a script that calls itself ends
SECONDS = 20  # a script that waits for something waits for ever here
CPU_SECONDS = 1  # so does a loop in the background, which would watch the training


def expanded(words: list[str]) -> list[str]:
    """The words of a training command; of a script's file or a quoted command, as bash expands them.

    Args:
        words: of the command line. Those behind a script's file are its arguments; overrides among them come last where
            the script uses none of its arguments.

    Raises:
        PlanError: the script has no training command, or does not come to it.
    """
    if words and words[0] in ("bash", "sh"):
        words = list(itertools.dropwhile(lambda word: word.startswith("-"), words[1:]))
    if not words:
        return words
    first, *rest = words
    is_quoted = any(map(str.isspace, first)) and any(map(MAIN.fullmatch, first.split()))
    is_file = not any(map(MAIN.fullmatch, words)) and os.path.isfile(first)  # which says no to names that cannot be
    if not (is_quoted or is_file):
        return words
    named = first if is_file else "the quoted command"
    text = first if is_quoted else Path(first).read_bytes().decode(errors="surrogateescape")
    ends = (line for line in text.split("\n") if line.endswith("\r") and not line.lstrip().startswith("#"))
    if is_file and any(map(str.strip, ends)):
        raise PlanError(f"{named} has Windows line ends, which bash reads as parts of words: sed -i 's/\\r$//' {named}")
    arguments = [] if is_quoted else [str(Path(first).resolve()), *rest]
    calls = _trainings(text, arguments, named)
    # A function that runs its arguments is in the trace first: run python3 -m ...
    calls = [words for words in calls if not any(words[1:] == other[: len(words) - 1] for other in calls)]
    trains = [words for i, words in enumerate(calls) if words not in calls[:i]]
    if not trains:
        raise PlanError(_why_none(text, arguments, named))
    command = next((words for words in trains if not any(map(VAL_ONLY.fullmatch, words))), trains[0])
    if len(trains) > 1:
        which = f"{named} has {len(trains)} training commands, and this is number {trains.index(command) + 1}"
        print(f"note: {which}; to plan another, paste it behind verl-prefix plan", file=sys.stderr)
    is_used = any(word in command for word in rest)
    return command if is_used else command + [word for word in rest if "=" in word or word.startswith("~")]


def _trainings(text: str, words: list[str], named: str, depth: int = 0) -> list[list[str]]:
    """The training commands of a script, and of the scripts that it calls; arguments as of `_trace`."""
    entries, found = _trace(text, words, named), list[list[str]]()
    _say_what_was_not_read(entries)
    for i, entry in enumerate(entries):
        if entry.startswith(": SCRIPT ") and depth < DEEP:
            _, _, folder, exports, *call = _words(entry) or [""] * 4
            script, *rest = [*itertools.dropwhile(lambda word: word.startswith("-"), call), ""]
            if os.path.isfile(path := Path(folder, script)):  # of `bash -c` a command, which may be no name
                inner = f"{exports}\nSCRIPT_SOURCE=$0\n{path.read_text(errors='surrogateescape')}"
                found += _trainings(inner, [str(path.resolve()), *rest[:-1]], str(path), depth + 1)
        elif any(name in entry for name in ("main_ppo", "fully_async_main")) and _trains(command := _words(entry)):
            found.append(command)
            if end := next((entry for entry in entries[:i] if re.match(r"exit\b", entry)), None):
                print(f"note: {named} ends with {end.strip()} before it trains; it was read on", file=sys.stderr)
    return found


def _why_none(text: str, arguments: list[str], named: str) -> str:
    """Why a script has no training command that can be planned, and what to type; arguments as of `_trace`."""
    if sft := SFT.search(text):
        told = f"not supported: {named} trains by {sft[0]}, whose rows share no prompt"
        return f"{told}; plan is for training by verl.trainer.main_ppo"
    if wrong := _syntax_error(text):
        return f"{named} is no script that bash can read: {wrong}"
    told = f"{named} comes to no python3 -m verl.trainer.main_ppo where no program runs and no file is written"
    said = _said_at_its_end(_trace(text, arguments, named))
    told += f", and ends with {said!r}; give its arguments, or" if said else "; give"
    return f"{told} the words of its training command, key=value ..."


def _syntax_error(text: str) -> str:
    """What bash says of a script that it cannot read to its end; "" where it can."""
    check = subprocess.run(
        ["/bin/bash", "-n", "/dev/stdin"], input=text.encode(errors="surrogateescape"), capture_output=True,
        check=False, env={"LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    first, _, _ = check.stderr.decode(errors="replace").removeprefix("/dev/stdin: ").partition("\n")
    return first


def _said_at_its_end(entries: list[str]) -> str:
    """What a script says where it ends with an error, as one does that misses an argument; "" where it says nothing."""
    for before, entry in itertools.pairwise(entries):
        if re.match(r"exit [1-9]", entry) and (words := _words(before))[:1] == ["echo"]:
            return " ".join(words[1:])
    return ""


def _sourced(entries: list[str]) -> dict[str, str]:
    """The files that a script sources: name, as it stands there -> the key of its text in SOURCED, a path."""
    calls = (_words(entry) for entry in entries if entry.startswith(": SOURCE "))
    return {words[2]: words[3] for words in calls if len(words) > 3}


def _say_what_was_not_read(entries: list[str]) -> None:
    files = [name for name, path in _sourced(entries).items() if not os.path.isfile(path)]
    if files := [name for name in files if not name.endswith("activate")]:
        print(f"note: {', '.join(files)} was not read; what it sets is empty here", file=sys.stderr)


def _words(entry: str) -> list[str]:
    """The words of an entry; none where it is text of several lines, of which one begins as an entry does."""
    try:
        return shlex.split(entry)
    except ValueError:
        return []


def _trains(words: list[str]) -> bool:
    """Whether this is a training command, and not one that names it, as an assignment, a test or pkill does."""
    if (
        not words
        or words[0] in ("echo", "eval", "printf", "[", "[[", "test")
        or re.match(r"\w+(\[.*\])?\+?=", words[0])
    ):
        return False
    pairs = zip(words, words[1:], strict=False)
    return any(MAIN.fullmatch(word) and (before == "-m" or word.endswith(".py")) for before, word in pairs)


def _trace(text: str, words: list[str], named: str) -> list[str]:
    """What bash would run of a script, and of the files that it sources, one entry a command; see `_traced`."""
    sourced = dict[str, str]()
    while True:
        entries = _traced(text, words, named, sourced)
        found = {path for path in _sourced(entries).values() if os.path.isfile(path)} - sourced.keys()
        if not found:
            return entries
        for path in found:
            sourced[path] = DECLARE.sub(r"\1 -g", _readable(Path(path).read_text(errors="surrogateescape")))


def _readable(text: str) -> str:
    """A script as restricted bash can run it."""
    text = CALL.sub(r"\1bash ", TO_FILE.sub(r"\1", text.replace("\0", "")))  # bash leaves NUL out as well
    return text.replace("BASH_SOURCE", "SCRIPT_SOURCE")  # of a file alone bash sets it


def _traced(text: str, words: list[str], named: str, sourced: dict[str, str]) -> list[str]:
    """What bash would run of a script, one entry a command.

    Args:
        words: its file and its arguments.
        sourced: texts of the files that it sources, as far as they are known.

    Raises:
        PlanError: it does not end, or `set --` makes it arguments that are not followed here.
    """
    with (
        tempfile.TemporaryFile("w+", errors="surrogateescape") as trace,
        tempfile.NamedTemporaryFile("w", errors="surrogateescape") as prelude,
    ):
        descriptor = fcntl.fcntl(trace.fileno(), fcntl.F_DUPFD, 100)  # scripts use those below 10
        try:
            prelude.write(PRELUDE.format(descriptor=descriptor, seconds=CPU_SECONDS))
            texts = " ".join(f"[{shlex.quote(path)}]={shlex.quote(inner)}" for path, inner in sourced.items())
            prelude.write(f"declare -A SOURCED=({texts})\n")
            prelude.flush()
            environment = {"PATH": "/nonexistent", "BASH_ENV": prelude.name, "PS4": "+ ", "LC_ALL": "C.UTF-8"}
            environment["SCRIPT_SOURCE"] = "".join(words[:1])
            script = (
                ARGUMENTS + _readable(text) + "\n\nwait"
            )  # behind a last line that ends in a backslash; for a training in the background
            bash = subprocess.Popen(
                ["/bin/bash", "-r", "-x", "-c", script, *words], env=os.environ | environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[descriptor], start_new_session=True,
            )  # fmt: skip
            try:
                bash.wait(SECONDS)
            except subprocess.TimeoutExpired:
                wrong = f"{named} takes over {SECONDS} s to read; give the words of its training command"
                raise PlanError(wrong) from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(bash.pid, signal.SIGKILL)  # with what it left in the background
                bash.wait()
        finally:
            os.close(descriptor)
        trace.seek(0)
        entries = re.split(r"^\++ ", trace.read(), flags=re.MULTILINE)
    if any(entry.startswith("set -- ") for entry in entries):
        raise PlanError(f"{named} sets its arguments by set --, which is not read; give the words of its command")
    return entries
