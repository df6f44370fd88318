"""What the site's generator has to be told about the pages."""


def on_page_markdown(markdown, **_):
    """Takes off the marks of code blocks that only the tests read."""
    return markdown.replace("```python no-run", "```python").replace("```text prints", "```text")
