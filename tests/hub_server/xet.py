"""Xet: the token exchange and a minimal content-addressed store."""

import json
import os
import re
import struct
import threading
import time

import lz4.frame

from hub_server.store import HttpError
from hub_server.transport import Cut, Transport, route

_RECORD_NBYTES = 48


def xet_hex(raw):
    """A Xet hash as text: four little-endian 64-bit words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def ungroup(data, size):
    """Undo the grouping of bytes by their place in a 4-byte word."""
    quotient, rest = divmod(size, 4)
    plain, at = bytearray(size), 0
    for group in range(4):
        count = quotient + (group < rest)
        plain[group::4] = data[at : at + count]
        at += count
    return bytes(plain)


class Cas:
    """xorbs as files, and {xet file hash: {segs, sha256, size}} learnt from uploaded shards."""

    def __init__(self, root):
        self.root = root
        (root / "xorbs").mkdir(parents=True, exist_ok=True)
        self.file = root / "files.json"
        self.files = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.lock = threading.RLock()

    def xorb(self, name):
        return self.root / "xorbs" / name

    def by_sha256(self, sha):
        return next((name for name, file in self.files.items() if file["sha256"] == sha), None)

    def add_shard(self, raw):
        """Shard = 48-byte header, then file sections of 48-byte records ended by an all-ones hash."""
        at, learnt = _RECORD_NBYTES, {}
        while (record := raw[at : at + _RECORD_NBYTES])[:32] != b"\xff" * 32:
            flags, count = struct.unpack("<II", record[32:40])
            at += _RECORD_NBYTES
            segments = []
            for _ in range(count):
                segment = raw[at : at + _RECORD_NBYTES]
                _, length, first, last = struct.unpack("<4I", segment[32:48])
                segments.append([xet_hex(segment[:32]), length, first, last])
                at += _RECORD_NBYTES
            if flags & 0x80000000:  # per-segment verification hashes
                at += _RECORD_NBYTES * count
            sha = None
            if flags & 0x40000000:  # metadata extension: sha256 in the same word order
                sha = xet_hex(raw[at : at + 32])
                at += _RECORD_NBYTES
            for name, *_ in segments:
                if not self.xorb(name).exists():
                    raise HttpError(400, f"shard refers to a xorb that was not uploaded: {name}")
            size = sum(segment[1] for segment in segments)
            learnt[xet_hex(record[:32])] = {"segs": segments, "sha256": sha, "size": size}
        with self.lock:
            self.files |= learnt
            temporary = self.file.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.files))
            temporary.replace(self.file)

    def chunks(self, xorb):
        """(offset, stored length with header, scheme, raw length) of each chunk."""
        out, at = [], 0
        with open(self.xorb(xorb), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while at + 8 <= size:
                file.seek(at)
                header = file.read(8)
                if header[0] != 0:
                    break
                stored = int.from_bytes(header[1:4], "little")
                out.append((at, 8 + stored, header[4], int.from_bytes(header[5:8], "little")))
                at += 8 + stored
        return out

    def cut(self, segments, wanted):
        """The part of `segments` that covers the bytes `wanted`, and how many bytes to skip at its start."""
        picked, at, skip = [], 0, 0
        for name, _, first, last in segments:
            chunks, keep = self.chunks(name), []
            for index in range(first, last):
                size = chunks[index][3]
                if at + size > wanted[0] and at <= wanted[1]:
                    if not picked and not keep:
                        skip = wanted[0] - at
                    keep.append(index)
                at += size
            if keep:
                length = sum(chunks[index][3] for index in keep)
                picked.append([name, length, keep[0], keep[-1] + 1])
        return picked, skip

    def reconstruction(self, name, data_url, wanted):
        file = self.files.get(name)
        if file is None:
            raise HttpError(404, "no such file")
        segments, skip = file["segs"], 0
        if wanted:
            if wanted[0] >= file["size"]:
                raise HttpError(416, "Range Not Satisfiable")
            segments, skip = self.cut(segments, wanted)
        spans = {}  # one covering range per xorb: several entries for one xorb confuse hf_xet 1.8
        for xorb, _, first, last in segments:
            low, high = spans.get(xorb, (first, last))
            spans[xorb] = min(low, first), max(high, last)
        fetch = {}
        for xorb, (first, last) in spans.items():
            chunks = self.chunks(xorb)
            url_range = {"start": chunks[first][0], "end": chunks[last - 1][0] + chunks[last - 1][1] - 1}
            place = {"range": {"start": first, "end": last}, "url": f"{data_url}/{xorb}", "url_range": url_range}
            fetch[xorb] = [place]
        terms = [
            {"hash": xorb, "unpacked_length": length, "range": {"start": first, "end": last}}
            for xorb, length, first, last in segments
        ]
        return {"offset_into_first_range": skip, "terms": terms, "fetch_info": fetch}

    def rebuild(self, name, destination):
        """Write the plain file, for clients without Xet."""
        temporary = destination.with_name(f"{destination.name}.{threading.get_ident()}.tmp")
        with open(temporary, "wb") as out:
            for xorb, _, first, last in self.files[name]["segs"]:
                with open(self.xorb(xorb), "rb") as file:
                    for offset, stored, scheme, size in self.chunks(xorb)[first:last]:
                        file.seek(offset + 8)
                        data = file.read(stored - 8)
                        data = lz4.frame.decompress(data) if scheme else data
                        out.write(ungroup(data, size) if scheme == 2 else data)
        temporary.replace(destination)


class Xet(Transport):
    @route("GET", "/api/{type}/{repo}/xet-(?P<kind>read|write)-token/{rev}")
    def xet_token(self, type, repo, kind, rev):
        if not self.hub.xet:
            raise HttpError(404, "Xet is not enabled")
        if kind == "write":
            self.need_write(type.rstrip("s"), repo, pull_request=True)
        else:
            self.need_read(type.rstrip("s"), repo)
        expires, url = int(time.time()) + 3600, f"{self.hub.url}/xet"
        headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": f"xet_{kind}", "X-Xet-Token-Expiration": str(expires)}
        self.reply(200, {"accessToken": f"xet_{kind}", "exp": expires, "casUrl": url}, headers)

    def xet_authorize(self, *kinds):
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in {f"xet_{kind}" for kind in kinds}:
            raise HttpError(401, "bad xet token")

    @route("HEAD", "/xet/v1/xorbs/[^/]+/(?P<name>[0-9a-f]{64})")
    def xet_xorb_head(self, name):
        if not self.hub.cas.xorb(name).exists():
            raise HttpError(404, "no such xorb")
        self.reply(200, b"")

    @route("POST", "/xet/v1/xorbs/[^/]+/(?P<name>[0-9a-f]{64})")
    def xet_xorb_put(self, name):
        self.xet_authorize("write")
        destination = self.hub.cas.xorb(name)
        existed = destination.exists()
        self.receive(destination)
        self.reply(200, {"was_inserted": not existed})

    @route("POST", "/xet/v1/shards")
    @route("POST", "/xet/shards")
    def xet_shard(self):
        self.xet_authorize("write")
        self.hub.cas.add_shard(self.body())
        self.reply(200, {"result": 1})

    @route("GET", "/xet/v1/reconstructions/(?P<name>[0-9a-f]{64})")
    def xet_reconstruct(self, name):
        self.xet_authorize("read", "write")
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        wanted = (int(match[1]), int(match[2])) if match else None
        self.reply(200, self.hub.cas.reconstruction(name, f"{self.hub.url}/xet/data", wanted))

    @route("GET HEAD", "/xet/data/(?P<name>[0-9a-f]{64})")
    def xet_data(self, name):
        path = self.hub.cas.xorb(name)
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        first, last = (int(match[1]), min(int(match[2]), size - 1)) if match else (0, size - 1)
        with open(path, "rb") as file:
            file.seek(first)
            data = file.read(last - first + 1)
        status, fields = 200, {"Content-Type": "application/octet-stream", "Content-Length": str(len(data))}
        if match:
            status, fields["Content-Range"] = 206, f"bytes {first}-{last}/{size}"
        cut = self.fault["cut_after"] if self.fault else None
        if cut is not None and len(data) > cut:
            self.close_connection = True
            self.send_fields(status, fields)
            self.wfile.write(data[:cut])
            self.wfile.flush()
            raise Cut
        self.reply(status, data, fields)
