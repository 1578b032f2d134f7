"""`gradsync launch` on one of two hosts.

    python on_host.py NAMESPACE,NAMESPACE ADDRESS WORD …

The variable TEST_HOST is its number; ADDRESS is the first one's.
"""

import os
import sys

from gradsync.commands.cli.main import main
from support.namespaces import become_host

PORT = "29400"


if __name__ == "__main__":
    names, address, *words = sys.argv[1:]
    number = os.environ["TEST_HOST"]
    become_host(names.split(",")[int(number)])
    nodes = ["--nnodes", "2", "--node-rank", number, "--master-addr", address]
    sys.exit(main(["launch", *nodes, "--master-port", PORT, *words]))
