"""Models over HTTP, the OpenAI way: many users, keys, limits, metrics, a page.  `hmt[serve]`."""

from hmt.server.app import create_app
from hmt.server.config import ServerConfig
from hmt.server.keys import KeyRing
from hmt.server.run import bind, serve
from hmt.server.shelf import Others

__all__ = ["KeyRing", "Others", "ServerConfig", "bind", "create_app", "serve"]
