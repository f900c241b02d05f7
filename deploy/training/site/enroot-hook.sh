#!/bin/bash
# Hook of enroot, and so of pyxis: /etc/enroot/hooks.d. Containers of jobs with GPUs report their
# trainings. A hook that fails keeps the container from starting, so this one always exits with 0.
site=/usr/lib/dshealthd/training
# also in other jobs: a TaskProlog is run in the container
enroot-mount --root "$ENROOT_ROOTFS" - <<<"$site $site none x-create=dir,bind,ro,nosuid,nodev,nofail,silent"
[ "${SLURM_JOB_GPUS-}${SLURM_STEP_GPUS-}${CUDA_VISIBLE_DEVICES-}" ] && [ -r "$site/environment.sh" ] || exit 0
image=$(grep '^PYTHONPATH=' "$ENROOT_ENVIRON" | tail -n 1)
# What a container sets hides what the job sets, but only pyxis hands on the job's: without it, what
# a container would have is not known, and is left alone.
if [ "$image" ]; then
    PYTHONPATH=${image#*=}
elif [ "${PYTHONPATH-}" ] && [ -z "${PYXIS_RUNTIME_PATH-}${PYXIS_VERSION-}" ]; then
    exit 0
fi
before=${PYTHONPATH-}
. "$site/environment.sh"
[ "${PYTHONPATH-}" = "$before" ] || echo "PYTHONPATH=$PYTHONPATH" >>"$ENROOT_ENVIRON"
exit 0
