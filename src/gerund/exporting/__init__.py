"""Export formats: what writes each, what they share, model cards, and uploads to the hub.

Another package adds a format by an entry point in the group ``gerund.exporters``. It names a function of the model and
an empty folder, which fills the folder and returns the line that loads it.
"""

from importlib.metadata import EntryPoint, entry_points


def added_formats() -> dict[str, EntryPoint]:
    """Return the export formats of other installed packages."""
    return {entry.name: entry for entry in entry_points(group="gerund.exporters")}
