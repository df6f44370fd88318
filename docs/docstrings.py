"""How the generator of the API page is to read the package's docstrings."""

import re

import griffe

_EXAMPLE = re.compile(r"^Example:\n\n(>>> .*(?:\n.+)*)", re.MULTILINE)


class Examples(griffe.Extension):
    """Shows what follows "Example:" as the console session that it is."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(r"**Example**\n\n```pycon\n\1\n```", text)
