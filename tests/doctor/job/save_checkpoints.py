"""Saves checkpoints with the installed DeepSpeed: save_checkpoints.py DIRECTORY PORT.

One of each layout, of two ranks, over gloo on the CPU, and a universal one. The second rank is
forked from the first, so that torch and DeepSpeed are imported once.
"""

import os
import sys
from pathlib import Path

import deepspeed  # type: ignore[import-untyped] # it has no types
import torch
from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-untyped]

DIRECTORY, PORT = Path(sys.argv[1]), sys.argv[2]
# else it compiles an operator for collectives on the CPU at its first start
deepspeed.ops.__compatible_ops__ = {}
torch.set_num_threads(1)
child = os.fork()
rank = 0 if child else 1
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
for stage in (0, 1, 3):
    model = torch.nn.Linear(8, 8)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    loss = engine(torch.ones(1, 8)).square().mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(
        str(DIRECTORY / f"stage{stage}"),
        tag="global_step1",
        client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}},
    )
torch.distributed.destroy_process_group()
if rank:
    os._exit(0)
_, status = os.waitpid(child, 0)
source = DIRECTORY / "stage1" / "global_step1"
sys.argv = ["ds_to_universal", "--input_folder", str(source)]
sys.argv += ["--output_folder", f"{source}_universal", "--num_extract_workers", "1"]
sys.argv += ["--num_merge_workers", "1"]
ds_to_universal.main(ds_to_universal.parse_arguments())
sys.exit(status)
