"""Request logging. Prompts, API keys and error messages are never logged, since messages may quote a prompt."""

import json
import logging
import sys
import time
import traceback
from typing import Any, Literal

logger = logging.getLogger("gerund.server")


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        said = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        return json.dumps({**said, **getattr(record, "fields", {})})


class Lines(logging.Formatter):
    """A record as a line of words."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()}{fields}"


def set_up(form: Literal["text", "json", "none"]) -> None:
    """Send the server's notes to standard error, and uvicorn's, whose words may be a client's, nowhere."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    logger.handlers[:] = [handler]
    logger.setLevel(logging.ERROR if form == "none" else logging.INFO)
    logger.propagate = False
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers[:] = [logging.NullHandler()]
        logging.getLogger(name).propagate = False


def note(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Note an event with its fields."""
    logger.log(level, event, extra={"fields": fields})


def note_defect(error: BaseException, **fields: Any) -> None:
    """Note where something went wrong that should not have: the frames without the message, which may quote a text."""
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    note("defect", logging.ERROR, error=type(error).__name__, **fields, frames=frames[-12:])
