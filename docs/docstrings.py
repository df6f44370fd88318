"""How the generator of the API page is to read the package's docstrings."""

import re
import textwrap

import griffe

_EXAMPLE = re.compile(r"^Example:\n\n?( *>>> .*(?:\n.+)*)", re.MULTILINE)


class Examples(griffe.Extension):
    """Shows what follows "Example:" as the console session that it is."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(_session, obj.docstring.value)


def _session(example):
    return f"**Example**\n\n```pycon\n{textwrap.dedent(example[1])}\n```"
