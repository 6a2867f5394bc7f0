"""Names in the folder of a run.

::

    OUT/run.yaml           the settings, as --config reads them
        store.json         identity of the store, for --resume
        provenance.json    command, versions, machine
        report.json        figures of the finished run
        metrics.csv        training and validation, beside tensorboard/ and curves.png
        memory.json        what a step takes of memory, and what was chosen by it
        tracker.json        its entry in Weights & Biases or MLflow, for --resume
        run.lock           held while a process trains here
        drafter/           the drafter of the best validation
        checkpoints/       last.ckpt to go on from, best.ckpt
"""

RUN_FILE = "run.yaml"
STORE_FILE = "store.json"
PROVENANCE_FILE = "provenance.json"
REPORT_FILE = "report.json"
METRICS_FILE = "metrics.csv"
CURVES_FILE = "curves.png"
MEMORY_FILE = "memory.json"
TRACKER_FILE = "tracker.json"
LOCK_FILE = "run.lock"
DRAFTER = "drafter"
CHECKPOINTS = "checkpoints"
LAST, BEST = f"{CHECKPOINTS}/last.ckpt", f"{CHECKPOINTS}/best.ckpt"
