"""One address for several servers of a model: each request goes where its prompt is known."""

from hmt.server.router.app import create_router
from hmt.server.router.replicas import Replica
