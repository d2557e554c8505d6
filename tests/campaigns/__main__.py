"""``python -m tests.campaigns NAME``: run a campaign and print its report in Markdown; 1 if something was found.

``python -m tests.campaigns NAME --help`` lists the options of one. README.md says what each shows.
"""

from __future__ import annotations

import importlib
import sys

from tests.campaigns.harness import run_campaign

MODULES = {
    "architectures": "architectures.campaign",
    "clipping": "clipping",
    "crashes": "crashes.campaign",
    "differential": "differential.campaign",
    "faults": "faults.campaign",
    "frames": "frames.campaign",
    "hangs": "hangs.campaign",
    "heads": "architectures.heads",
    "hosts": "hosts.campaign",
    "modules": "modules.campaign",
    "packaging": "packaging.campaign",
    "padding": "architectures.padding",
    "replicas": "replicas.campaign",
    "segfaults": "segfaults",
    "service": "service.campaign",
    "soak": "soak.soak",
    "week": "week",
    "workers": "workers.campaign",
}
"""Where the ``CAMPAIGN`` of each name is."""


def main(arguments: list[str]) -> int:
    """The exit status."""
    if not arguments or arguments[0] not in MODULES:
        print(f"{__doc__}\nNames: {', '.join(MODULES)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"tests.campaigns.{MODULES[arguments[0]]}")
    return run_campaign(module.CAMPAIGN, arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
