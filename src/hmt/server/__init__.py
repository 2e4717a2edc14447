"""Models over HTTP, the OpenAI way: many users, keys, limits, metrics, a page.  `hmt[serve]`."""

from hmt.server.app import create_app
from hmt.server.config import ServerConfig
from hmt.server.keys import KeyRing
from hmt.server.model_manager import LoadableModels
from hmt.server.run import bind, serve, serve_app
