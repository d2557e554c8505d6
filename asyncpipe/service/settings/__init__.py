"""What the operator of a service sets, checked before anything starts.

May import the layers below the service, and nothing of the service itself.

- ``service_settings.py``: ``ServiceSettings``, from arguments, environment variables and a TOML file. Start here.
- ``setting_types.py``: the types of its fields: how a value may be written and what it must be.
- ``retention_settings.py``: what of ended jobs is kept.
- ``token_file.py``: what a token must look like, and how it is read from a file that only its owner can read.
"""
