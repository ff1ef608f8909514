"""Processes that talk to the stand-in, and the tokens that it knows."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

from light_process import light_command

TOKEN = "hf_" + "AliceWritesHere0123456789abcdef"
READ_TOKEN = "hf_" + "r" * 30
STRANGER_TOKEN = "hf_" + "s" * 30
TOKENS = {TOKEN: ("alice", "write"), READ_TOKEN: ("alice", "read"), STRANGER_TOKEN: ("stranger", "write")}


class Worker:
    """A process with its own environment and caches; see hub_worker.py."""

    def __init__(self, environment, log):
        self._log = open(log, "ab")  # noqa: SIM115 - closed by close()
        command = light_command(Path(__file__).with_name("hub_worker.py").read_text())
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self.process = subprocess.Popen(command, env=environment, **streams)
        self.home = Path(environment["HF_HOME"])

    def start(self, name, *args, **options):
        request = {"call": name, "args": [str(arg) for arg in args], "options": options}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self):
        return SimpleNamespace(**json.loads(self.process.stdout.readline()))

    def __call__(self, name, *args, **options):
        self.start(name, *args, **options)
        return self.answer()

    def push(self, *args, token=TOKEN, **options):
        return self("push", *args, token=token, **options)

    def pull(self, *args, token=TOKEN, **options):
        return self("pull", *args, token=token, **options)

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()
