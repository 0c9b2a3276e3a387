"""The image and the deployment samples, as far as they can be read without an engine to run them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from chatsvc.config_load import load_config

ROOT = Path(__file__).parents[2]


def instructions():
    """The Dockerfile as ``(instruction, text)`` pairs, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text()
    joined = re.sub(r"\\\n\s*", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def stage(name):
    """The instructions of one stage of the image."""
    found, inside = [], False
    for instruction, text in instructions():
        if instruction == "FROM":
            inside = text.endswith(f" AS {name}")
        elif inside:
            found.append((instruction, text))
    return found


def settings(stage_name):
    """What ENV sets in a stage."""
    text = " ".join(text for instruction, text in stage(stage_name) if instruction == "ENV")
    return dict(pair.split("=", 1) for pair in text.split())


def services():
    return yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]


def test_base_images_are_named_by_version():
    images = dict(
        text.split("=", 1) for instruction, text in instructions() if instruction == "ARG" and "_IMAGE=" in text
    )
    for instruction, text in instructions():
        if instruction == "FROM":
            image = re.sub(r"\$\{(\w+)\}", lambda match: images[match[1]], text.split()[0])
            assert re.fullmatch(r"[a-z]+:\d+(\.\d+)*-[a-z-]+", image), image


def test_every_stage_that_is_copied_from_exists_and_every_file_too():
    stages = {text.rpartition(" AS ")[2] for instruction, text in instructions() if instruction == "FROM"}
    for instruction, text in instructions():
        assert instruction != "ADD"
        if instruction != "COPY":
            continue
        *sources, _target = [word for word in text.split() if not word.startswith("--")]
        if match := re.match(r"--from=(\w+)", text):
            assert match[1] in stages
        else:
            for source in sources:
                assert (ROOT / source).exists(), source


def test_everything_that_is_copied_passes_the_ignore_file():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for instruction, text in instructions():
        if instruction == "COPY" and not text.startswith("--from"):
            for source in text.split()[:-1]:
                assert source.split("/")[0] in kept, source


def test_the_image_runs_without_rights_and_can_be_watched():
    last = stage("runtime")
    assert [text for instruction, text in last if instruction == "USER"] == ["1000:0"]
    names = [instruction for instruction, _ in last]
    for needed in ("HEALTHCHECK", "ENTRYPOINT", "STOPSIGNAL", "VOLUME", "LABEL"):
        assert needed in names
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")
    assert "/healthz" in next(text for instruction, text in last if instruction == "HEALTHCHECK")


def test_the_image_refuses_to_be_open_to_all_unless_told_so():
    environment = {name: value for name, value in settings("runtime").items() if name != "PATH"}
    with pytest.raises(Exception, match="can be reached from other machines"):
        load_config(None, environment)
    assert load_config(None, environment | {"CHATSVC_AUTH": "proxy"}).data_dir == Path("/data")


@pytest.mark.parametrize("name", ["chatsvc", "chatsvc-1", "chatsvc-2"])
def test_every_chatsvc_service_has_a_configuration_that_loads_and_a_root_that_is_read_only(name):
    service = services()[name]
    environment = {key: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for key, value in service["environment"].items()}
    load_config(None, settings("runtime") | environment)
    assert service["read_only"]
    assert service["tmpfs"] == ["/tmp:mode=1777"]
    assert [volume for volume in service["volumes"] if volume.endswith(":/data")]
    grace = load_config(None, {"HOME": "/"}).server.grace_s
    assert float(service["stop_grace_period"].removesuffix("s")) > grace


def test_no_service_is_published_beyond_this_machine():
    for service in services().values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_only_nginx_may_name_users():
    address = services()["nginx"]["networks"]["edge"]["ipv4_address"]
    for name in ("chatsvc-1", "chatsvc-2"):
        assert services()[name]["environment"]["CHATSVC_AUTH_TRUSTED_PROXIES"] == f"{address}/32"


@pytest.mark.parametrize("sample", ["nginx.conf", "Caddyfile"])
def test_a_proxy_sample_sets_or_removes_both_identity_headers(sample):
    text = (ROOT / "deploy" / sample).read_text()
    for header in ("X-Forwarded-User", "X-Forwarded-Tier"):
        assert re.search(rf"(proxy_set_header {header} |request_header -{header}$)", text, re.MULTILINE)
    assert text.count("{") == text.count("}")


def unit_of_systemd():
    """What the unit for systemd sets in its section for the service; lists where a name comes again."""
    text = (ROOT / "deploy" / "chatsvc.service").read_text()
    section = re.search(r"^\[Service\]\n(.*?)^\[Install\]", text, re.MULTILINE | re.DOTALL)[1]
    found = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def test_systemd_tells_the_service_alone_to_end_and_gives_its_replies_time():
    """By default it would tell engine cores and embedded servers at the same moment, and running replies were lost."""
    unit = unit_of_systemd()
    assert unit["KillMode"] == ["mixed"]
    assert "KillSignal" not in unit
    (wait,) = unit["TimeoutStopSec"]
    assert float(wait) > load_config(None, {"HOME": "/"}).server.grace_s + 20


def test_systemd_starts_the_service_with_settings_that_load_in_directories_of_its_own():
    unit = unit_of_systemd()
    assert unit["ExecStart"][0].endswith("/python -m chatsvc")
    text = " ".join(unit["Environment"]).replace("%S", "/var/lib").replace("%C", "/var/cache")
    config = load_config(None, dict(pair.split("=", 1) for pair in text.split()))
    assert str(config.data_dir) == f"/var/lib/{unit['StateDirectory'][0]}"
    assert unit["Environment"][1].split()[0] == f"HOME=%C/{unit['CacheDirectory'][0]}"
    assert unit["EnvironmentFile"][0].startswith("-/etc/chatsvc/")
    # Nothing here tells systemd that it is ready or alive.
    assert unit["Type"] == ["exec"]
    assert "WatchdogSec" not in unit


def test_systemd_goes_on_starting_it_until_what_it_needs_is_there_and_leaves_a_wrong_configuration_be():
    """A model that another server loads for minutes must not find the service given up."""
    text = (ROOT / "deploy" / "chatsvc.service").read_text()
    assert re.findall(r"^StartLimit\w+=.*$", text, re.MULTILINE) == ["StartLimitIntervalSec=0"]
    unit = unit_of_systemd()
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == (["on-failure"], ["2"])


def test_who_may_sign_in_is_for_the_operator_to_say():
    """oauth2-proxy without a word on it does not start; with a star it lets in everybody who has an account."""
    assert "OAUTH2_PROXY_EMAIL_DOMAINS" not in services()["oauth2-proxy"]["environment"]


def test_caddy_keeps_the_metrics_from_users():
    """nginx is asked itself, in flows/test_behind_nginx.py."""
    text = (ROOT / "deploy" / "Caddyfile").read_text()
    assert re.search(r"handle /metrics\* \{\s+respond 404\s+\}", text)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path):
    text = (ROOT / "deploy" / "chatsvc.service").read_text()
    file = tmp_path / "chatsvc.service"
    file.write_text(text.replace("/opt/chatsvc/.venv/bin/python", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_takes_its_sample(tmp_path):
    text = (ROOT / "deploy" / "nginx.conf").read_text()
    for name in ("chatsvc-1", "chatsvc-2", "oauth2-proxy"):
        text = text.replace(f"server {name}:", "server 127.0.0.1:")
    file = tmp_path / "nginx.conf"
    file.write_text(text.replace("/tmp/nginx.pid", str(tmp_path / "pid")))
    done = subprocess.run(
        ["nginx", "-t", "-e", tmp_path / "log", "-c", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_signing_in_proxy_is_not_given_the_password_of_the_database():
    proxy = services()["oauth2-proxy"]
    assert [file["path"] for file in proxy["env_file"]] == ["oauth2-proxy.env"]
    assert "POSTGRES_PASSWORD" not in str(proxy["environment"])
