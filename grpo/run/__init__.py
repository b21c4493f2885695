"""The machinery of a run: folder, checkpoints, loop, trackers, progress. It knows no domain and holds no mathematics.

config      how a run is carried out: its settings
dialect     other systems' words for them
folder      what a run leaves on disk, and its reader (loads no framework: the viewer imports only this)
redaction   secrets are taken out before anything is written or sent
lock        one process a folder
seeding     (seed, step, stream) → every global generator
checkpoint  atomic, hashed, newest valid one found again
saving      … written while training goes on, at most one at a time
signals     Ctrl-C and SIGTERM as a request to stop between steps
budget      how many samples may fail
memory      how much of it the process holds
exhibits    a step's groups as rows and arrays to look at later
films       … and, where the source can, in motion
trackers    who gets metrics.jsonl too: TensorBoard, Weights & Biases, Trackio
progress    what a person sees meanwhile
output      … through streams that never fail
plot        curve.png
loop        all of it around `trainer.step`
"""
