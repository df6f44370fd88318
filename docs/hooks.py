"""What the site's generator has to be told about the pages."""

import pathlib
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
    return markdown.replace("```python no-run", "```python").replace("```text prints", "```text")
