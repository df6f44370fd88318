"""How the generator of the API page reads the package's docstrings."""

import re
import textwrap

import griffe

_EXAMPLE = re.compile(r"^Example:\n\n?( *>>> .*(?:\n.+)*)", re.MULTILINE)


class Shown(griffe.Extension):
    """Shows examples as console sessions, and omits the type `Any`."""

    def on_function(self, *, func, **_):
        for parameter in func.parameters:
            if str(parameter.annotation) == "Any":
                parameter.annotation = None

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(_session, obj.docstring.value)


def _session(example):
    return f"**Example**\n\n```pycon\n{textwrap.dedent(example[1])}\n```"
