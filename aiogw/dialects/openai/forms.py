"""One part of a multipart form (RFC 7578), found and replaced without a copy of the others; knows no field by name."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser

from attrs import field, frozen

from aiogw.errors import MalformedBody

# starlette, which parses the form at vLLM, stops at a thousand parts, too.
MAX_PARTS = 1000
MAX_PART_HEAD_BYTES = 16384


@frozen(kw_only=True)
class Part:
    """The content of a part: ``body[start:end]``."""

    body: bytes = field(repr=False)
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.body[self.start : self.end].decode("utf-8", "replace").strip()

    def replaced(self, text: str) -> bytes:
        """The whole form with ``text`` as this part's content."""
        return self.body[: self.start] + text.encode() + self.body[self.end :]


def find_part(content_type: str, body: bytes, name: str) -> Part | None:
    """The first part named ``name``; raises MalformedBody for what is not a form."""
    head = Message()
    head["content-type"] = content_type
    try:
        boundary = head.get_boundary()
    except UnicodeError:
        # boundary*=CHARSET'' with a character set that Python knows, but not as one for text of this kind.
        boundary = None
    if not boundary:
        raise MalformedBody(reason="its multipart content type names no boundary")
    delimiter = b"--" + boundary.encode("utf-8", "surrogateescape")
    start = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    if not body.startswith(delimiter, start):
        raise MalformedBody(reason="its multipart boundary does not occur in it")
    for _ in range(MAX_PARTS):
        head_start = start + len(delimiter)
        head_end = body.find(b"\r\n\r\n", head_start, head_start + MAX_PART_HEAD_BYTES)
        if head_end < 0:
            return None
        # From the end of the head's last line, which an empty part shares with its delimiter.
        end = body.find(b"\r\n" + delimiter, head_end + 2)
        if end < 0:
            raise MalformedBody(reason="its last multipart part has no end")
        part = BytesHeaderParser().parsebytes(body[head_start + 2 : head_end + 2])
        if part.get_param("name", header="content-disposition") == name:
            return Part(body=body, start=head_end + 4, end=max(end, head_end + 4))
        start = end + 2
    raise MalformedBody(reason=f"it has more than {MAX_PARTS} multipart parts before the one named {name}")
