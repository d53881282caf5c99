"""``python -m bitplan``: the same command line as the ``bitplan`` script."""

from bitplan.cli import main

if __name__ == "__main__":
    main()
