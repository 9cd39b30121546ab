from megarlhf.cluster import signals

signals.watch()  # before anything else is imported

from megarlhf.cli import run  # noqa: E402

run()
