"""A server that records: what callers say, get, or call themselves is not in the file, and the run comes again."""

import asyncio
import dataclasses

from jcb.config import ServerConfig, replace
from jcb.engine.record import start_recorder
from jcb.models.presets import preset
from jcb.recording import Arrival, Recording, RecordingFile
from jcb.simulate.replay import Replay
from jcb.steps.shapes import Shapes

CANARY = "canary7q"


async def test_a_recorded_server_writes_nothing_that_was_said(start_server, tmp_path):
    key_file = tmp_path / "keys"
    key_file.write_text(f"{CANARY}-key\n")
    server = await start_server(server=ServerConfig(port=0, api_key_file=str(key_file)))
    engine, path = server.engine, tmp_path / "run.jsonl"
    limits = engine.info.limits
    config = replace(engine.config, "scheduler", max_model_len=limits.max_model_len)
    config = replace(config, "cache", page_size=limits.page_size, num_pages=limits.num_pages)
    shape = dataclasses.replace(preset("smollm2-135m"), vocab_size=limits.vocab_size)
    shapes = Shapes.make(config.scheduler, limits)
    engine.core.recorder = start_recorder(RecordingFile(path), config, shape, "cpu", shapes)
    headers = {"Authorization": f"Bearer {CANARY}-key"}
    body = {"prompt": CANARY * 4, "user": CANARY, "request_id": CANARY, "cache_salt": CANARY, "stop": [CANARY + "!"]}
    for fields in ({}, {"stream": True}, {"seed": 1, "n": 2}, {"priority": 0}):
        async with server.session.post(server.url + "/v1/completions", json=body | fields, headers=headers) as reply:
            assert reply.status == 200
            assert await reply.read()
    while not server.async_engine._engine.is_idle:
        await asyncio.sleep(0.01)
    engine.core.recorder.close()
    text = path.read_text()
    assert CANARY not in text
    ids = ",".join(map(str, engine.tokenizer.encode(CANARY, add_special_tokens=False, parse_special=False)))
    assert ids not in text.replace(" ", "")
    recording = Recording.open(path)
    arrivals = [event for event in recording if isinstance(event, Arrival)]
    assert len(arrivals) == 5
    assert len({arrival.chain for arrival in arrivals}) == 1, "equal prompts are equal pages"
    assert Replay(recording).run().difference is None
