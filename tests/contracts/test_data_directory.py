"""The data directory: locked while it is used, and what cannot be one is refused by name."""

import pytest

from chatsvc.embedded import lock_data_dir
from chatsvc.errors import ConfigError


def test_a_lock_is_given_back(data_dir):
    for _ in range(2):
        with lock_data_dir(data_dir / "new" / "deep"):
            pass


@pytest.mark.parametrize("place", ["file/data", "/proc/none", "/dev/null/data"])
def test_a_directory_that_cannot_be_made_is_refused_by_name(data_dir, place):
    (data_dir / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"cannot be used: .*CHATSVC_DATA_DIR") as caught,
        lock_data_dir(data_dir / place),
    ):
        pass
    assert str(data_dir / place) in str(caught.value)


@pytest.mark.parametrize("place", ["file", "file/data", "file/deep/data", "link", "link/data"])
def test_what_is_no_directory_but_stands_in_its_place_is_named_and_no_rights_are_asked_for(data_dir, place):
    (data_dir / "file").touch()
    (data_dir / "link").symlink_to("nothing")
    with pytest.raises(ConfigError) as caught, lock_data_dir(data_dir / place):
        pass
    first, below, _ = place.partition("/")
    culprit = data_dir / first if below else "it"
    assert f"{data_dir / place} cannot be used: {culprit} is no directory." in str(caught.value)
    assert "writable" not in str(caught.value)


def test_an_error_in_the_body_is_not_mistaken_for_one_of_the_directory(data_dir):
    with pytest.raises(FileNotFoundError), lock_data_dir(data_dir):
        (data_dir / "none").read_text()
