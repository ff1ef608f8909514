"""What the stand-in keeps: repositories in one JSON file, blobs by sha256."""

import hashlib
import json
import threading
import time
from pathlib import Path

DEFAULT_LFS = [
    "*.7z",
    "*.arrow",
    "*.bin",
    "*.bz2",
    "*.ckpt",
    "*.ftz",
    "*.gz",
    "*.h5",
    "*.joblib",
    "*.lfs.*",
    "*.mlmodel",
    "*.model",
    "*.msgpack",
    "*.npy",
    "*.npz",
    "*.onnx",
    "*.ot",
    "*.parquet",
    "*.pb",
    "*.pickle",
    "*.pkl",
    "*.pt",
    "*.pth",
    "*.rar",
    "*.safetensors",
    "saved_model/**/*",
    "*.tar.*",
    "*.tar",
    "*.tflite",
    "*.tgz",
    "*.wasm",
    "*.xz",
    "*.zip",
    "*.zst",
    "*tfevents*",
]
LFS_ATTRIBUTES = " filter=lfs diff=lfs merge=lfs -text"


def git_blob_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())


class HttpError(Exception):
    """Answer this status. `code` is the Hub's X-Error-Code, which selects the client's exception."""

    def __init__(self, status, message, code=None, headers=None):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}


class Store:
    """Repositories and blobs. A commit maps path -> {oid, size, sha256, lfs, xet}."""

    def __init__(self, root):
        self.root = Path(root)
        (self.root / "blobs").mkdir(parents=True, exist_ok=True)
        (self.root / "parts").mkdir(exist_ok=True)
        self.file = self.root / "repos.json"
        self.repos = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.lock = threading.RLock()

    def save(self):
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.repos))
        temporary.replace(self.file)

    def blob(self, sha256):
        return self.root / "blobs" / sha256

    def put_bytes(self, data):
        sha = hashlib.sha256(data).hexdigest()
        if not self.blob(sha).exists():
            temporary = self.blob(sha).with_suffix(f".tmp{threading.get_ident()}")
            temporary.write_bytes(data)
            temporary.replace(self.blob(sha))
        return sha

    def regular(self, data):
        """The entry of a file that git holds itself."""
        return {"oid": git_blob_oid(data), "size": len(data), "sha256": self.put_bytes(data), "lfs": False, "xet": None}

    def large(self, sha256, size, xet):
        """The entry of a file that git only holds a pointer to."""
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        return {"oid": git_blob_oid(pointer), "size": size, "sha256": sha256, "lfs": True, "xet": xet}

    def repo(self, kind, repo_id):
        repo = self.repos.get(f"{kind}/{repo_id}")
        if repo is None:
            raise HttpError(404, "Repository not found", "RepoNotFound")
        return repo

    def resolve(self, repo, revision):
        for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if name in repo["refs"]:
                return repo["refs"][name]
        if revision in repo["commits"]:
            return revision
        hits = [commit for commit in repo["commits"] if len(revision) >= 7 and commit.startswith(revision)]
        if len(hits) == 1:
            return hits[0]
        raise HttpError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def create(self, kind, repo_id, private):
        owner = repo_id.split("/")[0]
        repo = {"id": repo_id, "type": kind, "owner": owner, "private": private, "created": now()}
        repo |= {"refs": {}, "commits": {}, "prs": []}
        self.repos[f"{kind}/{repo_id}"] = repo
        attributes = "".join(f"{pattern}{LFS_ATTRIBUTES}\n" for pattern in DEFAULT_LFS).encode()
        meta = {"parent": None, "title": "initial commit", "body": "", "author": owner}
        self.commit(repo, "refs/heads/main", {".gitattributes": self.regular(attributes)}, meta)

    def commit(self, repo, ref, tree, meta):
        meta = {**meta, "tree": tree, "date": now()}
        raw = json.dumps([meta, len(repo["commits"])], sort_keys=True).encode()
        sha = hashlib.sha1(raw).hexdigest()
        repo["commits"][sha] = meta
        repo["refs"][ref] = sha
        self.save()
        return sha

    def history(self, repo, revision="main"):
        """Commits of a ref, newest first, as (sha, commit)."""
        sha = self.resolve(repo, revision)
        while sha:
            yield sha, repo["commits"][sha]
            sha = repo["commits"][sha]["parent"]
