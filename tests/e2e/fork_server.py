"""Runs `splash-trt` command lines as forks of one process that has imported all of it, since importing torch for each
takes longer than most of them. `shim` makes a program `splash-trt` that asks it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

MESSAGE = 1 << 17

_SHIM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
    asked.connect({address!r})
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(asked, [request], [0, 1, 2])
    sys.exit(int(asked.recv(100)))
"""


class ForkServer:
    """The process; `folder` gets its socket and, in `bin`, the program."""

    def __init__(self, folder: Path) -> None:
        address = str(folder / "forks")
        self.bin = folder / "bin"
        self.bin.mkdir()
        program = self.bin / "splash-trt"
        program.write_text(_SHIM.format(python=sys.executable, address=address))
        program.chmod(0o755)
        argv = [sys.executable, str(Path(__file__).resolve()), address]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(address: str) -> None:
    """Until killed."""
    from splash_trt import cli, supervise  # noqa: F401  # the latter with all that `serve` loads in its time
    from splash_trt.commands import group  # noqa: F401

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            request, fds, _, _ = socket.recv_fds(connection, MESSAGE, 3)
            arguments, folder, environment = json.loads(request)
            child = os.fork()
            if child == 0:
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(environment)
                sys.argv = ["splash-trt", *arguments]
                os._exit(_exit_code_of(cli.main))
            for fd in fds:
                os.close(fd)
            _, status = os.waitpid(child, 0)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def _exit_code_of(main) -> int:  # type: ignore[no-untyped-def]
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    serve(sys.argv[1])
