"""Requests to a running gerund server, without loading a model.

Knows: HTTP, the server's errors. Does not know: what is asked.
"""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gerund.errors import ConfigError, DataError, GerundError, InputError, ResourceError
from gerund.server.config import KEY_VARIABLE, is_loopback, read_keys

# Longer than the server itself lets a request take.
_TIMEOUT = 150


class Remote:
    """A gerund server, by its address, which may end in ``/v1``, as other clients want it.

    The API key is the first line of a file, or else in the variable ``GERUND_API_KEY``.

    >>> Remote("http://127.0.0.1:8000/v1/").url
    'http://127.0.0.1:8000'
    """

    def __init__(self, url: str, api_key_file: Path | None = None) -> None:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https") or parts.username or parts.query or not url.isascii():
            raise ConfigError(f"--server takes a URL such as http://127.0.0.1:8000, not {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        keys = read_keys(None if api_key_file is None else str(api_key_file))
        self._headers = {"Content-Type": "application/json"}
        if keys:
            self._headers["Authorization"] = f"Bearer {keys[0]}"
        handlers: list[Any] = [_Unprocessed()]
        if is_loopback(host):  # no proxy leads to this machine
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON body and return the answer."""
        content = json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, content, self._headers)  # noqa: S310 - http and https alone
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as answer:
                status, received = answer.status, answer.read()
        except (urllib.error.URLError, TimeoutError, ssl.SSLError, ConnectionError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise ResourceError(f"{self.url} did not answer within {_TIMEOUT} s") from error
            detail = getattr(reason, "strerror", None) or reason
            message = f"no server answers at {self.url} ({detail}); gerund serve --index INDEX starts one"
            raise DataError(message) from error
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise self._stranger() from error
        try:
            decoded = json.loads(received)
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            raise self._stranger()
        if status != http.client.OK:
            raise self._refusal(status, decoded.get("error"))
        return decoded

    def _stranger(self) -> GerundError:
        return DataError(f"{self.url} is not a gerund server, or one of another version")

    def _refusal(self, status: int, error: Any) -> GerundError:
        if not isinstance(error, dict) or not isinstance(error.get("message"), str) or "code" not in error:
            return self._stranger()
        message, code = error["message"], error["code"]
        if status == http.client.UNAUTHORIZED:
            if "Authorization" not in self._headers:
                return InputError(
                    f"{self.url} needs an API key: put it into {KEY_VARIABLE} or a file for --api-key-file"
                )
            return InputError(f"{self.url} does not accept the API key of {KEY_VARIABLE} or --api-key-file")
        if status == http.client.NOT_FOUND and code not in ("no_index", "model_not_found"):
            return self._stranger()
        kind = ResourceError if status >= 500 or status == http.client.TOO_MANY_REQUESTS else InputError
        return kind(f"{self.url}: {message}")


class _Unprocessed(urllib.request.HTTPErrorProcessor):
    """Returns every answer as it is; following a redirect could take the key elsewhere."""

    def http_response(self, request: Any, response: Any) -> Any:
        del request
        return response

    https_response = http_response
