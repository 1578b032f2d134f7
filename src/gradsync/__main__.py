"""`python -m gradsync` is the `gradsync` command; torchrun starts it with `-m`."""

from gradsync.commands.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
