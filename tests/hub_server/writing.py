"""Preupload, git-LFS uploads (basic and multipart) and commits."""

import base64
import hashlib
import json
import os
import threading
from fnmatch import fnmatch

from hub_server.store import LFS_ATTRIBUTES, HttpError
from hub_server.transport import PIECE_NBYTES, Transport, route

REGULAR_MAX_NBYTES = 10 * 1024 * 1024  # the Hub stores larger files as LFS or Xet


def matches(path, patterns):
    return any(fnmatch(path if "/" in pattern else os.path.basename(path), pattern) for pattern in patterns)


class Writing(Transport):
    def lfs_patterns(self, tree):
        if ".gitattributes" not in tree:
            return []
        text = self.store.blob(tree[".gitattributes"]["sha256"]).read_text("utf-8")
        return [line.split()[0] for line in text.splitlines() if "filter=lfs" in line]

    @route("POST", "/api/{type}/{repo}/preupload/{rev}")
    def preupload(self, type, repo, rev):
        body = self.json_body()
        found = self.need_write(type.rstrip("s"), repo, pull_request=self.query.get("create_pr") == "1")
        sha = self.store.resolve(found, rev)
        tree = found["commits"][sha]["tree"]
        patterns = self.lfs_patterns(tree)
        ignored = self.store.blob(tree[".gitignore"]["sha256"]).read_text().split() if ".gitignore" in tree else []
        out = []
        for file in body["files"]:
            path, sample = file["path"], base64.b64decode(file["sample"])
            large = matches(path, patterns) or file["size"] > REGULAR_MAX_NBYTES or b"\0" in sample
            answer = {"path": path, "uploadMode": "lfs" if large else "regular"}
            answer["shouldIgnore"] = matches(path, ignored)
            if entry := tree.get(path):
                answer["oid"] = entry["sha256"] if entry["lfs"] else entry["oid"]
            out.append(answer)
        self.reply(200, {"commitOid": sha, "files": out})

    @route("POST", "/(?:(?P<type>datasets|spaces)/)?(?P<repo>[\\w.\\-]+/[\\w.\\-]+)\\.git/info/lfs/objects/batch")
    def lfs_batch(self, type, repo):
        body = self.json_body()
        self.need_write((type or "models").rstrip("s"), repo, pull_request=True)
        answer = [self.upload_actions(repo, wanted, body["transfers"]) for wanted in body["objects"]]
        transfer = "multipart" if self.hub.part_size else "basic"
        headers = {"Content-Type": "application/vnd.git-lfs+json"}
        self.reply(200, {"transfer": transfer, "objects": answer}, headers)

    def upload_actions(self, repo, wanted, transfers):
        oid, size, part_size = wanted["oid"], wanted["size"], self.hub.part_size
        if self.store.blob(oid).exists():  # no actions: already stored
            return {"oid": oid, "size": size}
        href, header = f"{self.hub.url}/lfs/{oid}", {}
        if part_size and size > part_size and "multipart" in transfers:
            header = {str(i + 1): f"{href}/part/{i + 1}" for i in range(-(-size // part_size))}
            header["chunk_size"] = str(part_size)
            href += "/complete"
        verify = {"href": f"{self.hub.url}/api/lfs/{repo}/verify", "header": {}}
        actions = {"upload": {"href": href, "header": header}, "verify": verify}
        return {"oid": oid, "size": size, "authenticated": True, "actions": actions}

    def receive(self, destination):
        temporary = destination.with_name(f"{destination.name}.{threading.get_ident()}.tmp")
        sha = hashlib.sha256()
        try:
            with open(temporary, "wb") as file:
                for data in self.body_pieces():
                    file.write(data)
                    sha.update(data)
            temporary.replace(destination)
        finally:
            temporary.unlink(missing_ok=True)
        return sha.hexdigest()

    @route("PUT", "/lfs/(?P<oid>[0-9a-f]{64})")
    def lfs_put(self, oid):
        destination = self.store.root / "parts" / oid
        if self.receive(destination) != oid:
            destination.unlink()
            raise HttpError(400, "content does not match its sha256")
        destination.replace(self.store.blob(oid))
        self.reply(200, b"", {"ETag": f'"{oid}"'})

    @route("PUT", "/lfs/(?P<oid>[0-9a-f]{64})/part/(?P<number>\\d+)")
    def lfs_part(self, oid, number):
        got = self.receive(self.store.root / "parts" / f"{oid}.{number}")
        self.reply(200, b"", {"ETag": f'"{got}"'})

    @route("POST", "/lfs/(?P<oid>[0-9a-f]{64})/complete")
    def lfs_complete(self, oid):
        parts = sorted(self.json_body()["parts"], key=lambda part: part["partNumber"])
        whole, sha = self.store.root / "parts" / oid, hashlib.sha256()
        with open(whole, "wb") as out:
            for part in parts:
                path = self.store.root / "parts" / f"{oid}.{part['partNumber']}"
                with open(path, "rb") as file:
                    while data := file.read(PIECE_NBYTES):
                        sha.update(data)
                        out.write(data)
                path.unlink()
        if sha.hexdigest() != oid:
            raise HttpError(400, "content does not match its sha256")
        whole.replace(self.store.blob(oid))
        self.reply(200, {"success": True})

    @route("POST", "/api/lfs/{repo}/verify")
    def lfs_verify(self, repo):
        body = self.json_body()
        self.need_write("model", repo, pull_request=True)
        path = self.store.blob(body["oid"])
        if not path.exists() or path.stat().st_size != body["size"]:
            raise HttpError(404, "object not found")
        self.reply(200, {})

    @route("POST", "/api/{type}/{repo}/commit/{rev}")
    def commit(self, type, repo, rev):
        header, *changes = [json.loads(line) for line in self.body().splitlines() if line]
        header = header["value"]
        create_pr = self.query.get("create_pr") == "1"
        found = self.need_write(type.rstrip("s"), repo, pull_request=create_pr or rev.startswith("refs/pr/"))
        with self.store.lock:
            parent = self.store.resolve(found, rev)
            if header.get("parentCommit") and not create_pr and header["parentCommit"] != parent:
                raise HttpError(412, "A commit has happened since. Please refresh and try again.")
            tree = dict(found["commits"][parent]["tree"])
            for change in changes:
                self.apply(tree, change["key"], change["value"])
            self.add_attributes(tree)
            ref = rev if rev.startswith("refs/") else f"refs/heads/{rev}"
            request = self.open_pull_request(found, header["summary"], parent) if create_pr else None
            meta = {"parent": parent, "title": header["summary"], "body": header.get("description", "")}
            meta["author"] = self.user
            sha = self.store.commit(found, request["ref"] if request else ref, tree, meta)
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"}
        if request:
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/{request['num']}"
        self.reply(200, answer | {"hookOutput": ""})

    def apply(self, tree, key, value):
        path = value["path"]
        if key == "file":
            tree[path] = self.store.regular(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            xet = self.hub.cas.by_sha256(value["oid"])
            if not xet and not self.store.blob(value["oid"]).exists():
                raise HttpError(400, f"LFS pointer of {path} points to a file that was not uploaded: {value['oid']}")
            size = value.get("size") or self.store.blob(value["oid"]).stat().st_size
            tree[path] = self.store.large(value["oid"], size, xet)
        elif key == "deletedFile":
            if path not in tree:
                raise HttpError(404, "A file with this name doesn't exist", "EntryNotFound")
            del tree[path]
        else:
            raise HttpError(400, f"unknown key {key}")

    def add_attributes(self, tree):
        """Like the Hub: an LFS file that no .gitattributes line covers gets a line of its own."""
        patterns = self.lfs_patterns(tree)
        extra = [path for path, entry in sorted(tree.items()) if entry["lfs"] and not matches(path, patterns)]
        if not extra:
            return
        old = b""
        if ".gitattributes" in tree:
            old = self.store.blob(tree[".gitattributes"]["sha256"]).read_bytes()
        if old and not old.endswith(b"\n"):
            old += b"\n"
        lines = "".join(path.replace(" ", "[[:space:]]") + LFS_ATTRIBUTES + "\n" for path in extra)
        tree[".gitattributes"] = self.store.regular(old + lines.encode())
