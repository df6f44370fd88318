"""Hooks of the site's generator."""

import pathlib
import re
import sys

sys.path.append(str(pathlib.Path(__file__).parent))
import home


def on_config(config):
    """Sets the project's home."""
    config.site_url = home.urls()["Documentation"]
    config.repo_url = home.urls()["Repository"]
    config.repo_name = home.name()
    return config


def on_page_markdown(markdown, **_):
    """Turns links out of the site into links to the home, and removes marks for the tests."""
    markdown = home.absolute(markdown, leaving="../")
    return re.sub(r"^(```\w+) (?:no-run|prints|needs \w+)", r"\1", markdown, flags=re.MULTILINE)


def on_post_page(output, page, **_):
    """Checks that a page fetches nothing from other hosts."""
    # The theme would fetch the number of stars.
    output = output.replace('data-md-component="source"', "")
    fetched = re.findall(r'<(?:script|img|iframe|link rel="stylesheet")[^>]*https?://[^>]*', output)
    if fetched:
        raise ValueError(f"{page.file.src_uri} must fetch nothing from elsewhere. Found: {fetched}")
    return output
