"""Two replicas of gerund's server behind one address, on Ray Serve: the same routes, keys and errors.

    pip install 'gerund[serve]' 'ray[serve]'
    export RAY_USAGE_STATS_ENABLED=0 GERUND_API_KEY=... GERUND_MODEL=./model
    python examples/ray_serve.py    # http://127.0.0.1:8000/v1

Ray itself listens on every interface of the machine, whatever the address here: leave its token on, and its ports shut.
"""

import os
from contextlib import suppress

from ray import serve

from gerund.server.app import GuardMiddleware, make_app
from gerund.server.config import ServerConfig
from gerund.server.service import Service, name_of
from gerund.settings.model_spec import ModelSpec


def replica() -> GuardMiddleware:
    """Load the model in a replica, and return its application."""
    spec, keys = ModelSpec.of(os.environ.get("GERUND_MODEL")), os.environ.get("GERUND_API_KEY", "").split()
    service = Service(ServerConfig(), (name_of(spec), spec.model))
    service.load(spec)
    return make_app(service, keys)


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 1}, max_ongoing_requests=64)
@serve.ingress(replica)
class Replica:
    """One model in memory, with an engine of its own."""


app = Replica.bind()

if __name__ == "__main__":
    serve.start(http_options={"host": "127.0.0.1", "port": 8000})
    with suppress(KeyboardInterrupt):
        serve.run(app, blocking=True)
