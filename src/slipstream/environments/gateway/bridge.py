"""Program inside an agent's sandbox that forwards a TCP port to the gateway's socket, and runs the agent.

    python3 bridge.py SOCKET PORT -- COMMAND …

This file imports only the standard library. It ends when the command ends, with the same exit status.
"""

import socket
import subprocess
import sys
import threading


def copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # one side has closed the connection


def both(inner: socket.socket, path: str) -> None:
    with inner, socket.socket(socket.AF_UNIX) as outer:
        try:
            outer.connect(path)
        except OSError:
            return  # the gateway has ended
        back = threading.Thread(target=copy, args=(outer, inner), daemon=True)
        back.start()
        copy(inner, outer)
        back.join()


def serve(listening: socket.socket, path: str) -> None:
    while True:
        threading.Thread(target=both, args=(listening.accept()[0], path), daemon=True).start()


def main() -> int:
    path, port, _, *command = sys.argv[1:]
    listening = socket.create_server(("127.0.0.1", int(port)), backlog=1024)
    threading.Thread(target=serve, args=(listening, path), daemon=True).start()
    code = subprocess.call(command)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
