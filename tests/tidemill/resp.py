"""The wire format of Redis, version 2, as far as a proxy must know it: where a message ends."""

from __future__ import annotations

END = b"\r\n"


class Messages:
    """Cuts what comes over one direction of a connection into whole commands, or whole replies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._seen = 0
        """Bytes of the buffer that belong to the message under way and have been looked at."""
        self._parts = 1
        """Parts of the message that are still to come."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they come; return the messages that they complete."""
        self._buffer += data
        complete = []
        while (end := self._end_of_part()) is not None:
            self._seen = end
            if self._parts == 0:
                complete.append(bytes(self._buffer[:end]))
                del self._buffer[:end]
                self._seen, self._parts = 0, 1
        return complete

    def _end_of_part(self) -> int | None:
        """Where the next part ends, if it is here in full; an array's head is a part by itself."""
        line_end = self._buffer.find(END, self._seen)
        if line_end < 0:
            return None
        kind = self._buffer[self._seen : self._seen + 1]
        size = int(self._buffer[self._seen + 1 : line_end]) if kind in b"$*" else 0
        end = line_end + len(END)
        if kind == b"$" and size >= 0:
            end += size + len(END)
            if end > len(self._buffer):
                return None
        self._parts += max(size, 0) - 1 if kind == b"*" else -1
        return end


def words_of(command: bytes) -> list[bytes]:
    """The words of a whole command."""
    words = []
    position = command.index(END) + len(END)
    while position < len(command):
        line_end = command.index(END, position)
        begin = line_end + len(END)
        end = begin + int(command[position + 1 : line_end])
        words.append(command[begin:end])
        position = end + len(END)
    return words
