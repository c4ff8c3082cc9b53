"""For the site: what is made of the code when it is built, so that it cannot be older than the code."""

from typing import Any

from looptim.base.markup import markdown_table
from looptim.recipe import Key, keys


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with the table of all keys in its place."""
    return markdown.replace("<!-- every key -->", markdown_table(Key._fields, keys()))
