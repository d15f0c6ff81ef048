"""Request logging. Prompts, API keys and error messages are never logged, since messages may quote a prompt."""

import json
import logging
import sys
import time
import traceback
from typing import Any, Literal

logger = logging.getLogger("gerund.server")


class JsonLines(logging.Formatter):
    """One line of JSON per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        record_ = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        return json.dumps({**record_, **getattr(record, "fields", {})})


class Lines(logging.Formatter):
    """One line of text per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.getMessage()}{fields}"


def set_up(form: Literal["text", "json", "none"]) -> None:
    """Log to standard error, without uvicorn's records, which may quote a client."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    logger.handlers[:] = [handler]
    logger.setLevel(logging.ERROR if form == "none" else logging.INFO)
    logger.propagate = False
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers[:] = [logging.NullHandler()]
        logging.getLogger(name).propagate = False


def note(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event with its fields."""
    logger.log(level, event, extra={"fields": fields})


def note_defect(error: BaseException, **fields: Any) -> None:
    """Log the frames of an unexpected error, without its message, which may quote a text."""
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    note("defect", logging.ERROR, error=type(error).__name__, **fields, frames=frames[-12:])
