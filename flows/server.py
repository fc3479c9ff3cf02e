"""Prefect's API while a command runs: the server that Prefect's settings name, or a temporary one."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time

from schemas.errors import WorkerError

START_SECONDS = 120.0


class TemporaryServer:
    """A Prefect server in a session of its own, ended when this process ends.

    Prefect would start one by itself, but in our process group: a Ctrl-C in the terminal would end it before the flow
    could report that it was cancelled.
    """

    def __init__(self) -> None:
        with socket.socket() as listener:  # handed over, so that nobody else can take the port meanwhile
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
            self._process = self._start(listener.fileno())
        self.url = f"http://127.0.0.1:{self._port}/api"
        atexit.register(self.stop)

    def _start(self, fd: int) -> subprocess.Popen[bytes]:
        command = f"-m uvicorn --factory prefect.server.api.server:create_app --fd {fd} --log-level error"
        return subprocess.Popen(
            [sys.executable, *command.split()],
            pass_fds=(fd,),
            env=os.environ
            | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Until it answers. Raises WorkerError when it ended or START_SECONDS are over."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=5):
                    return  # it listens only once its start-up is over
            except OSError:
                time.sleep(0.1)
        code = self._process.poll()
        found = f"no answer within {START_SECONDS:g} s" if code is None else f"it ended with exit status {code}"
        raise WorkerError(f"the temporary Prefect server ({self.url}): {found}; what it printed stands above")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_server() -> TemporaryServer | None:
    """Make this process and what it starts use a temporary server, unless Prefect's settings name one already."""
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value():
        return None
    server = TemporaryServer()
    os.environ["PREFECT_API_URL"] = server.url
    refresh_global_settings_context()
    return server
