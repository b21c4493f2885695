"""`grpo view`: reads run folders and serves a page about them. Never writes to them, never loads a framework.

files      opens what lies inside the runs folder and nothing else; JSON lines by offset, single rows of an npz
series     metrics and timing as columns that grow with their file
patience   long readings are cut into pieces
process    whether the process of a run is alive
panels     which curves come first, and which belong together
runs       one run: how it is doing, what the page shows of it
shelf      which runs there are, and what several differ in
index      numbers and offsets of the groups in a step's file
groups     the groups of a run: list, filters, search
group      one group, its tokens, one prompt through time
objective  what was minimised, in words and numbers
advice     plain-language warnings
verdict    is it learning: the score at first and now; what was looked at
about      what docs/metrics.md says of a metric
library    all of these behind one lock: an answer to every path of the API, for the server and for an export
live       what changed since the last look
server     HTTP: the page, the API, live events; who may ask
export     the page and its answers as one file
launch     the command, and `grpo.show` for notebooks
"""
