"""Settings of DeepSpeed that contradict each other."""

from __future__ import annotations

from dshealthd.doctor.check import warning
from dshealthd.doctor.job.rules import JobRule

_ZERO, _PARAMS = "zero_optimization", "scheduler.params"
_PARAM, _OPTIMIZER = f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer"
_ELASTIC = "elasticity.enabled=true & !elasticity.ignore_non_elastic_batch_info=true"
_CONFIG, _ENGINE = "deepspeed/runtime/config.py", "deepspeed/runtime/engine.py"
_OFFLOAD, _SCHEDULES = (
    "deepspeed/runtime/zero/offload_config.py",
    "deepspeed/runtime/lr_schedules.py",
)
OF_DEEPSPEED = tuple(
    JobRule(*row)
    for row in (
        *(
            ("bf16", f"fp16.enabled=true & {name}.enabled=true",
             "fp16 and bf16 are both enabled; DeepSpeed aborts at startup", _CONFIG)
            for name in ("bf16", "bfloat16")
        ),
        *(
            ("elasticity", f"{_ELASTIC} & {name}~.",
             (f"elasticity chooses the batch sizes, so DeepSpeed refuses {name} beside it unless"
              " ignore_non_elastic_batch_info is true; DeepSpeed 0.19.8 refuses elasticity itself"),
             _CONFIG)
            for name in ("train_batch_size", "train_micro_batch_size_per_gpu",
                         "gradient_accumulation_steps")
        ),
        (f"{_ZERO}.stage", f"{_ZERO}.stage & !{_ZERO}.stage=0|1|2|3",
         "zero_optimization.stage is {0}, but ZeRO has stages 0 to 3",
         "deepspeed/runtime/zero/config.py, ZeroStageEnum"),
        (f"{_OPTIMIZER}.ratio", f"{_OPTIMIZER}.ratio<1 & !{_ZERO}.stage=3",
         "Partial offloading, with a ratio, takes ZeRO stage 3",
         "deepspeed/runtime/zero/config.py, offload_ratio_check"),
        *(
            (f"{_ZERO}.{part}.nvme_path",
             f"{_ZERO}.{part}.device=nvme & !{_ZERO}.{part}.nvme_path~.",
             f"{part} goes to NVMe but has no nvme_path", _OFFLOAD)
            for part in ("offload_param", "offload_optimizer")
        ),
        *(
            ("scheduler.type", f"scheduler.type={kinds} & !{_PARAMS}.{name}",
             f"{{0}} has no {name}, which it takes to be created: TypeError at startup", _SCHEDULES)
            for kinds, name in (("WarmupDecayLR|WarmupCosineLR", "total_num_steps"),
                                ("OneCycle", "cycle_min_lr"), ("OneCycle", "cycle_max_lr"))
        ),
        ("pipeline.stages", f"pipeline.stages>1 & {_ZERO}.stage>1",
         ("ZeRO stage {1} shards gradients, which the pipeline engine refuses: it takes stage 0 or"
          " 1"), "deepspeed/runtime/pipe/engine.py, PipelineEngine.__init__"),
        ("checkpoint.tag_validation",
         "checkpoint.tag_validation & !checkpoint.tag_validation~(?i)^(ignore|warn|fail)$",
         "tag_validation is {0}, not Ignore, Warn or Fail",
         f"{_CONFIG}, get_checkpoint_tag_validation_mode"),
    )
) + tuple(
    JobRule(*row, warning)
    for row in (
        ("optimizer.params.max_grad_norm", "optimizer.params.max_grad_norm",
         ("DeepSpeed aborts at startup because max_grad_norm is not an optimizer parameter, unless"
          " the program makes its own optimizer; use gradient_clipping at top level"),
         f"{_ENGINE}, _configure_basic_optimizer"),
        (_PARAM, f"{_PARAM}.device=cpu|nvme & !{_ZERO}.stage=3",
         "offload_param needs ZeRO stage 3 or higher: nothing is offloaded", _OFFLOAD),
        (_OPTIMIZER, f"{_OPTIMIZER}.device=cpu & !{_ZERO}.stage=1|2|3",
         "offload_optimizer needs ZeRO stage 1 or higher: nothing is offloaded", _OFFLOAD),
        (_OPTIMIZER, f"{_OPTIMIZER}.device=nvme & !{_ZERO}.stage=3",
         "offload_optimizer needs ZeRO stage 3 or higher for NVMe: nothing is offloaded", _OFFLOAD),
        ("optimizer.type",
         # _configure_basic_optimizer of 0.19.8 has these for the CPU
         (f"optimizer.type & !optimizer.type~(?i)^(adagrad|adam|adamw|lion|muon)$ & {_ZERO}.stage>0"
          f" & {_OPTIMIZER}.device=cpu|nvme"),
         "the optimizer is offloaded to the CPU, but DeepSpeed has no {0} for the CPU", _ENGINE),
        *(
            (f"{_PARAMS}.{low}", f"{_PARAMS}.{low}>{_PARAMS}.{high}",
             f"{low} {{0}} is above {high}", _SCHEDULES)
            for low, high in (("warmup_num_steps", "total_num_steps"),
                              ("warmup_min_lr", "warmup_max_lr"), ("cycle_min_lr", "cycle_max_lr"))
        ),
    )
)  # fmt: skip
"""Settings of DeepSpeed that it refuses together, or of which one has no effect."""
