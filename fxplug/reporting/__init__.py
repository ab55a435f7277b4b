"""A page that shows a rewritten model: what it is, what changed where, what it costs, and how it was checked and trained."""

from ..core.extensions import Extension

EXTENSION = Extension(
    name="reporting",
    extra="report",
    bases=("lowerings", "step_cache"),
    names={
        "Page": "fxplug.reporting.contents:Page",
        "report": "fxplug.reporting.reports:report",
    },
    verbs={
        "report": "fxplug.reporting.verbs:report",
    },
    hooks={
        "report_of_result": "fxplug.reporting.reports:report_of",
        "show_to": "fxplug.reporting.formats:show_to",
        "changes": "fxplug.reporting.records:find_changes",
    },
)
