"""A fork server of multiprocessing that is forked itself, from a process that has imported much already."""

import subprocess
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path

CODE = """\
import os, socket, sys
from multiprocessing import forkserver
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
alive = os.dup(0)  # it ends with the process that has the other end
print("ready", flush=True)
os.dup2(2, 1)
forkserver.main(listener.fileno(), alive, sys.argv[2:])
"""


class ForkServer(forkserver.ForkServer):
    """Its processes are forks of what `python` runs, which imports `modules` in this environment first."""

    def __init__(self, python: str, modules: list[str], environment: dict[str, str]) -> None:
        super().__init__()
        self.command = [python, "-c", CODE, connection.arbitrary_address("AF_UNIX"), *modules]
        self.environment = environment

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()
        if self._forkserver_address is None:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self.process.stdout.readline() == b"ready\n", "the fork server has not started"
            self._forkserver_alive_fd = self.process.stdin.fileno()
            self._forkserver_address = self.command[3]

    def close(self) -> None:
        if self._forkserver_address is not None:
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait(timeout=300)
            Path(self._forkserver_address).unlink(missing_ok=True)
