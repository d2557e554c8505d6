"""What a recording rule and an alert are, before they are written for Prometheus.

An alert is a value and a threshold rather than one expression, since the value has data also when nothing is wrong: a
test can ask for it, and a panel can show how far away the alert is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["WINDOW", "Alert", "Recording"]

WINDOW = "5m"
"""What rates are taken over: several scrapes at any usual interval, and a step also of jobs with steps of minutes."""
RUNBOOK = "dashboards/RUNBOOK.md"


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording rule. ``[WINDOW]`` in its expression stands for the range of its rates."""

    name: str
    template: str

    def expression(self, window: str = WINDOW) -> str:
        """The expression with its rates over ``window``."""
        return _over(self.template, window)


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert: it fires when ``value`` has compared so with ``threshold`` for ``hold`` seconds."""

    name: str
    value: str
    """Has data also when nothing is wrong. ``[WINDOW]`` stands for the range of its rates."""
    comparison: str
    threshold: float
    hold: int
    severity: str
    summary: str
    description: str
    runbook: str
    """The heading of its entry in the runbook."""
    labels: dict[str, str] = field(default_factory=dict)
    """Further labels, for alerts that several rules may fire."""

    def value_expression(self, window: str = WINDOW) -> str:
        """What is compared, with its rates over ``window``."""
        return _over(self.value, window)

    def expression(self, window: str = WINDOW) -> str:
        """The whole condition."""
        value = self.value_expression(window)
        whole = f"(\n{_indented(value)}\n)" if "\n" in value else f"({value})" if " " in value else value
        return f"{whole} {self.comparison} {self.threshold:g}"

    @property
    def anchor(self) -> str:
        """Where the runbook has its entry."""
        return f"{RUNBOOK}#{self.runbook.lower().replace(' ', '-')}"


def _over(template: str, window: str) -> str:
    return template.replace("[WINDOW]", f"[{window}]")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
