"""A rank that trains nothing: it appends each view that it gets to a file.

A step is a tenth of a second in which it was in a view. The first view has the steps 0
to 99, the second one 100 to 199, and so on, however long ranks take to agree on a view.
It ends once it has got as many views as the second argument says.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from stretto import variable_names
from stretto.members.client import MemberClient
from stretto.step_counts import StepCounter

folder, views = Path(sys.argv[1]), int(sys.argv[2])
client = MemberClient.of_environment()
address = f"h:{client.member}"
client.start(address, on_view=lambda _: None, on_end=lambda _: None)
counter = StepCounter(os.environ[variable_names.STEP_COUNTS], int(os.environ["RANK"]))


def count():
    while client.newest is None:
        time.sleep(0.01)
    steps = 0
    while True:
        time.sleep(0.1)
        first = 100 * (client.newest.generation - 1)
        new = max(first - steps, 1) if steps < first + 99 else 0
        for _ in range(new):
            counter.add()
        steps += new


threading.Thread(target=count, daemon=True).start()
generation = 0
with (folder / f"{client.member}.jsonl").open("a", buffering=1) as file:
    while generation < views:
        view = client.next_view(generation, timeout_s=100)
        generation = view.generation
        print(json.dumps([generation, view.ids, time.monotonic()]), file=file)
        if view.rank(client.member) is None:
            client.ready(address)
        else:
            client.entered(generation)
client.left()
