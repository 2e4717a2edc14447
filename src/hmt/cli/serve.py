"""`hmt serve`: a model over HTTP, the OpenAI way."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hmt.base.errors import ConfigError, MachineError
from hmt.base.units import parse_bytes
from hmt.cli.console import loading, notes
from hmt.cli.options import EngineOptions, ModelArgument, RememberOption, choose_model, expand
from hmt.cli.plan_options import suggesting
from hmt.cli.remembered import settled
from hmt.cli.torchrun import join_torchrun, launch

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from hmt.engine import LoadedModel
    from hmt.server import KeyRing, ServerConfig

# Options by the panel of the help in which they are.
_where = partial(typer.Option, rich_help_panel="Where")
_who = partial(typer.Option, rich_help_panel="Who")
_limits = partial(typer.Option, rich_help_panel="Limits")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen, whom to serve, and how much of it; see hmt.server.ServerConfig."""

    host: Annotated[str, _where(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _where(help="Port; 0: any that is free.")] = 8000
    name: Annotated[
        str | None, _where(help="What clients call the model; its folder's name when left out.")
    ] = None
    extra_model: Annotated[
        list[Path] | None,
        _where(
            help="Folder of a model that clients may load, in what --host-memory has left; may be "
            "repeated.  The first one may then be unloaded, too."
        ),
    ] = None
    first_memory: Annotated[
        str | None,
        _where(help="The most that MODEL takes of --host-memory, so that others have room."),
    ] = None
    api_key: Annotated[
        list[str] | None,
        _who(
            help="A key that clients must send; may be repeated.  Others on this machine can see "
            "it in the list of processes: better a file."
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        _who(help="File of keys, one per line, as they are or as sha256: and the hash."),
    ] = None
    public: Annotated[
        bool,
        _who(
            "--public", help="Listen where other machines can reach it, although there is no key."
        ),
    ] = False
    origin: Annotated[
        list[str] | None,
        _who(
            help="Origin of web pages that may use it (CORS), such as https://example.org; may be "
            "repeated."
        ),
    ] = None
    allow_image_host: Annotated[
        list[str] | None,
        _who(
            help="A host (HOST, or HOST:PORT) from which the server fetches images that requests "
            "name by their URLs; may be repeated.  Only from public addresses."
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        _where(help="File with the chat template (Jinja) to use instead of MODEL's own."),
    ] = None
    max_batch: Annotated[
        int | None,
        _limits(
            help="Answers that are computed at once; 16, or what --profile says, when left out."
        ),
    ] = None
    max_waiting: Annotated[
        int, _limits(help="Answers that wait besides; more are refused at once.")
    ] = 64
    max_tokens: Annotated[
        int | None,
        _limits(
            help="The longest answer of requests that do not say; when left out 1024 for OpenAI's "
            "chats, and what the context holds for its Responses API and Ollama's."
        ),
    ] = None
    max_body: Annotated[str, _limits(help="The largest request.")] = "4MiB"
    timeout: Annotated[
        float, _limits(help="Seconds that an answer may take, its wait included.")
    ] = 600.0

    shutdown_timeout: Annotated[
        float,
        _limits(
            help="Seconds that answers have to end once the server is told to stop (Ctrl-C, "
            "SIGTERM); a second signal ends it at once."
        ),
    ] = 30.0
    adapter_dir: Annotated[
        Path | None,
        _where(
            help="Folder of which clients may load adapters, and unload any (vLLM's "
            "/v1/load_lora_adapter); see --adapter-memory."
        ),
    ] = None
    dp: Annotated[
        int,
        _where(
            min=1,
            help="Servers of the model behind one address, each a process with its part of the "
            "memory, cores and GPUs; prompts go where their beginning is known.",
        ),
    ] = 1
    log_requests: Annotated[
        bool,
        _limits(
            "--log-requests",
            help="Write a line of JSON for each response to stderr, without what was said.",
        ),
    ] = False

    def others(self, first: str) -> dict[str, Path]:
        """Folders of models by name, beside the one called `first`.  Raises ConfigError."""
        found: dict[str, Path] = {}
        for folder in self.extra_model or ():
            name = folder.absolute().name
            if not folder.exists():
                raise ConfigError(f"--extra-model {folder}: there is no such folder or file")
            if name in found or name == first:
                raise ConfigError(
                    f"--extra-model {folder}: another model of this server is called {name}"
                )
            found[name] = folder
        return found

    def keys(self) -> "KeyRing":
        """Whom to serve.  Raises ConfigError."""
        from hmt.server import KeyRing

        return KeyRing.of(self.api_key or (), self.api_key_file)

    def config(self, keys: "KeyRing", replica: int | None = None) -> "ServerConfig":
        """The same for the server, and see ServerConfig.  Raises ConfigError."""
        from hmt.server import ServerConfig
        from hmt.text import read_template

        template = None if self.chat_template is None else read_template(self.chat_template)
        return ServerConfig(
            name=self.name,
            host=self.host,
            port=self.port,
            keys=keys,
            public=self.public,
            max_waiting=self.max_waiting,
            default_new_tokens=self.max_tokens,
            timeout_s=self.timeout,
            shutdown_s=self.shutdown_timeout,
            max_body_bytes=parse_bytes(self.max_body),
            origins=tuple(self.origin or ()),
            image_hosts=tuple(self.allow_image_host or ()),
            log_requests=self.log_requests,
            chat_template=template,
            adapter_dir=self.adapter_dir,
            replica=replica,
        )


@expand
def serve(
    engine: EngineOptions,
    server: ServerOptions,
    model: ModelArgument = None,
    remember: RememberOption = False,
) -> None:
    """Serve a model over HTTP, the OpenAI way, until Ctrl-C."""
    join_torchrun()
    try:
        import hmt.server as room
    except ImportError as error:
        raise MachineError(
            f"hmt serve needs {error.name}, which is not installed: pip install 'hmt[serve]'"
        ) from error
    from hmt.formats import shown_name

    keys = server.keys()
    config, engine = server.config(keys), settled(engine, model, remember)
    path, console = choose_model(model), notes()
    name = config.name or shown_name(path)

    def started(address: str) -> None:
        console.print(
            f"{name} is served at {address}/v1 and has a page at {address}/",
            soft_wrap=True,
            markup=False,
        )

    with room.bind(config) as bound:
        if server.dp > 1:
            _serve_replicas(path, engine, server, config, bound, started)
        else:
            serve_here(path, engine, server, config, bound, started)


def serve_here(
    path: Path,
    engine: EngineOptions,
    server: ServerOptions,
    config: "ServerConfig",
    bound: "socket.socket",
    started: "Callable[[str], None]",
    loaded: "Callable[[LoadedModel], None]" = lambda model: None,
) -> None:
    """Load the model and serve it in this process; see hmt.server.serve.

    `loaded` is told of the model before anything is asked of it.
    """
    import hmt.server as room
    from hmt.formats import shown_name
    from hmt.memory import limit_malloc_arenas

    limit_malloc_arenas()
    also = server.others(config.name or shown_name(path))
    first = None if server.first_memory is None else parse_bytes(server.first_memory)
    with loading(f"loading {shown_name(path)}") as report:
        from hmt.engine import Engine

        arguments = engine.arguments() | {"max_batch": server.max_batch}
        with suggesting(path, arguments | ({"host_memory": first} if first else {})):
            engines = Engine(**arguments)
            if told := engines.numa:
                notes().print(f"NUMA: {told}", soft_wrap=True, markup=False)
            model = engines.load_model(path, progress=report, host_memory=first)
    loaded(model)
    others = room.LoadableModels(engines, also) if also else None
    with engines:
        room.serve(model, config, bound, started, others)


def _serve_replicas(
    path: Path,
    engine: EngineOptions,
    server: ServerOptions,
    config: "ServerConfig",
    bound: "socket.socket",
    started: "Callable[[str], None]",
) -> None:
    """Serve the model by several processes, and route requests to them in this one."""
    import hmt.server as room
    from hmt.cli.replicas import Replicas, divided, order_of
    from hmt.engine import EngineConfig
    from hmt.server.router import create_router

    for option, given in (
        ("--extra-model", server.extra_model), ("--first-memory", server.first_memory),
        ("--adapter-dir", server.adapter_dir),
    ):  # fmt: skip
        if given:
            raise ConfigError(f"{option} is of one server, and --dp {server.dp} starts several")
    if launch() is not None:
        raise ConfigError(
            "torchrun starts the processes of one server: leave --dp out, or torchrun"
        )
    own = replace(server, api_key=None, api_key_file=None, dp=1, log_requests=False, origin=None)
    keys = [f"sha256:{one.hex()}" for one in config.keys.hashes]
    parts = divided(engine, server.dp)
    orders = [order_of(path, part, asdict(own), keys) for part in parts]
    arguments = parts[0].arguments() | {"max_batch": server.max_batch}
    at_once = EngineConfig.resolve(**arguments).max_batch
    with Replicas(orders, config.shutdown_s) as replicas:
        replicas.wait()
        app = create_router(replicas.replicas, config, at_once=at_once)
        room.serve_app(app, config, bound, started)
