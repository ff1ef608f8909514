"""A small stand-in for the Hugging Face Hub, for tests over loopback.

It speaks the part of the Hub's HTTP API that huggingface_hub 2.4 uses to create a repository, upload files (git-LFS
basic and multipart, or Xet), commit, open a pull request, list and download.

    with HubServer(tmp_path, tokens={"hf_write": ("alice", "write")}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        ...
    hub.log                                     # [(method, path, status), ...]
    hub.fault("PUT", r"/lfs/", cut_after=50_000_000, times=1)
"""

import re
import threading

from hub_server.reading import Reading
from hub_server.repositories import Repositories
from hub_server.store import Store
from hub_server.transport import Server
from hub_server.writing import Writing
from hub_server.xet import Cas, Xet


class Handler(Repositories, Reading, Writing, Xet):
    """Every route of the stand-in."""


class HubServer:
    """The stand-in on 127.0.0.1.

    `tokens` maps a token to (user, "read" | "write"); LFS files above `part_size` bytes are sent in parts; without
    `xet` the xet token routes answer 404; with `cdn` an LFS download is redirected to another origin.
    """

    def __init__(self, root, tokens=None, *, part_size=None, xet=True, cdn=False):
        self.store = Store(root)
        self.tokens = tokens or {}
        self.part_size, self.xet, self.cdn = part_size, xet, cdn
        self.log = []
        self.seen_auth = []  # (path, was an authorization header sent?)
        self.faults = []
        self.cas = Cas(self.store.root / "xet")
        self.httpd = Server(("127.0.0.1", 0), Handler)
        self.httpd.hub = self
        self.port = self.httpd.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def fault(self, method, path, *, cut_after=None, status=None, cut_reply=False, times=1, headers=None):
        """Spoil the next `times` requests whose path matches the expression `path`.

        `cut_after=N` drops the connection after N body bytes, `status` answers that, `cut_reply` does the work and
        drops the answer.
        """
        fault = {"method": method, "path": re.compile(path), "cut_after": cut_after, "status": status}
        self.faults.append(fault | {"cut_reply": cut_reply, "times": times, "headers": headers or {}})

    def take_fault(self, method, path):
        with self.store.lock:
            for fault in self.faults:
                if fault["times"] > 0 and fault["method"] == method and fault["path"].search(path):
                    fault["times"] -= 1
                    return fault
        return None

    @property
    def clients(self):
        """Addresses of the connections that are served now."""
        return set(self.httpd.clients)

    def repo(self, repo_id):
        return self.store.repo("model", repo_id)

    def commits(self, repo_id, revision="main"):
        """Titles of the commits of a branch, newest first, without the one that created the repository."""
        return [commit["title"] for _, commit in self.store.history(self.repo(repo_id), revision)][:-1]

    def tree(self, repo_id, revision="main"):
        repo = self.repo(repo_id)
        return repo["commits"][self.store.resolve(repo, revision)]["tree"]

    def __enter__(self):
        thread = threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        return self

    def __exit__(self, *exc_info):
        self.httpd.shutdown()
        self.httpd.server_close()
