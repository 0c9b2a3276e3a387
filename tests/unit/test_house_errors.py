"""The tree that errors.py opens with is the tree that follows."""

import re

from chatsvc import errors


def test_the_tree_names_every_error():
    defined = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.ChatError) and kind.__module__ == errors.__name__
    }
    tree = errors.__doc__.partition("    ChatError")[2]
    drawn = set(re.findall(r"\b[A-Z][a-z]+[A-Za-z]+\b", "ChatError" + tree))
    assert drawn == defined
