"""``python -m gerund``: the command line, also for launchers that start a module in several processes."""

from gerund.cli.main import run

if __name__ == "__main__":
    run()
