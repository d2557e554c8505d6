"""The types of recording rules and alerts, from which Prometheus's rules are written.

An alert is a value and a threshold instead of one condition, because the value has data also when nothing is wrong: a
test can query it, and a panel can show how far it is from the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["WINDOW", "Alert", "Recording"]

WINDOW = "5m"
"""The range of rates: several scrapes at the usual intervals, and at least a step of jobs with steps of minutes."""
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
    """An alert, which fires when the comparison of ``value`` with ``threshold`` has held for ``hold`` seconds."""

    name: str
    """Also the heading of its entry in the runbook."""
    value: str
    """PromQL that has data also when nothing is wrong. ``[WINDOW]`` stands for the range of its rates."""
    threshold: float
    hold: int
    severity: str
    summary: str
    description: str
    comparison: str = ">"
    labels: dict[str, str] = field(default_factory=dict)
    """Further labels, which distinguish the rules of an alert that has several."""

    def value_expression(self, window: str = WINDOW) -> str:
        """The value, with its rates over ``window``."""
        return _over(self.value, window)

    def expression(self, window: str = WINDOW) -> str:
        """The condition, with its rates over ``window``."""
        value = self.value_expression(window)
        whole = f"(\n{_indented(value)}\n)" if "\n" in value else f"({value})" if " " in value else value
        return f"{whole} {self.comparison} {self.threshold:g}"

    @property
    def anchor(self) -> str:
        """The address of its entry in the runbook."""
        return f"{RUNBOOK}#{self.name.lower()}"


def _over(template: str, window: str) -> str:
    return template.replace("[WINDOW]", f"[{window}]")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
