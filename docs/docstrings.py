"""How the generator of the API page reads the package's docstrings."""

import re
import textwrap

import griffe

_EXAMPLE = re.compile(r"^Example:\n\n?( *>>> .*(?:\n.+)*)", re.MULTILINE)
_FORWARDED = re.compile(r"""_of_inner\(.*, ['"](.*)['"]\)$""")


class Shown(griffe.Extension):
    """Shows examples as console sessions, marks forwarded attributes, and omits the type `Any`."""

    def on_function(self, *, func, **_):
        for parameter in func.parameters:
            if str(parameter.annotation) == "Any":
                parameter.annotation = None

    def on_attribute(self, *, attr, **_):
        forwarded = _FORWARDED.match(str(attr.value))
        if forwarded:
            attr.value = None
            attr.docstring = griffe.Docstring(
                f"{forwarded[1]}; read and set on the inner optimizer.", parent=attr
            )

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(_session, obj.docstring.value)


def _session(example):
    return f"**Example**\n\n```pycon\n{textwrap.dedent(example[1])}\n```"
