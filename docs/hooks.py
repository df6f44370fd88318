"""What the site's generator has to be told about the pages."""

import pathlib
import re
import sys

sys.path.append(str(pathlib.Path(__file__).parent))
import home


def on_config(config):
    """Takes the project's home from where it is named."""
    config.site_url = home.urls()["Documentation"]
    config.repo_url = home.urls()["Repository"]
    config.repo_name = home.name()
    return config


def on_page_markdown(markdown, **_):
    """Leads links out of the site to the home, and takes off marks that only the tests read."""
    markdown = home.absolute(markdown, leaving="../")
    return re.sub(r"^(```\w+) (?:no-run|prints|needs \w+)", r"\1", markdown, flags=re.MULTILINE)


def on_post_page(output, page, **_):
    """Sees to it that a page fetches nothing from elsewhere when it is read."""
    # The theme would ask the home how many stars it has.
    output = output.replace('data-md-component="source"', "")
    fetched = re.findall(r'<(?:script|img|iframe|link rel="stylesheet")[^>]*https?://[^>]*', output)
    if fetched:
        raise ValueError(f"{page.file.src_uri} must fetch nothing from elsewhere. Found: {fetched}")
    return output
