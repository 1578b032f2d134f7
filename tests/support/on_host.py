"""`gradsync launch` on one of two hosts.

    python on_host.py NAMESPACE,NAMESPACE ADDRESS WORD …

The variable TEST_HOST is its number; ADDRESS is the first one's. With TEST_NODES, they are
`--nnodes`; with TEST_AFTER, it starts when that file is there.
"""

import os
import sys
import time

from gradsync.commands.cli.main import main
from support.namespaces import become_host

PORT = "29400"


if __name__ == "__main__":
    names, address, *words = sys.argv[1:]
    number = os.environ["TEST_HOST"]
    become_host(names.split(",")[int(number)])
    while (file := os.environ.get("TEST_AFTER")) and not os.path.exists(file):
        time.sleep(0.05)
    count = os.environ.get("TEST_NODES", "2")
    nodes = ["--nnodes", count, "--node-rank", number, "--master-addr", address]
    sys.exit(main(["launch", *nodes, "--master-port", PORT, *words]))
