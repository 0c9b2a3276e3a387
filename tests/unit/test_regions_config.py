"""The configuration of regions: what is refused, and that the secret is shown nowhere."""

import pytest

from chatsvc.config import PeerConfig
from chatsvc.config_load import load_config
from chatsvc.config_show import effective
from chatsvc.errors import ConfigError

SECRET = "5ecr3t" * 6
HOME = {"HOME": "/h", "CHATSVC_REGION": "eu"}
GOOD = f"""
[regions]
secret = "{SECRET}"
[regions.us]
url = "https://chat-us.example/chat/"
[regions.asia]
urls = ["http://10.3.0.5:8080", "http://[::1]:8080/"]
"""


def load(tmp_path, text, **variables):
    file = tmp_path / "chatsvc.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, HOME | variables)


def problems(tmp_path, text, **variables):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, **variables)
    return "\n".join(caught.value.problems)


def test_peers_have_one_address_or_several(tmp_path):
    config = load(tmp_path, GOOD)
    assert config.regions.secret == SECRET
    assert config.peers["us"].replicas == ("https://chat-us.example/chat/",)
    assert config.peers["asia"].replicas == ("http://10.3.0.5:8080", "http://[::1]:8080/")
    assert PeerConfig().replicas == ()


def test_the_secret_may_come_from_the_environment(tmp_path):
    text = GOOD.replace(f'secret = "{SECRET}"', "")
    assert load(tmp_path, text, CHATSVC_REGIONS_SECRET=SECRET).regions.secret == SECRET


def test_a_secret_without_peers_is_fine(tmp_path):
    assert load(tmp_path, f'[regions]\nsecret = "{SECRET}"').peers == {}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (GOOD.replace("regions.us", "regions.eu"), "[regions.eu]: this is the region that this server is in"),
        (GOOD.replace("regions.us", "regions.US"), "[regions.US]: a region's name must be"),
        (GOOD.replace(f'secret = "{SECRET}"', ""), "[regions] secret (CHATSVC_REGIONS_SECRET): must be set"),
        (GOOD.replace(SECRET, "short"), "must have at least 32 characters"),
        (GOOD.replace("https://chat-us.example/chat/", "chat-us.example"), "must start with http:// or https://"),
        (GOOD.replace("https://chat-us.example/chat/", "https://"), "[regions.us] url: must"),
        (GOOD.replace("https://chat-us.example/chat/", "https://h:99999/"), "[regions.us] url: is no valid URL"),
        (GOOD.replace("https://chat-us.example/chat/", "https://u:pw@h/"), "without user, query or fragment"),
        (GOOD.replace("https://chat-us.example/chat/", "https://h/?a=1"), "without user, query or fragment"),
        (GOOD.replace("https://chat-us.example/chat/", "https://h/a b/"), "must end with the base path"),
        (GOOD.replace("http://[::1]:8080/", "ftp://h/"), "[regions.asia] urls: must start with"),
        (GOOD.replace('url = "https://chat-us.example/chat/"', ""), "[regions.us]: must have one of the keys"),
        (GOOD + 'url = "http://h/"', "[regions.asia]: must have one of the keys"),
        (GOOD.replace("url =", "uri ="), "[regions.us] uri: there is no such key; did you mean `url`?"),
        (GOOD.replace("[regions]", "[regions]\nsecrets = 1"), "[regions] secrets: there is no such key"),
        (GOOD.replace('"https://chat-us.example/chat/"', "3"), "[regions.us] url: must be text"),
        ("regions = 3", "regions: there is no such key"),
    ],
)
def test_a_file_that_cannot_work_is_refused_with_what_would(tmp_path, text, part):
    assert part in problems(tmp_path, text)


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    text = GOOD.replace(SECRET, "short").replace("regions.us", "regions.eu").replace("http://[::1]:8080/", "x")
    said = problems(tmp_path, text)
    assert [part in said for part in ("at least 32", "[regions.eu]", "[regions.asia] urls")] == [True] * 3


def test_the_secret_is_masked_in_the_configuration_in_effect(tmp_path):
    text = effective(load(tmp_path, GOOD))
    assert SECRET not in text
    assert 'secret = "***"' in text
    assert 'url = "https://chat-us.example/chat/"' in text
    assert 'secret = ""' in effective(load(tmp_path, ""))


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("[regions]\nsecret = 1234567890", {}),
        ("[regions]\nsecret = [1234567890]", {}),
        ('[regions]\nsecret = "1234567890"', {}),
        ("", {"CHATSVC_REGIONS_SECRET": "1234567890"}),
    ],
)
def test_no_fault_shows_a_secret(tmp_path, text, variables):
    assert "1234567890" not in problems(tmp_path, text, **variables)
