"""The configuration: what wins, what is refused, and that everything wrong is said at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.config import AuthMode, Config
from chatsvc.config_load import known_keys, load_config
from chatsvc.errors import ConfigError
from chatsvc.limits import TierName

HOME = {"HOME": "/home/someone"}


def from_variables(**variables: str) -> Config:
    return load_config(None, HOME | variables)


def from_file(tmp_path: Path, text: str, **variables: str) -> Config:
    file = tmp_path / "chatsvc.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, HOME | variables)


def problems_of(load, *arguments, **variables) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **variables)
    return caught.value.problems


def test_without_file_and_variables_the_defaults_of_the_structs_hold():
    config = from_variables()
    models = {"default": config.models["default"]}
    assert config == Config(data_dir=Path("/home/someone/.local/share/chatsvc"), models=models)
    assert (models["default"].engine, models["default"].default) == ("auto", True)


@pytest.mark.parametrize(
    ("variable", "text", "read"),
    [
        ("CHATSVC_HOST", "::1", lambda c: c.server.host == "::1"),
        ("CHATSVC_PORT", "9000", lambda c: c.server.port == 9000),
        ("CHATSVC_BASE_PATH", "/chat/", lambda c: c.server.base_path == "/chat/"),
        ("CHATSVC_DATA_DIR", "/data", lambda c: c.data_dir == Path("/data")),
        ("CHATSVC_DATA_DIR", "~/chat", lambda c: c.data_dir == Path("/home/someone/chat")),
        ("CHATSVC_DATA_DIR", "here", lambda c: c.data_dir == Path.cwd() / "here"),
        ("CHATSVC_DATABASE_URL", "postgresql://u@h/d", lambda c: c.database.url == "postgresql://u@h/d"),
        ("CHATSVC_REDIS_URL", "unix:///run/redis.sock", lambda c: c.database.redis_url == "unix:///run/redis.sock"),
        ("CHATSVC_REDIS_URL", "redis+sentinel://a,b/main", lambda c: c.database.redis_url.endswith("/main")),
        ("CHATSVC_ENGINE", "scripted:?tokens=3", lambda c: c.models["default"].engine == "scripted:?tokens=3"),
        ("CHATSVC_ROLES", "api", lambda c: c.roles == {"api"}),
        ("CHATSVC_ROLES", " worker , api ", lambda c: c.roles == {"api", "worker"}),
        ("CHATSVC_REGION", "eu-1", lambda c: c.region == "eu-1"),
        ("CHATSVC_AUTH", "proxy", lambda c: c.auth.mode is AuthMode.PROXY),
        ("CHATSVC_LOG_FORMAT", "json", lambda c: c.log.format == "json"),
        ("CHATSVC_LOG_LEVEL", "DEBUG", lambda c: c.log.level == "debug"),
        ("CHATSVC_STREAM_BATCH_MS", "20", lambda c: c.stream.batch_ms == 20),
        ("CHATSVC_AUTH_USER_HEADER", "X-User", lambda c: c.auth.user_header == "X-User"),
        ("CHATSVC_AUTH_TRUSTED_PROXIES", "10.0.0.0/8, ::1", lambda c: c.auth.trusted_proxies == ("10.0.0.0/8", "::1")),
        ("CHATSVC_AUTH_ALLOW_PUBLIC_WITHOUT_AUTH", "True", lambda c: c.auth.allow_public_without_auth),
        ("CHATSVC_LEASE_TTL_S", "8", lambda c: c.lease.ttl_s == 8.0),
        ("CHATSVC_SERVER_GRACE_S", "0", lambda c: c.server.grace_s == 0),
        ("CHATSVC_TIERS_PRO_WEIGHT", "2.5", lambda c: c.tiers[TierName.PRO].weight == 2.5),
        ("CHATSVC_OPENAI_API_KEY", "sk-1", lambda _: True),
    ],
)
def test_a_variable_sets_its_key(variable, text, read):
    assert read(from_variables(**{variable: text}))


def test_every_key_has_one_variable_of_its_own():
    variables = [key.variable for key in known_keys()]
    assert len(variables) == len(set(variables))
    assert all(variable.startswith("CHATSVC_") and variable.isupper() for variable in variables)


def test_the_environment_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    config = from_file(tmp_path, "[server]\nport = 1\ngrace_s = 2\n", CHATSVC_PORT="3")
    assert (config.server.port, config.server.grace_s, config.server.host) == (3, 2.0, "127.0.0.1")


def test_an_empty_variable_counts_as_not_set(tmp_path):
    assert from_file(tmp_path, "[server]\nport = 1\n", CHATSVC_PORT=" ").server.port == 1


def test_chatsvc_config_names_the_file_and_the_argument_goes_before_it(tmp_path):
    (tmp_path / "a.toml").write_text("[server]\nport = 1\n")
    (tmp_path / "b.toml").write_text("[server]\nport = 2\n")
    variables = HOME | {"CHATSVC_CONFIG": str(tmp_path / "a.toml")}
    assert load_config(None, variables).server.port == 1
    assert load_config(tmp_path / "b.toml", variables).server.port == 2


def test_part_of_a_tier_can_be_changed_and_the_rest_keeps_its_default(tmp_path):
    config = from_file(tmp_path, "[tiers.free]\nmax_open_replies = 1\n")
    assert config.tiers[TierName.FREE].max_open_replies == 1
    assert config.tiers[TierName.FREE].weight == 1
    assert config.tiers[TierName.PRO].weight == 16


def test_several_models_come_from_the_file_and_one_of_them_is_the_default(tmp_path):
    config = from_file(
        tmp_path, '[models.a]\nengine = "auto"\ndefault = true\n[models."b.2"]\nengine = "vllm:/m"\nwindow = 9\n'
    )
    assert list(config.models) == ["a", "b.2"]
    assert (config.models["a"].default, config.models["b.2"].default, config.models["b.2"].window) == (True, False, 9)


def test_a_model_alone_in_the_file_is_the_default(tmp_path):
    assert from_file(tmp_path, '[models.a]\nengine = "auto"\n').models["a"].default


def test_every_fault_of_file_and_environment_is_said_in_one_go(tmp_path):
    problems = problems_of(
        from_file,
        tmp_path,
        'regoin = "x"\n[stream]\nbatch_ms = "5"\n[lease]\nttl_s = 3\n[models.a]\nengine = "foo:x"\n',
        CHATSVC_PROT="1",
        CHATSVC_LOG_LEVEL="loud",
        CHATSVC_HOST="0.0.0.0",
    )
    for part in ("regoin", "batch_ms", "ttl_s", "[models.a] engine", "CHATSVC_PROT", "CHATSVC_LOG_LEVEL", "0.0.0.0"):
        assert [p for p in problems if part in p], part
    assert len(problems) == 7


def test_all_that_is_wrong_with_tiers_and_degradation_is_said_at_once(tmp_path):
    problems = problems_of(
        from_file,
        tmp_path,
        """
        [tiers.gold]
        weight = 32
        [tiers.pro]
        weight = ""
        [tiers.plus]
        weight = 0
        max_open_replies = -3
        [tiers.free]
        max_queued = 1_000_000_000
        deadline_s = 2
        [degradation]
        enabled = "perhaps"
        [models.large]
        engine = "scripted:"
        default = true
        degrade_to = "large"
        [models.other]
        engine = "scripted:"
        degrade_to = "small"
        """,
    )
    for part in (
        "[tiers] gold: there is no such key; the tiers are pro, plus, free",
        "[tiers.pro] weight",
        "[tiers.plus] weight",
        "[tiers.plus] max_open_replies",
        "[tiers.free] max_queued",
        "[tiers.free] deadline_s",
        "[degradation] enabled",
        "[models.large] degrade_to: must name another model",
        '[models.other] degrade_to: "small" is none of the models here: "large"',
    ):
        assert [problem for problem in problems if part in problem], (part, problems)
    assert len(problems) == 9


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("regoin = 'x'", "did you mean `region`?"),
        ("[sever]\nport = 1", "did you mean `[server]`?"),
        ("port = 1", "did you mean `port` in table [server]?"),
        ("[stream]\nbatch_token = 1", "did you mean `batch_tokens`?"),
        ("[tiers.por]\nweight = 1", "did you mean `[tiers.pro]`?"),
        ("[tiers.pro]\nwieght = 1", "did you mean `weight`?"),
        ("[model.a]\nengine = 'auto'", "did you mean `[models]`?"),
        ("[models.a]\nengin = 'auto'", "did you mean `engine`?"),
        ("server = 5", "did you mean `[server]`?"),
        ("[server.tls]\non = true", "[server] tls: there is no such key"),
        ("[tiers.pro]\nname = 'free'", "[tiers.pro] name: there is no such key"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_known_one(tmp_path, text, hint):
    assert hint in problems_of(from_file, tmp_path, text)[0]


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("CHATSVC_PROT", "did you mean `CHATSVC_PORT`?"),
        ("CHATSVC_SERVER_HOST", "did you mean `CHATSVC_HOST`?"),
        ("CHATSVC_AUTH_MODE", "did you mean `CHATSVC_AUTH`?"),
        ("CHATSVC_STREAM_BATCHMS", "did you mean `CHATSVC_STREAM_BATCH_MS`?"),
        ("CHATSVC_MODELS_A_ENGINE", "models are set by CHATSVC_ENGINE or in the file"),
        ("CHATSVC_ENGIN", "did you mean `CHATSVC_ENGINE`?"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest_known_one(variable, hint):
    (problem,) = problems_of(from_variables, **{variable: "1"})
    assert problem.startswith(f"{variable}: ")
    assert hint in problem


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CHATSVC_PORT", "tcp://10.0.0.1:8080"),
        ("CHATSVC_PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("CHATSVC_SERVICE_HOST", "10.0.0.1"),
    ],
)
def test_variables_that_kubernetes_sets_for_a_service_are_recognised(variable, text):
    assert "enableServiceLinks" in problems_of(from_variables, **{variable: text})[0]


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"CHATSVC_HOST": "0.0.0.0"}, "CHATSVC_AUTH_ALLOW_PUBLIC_WITHOUT_AUTH"),
        ({"CHATSVC_HOST": "chat.example.org"}, "CHATSVC_AUTH_ALLOW_PUBLIC_WITHOUT_AUTH"),
        ({"CHATSVC_HOST": "::"}, "CHATSVC_AUTH_ALLOW_PUBLIC_WITHOUT_AUTH"),
        ({"CHATSVC_HOST": "a b"}, "must be an IP address or a host name"),
        ({"CHATSVC_HOST": "127.0.0"}, "must be an IP address or a host name"),
        ({"CHATSVC_PORT": "65536"}, "a whole number from 0 to 65535"),
        ({"CHATSVC_PORT": "-1"}, "a whole number from 0 to 65535"),
        ({"CHATSVC_PORT": "80.5"}, "a whole number from 0 to 65535"),
        ({"CHATSVC_BASE_PATH": "chat"}, 'write "/chat/"'),
        ({"CHATSVC_BASE_PATH": "/chat"}, 'write "/chat/"'),
        ({"CHATSVC_BASE_PATH": "/a//b/"}, "starts and ends with a slash"),
        ({"CHATSVC_BASE_PATH": "/a/../b/"}, "starts and ends with a slash"),
        ({"CHATSVC_BASE_PATH": '/"><script>/'}, "starts and ends with a slash"),
        ({"CHATSVC_REGION": "EU"}, "1–32 of a–z"),
        ({"CHATSVC_REGION": "a" * 33}, "1–32 of a–z"),
        ({"CHATSVC_REGION": "eu\n"}, ""),
        ({"CHATSVC_ROLES": "api,wroker"}, '"wroker"'),
        ({"CHATSVC_ROLES": ","}, 'must be "api", "worker" or both'),
        ({"CHATSVC_AUTH": "proxi"}, 'must be "none" or "proxy"'),
        ({"CHATSVC_AUTH_TRUSTED_PROXIES": "10.0.0.1/8"}, "host bits"),
        ({"CHATSVC_AUTH_TRUSTED_PROXIES": "proxy.local"}, "is no network"),
        ({"CHATSVC_AUTH_TRUSTED_PROXIES": "::/0"}, "is everybody"),
        ({"CHATSVC_AUTH": "proxy", "CHATSVC_AUTH_TRUSTED_PROXIES": ","}, "nobody could sign in"),
        ({"CHATSVC_AUTH_USER_HEADER": "X User"}, "name of a header"),
        ({"CHATSVC_AUTH_TIER_HEADER": "x-forwarded-user"}, "must not be the same header"),
        ({"CHATSVC_DATABASE_URL": "mysql://h/d"}, "must start with postgresql://"),
        ({"CHATSVC_DATABASE_URL": "postgresql://h:port/d"}, "is no valid URL"),
        ({"CHATSVC_DATABASE_URL": "postgresql://u:p/w@h/d"}, "%2F"),
        ({"CHATSVC_REDIS_URL": "localhost:6379"}, "must start with redis://"),
        ({"CHATSVC_REDIS_URL": "redis://:p/w@h"}, "%2F"),
        ({"CHATSVC_REDIS_URL": "redis+sentinel://a:26379,b:26379"}, "must end with the master's name, as in redis+"),
        ({"CHATSVC_ENGINE": "llama:x"}, "must be auto, vllm:<model>"),
        ({"CHATSVC_ENGINE": "openai:localhost:8000"}, "openai:<base url>#<model>"),
        ({"CHATSVC_ENGINE": "openai:http://localhost:8000/v1"}, "openai:<base url>#<model>"),
        ({"CHATSVC_STREAM_HEARTBEAT_S": "nan"}, "a number above 0"),
        ({"CHATSVC_STREAM_HEARTBEAT_S": "inf"}, "a number above 0"),
        ({"CHATSVC_STREAM_HEARTBEAT_S": "0"}, "a number above 0"),
        ({"CHATSVC_LEASE_RENEW_S": "4"}, "at least twice renew_s"),
        ({"CHATSVC_TIERS_FREE_WEIGHT": "0"}, "a number above 0"),
        ({"CHATSVC_TIERS_PRO_WEIGHT": "-4"}, "a number above 0"),
        ({"CHATSVC_TIERS_PRO_WEIGHT": "1e300"}, "of at most 1000000"),
        ({"CHATSVC_TIERS_FREE_MAX_OPEN_REPLIES": "0"}, "a whole number from 1 to 100000"),
        ({"CHATSVC_TIERS_FREE_MAX_OPEN_REPLIES": "-1"}, "a whole number from 1 to 100000"),
        ({"CHATSVC_TIERS_PLUS_BUDGET": "-1"}, "a number from 0 to 1000000000000"),
        ({"CHATSVC_TIERS_PLUS_BUDGET": "1e15"}, "a number from 0 to 1000000000000"),
        ({"CHATSVC_TIERS_FREE_BUDGET_WINDOW_S": "1"}, "a number from 300 to 2678400"),
        ({"CHATSVC_TIERS_FREE_MAX_QUEUED": "0"}, "a whole number from 1 to 10000000"),
        ({"CHATSVC_TIERS_FREE_QUEUE_TARGET_S": "0"}, "a number above 0"),
        ({"CHATSVC_TIERS_FREE_DEADLINE_S": "5"}, "must be longer than queue_target_s (10 s), not 5 s"),
        ({"CHATSVC_DEGRADATION_INTERVAL_S": "0"}, "a number from 0.1 to 3600"),
        ({"CHATSVC_DEGRADATION_HISTORY_SHARE": "1.5"}, "of at most 1"),
        ({"CHATSVC_DEGRADATION_QUEUE_SHARE": "-0.5"}, "above 0"),
        ({"CHATSVC_DEGRADATION_MAX_TOKENS": "0"}, "a whole number from 1 to 10000000"),
        ({"CHATSVC_SERVICE_CACHED": "2"}, "must be at most prompt (1), not 2"),
        ({"CHATSVC_SERVICE_OUTPUT": "-3"}, "a number above 0"),
        ({"CHATSVC_AUTH_ALLOW_PUBLIC_WITHOUT_AUTH": "maybe"}, "true or false"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_what_would(variables, part):
    if variables == {"CHATSVC_REGION": "eu\n"}:
        assert from_variables(**variables).region == "eu"  # white space around a value is the shell's, not the user's
        return
    assert part in problems_of(from_variables, **variables)[0]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[server]\nport = true", "a whole number from 0 to 65535"),
        ("[server]\nport = 80.0", "a whole number from 0 to 65535"),
        ("[server]\nhost = 5", "must be text"),
        ("[server]\ngrace_s = inf", "a number of at least 0"),
        ("roles = 'api'", "a list of texts"),
        ("[auth]\ntrusted_proxies = [1]", "a list of texts"),
        ("data_dir = ''", "a path"),
        ("models = 5", "must be tables such as"),
        ("models.a = 5", "must be a table with the key `engine`"),
        ("[models.a]\nslots = 1", "the key `engine` is missing"),
        ("[models.a]\nengine = 'auto'\nslots = 0", "a whole number of at least 1"),
        ("[models.a]\nengine = 'auto'\n[models.b]\nengine = 'auto'", "one of them must say `default = true`"),
        (
            "[models.a]\nengine = 'auto'\ndefault = true\n[models.b]\nengine = 'auto'\ndefault = true",
            'only one may say `default = true`, not "a", "b"',
        ),
        ("[models.default]\nengine = 'auto'\n[models.b]\nengine = 'auto'\ndefault = true", "this name is taken"),
        ("[models.'']\nengine = 'auto'", "the name must start with"),
        ("[context]\nembedder = 'minilmm'", "must be auto, none, minilm, transformers:<model> or vllm:<model>"),
        ("port 80", "is no valid TOML"),
        ("[a]\n[a]", "is no valid TOML"),
    ],
)
def test_a_file_that_cannot_work_is_refused_with_what_would(tmp_path, text, part):
    assert part in problems_of(from_file, tmp_path, text)[0]


def test_an_engine_in_the_environment_and_models_in_the_file_are_a_conflict(tmp_path):
    (problem,) = problems_of(from_file, tmp_path, "[models.a]\nengine = 'auto'\n", CHATSVC_ENGINE="auto")
    assert "remove one of the two" in problem


def test_a_missing_file_is_said_by_its_name(tmp_path):
    (problem,) = problems_of(load_config, tmp_path / "none.toml", HOME)
    assert str(tmp_path / "none.toml") in problem


def test_a_file_that_is_no_text_is_said_by_its_name(tmp_path):
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    (problem,) = problems_of(load_config, tmp_path / "c.toml", HOME)
    assert "is no valid TOML" in problem


def test_a_fault_does_not_drag_others_behind_it(tmp_path):
    """With the auth mode unreadable nobody can say whether a public address is fine."""
    assert len(problems_of(from_variables, CHATSVC_AUTH="proxi", CHATSVC_HOST="0.0.0.0")) == 1
    assert len(problems_of(from_file, tmp_path, "[auth\nmode = 'proxy'", CHATSVC_HOST="0.0.0.0")) == 1


def test_a_public_address_is_fine_behind_a_proxy_or_when_asked_for_by_name():
    assert from_variables(CHATSVC_HOST="0.0.0.0", CHATSVC_AUTH="proxy").server.host == "0.0.0.0"
    assert from_variables(CHATSVC_HOST="0.0.0.0", CHATSVC_AUTH_ALLOW_PUBLIC_WITHOUT_AUTH="true").server.host
    assert from_variables(CHATSVC_HOST="localhost").server.host == "localhost"


def test_without_a_home_directory_the_data_directory_must_be_named():
    assert "CHATSVC_DATA_DIR" in problems_of(load_config, None, {})[0]
    assert load_config(None, {"XDG_DATA_HOME": "/x"}).data_dir == Path("/x/chatsvc")
    assert load_config(None, {"CHATSVC_DATA_DIR": "/y"}).data_dir == Path("/y")


def test_problems_hold_no_password():
    problems = problems_of(
        from_variables,
        CHATSVC_DATABASE_URL="postgresql://user:hunter2@h:x/d",
        CHATSVC_REDIS_URL="http://:hunter2@h",
        CHATSVC_ENGINE="opanai:https://user:hunter2@h/v1#m",
        CHATSVC_PORT="postgres://u:hunter2@h",
    )
    assert len(problems) == 4
    assert "hunter2" not in "".join(problems)


@given(st.dictionaries(st.sampled_from([key.variable for key in known_keys()]), st.text(max_size=20), max_size=4))
def test_whatever_the_variables_hold_the_answer_is_a_config_or_a_config_error(variables):
    try:
        outcome = load_config(None, HOME | variables)
    except ConfigError as error:
        outcome = error
    assert outcome.data_dir.is_absolute() if isinstance(outcome, Config) else all(outcome.problems)
