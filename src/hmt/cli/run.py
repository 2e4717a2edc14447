"""`hmt run`: an answer to one prompt, or a chat."""

import json as json_format
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hmt.base.errors import ConfigError, EmptyPromptError, HMTError
from hmt.cli.console import loading, notes
from hmt.cli.interrupt import StopKey
from hmt.cli.options import (
    EngineOptions,
    RememberOption,
    SamplingOptions,
    choose_model,
    expand,
)
from hmt.cli.plan_options import suggesting
from hmt.cli.remembered import settled
from hmt.cli.torchrun import join_torchrun

if TYPE_CHECKING:
    from hmt.cli.conversation import Conversation
    from hmt.contracts.request import FinishReason, TokenEvent
    from hmt.engine import LoadedModel
    from hmt.engine.streams import TokenStream
    from hmt.text import HarmonyReader

_INTERRUPTED = 130  # as shells count: 128 + SIGINT


@dataclass(frozen=True, slots=True)
class Job:
    """What `hmt run` was asked to do."""

    model: Path
    prompt: str | None
    engine: EngineOptions
    sampling: SamplingOptions
    raw: bool = False
    summary: bool = True
    json: bool = False
    chat_template: Path | None = None
    images: tuple[Path, ...] = ()
    videos: tuple[Path, ...] = ()


@dataclass(slots=True)
class Answer:
    """What was generated until the answer ended or was stopped."""

    prompt_tokens: int
    text: str = ""
    reasoning: str = ""  # of models whose answers have channels; else part of the text
    token_ids: tuple[int, ...] = ()
    finish_reason: "FinishReason | None" = None

    @property
    def stopped(self) -> bool:
        """True when the user stopped it."""
        return self.finish_reason is None


@expand
def run(
    engine: EngineOptions,
    sampling: SamplingOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder of a checkpoint or pack, a GGUF file, owner/name or owner/name:TYPE on "
            "the Hugging Face hub, or a name of the list that `hmt` shows; the embedded model "
            "when left out, or when this is the only argument and is a prompt."
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; a chat when left out.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")
    ] = False,
    no_summary: Annotated[
        bool, typer.Option("--no-summary", help="Do not say what it cost.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print answer and summary as JSON.")] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="File with the chat template (Jinja) to use instead of MODEL's own."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image that PROMPT is about (PNG, JPEG, WebP or GIF), for models that see; can be "
            "given several times. In a chat: /image FILE."
        ),
    ] = None,
    video: Annotated[
        list[Path] | None,
        typer.Option(
            help="Video that PROMPT is about (an animation in GIF, WebP or PNG; with PyAV also "
            "MP4, QuickTime, WebM and Matroska), for models that take them; can be given several "
            "times.  In a chat: /video FILE."
        ),
    ] = None,
    remember: RememberOption = False,
) -> None:
    """Answer a prompt, or chat, and say what it cost."""
    join_torchrun()
    named = None if model is None or (prompt is None and _is_prompt(model)) else model
    engine = settled(engine, named, remember)
    path, prompt = choose(model, prompt)
    if json and prompt is None:
        raise ConfigError("--json prints one answer; give a prompt, or leave --json out to chat")
    for kind, given in (("image", image), ("video", video)):
        if given and prompt is None:
            raise ConfigError(f"--{kind} belongs to a prompt; in a chat write /{kind} FILE")
    shown = tuple(image or ()), tuple(video or ())
    answer_or_chat(
        Job(path, prompt, engine, sampling, raw, not no_summary, json, chat_template, *shown)
    )


def choose(model: str | None, prompt: str | None) -> tuple[Path, str | None]:
    """The checkpoint's folder and the prompt.

    A single argument that names nothing on disk is a prompt for the embedded model, unless it can
    only be meant as a path.
    """
    if model is None or prompt is not None or not _is_prompt(model):
        return choose_model(model), prompt
    return choose_model(None), model


def answer_or_chat(job: Job) -> None:
    """Load the model, answer or chat, print the summary; also after Ctrl-C and after errors."""
    if job.prompt is not None and not job.prompt.strip():
        raise EmptyPromptError("the prompt is empty; give some text, or no prompt at all to chat")
    from hmt.formats import shown_name
    from hmt.text import read_template

    template = None if job.chat_template is None else read_template(job.chat_template)
    with loading(f"loading {shown_name(job.model)}") as report:
        from hmt.cli.conversation import Conversation, file_of, video_of
        from hmt.engine import Engine

        images = [file_of(image) for image in job.images]  # before a model is loaded in vain
        videos = [video_of(video) for video in job.videos]
        arguments = job.engine.arguments()
        with suggesting(job.model, arguments):
            engine = Engine(**arguments)
            model = job.engine.with_adapter(engine.load_model(job.model, progress=report))
    with engine:
        try:
            if template is not None:
                model.tokenizer.use_chat_template(template)
            conversation = Conversation(model, job.sampling, raw=job.raw)
            conversation.show(images, videos)
            if job.prompt is None:
                _chat(conversation, job)
            elif not _answer_once(conversation, job.prompt, job):
                raise typer.Exit(_INTERRUPTED)
        finally:
            if job.summary and not job.json:
                _print_summary(model)
                if told := engine.numa:
                    notes().print(f"NUMA: {told}", soft_wrap=True, markup=False)


def _is_prompt(text: str) -> bool:
    from hmt.planner.catalogue import known_models

    if not text.strip():
        return True
    try:
        exists = Path(text).expanduser().exists()
    except (OSError, RuntimeError):  # far too long for a path, or an unknown ~user
        return True
    if any(text.partition(":")[0] == known.name for known in known_models()):
        return False
    # Also owner/name, as models are called elsewhere: better a clear error than an odd answer.
    looks_like_path = "/" in text and not any(map(str.isspace, text))
    return not exists and not looks_like_path


def _answer_once(conversation: "Conversation", prompt: str, job: Job) -> bool:
    """Print one answer; False when it was stopped."""
    write = (lambda text: None) if job.json else _write
    answer = _answer(conversation, prompt, write)
    if job.json:
        _print_json(answer, conversation.model)
    else:
        print()
    return not answer.stopped


def _chat(conversation: "Conversation", job: Job) -> None:
    """Answer line after line, until /exit, the end of the input, or Ctrl-C between answers."""
    console, person = notes(), sys.stdin.isatty()
    from hmt.formats import shown_name

    commands = "/image FILE and /video FILE show one, /reset forgets, /exit leaves"
    console.print(f"[bold]{shown_name(job.model)}[/] [dim]· {commands}[/]")
    if person:
        import readline  # noqa: F401  # gives input() a line editor and a history
    while True:
        try:
            line = input("\n> " if person else "").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith(("/image ", "/video ")):
            _show(conversation, *line.removeprefix("/").split(maxsplit=1))
        elif line:
            _one_turn(conversation, line)


def _show(conversation: "Conversation", kind: str, file: str) -> None:
    """Let the next line be about an image or a video."""
    from rich.text import Text

    from hmt.cli.conversation import file_of, video_of

    try:
        if kind == "image":
            conversation.show([file_of(Path(file))])
        else:
            conversation.show((), [video_of(Path(file))])
    except HMTError as error:
        notes().print(Text(f"{error}", style="red"), soft_wrap=True)


def _one_turn(conversation: "Conversation", line: str) -> None:
    console = notes()
    try:
        answer = _answer(conversation, line, _write)
    except HMTError as error:
        from rich.text import Text

        console.print(Text(f"{error}", style="red"), soft_wrap=True)
        return
    print()
    if answer.stopped:
        console.print("[dim](stopped; Ctrl-C once more leaves)[/]")
    conversation.remember(line, answer.text)


def _answer(conversation: "Conversation", line: str, write: Callable[[str], None]) -> Answer:
    """Stream the answer to `line`.  The first Ctrl-C stops it, the second is KeyboardInterrupt."""
    request = conversation.request(line)
    answer = Answer(prompt_tokens=len(request.input))
    with StopKey() as key:
        try:
            reader = conversation.reader(line)
            stream = conversation.model.stream(request)
            answer.prompt_tokens = stream.prompt_tokens
            _stream(stream, reader, answer, key, write)
        except KeyboardInterrupt:
            if key.pressed:
                raise
    return answer


def _stream(
    events: "TokenStream",
    reader: "HarmonyReader | None",
    answer: Answer,
    key: StopKey,
    write: Callable[[str], None],
) -> None:
    with closing(events):  # which cancels the request
        for event in events:
            text = event.text
            if reader is not None:
                text = _parted(reader, event, answer, write is _write)
            answer.text += text
            answer.token_ids += (event.token_id,)
            answer.finish_reason = event.finish_reason
            write(text)
            key.patient = True
            if key.pressed:
                return


def _parted(reader: "HarmonyReader", event: "TokenEvent", answer: Answer, shown: bool) -> str:
    """What the answer goes on with; what was thought goes to where notes go, if it is shown."""
    thought, text, _ = reader.push(event.text)
    if event.finish_reason is not None:
        rest, ending, _ = reader.flush()
        thought, text = thought + rest, text + ending
    answer.reasoning += thought
    if shown and thought:
        from rich.text import Text

        notes().print(Text(thought, style="dim"), end="", soft_wrap=True)
    if shown and text and answer.reasoning and not answer.text:
        notes().print("\n")
    return text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_summary(model: "LoadedModel") -> None:
    from hmt.cli.report import summary_view

    summary = model.summary()
    if summary.prompt.tokens or summary.generation.tokens:
        notes().print(summary_view(summary))


def _print_json(answer: Answer, model: "LoadedModel") -> None:
    from hmt.cli.report import summary_json

    content = {
        "text": answer.text,
        **({"reasoning": answer.reasoning} if answer.reasoning else {}),
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason or "cancelled",
        "prompt_tokens": answer.prompt_tokens,
        "summary": summary_json(model.summary()),
    }
    print(json_format.dumps(content, indent=1))
