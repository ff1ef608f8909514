"""HTTP plumbing of the stand-in: routing, authorization, bodies, replies and injected faults."""

import json
import re
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from hub_server.store import HttpError

PIECE_NBYTES = 1 << 20
_UNSIGNED = ("/lfs/", "/cdn/", "/xet/")  # signed URLs on the real Hub: no Hub token
ROUTES = []


class Cut(Exception):
    """Drop the TCP connection without an answer."""


def route(methods, pattern):
    """Serve `methods` of paths like `pattern`.

    {type} is models, datasets or spaces, {repo} a name or owner/name, {rev} one quoted segment.
    """
    expression = (
        pattern.replace("{type}", r"(?P<type>models|datasets|spaces)")
        .replace("{repo}", r"(?P<repo>[\w.\-]+(?:/[\w.\-]+)?)")
        .replace("{rev}", r"(?P<rev>[^/]+)")
    )

    def register(function):
        for method in methods.split():
            ROUTES.append((method, re.compile(expression + r"\Z"), function.__name__))
        return function

    return register


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    hub = None

    def __init__(self, *args):
        super().__init__(*args)
        self.clients = set()  # addresses of the connections that are served now

    def handle_error(self, request, client_address):  # dropped connections are expected here
        if not isinstance(sys.exc_info()[1], (ConnectionError, Cut, TimeoutError)):
            super().handle_error(request, client_address)


class Transport(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "hub-stand-in/1"
    timeout = 60
    wbufsize = 1 << 16

    def setup(self):
        self.server.clients.add(self.client_address)
        super().setup()

    def finish(self):
        try:
            super().finish()
        finally:
            self.server.clients.discard(self.client_address)

    def log_message(self, *args):
        pass

    @property
    def hub(self):
        return self.server.hub

    @property
    def store(self):
        return self.server.hub.store

    def dispatch(self):
        url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.body_read, self.user, self.role, self.sent = False, None, None, 0
        self.fault = self.hub.take_fault(self.command, url.path)
        try:
            if self.fault and self.fault["status"]:
                raise HttpError(self.fault["status"], "injected fault", headers=self.fault["headers"])
            self.authorize(url.path)
            self.call_route(url.path)
        except HttpError as error:
            headers = {"X-Error-Message": error.message, **error.headers}
            if error.code:
                headers["X-Error-Code"] = error.code
            self.reply(error.status, {"error": error.message}, headers)
        except Cut:
            self.close_connection = True
            self.sent = 499
            self.connection.shutdown(socket.SHUT_RDWR)
        finally:
            self.hub.log.append((self.command, url.path, self.sent))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = dispatch

    def call_route(self, path):
        # The raw path is matched before unquoting: a revision is one segment even when it holds %2F.
        for method, expression, name in ROUTES:
            if method == self.command and (match := expression.match(path)):
                groups = {key: unquote(value) if value else value for key, value in match.groupdict().items()}
                getattr(self, name)(**groups)
                return
        raise HttpError(404, f"no such route: {self.command} {path}")

    def authorize(self, path):
        header = self.headers.get("authorization")
        self.hub.seen_auth.append((path, header is not None))
        if path.startswith(_UNSIGNED):
            return
        if header:
            token = header.removeprefix("Bearer ").strip()
            if token not in self.hub.tokens:
                raise HttpError(401, "Invalid credentials in Authorization header")
            self.user, self.role = self.hub.tokens[token]

    def need_read(self, kind, repo_id):
        repo = self.store.repos.get(f"{kind}/{repo_id}")
        if repo is None or (repo["private"] and self.user != repo["owner"]):
            # The Hub answers 401 to strangers, 404 to signed-in users.
            raise HttpError(404 if self.user else 401, "Repository not found", "RepoNotFound")
        return repo

    def need_write(self, kind, repo_id, pull_request=False):
        repo = self.need_read(kind, repo_id)
        if self.user is None:
            raise HttpError(401, "Invalid username or password.")
        if self.role != "write" or (self.user != repo["owner"] and not pull_request):
            raise HttpError(403, "you must use a write token, and have write access to this repo")
        return repo

    def _pieces(self):
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            yield from self._exactly(int(self.headers.get("Content-Length") or 0))
            return
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield from self._exactly(size)
            self.rfile.readline()
        self.rfile.readline()

    def _exactly(self, left):
        while left:
            data = self.rfile.read(min(left, PIECE_NBYTES))
            if not data:
                raise Cut
            left -= len(data)
            yield data

    def body_pieces(self):
        """The request body in pieces; honours cut_after."""
        cut = self.fault["cut_after"] if self.fault else None
        got = 0
        for data in self._pieces():
            got += len(data)
            if cut is not None and got >= cut:
                raise Cut
            yield data
        self.body_read = True

    def body(self):
        return b"".join(self.body_pieces())

    def json_body(self):
        return json.loads(self.body() or b"{}")

    def _skip_body(self):
        if self.body_read or self.command not in ("POST", "PUT"):
            return
        left = int(self.headers.get("Content-Length") or 0)
        if left > PIECE_NBYTES or "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            self.close_connection = True  # do not read an unwanted large body
        elif left:
            self.rfile.read(left)

    def reply(self, status, payload=None, headers=None):
        self._skip_body()
        if self.fault and self.fault["cut_reply"] and status < 400:
            raise Cut
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        fields = {"Content-Type": "application/json; charset=utf-8", "Content-Length": str(len(raw)), **(headers or {})}
        if self.close_connection:
            fields["Connection"] = "close"
        self.send_fields(status, fields)
        if self.command != "HEAD":
            self.wfile.write(raw)

    def send_fields(self, status, fields):
        self.sent = status
        self.send_response(status)
        for key, value in fields.items():
            self.send_header(key, value)
        self.end_headers()
