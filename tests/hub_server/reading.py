"""Repository listings and plain downloads."""

import hashlib
import json
import os
import re
from urllib.parse import parse_qs, quote, urlsplit

import yaml

from hub_server.store import HttpError
from hub_server.transport import PIECE_NBYTES, Cut, Transport, route


def byte_range(header, size):
    """First and last byte that a Range header asks for, or None."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if not match:
        return None
    start = int(match[1]) if match[1] else size - int(match[2])
    end = min(int(match[2]) if match[1] and match[2] else size - 1, size - 1)
    if start >= size:
        raise HttpError(416, "Range Not Satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return start, end


def entry_json(path, entry):
    out = {"type": "file", "path": path, "size": entry["size"], "oid": entry["oid"]}
    if entry["lfs"]:
        out["lfs"] = {"oid": entry["sha256"], "size": entry["size"], "pointerSize": 134}
    if entry.get("xet"):
        out["xetHash"] = entry["xet"]
    return out


def sibling_json(path, entry):
    out = {"rfilename": path, "size": entry["size"], "blobId": entry["oid"]}
    if entry["lfs"]:
        out["lfs"] = {"sha256": entry["sha256"], "size": entry["size"], "pointerSize": 134}
    return out


class Reading(Transport):
    def find(self, type, repo, rev):
        found = self.need_read(type.rstrip("s"), repo)
        sha = self.store.resolve(found, rev or "main")
        return found, sha, found["commits"][sha]["tree"]

    def card_metadata(self, tree):
        if "README.md" not in tree:
            return {}
        text = self.store.blob(tree["README.md"]["sha256"]).read_text("utf-8")
        match = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        return (yaml.safe_load(match.group(1)) or {}) if match else {}

    @route("GET", "/api/{type}/{repo}/revision/{rev}")
    @route("GET", "/api/{type}/{repo}")
    def info(self, type, repo, rev=None):
        found, sha, tree = self.find(type, repo, rev)
        listed = sorted(tree.items())
        blobs = "blobs" in self.query
        siblings = [sibling_json(path, entry) if blobs else {"rfilename": path} for path, entry in listed]
        card = self.card_metadata(tree)
        about = {"_id": sha[:24], "id": found["id"], "modelId": found["id"], "author": found["owner"], "sha": sha}
        about |= {"private": found["private"], "gated": False, "disabled": False, "downloads": 0, "likes": 0}
        about |= {"createdAt": found["created"], "lastModified": found["commits"][sha]["date"]}
        about |= {"library_name": card.get("library_name"), "pipeline_tag": card.get("pipeline_tag")}
        about |= {"tags": card.get("tags") or [], "cardData": card, "siblings": siblings}
        self.reply(200, about)

    @route("GET", "/api/{type}/{repo}/tree/{rev}(?:/(?P<path>.*))?")
    def tree(self, type, repo, rev, path=None):
        _, _, tree = self.find(type, repo, rev)
        prefix = path.rstrip("/") + "/" if path else ""
        recursive = self.query.get("recursive", "").lower() == "true"
        out, folders = [], set()
        for name, entry in sorted((name, entry) for name, entry in tree.items() if name.startswith(prefix)):
            parts = name[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folder = prefix + "/".join(parts[:depth])
                if folder not in folders:
                    folders.add(folder)
                    oid = hashlib.sha1(folder.encode()).hexdigest()
                    out.append({"type": "directory", "path": folder, "size": 0, "oid": oid})
            if recursive or len(parts) == 1:
                out.append(entry_json(name, entry))
        if path and not out:
            raise HttpError(404, f"{path} does not exist", "EntryNotFound")
        limit, start = int(self.query.get("limit", 1000)), int(self.query.get("cursor", 0))
        headers = {}
        if start + limit < len(out):
            query = f"recursive={str(recursive).lower()}&limit={limit}&cursor={start + limit}"
            headers["Link"] = f'<{self.hub.url}{urlsplit(self.path).path}?{query}>; rel="next"'
        self.reply(200, out[start : start + limit], headers)

    @route("POST", "/api/{type}/{repo}/paths-info/{rev}")
    def paths_info(self, type, repo, rev):
        raw = self.body()
        is_json = "json" in (self.headers.get("Content-Type") or "")
        paths = json.loads(raw)["paths"] if is_json else parse_qs(raw.decode()).get("paths", [])
        _, _, tree = self.find(type, repo, rev)
        self.reply(200, [entry_json(path, tree[path]) for path in paths if path in tree])

    @route("GET", "/api/{type}/{repo}/refs")
    def refs(self, type, repo):
        found, _, _ = self.find(type, repo, None)

        def pick(prefix, strip):
            refs = [(ref, sha) for ref, sha in found["refs"].items() if ref.startswith(prefix)]
            return [{"name": ref[strip:], "ref": ref, "targetCommit": sha} for ref, sha in refs]

        lists = {"branches": pick("refs/heads/", 11), "tags": pick("refs/tags/", 10), "converts": []}
        self.reply(200, lists | {"pullRequests": pick("refs/pr/", 0)})

    @route("GET", "/api/{type}/{repo}/commits/{rev}")
    def commits(self, type, repo, rev):
        found, sha, _ = self.find(type, repo, rev)
        out = []
        for commit_sha, commit in self.store.history(found, sha):
            about = {"id": commit_sha, "title": commit["title"], "message": commit["body"], "date": commit["date"]}
            out.append(about | {"authors": [{"user": commit["author"]}]})
        self.reply(200, out)

    @route("HEAD GET", "/(?:(?P<type>datasets|spaces)/)?{repo}/resolve/{rev}/(?P<path>.+)")
    def download(self, type, repo, rev, path):
        _, sha, tree = self.find(type or "models", repo, rev)
        entry = tree.get(path)
        if entry is None:
            raise HttpError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": sha})
        etag = entry["sha256"] if entry["lfs"] else entry["oid"]
        headers = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes", "ETag": f'"{etag}"'}
        headers["Content-Disposition"] = f"inline; filename*=UTF-8''{quote(os.path.basename(path))}"
        if entry["lfs"]:
            headers |= {"X-Linked-Etag": f'"{entry["sha256"]}"', "X-Linked-Size": str(entry["size"])}
            if entry.get("xet"):
                headers["X-Xet-Hash"] = entry["xet"]
                token_url = f"{self.hub.url}/api/{type or 'models'}/{repo}/xet-read-token/{sha}"
                headers["Link"] = f'<{token_url}>; rel="xet-auth"'
            self.ensure_plain(entry)
            if self.hub.cdn:
                location = f"http://localhost:{self.hub.port}/cdn/{entry['sha256']}"
                return self.reply(302, b"", headers | {"Location": location})
        return self.send_file(entry, headers)

    @route("HEAD GET", "/cdn/(?P<oid>[0-9a-f]{64})")
    def cdn_get(self, oid):
        path = self.store.blob(oid)
        if not path.exists():
            raise HttpError(404, "no such object")
        entry = {"sha256": oid, "size": path.stat().st_size}
        self.send_file(entry, {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def ensure_plain(self, entry):
        """Put a file that came by Xet together when it is first asked for without Xet."""
        path = self.store.blob(entry["sha256"])
        if entry.get("xet") and self.command == "GET" and not path.exists():
            self.hub.cas.rebuild(entry["xet"], path)

    def send_file(self, entry, headers):
        wanted = byte_range(self.headers.get("Range"), entry["size"])
        start, end = wanted or (0, entry["size"] - 1)
        if wanted:
            headers = headers | {"Content-Range": f"bytes {start}-{end}/{entry['size']}"}
        length = end - start + 1
        fields = {"Content-Type": "application/octet-stream", **headers, "Content-Length": str(length)}
        self.send_fields(206 if wanted else 200, fields)
        if self.command == "HEAD":
            return
        cut = self.fault["cut_after"] if self.fault else None
        with open(self.store.blob(entry["sha256"]), "rb") as file:
            file.seek(start)
            sent = 0
            while sent < length and (data := file.read(min(length - sent, PIECE_NBYTES))):
                if cut is not None and sent + len(data) >= cut:
                    self.wfile.write(data[: cut - sent])
                    self.wfile.flush()
                    raise Cut
                self.wfile.write(data)
                sent += len(data)
