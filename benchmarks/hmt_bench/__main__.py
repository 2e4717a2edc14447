"""`python -m hmt_bench NAME ...`: developers' benchmarks; `hmt bench` has those for users."""

import typer

from hmt.cli.main import guard
from hmt_bench.commands import (
    adapters,
    bigger_than_ram,
    cache,
    drift,
    encoders,
    gpu,
    hybrid,
    images,
    kv,
    kv_speed,
    pages,
    peer,
    plans,
    predictions,
    prefix,
    published,
    quantize_large,
    quantized,
    soak,
    speculation,
    speculation_check,
)

app = typer.Typer(
    name="hmt_bench",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help=__doc__,
)
app.command("adapters")(adapters.adapters)
app.command("cache")(cache.cache)
app.command("drift")(drift.drift)
app.command("encoders")(encoders.encoders)
app.command("gpu")(gpu.gpu)
app.command("hybrid")(hybrid.hybrid)
app.command("images")(images.images)
app.command("kv")(kv.kv)
app.command("kv-speed")(kv_speed.kv_speed)
app.command("larger-than-ram")(bigger_than_ram.larger_than_ram)
app.command("bigger-than-ram", hidden=True)(bigger_than_ram.larger_than_ram)  # as it was called
app.command("pages")(pages.pages)
app.command("peer")(peer.peer)
app.command("plans")(plans.plans)
app.command("predictions")(predictions.predictions)
app.command("prefix")(prefix.prefix)
app.command("published")(published.published)
app.command("quantize-large")(quantize_large.quantize_large)
app.command("quantized")(quantized.quantized)
app.command("soak")(soak.soak)
app.command("speculation")(speculation.speculation)
app.command("speculation-check")(speculation_check.speculation_check)
app.command("traces")(cache.traces)

if __name__ == "__main__":
    guard(app)
