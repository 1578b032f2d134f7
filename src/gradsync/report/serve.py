"""The current page of a run over HTTP, read-only, for as long as it is watched."""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from gradsync.errors import ConfigError, GradsyncError
from gradsync.report.page import page
from gradsync.report.run import read_run, read_verified

_AGAIN_S = 10
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
}


@contextmanager
def serving(run: Path, where: str) -> Generator[str]:
    """Serve the page of `run` at `where`, [HOST:]PORT, in a thread; gives the address to open.

    The address has a token, also on loopback: a run's directory is its user's alone, and a port is
    open to all users of a host and to the pages that its browsers show.

    Raises:
        ConfigError: no port, or it cannot be had.
    """
    host, _, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--http: [HOST:]PORT expected, such as 8000; got {where!r}")
    version = socket.AF_INET6 if ":" in host else socket.AF_INET
    token = secrets.token_urlsafe(16)

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # For a connection on which nothing comes

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if not hmac.compare_digest(path.encode(), f"/{token}/".encode()):
                words = "the page's address has a token: gradsync watch has printed it whole"
                self.send_error(404, explain=words)
                return
            try:
                verified = None
                with suppress(ConfigError):  # it may be being written
                    verified = read_verified(run)
                body = page([read_run(run)], verified, again_s=_AGAIN_S).encode()
            except (GradsyncError, OSError) as error:
                self.send_error(503, explain=str(error))
                return
            self.send_response(200)
            for name, value in {**_HEADERS, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing: the terminal is the run's."""

    class Server(ThreadingHTTPServer):
        address_family = version

    try:
        server = Server((host, int(port)), Handler)
    except OSError as error:
        raise ConfigError(f"--http {where}: cannot listen there: {error.strerror}") from None
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        reached = socket.gethostname() if host in ("0.0.0.0", "::") else host
        reached = f"[{reached}]" if ":" in reached else reached
        yield f"http://{reached}:{server.server_address[1]}/{token}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
