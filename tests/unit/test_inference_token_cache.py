"""Texts that come again are looked up: the same tokens, within the bytes that are allowed."""

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from chatsvc.inference.scripted_text import encode
from chatsvc.inference.token_cache import TokenCache

LONG = "a text that is long enough to be kept"


class Counting:
    def __init__(self):
        self.texts = []

    def __call__(self, text):
        self.texts.append(text)
        return encode(text)


@given(st.lists(st.text(max_size=30), max_size=30), st.integers(0, 5_000))
def test_it_gives_what_the_function_gives_within_its_bytes(texts, most_bytes):
    cache = TokenCache(encode, most_bytes=most_bytes)
    for text in [*texts, *texts]:
        assert list(cache(text)) == encode(text)
        assert 0 <= cache.bytes <= most_bytes


def test_what_comes_again_is_not_tokenized_again():
    counting = Counting()
    cache = TokenCache(counting)
    assert [list(cache(LONG)) for _ in range(3)] == [encode(LONG)] * 3
    assert counting.texts == [LONG]
    assert cache.misses == len(LONG)


def test_what_was_used_least_recently_goes_first():
    counting = Counting()
    one = TokenCache(counting)
    one(LONG + "1")
    cache = TokenCache(counting, most_bytes=2 * one.bytes)
    for text in ("1", "2", "1", "3", "1", "2"):
        cache(LONG + text)
    assert [text[-1] for text in counting.texts[1:]] == ["1", "2", "3", "2"]


def test_a_text_larger_than_the_cache_is_given_and_not_kept():
    cache = TokenCache(encode, most_bytes=10)
    assert list(cache(LONG)) == encode(LONG)
    assert cache.bytes == 0


def test_many_threads_get_their_own_texts_tokens():
    cache = TokenCache(encode, most_bytes=3_000)
    texts = [f"{LONG} {number % 40}" for number in range(2_000)]
    with ThreadPoolExecutor(8) as pool:
        assert all(list(ids) == encode(text) for text, ids in zip(texts, pool.map(cache, texts), strict=True))
    assert cache.bytes <= 3_000
