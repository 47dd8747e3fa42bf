"""The peers' settings: the same sizes for all, modes of jcb, names that cannot be."""

from pathlib import Path

import pytest

from jcb.bench.peers.__main__ import main
from jcb.bench.peers.catalogue import PACKAGES, Files, Machine, catalogue, parse_mode

MACHINE = Machine(threads=2, dtype="float32", max_model_len=768, work=Path("work"))
FILES = Files(gguf=Path("m.gguf"), f16=Path("f16.gguf"), folder=Path("hf"))


def test_all_peers_get_the_same_threads_and_sizes():
    peers = catalogue(MACHINE, FILES, {"f32": ("dtype=float32",)})
    sizes = {(p.settings["threads"], p.settings["max_model_len"], p.settings["max_num_seqs"]) for p in peers.values()}
    assert sizes == {(2, 768, 64)}
    assert {peer.environment for peer in peers.values()} == {"", *PACKAGES}
    assert all(peer.env["OMP_NUM_THREADS"] == "2" for peer in peers.values())


def test_modes_of_jcb_reach_engine_and_server():
    peer = catalogue(MACHINE, FILES, {"f32": ("dtype=float32", "page_size=32")})["jcb-f32"]
    assert peer.settings["set"] == ["dtype=float32", "page_size=32"]
    assert peer.server[-4:] == ("--set", "dtype=float32", "--set", "page_size=32")
    assert peer.is_jcb


def test_modes_are_parsed():
    assert parse_mode("f32=dtype=float32,page_size=32") == ("f32", ("dtype=float32", "page_size=32"))
    with pytest.raises(ValueError, match="'f32' is not of the form"):
        parse_mode("f32")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--cells", "9-9-9"], "--cells '9-9-9' is not one of 128-32-1"),
        (["--jcb-mode", "x"], "--jcb-mode 'x' is not of the form"),
    ],
)
def test_bad_flags_are_named(flags, error, capsys):
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert error in capsys.readouterr().err
