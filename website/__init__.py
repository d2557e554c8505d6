"""How the documentation becomes a site: ``make docs``, by mkdocs with the settings of ``mkdocs.yml``.

Start with ``hooks.py``, which mkdocs calls. Then:

    pages.py        which files of the repository are pages, and their links
    dialect.py      Markdown as repository hosts read it, for the parser of the site
    docstrings.py   docstrings as Markdown, with links between names
    reference.py    which public names the reference must show, and which it shows
    constructor.py  the constructor of a pipeline, and a table of its options
    commands.py     the page of commands, from their parsers

Pages are read on repository hosts as well, so what a page says is in its file. Only what is written elsewhere already
(docstrings and the texts of commands) is filled in here. This folder is no part of the package.
"""
