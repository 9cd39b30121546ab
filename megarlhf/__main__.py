from megarlhf.cli import run

run()
