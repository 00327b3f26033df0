"""Text of others on a terminal: ids, messages and payloads come from whoever sent them."""


def plain(text: str) -> str:
    r"""Without what a terminal would obey: characters that are not printable are escaped (`\x1b`)."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
