"""English that comes with Python: the reference manual, as `help()` prints it."""

from __future__ import annotations

from pydoc_data.topics import topics


def paragraphs() -> list[str]:
    """Some hundreds of paragraphs, in a fixed order."""
    return [
        paragraph.strip()
        for topic in sorted(topics)
        for paragraph in topics[topic].split("\n\n")
        if len(paragraph) > 200
    ]
