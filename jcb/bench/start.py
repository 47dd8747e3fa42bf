"""How long a server takes to be ready: with an empty compile cache, and again with what the first start left there.

python -m jcb.bench.start [--output FILE] [serve flags]

Also of the second start: memory that is resident when it is ready beside weights and pages, and the time to the first
token of the first request beside that of the hundredth.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from jcb.bench.server_process import metric, model_id, running
from jcb.bench.serving.client import make_body, send

REQUESTS = 100
PROMPT = "The quick brown fox jumps over the lazy dog. " * 3


def start(arguments: list[str], requests: int) -> dict[str, Any]:
    """Seconds from starting the process to /ready answering 200, and what the server is like then."""
    began = time.perf_counter()
    with running(arguments) as server:
        url, seconds = server.url, time.perf_counter() - began
        return {
            "ready_seconds": seconds,
            "programs": metric(url, "jcb:programs"),
            "load_seconds": metric(url, "jcb:model_load_seconds"),
            "compile_seconds": metric(url, "jcb:compile_seconds_total"),
            "resident_bytes": server.resident_bytes(),
            "weight_bytes": metric(url, "jcb:weight_bytes"),
            "page_bytes": metric(url, "jcb:page_bytes"),
            "first_token_seconds": asyncio.run(first_tokens(url, requests)),
        }


async def first_tokens(url: str, requests: int) -> list[float]:
    """Seconds to the first token of requests sent one after another."""
    found: list[float] = []
    async with aiohttp.ClientSession() as session:
        model = await asyncio.to_thread(model_id, url)
        for number in range(requests):
            body = make_body("openai", model, f"{number} {PROMPT}", 4, {"ignore_eos": True})
            outcome = await send(session, f"{url}/v1/completions", body, 0)
            if outcome.error:
                raise RuntimeError(f"request {number}: {outcome.error}")
            found.append(outcome.ttft)
    return found


def lines(cold: dict[str, Any], warm: dict[str, Any]) -> list[str]:
    """What both starts say."""
    made = [
        f"{name:<6} ready after {each['ready_seconds']:.1f} s: {each['programs']:.0f} programs in "
        f"{each['compile_seconds']:.1f} s, model in {each['load_seconds']:.1f} s"
        for name, each in (("first", cold), ("second", warm))
    ]
    resident, known = warm["resident_bytes"], warm["weight_bytes"] + warm["page_bytes"]
    made.append(
        f"resident {resident / 1e6:,.0f} MB, weights {warm['weight_bytes'] / 1e6:,.0f} MB and pages "
        f"{warm['page_bytes'] / 1e6:,.0f} MB: {(resident - known) / 1e6:,.0f} MB beside them (goal 700)"
    )
    times = warm["first_token_seconds"]
    if times:
        late = statistics.median(times[-10:])
        made.append(
            f"first token of the first request {times[0] * 1e3:.1f} ms, of the last {times[-1] * 1e3:.1f} ms, last ten "
            f"{late * 1e3:.1f} ms (median): {times[0] / late:.2f} x (goal 1.2)"
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Start twice, print what was found; status 2 for a bad flag."""
    flags = sys.argv[1:] if arguments is None else arguments
    output = None
    if "--output" in flags:
        at = flags.index("--output")
        if at + 1 == len(flags):
            print("jcb: --output needs a file", file=sys.stderr)
            return 2
        output, flags = Path(flags[at + 1]), flags[:at] + flags[at + 2 :]
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--set", f"engine.compile_cache={folder}"]
        print("first start, empty compile cache ...", flush=True)
        cold = start(flags, 0)
        print(f"  ready after {cold['ready_seconds']:.1f} s\nsecond start ...", flush=True)
        warm = start(flags, REQUESTS)
    print(*lines(cold, warm), sep="\n")
    print(f"the second start is {cold['ready_seconds'] / warm['ready_seconds']:.2f} x faster")
    if output is not None:
        output.write_text(json.dumps({"cold": cold, "warm": warm}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
