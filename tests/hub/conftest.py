"""A stand-in of the Hub, and processes that talk to it with Xet on and off."""

from types import SimpleNamespace

import pytest
from hub_folders import hub_environment
from hub_processes import TOKEN, TOKENS, Worker
from hub_server import HubServer


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with HubServer(tmp_path_factory.mktemp("hub"), TOKENS) as hub:
        yield hub


@pytest.fixture(scope="session")
def workers(server, tmp_path_factory):
    """Start a worker: workers(xet=True, home=None, url=None, token=None)."""
    started = []

    def start(*, xet, home=None, url=None, token=None):
        home = home or tmp_path_factory.mktemp("home")
        worker = Worker(hub_environment(home, url or server.url, xet=xet, token=token), home / "stderr.txt")
        worker.xet = xet
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.close()


@pytest.fixture(scope="session")
def lfs_worker(workers):
    return workers(xet=False)


@pytest.fixture(scope="session")
def xet_worker(workers):
    return workers(xet=True)


@pytest.fixture(scope="session", params=["lfs", "xet"])
def any_worker(request):
    return request.getfixturevalue(f"{request.param}_worker")


@pytest.fixture(scope="session")
def cdn(workers, tmp_path_factory):
    """Another stand-in, that takes files in parts and hands them out from another address; its worker is logged in."""
    with HubServer(tmp_path_factory.mktemp("cdn"), TOKENS, part_size=5 << 20, cdn=True, xet=False) as hub:
        yield SimpleNamespace(server=hub, worker=workers(xet=False, url=hub.url, token=TOKEN))


@pytest.fixture
def worker(any_worker, server):
    server.log.clear()
    server.seen_auth.clear()
    server.faults.clear()
    return any_worker


@pytest.fixture
def repo(request):
    """A repository name that no other test uses."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return "alice/" + "-".join(part for part in name.split("-") if part)[-80:].strip("-")
