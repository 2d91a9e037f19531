"""`jfi train` whose last process dies: dying.py DEATHS ARGUMENT...

DEATHS is a JSON list of [phase, step], one for each start by torchrun: the process kills itself in this phase of the
step after so many. The phase "error" raises an error instead. Later starts live.
"""

import json
import os
import signal
import sys
from unittest import mock

from torchrec.distributed.embedding import ShardedEmbeddingCollection

from jfi import cli
from jfi.training import TrainingConfig
from jfi.training.checkpoints.tensor_files import TensorWriter
from jfi.training.loop.trainer import Trainer


def patches(phase: str, step: int) -> list:
    """What makes this process die; a phase is reached in the step after `step` steps."""
    forward, due = Trainer._forward, []

    def kill(*_: object) -> None:
        print(f"dies in {phase}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def counted_forward(trainer: Trainer, batch):
        due[:] = [trainer] if trainer.model.training and trainer.progress.step == step else []
        if due and phase == "error":
            raise RuntimeError("this process ends badly")
        loss, output = forward(trainer, batch)
        if due and phase == "backward":
            loss.register_hook(kill)
        return loss, output

    def deadly(owner: type, name: str):
        function = getattr(owner, name)

        def act(*arguments):
            if due:
                kill()
            return function(*arguments)

        return mock.patch.object(owner, name, act)

    found = [mock.patch.object(Trainer, "_forward", counted_forward)]
    if phase == "ids":
        found.append(deadly(ShardedEmbeddingCollection, "input_dist"))
    elif phase == "forward":
        found.append(deadly(ShardedEmbeddingCollection, "compute_and_output_dist"))
    elif phase == "checkpoint":
        found.append(deadly(TensorWriter, "write_data"))
    return found


if __name__ == "__main__":
    deaths, start = json.loads(sys.argv.pop(1)), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] == "1" and start < len(deaths):
        for patch in patches(*deaths[start]):
            patch.start()
    TrainingConfig.log_every = 1  # as the module whose runs these are
    sys.exit(cli.main(["train", *sys.argv[1:]]))
