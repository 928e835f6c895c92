"""The prose of a document that is written in Markdown, reStructuredText or HTML.

Badges, link targets, code blocks and tags cost tokens and say little; a small model that sees them
goes on writing them instead of a summary. Plain text passes through unchanged.
"""

from __future__ import annotations

import re

_REMOVALS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, flags), replacement)
    for pattern, flags, replacement in (
        (r"<!--(?:(?!<!--).)*?-->", re.DOTALL, ""),
        # fenced code, to its closing fence
        (r"^[ \t]*+(`{3,}+|~{3,}+)[^\n]*+\n.*?^[ \t]*+\1[`~]*[ \t]*$", re.DOTALL | re.MULTILINE, ""),
        # reStructuredText: directives, comments and targets with all that is indented under them
        (r"^\.\.(?: [^\n]*)?(?:\n(?:[ \t]+[^\n]*|(?=\n)))*", re.MULTILINE, ""),
        (r"^(.*[^:\n]):?::[ \t]*$(?:\n(?:[ \t]+[^\n]+|(?=\n)))*", re.MULTILINE, r"\1:\n"),
        (r"^:[\w -]+:[^\n]*$", re.MULTILINE, ""),
        # headings underlined in reStructuredText or Markdown
        (r"^([=\-~^\"'`#*+]{3,})[ \t]*$", re.MULTILINE, ""),
        # images; lines of nothing but links, which is navigation; links; where references lead
        (r"!\[[^\]]{0,500}\](?:\([^)]{0,2000}\)|\[[^\]]{0,500}\])", 0, ""),
        (r"^[ \t>]*(?:[-*+•][ \t]+)?(?:\[[^\]\n]{0,500}\]\([^)\n]{0,2000}\)[ \t|,•·-]*)+$", re.MULTILINE, ""),
        (r"\[([^\]]{0,500})\](?:\([^)\s]{0,2000}(?:\s+\"[^\"]{0,500}\")?\)|\[[^\]]{0,500}\])", 0, r"\1"),
        (r"^\[[^\]\n]{1,500}\]:[^\n]*$", re.MULTILINE, ""),
        (r"(?::[\w:+-]{1,50}:)?`([^`<]{1,500}?)\s*<[^`>]{1,2000}>`_{0,2}", 0, r"\1"),
        (r":[\w:+-]{1,50}:`([^`]{1,500})`", 0, r"\1"),
        (r"</?[A-Za-z][^<>]{0,2000}>", 0, ""),
        (r"<?https?://[^\s<>)\]]+>?", 0, ""),
        (r"``([^`\n]+)``|`([^`\n]+)`_{0,2}", 0, r"\1\2"),
        # lines of badges in reStructuredText; rules of tables
        (r"^(?:[ \t]*\|[^|\s][^|\n]*\|_?)+[ \t]*$", re.MULTILINE, ""),
        (r"^[ \t]*+[|+]?[ \t]*+:?[-=]{3,}[-=|+: \t]*$", re.MULTILINE, ""),
        (r"(\*\*|__)(?=\S)(.{1,500}?)(?<=\S)\1", 0, r"\2"),
        (r"(?<=\w)_(?=[\s.,;:!?)]|\Z)", 0, ""),
        (r"^[ \t]*#{1,6}[ \t]+(.{0,500}?)[ \t#]*$", re.MULTILINE, r"\1"),
        (r"(?<![ \t])[ \t]+$", re.MULTILINE, ""),
        (r"\n{3,}", 0, "\n\n"),
    )
)


def prose_of(text: str) -> str:
    """`text` without its markup and code; `text` itself if nothing else would be left."""
    prose = text
    for pattern, replacement in _REMOVALS:
        prose = pattern.sub(replacement, prose)
    return prose.strip() or text
