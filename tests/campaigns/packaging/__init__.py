"""What a user gets who installs asyncpipe: ``python -m tests.campaigns packaging``, or ``make package``.

Builds the sdist, from it the wheel, and compares their files with those of the repository. Installs the wheel into an
empty environment beside another torch than the tests', first bare and then with extras, and uses it there from an
empty folder: ``smoke.py`` runs there, and imports nothing of the tests. Needs pip's index.
"""
