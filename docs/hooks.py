"""What the site's generator has to be told about the pages."""


def on_page_markdown(markdown, **_):
    """Takes off the mark of examples that are shown but not run, which only the tests read."""
    return markdown.replace("```python no-run", "```python")
