"""A small stand-in for the Hugging Face Hub over loopback: see `hub_server.server`."""

from hub_server.server import HubServer

__all__ = ["HubServer"]
