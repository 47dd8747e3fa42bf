"""TOML files, key=value settings and their errors."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jcb import config_file
from jcb.config import CacheConfig, EngineConfig, SchedulerConfig, ServeConfig, ServerConfig

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


def load_text(folder, text):
    path = folder / "config.toml"
    path.write_text(text)
    return config_file.load(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load(path):
    assert config_file.load(path) != ServeConfig()


def test_the_commented_config_names_every_setting():
    text = next(path for path in CONFIGS if path.stem == "smollm2-cpu").read_text()
    for field in config_file.fields():
        assert f"\n{field.rpartition('.')[2]} = " in text or f"\n# {field.rpartition('.')[2]} = " in text, field


def test_a_file_changes_only_what_it_names(tmp_path):
    config = load_text(tmp_path, 'model = "a.gguf"\n[cache]\npage_size = 64\nmemory_gib = 2\n')
    assert config == ServeConfig(model="a.gguf", cache=CacheConfig(page_size=64, memory_gib=2.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cache]\npage_sise = 3", "unknown setting 'cache.page_sise'; did you mean 'cache.page_size'"),
        ("page_size = 3", "unknown setting 'page_size'; did you mean 'cache.page_size'"),
        ("[cash]\npage_size = 3", "unknown setting 'cash'; did you mean 'cache'"),
        ("[scheduler]\nmax_num_seqs = '4'", "scheduler.max_num_seqs='4' must be a whole number"),
        ("[scheduler]\nmax_num_seqs = true", "scheduler.max_num_seqs=True must be a whole number"),
        ("[scheduler]\npolicy = 'fair'", "scheduler.policy='fair' must be one of fcfs, priority"),
        ("[scheduler]\ntoken_buckets = 512", "scheduler.token_buckets=512 must be a list of whole numbers"),
        ("[scheduler]\ntoken_buckets = [16, true]", "scheduler.token_buckets=[16, True] must be a list"),
        ("[scheduler]\ntoken_buckets = [16, 256]", "token_buckets=[16, 256] must reach max_num_batched_tokens=512"),
        ("[scheduler]\ndecode_row_buckets = [8, 8, 64]", "decode_row_buckets=[8, 8, 64] must ascend"),
        ("[scheduler]\nprefill_row_buckets = [1, 64]", "prefill_row_buckets=[1, 64] must ascend from 2"),
        ("[cache]\nmemory_gib = nan", "cache.memory_gib=nan must be a number"),
        ("[cache]\npage_size = 24", "page_size=24 must be a power of two"),
        ("cache = 3", "cache=3 must be a section"),
        ("[server]\nmax_body_bytes = -1", "max_body_bytes=-1 must be 1 to 67,108,864"),
        ("[server]\nmax_body_bytes = 0", "max_body_bytes=0 must be"),
        ("[server]\nmax_body_bytes = 99999999999", "max_body_bytes=99999999999 must be"),
        ("[server]\ndrain_seconds = inf", "drain_seconds=inf must be"),
        ("[server]\ndrain_seconds = -1.0", "drain_seconds=-1.0 must be"),
        ("[cache", "is not TOML"),
    ],
)
def test_a_bad_file_is_an_error_that_names_path_and_fix(tmp_path, text, message):
    with pytest.raises(ValueError, match=r"config\.toml") as caught:
        load_text(tmp_path, text)
    assert message in str(caught.value)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml.*No such file"):
        config_file.load(tmp_path / "nowhere.toml")


def test_settings_are_read_as_the_type_of_their_field():
    values = config_file.parse_settings(
        ["engine.seed=7", "overlap=false", "cache.memory_gib=2", "model=8", "engine.compile_cache="]
    )
    config = config_file.override(ServeConfig(), values)
    assert config.engine == EngineConfig(seed=7, overlap=False, compile_cache="")
    assert config.cache.memory_gib == 2.0
    assert isinstance(config.cache.memory_gib, float)
    assert config.model == "8"


@pytest.mark.parametrize("text", ["16,48,512", "[16, 48, 512]", "16 48 512"])
def test_a_list_is_written_with_commas_or_blanks(text):
    config = config_file.override(ServeConfig(), config_file.parse_settings([f"token_buckets={text}"]))
    assert config.scheduler.token_buckets == (16, 48, 512)
    assert config_file.loads(config_file.dump(config)) == config
    empty = config_file.parse_settings(["token_buckets="])
    assert config_file.override(config, empty).scheduler.token_buckets == ()


def test_none_is_written_as_none():
    config = ServeConfig(engine=EngineConfig(seed=3))
    assert config_file.override(config, config_file.parse_settings(["seed=none"])).engine.seed is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("max_num_seq=3", "did you mean 'scheduler.max_num_seqs'"),
        ("cache.page_size=x", "cache.page_size='x' must be a whole number"),
        ("engine.overlap=maybe", "engine.overlap='maybe' must be true or false"),
        ("token_buckets=16,many", "scheduler.token_buckets=[16, 'many'] must be a list of whole numbers"),
        ("engine.seed=1.5", "engine.seed='1.5' must be a whole number or none"),
        ("dtype=float64", "dtype='float64' must be one of auto, float32, bfloat16"),
        ("cache=3", "unknown setting 'cache'"),
        ("page_size", "is not of the form key=value"),
    ],
)
def test_a_bad_setting_is_an_error_that_names_it(setting, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config_file.parse_settings([setting])


def test_settings_that_are_valid_only_together_may_come_in_any_order():
    values = {"max_num_seqs": 1024, "max_num_batched_tokens": 2048}
    for order in (values, dict(reversed(values.items()))):
        assert config_file.override(ServeConfig(), order).scheduler.max_num_seqs == 1024


def test_every_field_name_stands_alone_in_one_section():
    names = [path.rpartition(".")[2] for path in config_file.fields()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "gib"), [("2", 2.0), ("2G", 2.0), ("1.5GiB", 1.5), ("512M", 0.5), ("512 mb", 0.5), (".5t", 512.0)]
)
def test_sizes(text, gib):
    assert config_file.parse_gib(text) == gib


@pytest.mark.parametrize("text", ["", "G", "-1", "2X", "1e3", "nan", "2 2"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="must be a number of GiB"):
        config_file.parse_gib(text)


@given(
    model=st.text(st.characters(codec="utf-8")),
    memory=st.floats(0, 1e5),
    timeout=st.floats(min_value=1e-3, allow_nan=False),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    port=st.integers(0, 65535),
)
def test_dump_reads_back_the_same(tmp_path_factory, model, memory, timeout, seed, port):
    config = ServeConfig(
        model=model,
        cache=CacheConfig(memory_gib=memory),
        scheduler=SchedulerConfig(run_timeout=timeout),
        engine=EngineConfig(seed=seed),
        server=ServerConfig(port=port),
    )
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    path.write_text(config_file.dump(config), encoding="utf-8", newline="")
    assert config_file.load(path) == config


def test_dump_names_every_setting():
    dumped = config_file.dump(ServeConfig())
    assert len(config_file.fields()) == sum(" = " in line for line in dumped.splitlines())
