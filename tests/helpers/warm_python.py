"""A `python` for what tests start: forked from a process that has imported much already, instead of a new one.

verl with what it imports takes 11 CPU seconds in each of a dozen processes of a training; 8 of them are other packages,
which are here. verl and this package are imported by every process itself, with its own environment.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

# Not Ray: what it reads when it is imported it cannot read again in another process.
PRELOAD = "torch._dynamo torchvision transformers tensordict peft datasets hydra fastapi".split()
# What the executable runs, in 20 ms: its words, folder, environment and streams go to the server.
CLIENT = """\
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(chr(0) + sys.argv[1])
    message = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(message).to_bytes(8, "little")], [0, 1, 2])
    server.sendall(message)
    code = server.recv(1)
os._exit(code[0] if code else 1)
"""


@contextlib.contextmanager
def warm_python(folder: Path) -> Iterator[Path]:
    """An executable in `folder` that takes `-c CODE`, `-m MODULE` or a script, with words behind it, as python does."""
    executable, client = folder / "python", folder / "client.py"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # a name of Linux's own choice, in no folder
        listener.listen(64)
        client.write_text(CLIENT)
        name = listener.getsockname()[1:].decode()
        executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{client}" {name} "$@"\n')
        executable.chmod(0o755)
        words = [sys.executable, __file__, str(listener.fileno())]
        server = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    try:
        yield executable
    finally:
        server.stdin.close()
        server.wait(timeout=300)


def in_workers(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """What RAY_RUNTIME_ENV_HOOK=warm_python.in_workers makes of a job's: its workers are the `python` that WARM_PYTHON
    names. For commands that take no override of it."""
    return (runtime_env or {}) | {"py_executable": os.environ["WARM_PYTHON"]}


def serve(listener: socket.socket) -> list[Any] | None:
    """Forks for every connection, and returns what the client sent in the process that shall run it. None: the end."""
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not {"verl", "verl_prefix", "ray"} & sys.modules.keys()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while 0 not in (ready := select.select([listener, 0], [], [])[0]):
        assert ready
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return accept(connection)
        connection.close()
    return None


def accept(connection: socket.socket) -> list[Any]:
    """Returns in a child of this process, which ends it when the client ends, and sends the client its exit code."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    length, message = int.from_bytes(head, "little"), b""
    while len(message) < length:
        message += connection.recv(length - len(message))
    child = os.fork()
    if child == 0:
        os.setsid()  # Ray ends the process group of a worker, which is not to be that of the tests
        connection.close()
        for fd, stream in enumerate(streams):
            os.dup2(stream, fd)
            os.close(stream)
        return json.loads(message)
    for fd in (0, 1, 2, *streams):
        os.close(fd)
    ended = os.pidfd_open(child)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def run(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """What `python WORDS` does in `folder`."""
    ours = {os.path.dirname(os.path.abspath(__file__)), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = added + [path for path in sys.path if path not in ours]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    random.seed()
    while words[0] in ("-u", "-B"):
        words = words[1:]
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, folder)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def end(code: Any) -> NoReturn:
    """What the interpreter does at its end, but for two seconds of freeing what was imported."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 255)


if __name__ == "__main__" and (request := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
    try:
        run(*request)
    except SystemExit as error:
        end(error.code)
    except BaseException:
        traceback.print_exc()
        end(1)
    end(0)
