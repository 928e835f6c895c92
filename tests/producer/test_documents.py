from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tidemill_producer.documents import Document, Unreadable, find_documents, read_documents


def read(*paths: str | Path, stdin: bytes = b"", exclude: Path | None = None) -> list[Document | Unreadable]:
    found = find_documents(map(str, paths), exclude=exclude)
    return list(read_documents(found, stdin=io.BytesIO(stdin)))


def names(found: Sequence[Document | Unreadable], folder: Path) -> list[str]:
    return [os.path.relpath(document.name, folder) for document in found if isinstance(document, Document)]


def plant(folder: Path, *files: str) -> None:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {file}")


def test_files_are_read_as_given_whatever_their_suffix(tmp_path: Path) -> None:
    plant(tmp_path, "b.rst", "a.txt")

    assert read(tmp_path / "b.rst", tmp_path / "a.txt") == [
        Document(str(tmp_path / "b.rst"), "text of b.rst"),
        Document(str(tmp_path / "a.txt"), "text of a.txt"),
    ]


def test_folders_are_walked_in_sorted_order_for_texts(tmp_path: Path) -> None:
    plant(tmp_path, "z.md", "a.TXT", "sub/c.markdown", "sub/b.text", "photo.png", ".hidden.md", ".git/x.md")

    assert names(read(tmp_path), tmp_path) == ["a.TXT", "z.md", "sub/b.text", "sub/c.markdown"]


def test_the_folder_of_the_summaries_is_not_entered(tmp_path: Path) -> None:
    plant(tmp_path, "a.txt", "out/a.txt.summary.txt")

    assert names(read(tmp_path, exclude=tmp_path / "out"), tmp_path) == ["a.txt"]


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    plant(tmp_path, "sub/a.txt")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)

    assert names(read(tmp_path), tmp_path) == ["sub/a.txt"]


def test_standard_input_is_a_document() -> None:
    assert read("-", stdin=b"from a pipe") == [Document("-", "from a pipe")]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("Gezeiten-Mühle 水車".encode(), "Gezeiten-Mühle 水車"),
        (b"\xef\xbb\xbfmarked", "marked"),
        ("\ufeffwide".encode("utf-16-le"), "wide"),
        ("\ufeffwide".encode("utf-16-be"), "wide"),
        (b"one\r\ntwo\rthree", "one\ntwo\nthree"),
    ],
)
def test_encodings_that_say_what_they_are(data: bytes, text: str) -> None:
    assert read("-", stdin=data) == [Document("-", text)]


def test_bad_bytes_are_named_with_their_place_and_the_others_go_on(tmp_path: Path) -> None:
    plant(tmp_path, "a.txt", "c.txt")
    (tmp_path / "b.txt").write_bytes(b"fine so far \xff")

    first, bad, last = read(tmp_path)

    assert isinstance(first, Document)
    assert bad == Unreadable(str(tmp_path / "b.txt"), "not utf-8 at byte 12: invalid start byte")
    assert isinstance(last, Document)


def test_the_place_counts_the_byte_order_mark(tmp_path: Path) -> None:
    (bad,) = read("-", stdin=b"\xef\xbb\xbfab\xff")

    assert bad == Unreadable("-", "not utf-8 at byte 5: invalid start byte")


@pytest.mark.parametrize("data", [b"", b" \n\t\n", b"\xef\xbb\xbf"])
def test_empty_documents_are_reported(data: bytes) -> None:
    assert read("-", stdin=data) == [Unreadable("-", "empty")]


def test_a_folder_without_texts_is_reported(tmp_path: Path) -> None:
    plant(tmp_path, "photo.png")

    assert read(tmp_path) == [Unreadable(str(tmp_path), "no .markdown, .md, .text, .txt file in this folder")]


def test_a_file_that_vanished_is_reported(tmp_path: Path) -> None:
    gone = tmp_path / "gone.txt"

    assert read(gone) == [Unreadable(str(gone), "no such file or directory")]
