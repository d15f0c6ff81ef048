"""``gerund`` and ``python -m gerund``: the command line, also for launchers that start a module."""

import sys


def run() -> None:
    """Run the command line; Ctrl-C ends it quietly while its libraries are imported too."""
    try:
        from gerund.cli.main import run as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
